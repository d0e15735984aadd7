# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sequences for requests: who gets one, how large, and who has to give one up."""

from __future__ import annotations

import io
from collections.abc import Sequence

from gpu_runtime.errors import OutOfMemory
from metrale.engine.handle import RequestHandle
from metrale.engine.lane import Lane, Swapped, place
from metrale.errors import NoFreeSlot
from metrale.model import Model, SequenceState

_SPARE = 16
"""Decoder positions that a sequence gets at least, beyond those that it is known to need."""


class Admission:
    """Allocates sequences, moves them to host memory and back.

    A sequence gets KV for all that its request may generate, if there is room. Otherwise it gets what a translation
    commonly needs, half as many tokens again as its source has, and is moved should it outgrow that.

    Parameters
    ----------
    model : Model

    Attributes
    ----------
    is_hopeless : bool
        Whether waiting is in vain for the last request that found no room: the whole pool is too small for it, or
        nothing was taken.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._capacity = model.capacity()
        self.is_hopeless = False

    def open(self, handle: RequestHandle) -> Lane | None:
        """Return a lane with a new sequence, or None when there is no room for one now."""
        request = handle.request
        usual = len(request.prompt_tokens) * 3 // 2 + _SPARE
        found = self._alloc(len(request.prompt_tokens), request.most_tokens, usual)
        if found is None:
            return None
        seq, limit = found
        seq.src_lang_id, seq.tgt_lang_id = request.src_lang_id, request.tgt_lang_id
        seq.adapter_slot = request.adapter_slot
        return Lane(handle, seq, limit)

    def resume(self, swapped: Swapped) -> Lane | None:
        """Return the lane of a request whose sequence was in host memory, or None when there is no room now.

        Raises what the model raises when it cannot restore the sequence.
        """
        request = swapped.handle.request
        found = self._alloc(len(request.prompt_tokens), request.most_tokens, swapped.positions + _SPARE)
        if found is None:
            return None
        seq, limit = found
        try:
            self._model.restore_sequence_state(seq, 0, io.BytesIO(swapped.data))
        except BaseException:
            self._model.free_sequence(seq)
            raise
        seq.adapter_slot = request.adapter_slot
        ids = list(swapped.ids)
        return Lane(swapped.handle, seq, limit, chosen=len(ids), ids=ids, pending=ids[-1])

    def swap_out(self, lane: Lane) -> Swapped:
        """Move a lane's sequence to host memory. No step with it may be in flight.

        Raises what the model raises when it cannot save the sequence, which is live then.
        """
        lane.settle()
        data = io.BytesIO()
        self._model.save_sequence_state(lane.seq, data)
        swapped = Swapped(lane.handle, lane.ids, lane.seq.seq_len, data.getvalue())
        self._model.free_sequence(lane.seq)
        return swapped

    def close(self, lane: Lane) -> None:
        """Give back a lane's sequence. Steps in flight may still use it: the model orders what comes after them."""
        lane.ended = True
        self._model.free_sequence(lane.seq)

    def _alloc(self, prompt: int, most: int, usual: int) -> tuple[SequenceState, int] | None:
        """Return a new sequence with its decoder positions, at best ``most`` and at least ``usual``; None if neither.

        The last token that is generated is not fed, and the decoder start is: as many positions as tokens.
        """
        overhead = prompt + self._capacity.prompt_overhead
        self.is_hopeless = False
        with self._model.exclusive():  # nobody gives room back between the attempts and the verdict
            for positions in dict.fromkeys((most, min(usual, most))):
                try:
                    return self._model.alloc_sequence_for(overhead + positions), positions
                except OutOfMemory:
                    continue
                except NoFreeSlot:
                    return None
            usage = self._model.kv_usage()
        pool = self._capacity.kv_positions
        too_large = pool is not None and overhead + min(usual, most) > pool
        self.is_hopeless = too_large or usage is None or usage[0] == 0
        return None


def victim(lanes: Sequence[Lane], handle: RequestHandle) -> Lane | None:
    """Return the lane that gives way to a request: the last of those of a lower priority that stand behind it.

    The order is the queue's, in which waiting counts: who waited long enough gives way to nobody.
    """
    lower = [one for one in lanes if one.priority < handle.request.priority and place(handle) < place(one.handle)]
    return max(lower, key=lambda one: place(one.handle), default=None)
