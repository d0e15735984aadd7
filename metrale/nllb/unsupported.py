# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an encoder-decoder translation model has no use for: it refuses to draft and verify, and has no SSM state."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.errors import NotSupported
from metrale.model import Model, SequenceState, refusal

_DRAFTS = "it drafts nothing"


class TranslationOnly(Model):
    """The methods of the interface that NLLB refuses, or for which there is nothing to do."""

    def _refuse_verify(self, method: str) -> NotSupported:
        return refusal(self, method, _DRAFTS)

    def decode_verify(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        raise self._refuse_verify("decode_verify")

    def decode_verify_graphed(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        raise self._refuse_verify("decode_verify_graphed")

    def decode_verify_graphed_k3(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        raise self._refuse_verify("decode_verify_graphed_k3")

    def decode_verify_graphed_k4(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> list[int]:
        raise self._refuse_verify("decode_verify_graphed_k4")

    def generate_speculative(self, tokens: Sequence[int], params: object, num_drafts: int) -> list[int]:
        raise self._refuse_verify("generate_speculative")

    def decode_draft(self, token: int, seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        raise self._refuse_verify("decode_draft")

    def has_proposer(self) -> bool:
        return False

    def has_self_speculative(self) -> bool:
        return False

    def save_hidden_for_mtp(self, token_idx: int, stream: StreamLike = 0) -> None:
        return

    def run_mtp_propose(self, token: int, position: int, seq: SequenceState, stream: StreamLike = 0) -> int | None:
        return None

    def run_mtp_propose_multi(
        self,
        token: int,
        position: int,
        num_drafts: int,
        seq: SequenceState,
        stream: StreamLike = 0,
        grammar_bitmask: Sequence[int] | None = None,
    ) -> list[int]:
        return []

    def trim_proposer_state(self, seq: SequenceState, num_accepted: int, stream: StreamLike = 0) -> None:
        return

    def checkpoint_ssm_states(self, seq: SequenceState) -> None:
        return

    def rollback_ssm_states(self, seq: SequenceState, num_accepted: int) -> None:
        return

    def prepare_vision_embed(self, images: Sequence[object]) -> None:
        """Refuse images rather than ignore them; none at all is fine."""
        if len(images):
            raise refusal(self, "prepare_vision_embed", "it takes no images")

    def prepare_vision_embed_batched(self, per_request: Sequence[Sequence[object]]) -> list[tuple[int, int, int, int]]:
        """Refuse images rather than ignore them; none at all is fine."""
        if any(len(images) for images in per_request):
            raise refusal(self, "prepare_vision_embed_batched", "it takes no images")
        return []
