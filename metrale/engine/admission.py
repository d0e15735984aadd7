# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sequences for requests: who gets one, how large, and who has to give one up."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from gpu_runtime.errors import OutOfMemory
from metrale.engine.errors import EngineError
from metrale.engine.handle import RequestHandle
from metrale.engine.lane import Lane, Swapped, place
from metrale.engine.request import Request
from metrale.errors import NoFreeSlot
from metrale.model import Model, SequenceState

_SPARE = 16
"""Decoder positions that a sequence gets at least, beyond those that it is known to need."""


class Admission:
    """Allocates sequences, moves them to host memory and back.

    A sequence gets KV for all that its request may generate, if there is room. Otherwise it gets what a translation
    commonly needs, half as many tokens again as its source has, and is moved should it outgrow that. A beam search gets
    all it can need from the start, and is never moved.

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
        """Return a lane with a new sequence, or None when there is no room for one now.

        Raises
        ------
        EngineError
            When the adapter that the request asked for has left its slot; also what the model raises.
        """
        request = handle.request
        usual = len(request.prompt_tokens) * 3 // 2 + len(request.prefix_tokens) + _SPARE
        found = self._alloc(request, usual) if request.beams is None else self._alloc_beams(request)
        if found is None:
            return None
        seq, limit = found
        seq.src_lang_id, seq.tgt_lang_id = request.src_lang_id, request.tgt_lang_id
        seq.adapter_slot, seq.prefix_tokens = request.adapter_slot, request.prefix_tokens
        try:
            adapter = self._acquire(handle)
        except BaseException:
            self._model.free_sequence(seq)
            raise
        return Lane(handle, seq, limit, adapter=adapter)

    def resume(self, swapped: Swapped) -> Lane | None:
        """Return the lane of a request whose sequence was in host memory, or None when there is no room now.

        Raises what the model raises when it cannot restore the sequence.
        """
        request = swapped.handle.request
        found = self._alloc(request, swapped.positions + _SPARE)
        if found is None:
            return None
        seq, limit = found
        seq.adapter_slot = request.adapter_slot
        try:
            self._model.restore_sequence_state(seq, 0, io.BytesIO(swapped.data))
        except BaseException:
            self._model.free_sequence(seq)
            raise
        seq.prefix_tokens = request.prefix_tokens
        ids = swapped.handle.tokens
        return Lane(swapped.handle, seq, limit, chosen=len(ids), pending=ids[-1], adapter=swapped.adapter)

    def swap_out(self, lane: Lane) -> Swapped:
        """Move a lane's sequence to host memory. No step with it may be in flight.

        Raises what the model raises when it cannot save the sequence, which is live then.
        """
        lane.settle()
        data = io.BytesIO()
        self._model.save_sequence_state(lane.seq, data)
        swapped = Swapped(lane.handle, lane.seq.seq_len, data.getvalue(), lane.adapter)
        self._model.free_sequence(lane.seq)
        return swapped

    def close(self, lane: Lane) -> None:
        """Give back a lane's sequence. Steps in flight may still use it: the model orders what comes after them."""
        lane.ended = True
        self._model.free_sequence(lane.seq)
        self._model.release_adapter_slot(lane.adapter)

    def drop(self, swapped: Swapped) -> None:
        """Give back what a request in host memory still has of the model, when it does not come back."""
        self._model.release_adapter_slot(swapped.adapter)

    def _acquire(self, handle: RequestHandle) -> int:
        """Take a reference to the adapter that was in the request's slot when it came; -1 for the base model."""
        slot = handle.request.adapter_slot
        if slot == -1:
            return -1
        with self._model.exclusive():
            resolved = self._model.acquire_adapter_slot(slot)
            if resolved == slot and self._model.adapter_id_for(slot) == handle.adapter_id:
                return resolved
            self._model.release_adapter_slot(resolved)
        raise EngineError(f"the adapter in slot {slot} has left it while the request waited")

    def _alloc(self, request: Request, usual: int) -> tuple[SequenceState, int] | None:
        """Return a new sequence with its decoder positions, all it can need or at least ``usual``; None if neither."""
        source, most = self._source(request), request.target_positions
        least = min(usual, most)
        sizes = dict.fromkeys((most, least))
        return self._first(((n, partial(self._model.alloc_sequence_for, source + n)) for n in sizes), source + least)

    def _alloc_beams(self, request: Request) -> tuple[SequenceState, int] | None:
        """Return a new sequence with a target of full size for each beam, which none outgrows; None without room."""
        source, most = self._source(request), request.target_positions
        alloc = partial(self._model.alloc_beams, request.width, source, most)
        return self._first([(most, alloc)], source + request.width * most)

    def _source(self, request: Request) -> int:
        return len(request.prompt_tokens) + self._capacity.prompt_overhead

    def _first(
        self, attempts: Iterable[tuple[int, Callable[[], SequenceState]]], least: int
    ) -> tuple[SequenceState, int] | None:
        """Return the first sequence that can be had, with its number; ``least`` is the KV that the smallest takes."""
        self.is_hopeless = False
        with self._model.exclusive():  # nobody gives room back between the attempts and the verdict
            for positions, alloc in attempts:
                try:
                    return alloc(), positions
                except OutOfMemory:
                    continue
                except NoFreeSlot:
                    return None
            usage = self._model.kv_usage()
        pool = self._capacity.kv_positions
        too_large = pool is not None and least > pool
        self.is_hopeless = too_large or usage is None or usage[0] == 0
        return None


def those_giving_way(lanes: Sequence[Lane], handle: RequestHandle) -> list[Lane]:
    """Return the lanes that give way to a request: those of a lower priority that stand behind it, the last one first.

    The order is the queue's, in which waiting counts: who waited long enough gives way to nobody.
    """
    lower = [one for one in lanes if one.priority < handle.request.priority and place(handle) < place(one.handle)]
    return sorted(lower, key=lambda one: place(one.handle), reverse=True)
