# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the device must know of a slot to process its scores: forbidden ids, bad words, and the ids so far."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.backend import GpuBackend
from gpu_runtime.streams import StreamLike
from metrale.errors import InvalidInput
from metrale.model import SamplingParams, SequenceState
from metrale.nllb.checks import token_id, token_ids
from metrale.nllb.limits import WORD_ROOM, ModelShape
from metrale.nllb.passes import Passes
from metrale.nllb.staging import Ring
from metrale.nllb.workspace import Workspace
from metrale.ops.processing import BANNED, SUPPRESS, WORDS, encoded_words

UPLOADS_AHEAD: Final = 4


class SlotRules:
    """Sends the rules and the history of a slot, of a sequence that is sampled or searched.

    Parameters
    ----------
    gpu : GpuBackend
    shape : ModelShape
    space : Workspace
    passes : Passes
        Whose feeding turn orders this.
    """

    def __init__(self, gpu: GpuBackend, shape: ModelShape, space: Workspace, passes: Passes) -> None:
        self._shape = shape
        self._space = space
        self._passes = passes
        with ExitStack() as undo:

            def ring(words: int) -> Ring:
                made = Ring(gpu, 4 * words, UPLOADS_AHEAD)
                undo.callback(made.free)
                return made

            self._bans = ring(2 * shape.ban_words)
            self._words = ring(WORD_ROOM)
            self._history = ring(shape.limits.target_positions)
            self._teardown = undo.pop_all()

    def free(self) -> None:
        """Free what is not the workspace's. Work that is enqueued may still use it."""
        self._teardown.close()

    @staticmethod
    def mode(params: SamplingParams, *, withhold_eos: bool) -> int:
        """Return the bits of `metrale.ops.processing` for a row of ``params``."""
        mode = (BANNED if params.banned_ids else 0) | (WORDS if params.bad_phrases else 0)
        return mode | (SUPPRESS if withhold_eos and params.suppresses_eos else 0)

    def check(self, params: SamplingParams) -> None:
        """Refuse what is no `SamplingParams`, or does not fit the model.

        Raises
        ------
        InvalidInput
            When an id is not in the vocabulary, the bad words are too many, or an option lacks what it goes with.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidInput("params", "a SamplingParams", params)
        if params.min_new_tokens and not params.eos_ids:
            raise InvalidInput("params.eos_ids", "the ids that min_new_tokens withholds", ())
        if params.forced_eos_id is not None:
            token_id("forced_eos_id", params.forced_eos_id, self._shape.vocab)
            if params.max_new_tokens is None:
                raise InvalidInput("params.max_new_tokens", "the limit at which forced_eos_id comes", None)
        for name in ("suppress_tokens", "eos_ids"):
            for index, token in enumerate(getattr(params, name)):
                token_id(f"{name}[{index}]", token, self._shape.vocab)
        for index, word in enumerate(params.bad_words):
            for place, token in enumerate(word):
                token_id(f"bad_words[{index}][{place}]", token, self._shape.vocab)
        size = len(encoded_words(params.bad_phrases))
        if size > WORD_ROOM:
            expected = f"at most {WORD_ROOM - 2} ids in all, each word counting for one more"
            raise InvalidInput("bad_words", expected, f"{size - 2}")

    def send(self, seq: SequenceState, params: SamplingParams, stream: StreamLike, *, always: bool = False) -> None:
        """Enqueue the uploads that checked ``params`` need, for the slot of ``seq``.

        With ``always``, the planes of ids and the history go there even if no processor looks at them.
        """
        self._passes.refuse_capture(stream)
        history = token_ids("seq.tokens", seq.tokens, self._shape.vocab)
        self._passes.decoding.wait(stream)  # a step may still write the history of the slot's former owner
        with self._passes.feeding.use(stream):
            if always or params.banned_ids or params.suppresses_eos:
                self._send_bans(params, seq.slot_idx, stream)
            if params.bad_phrases:
                self._send(self._words, "feed.words", encoded_words(params.bad_phrases), seq.slot_idx, stream)
            if always or params.needs_history:
                self._send(self._history, "feed.history", np.array(history), seq.slot_idx, stream)

    def _send_bans(self, params: SamplingParams, slot: int, stream: StreamLike) -> None:
        planes = np.zeros((2, self._shape.ban_words), dtype=np.uint32)
        for plane, ids in zip(planes, (params.banned_ids, params.eos_ids), strict=True):
            tokens = np.array(ids, dtype=np.uint32)
            np.bitwise_or.at(plane, tokens // 32, np.uint32(1) << tokens % 32)
        self._send(self._bans, "feed.bans", planes.reshape(-1).view(np.int32), slot, stream)

    def _send(self, ring: Ring, name: str, values: NDArray[Any], slot: int, stream: StreamLike) -> None:
        """Enqueue the upload of a slot's row of the region ``name``: ``values``, and zeros to its end."""
        row = ring.slots[ring.take()].view(np.int32)
        row[: len(values)] = values
        row[len(values) :] = 0
        ring.send(self._space[name].offset(slot * row.nbytes), stream)
