# SPDX-License-Identifier: MIT OR Apache-2.0
"""Targets that are given: their log-probabilities, and what their tokens attend to in the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr
from metrale import ops
from metrale.checks import listed
from metrale.errors import InvalidInput, NoFreeSlot, NonFiniteLogits
from metrale.model import NOT_FINITE_FLAG, PrefillSlice, ScoredTarget, ScoreReq, SequenceState
from metrale.nllb.admission import PREFIX_LEN, Prompt
from metrale.nllb.beam_calls import BeamCalls
from metrale.nllb.checks import token_ids
from metrale.nllb.fed import Feed
from metrale.nllb.layers import Rows
from metrale.nllb.passes import Force
from metrale.nllb.workspace import attention_rows

_RESULTS: Final = 3  # id, log-probability, flags
_GROUP: Final = 64


class ScoringCalls(BeamCalls):
    """`metrale.model.ModelScoring`."""

    def score_targets(self, reqs: Sequence[ScoreReq], *, attention: bool = False) -> list[ScoredTarget]:
        """Score targets, some at a time, as far as there are slots and KV; the lock is held for one group of them."""
        self._check_open()
        reqs = listed("reqs", reqs, "a sequence of ScoreReq")
        targets = [self._target(f"reqs[{index}]", req) for index, req in enumerate(reqs)]
        results: list[ScoredTarget] = []
        spoilt: list[int] = []
        while len(results) < len(reqs):
            with self._lock:
                self._check_open()
                group = self._score_group(reqs[len(results) :], targets[len(results) :], attention)
            spoilt += [len(results) + place for place, one in enumerate(group) if one is None]
            results += [one or ScoredTarget([]) for one in group]
        if spoilt:
            raise NonFiniteLogits(tuple(spoilt), "requests")
        return results

    def _target(self, name: str, req: ScoreReq) -> list[int]:
        """Return the target of a request, all of which is checked before any is scored."""
        if not isinstance(req, ScoreReq):
            raise InvalidInput(name, "a ScoreReq", req)
        try:
            ids = token_ids("target_tokens", req.target_tokens, self.shape.vocab)
            most = self.shape.limits.target_positions - 1  # the last one is not fed
            if not 1 <= len(ids) <= most:
                raise InvalidInput("target_tokens", f"1 to {most} ids", f"{len(ids)} ids")
            source, room = token_ids("prompt_tokens", req.prompt_tokens, self.shape.vocab), self.capacity()
            if len(source) > room.max_prompt_tokens:
                raise InvalidInput("prompt_tokens", f"at most {room.max_prompt_tokens} ids", f"{len(source)} ids")
            self._admission.language_ids(req)
            with self._lock:
                self._adapters.check(req.adapter_slot)
        except InvalidInput as error:
            raise InvalidInput(f"{name}.{error.argument}", error.expected, error.got) from None
        return ids

    def _score_group(
        self, reqs: Sequence[ScoreReq], targets: Sequence[list[int]], attention: bool
    ) -> list[ScoredTarget | None]:
        """Score as many of the requests as there is room for, at least one; None for one with a NaN or an infinity."""
        with ExitStack() as stack:
            prompts: list[Prompt] = []
            for req, target in zip(reqs[:_GROUP], targets, strict=False):
                try:
                    seq = self._open(req, len(target))
                except (NoFreeSlot, OutOfMemory):
                    if not prompts:
                        raise
                    break
                stack.callback(self.free_sequence, seq)
                slice_ = PrefillSlice.whole(tuple(req.prompt_tokens), seq)
                prompts.append(self._admission.prompt(slice_, "prompt_tokens"))
            force = stack.enter_context(self._passes.forcing(prompts, 0))
            pairs = zip(prompts, targets, strict=False)
            return [self._score(prompt, target, attention, force) for prompt, target in pairs]

    def _open(self, req: ScoreReq, target: int) -> SequenceState:
        source = len(req.prompt_tokens) + self.capacity().prompt_overhead
        seq = self.alloc_sequence_for(source + PREFIX_LEN + target - 1)
        seq.src_lang_id, seq.tgt_lang_id, seq.adapter_slot = req.src_lang_id, req.tgt_lang_id, req.adapter_slot
        return seq

    def _score(self, prompt: Prompt, target: list[int], attention: bool, force: Force) -> ScoredTarget | None:
        """Feed one target, whose source is encoded, as many ids at a time as the workspace holds."""
        fed, asked = (*prompt.prefix, *target[:-1]), [*prompt.prefix[1:], *target]
        looker = _Attention(self, prompt, len(fed)) if attention else None
        step = self.shape.prefix_rows
        if looker is not None:
            step = min(step, attention_rows(self.shape, len(prompt.source)))
        logprobs: list[float] = []
        flags = 0
        with ExitStack() as stack:
            memory = self.gpu.alloc_host_pinned(_RESULTS * step * 4)
            stack.callback(self.gpu.free_host_pinned, memory)
            event = self.gpu.create_event()
            stack.callback(self.gpu.destroy_event, event)
            for first in range(0, len(fed), step):
                ids = fed[first : first + step]
                base = force(Feed(ids, first, prompt.span), looker and looker.at(first))
                dst = memory.array[: _RESULTS * len(ids) * 4].view(np.int32).reshape(_RESULTS, len(ids))
                self._feed.score(base, asked[first : first + len(ids)], dst, event, 0)
                self.gpu.event_synchronize(event)
                logprobs += dst[1].view(np.float32).tolist()
                flags |= int(np.bitwise_or.reduce(dst[2]))
        if flags & NOT_FINITE_FLAG:
            return None
        return ScoredTarget(logprobs[1:], None if looker is None else looker.result())


class _Attention:
    """Looks on at the passes over one target, and takes the cross-attention of every layer to the host.

    The probabilities of a layer lie where the encoder has worked, until they are copied.
    """

    def __init__(self, model: ScoringCalls, prompt: Prompt, rows: int) -> None:
        config = model.config
        self._gpu = model.gpu
        self._shape = model.shape
        self._place = model._passes.attention_space
        self._longest = len(prompt.source)
        self._first = 0
        self._weights: NDArray[np.float32] = np.empty(
            (config.decoder_layers, rows, config.decoder_attention_heads, self._longest), dtype=np.float32
        )

    def at(self, first: int) -> _Attention:
        """Return itself, for the pass that begins at row ``first``."""
        self._first = first
        return self

    def __call__(self, rows: Rows, layer: int, table: Mapping[str, DevicePtr]) -> None:
        config, shape = self._shape.config, self._shape
        ops.attention_weights(
            self._gpu,
            rows.wide,
            table["cross_spans"],
            table["cross_lengths"],
            self._place,
            rows=rows.count,
            heads=config.decoder_attention_heads,
            head_dim=config.decoder_head_dim,
            longest=self._longest,
            q_stride=config.d_model,
            k_offset=layer * 2 * config.d_model,
            kv_stride=shape.kv_width,
            scale=config.decoder_head_dim**-0.5,
            dtype=shape.dtype,
            stream=rows.stream,
        )
        part = self._weights[layer, self._first : self._first + rows.count]
        self._gpu.copy_d2h_async(self._place, part, rows.stream)

    def result(self) -> NDArray[Any]:
        """Return what was seen, without the position that the language token is predicted from.

        The copies are done: what was chosen after them has been waited for.
        """
        return np.ascontiguousarray(self._weights[:, 1:].transpose(0, 2, 1, 3))
