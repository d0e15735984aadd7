# SPDX-License-Identifier: MIT OR Apache-2.0
"""Adapters are loaded while work is in flight, in whatever order a device runs that: every row has its own adapter.

The sequences of an adapter are freed as soon as their work is enqueued, so that its slot may be loaded into at once.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_runtime.host import HostBackend
from metrale.errors import SequenceError
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb import staging
from metrale.nllb.model import NllbModel
from tests.draws import draws
from tests.nllb.adapters import NAMES, Shelf, begin, rows_of
from tests.nllb.decoding import company, relative

PROGRAMS = range(2)
ORDERS: list[tuple[str, int]] = [("deferred", 0), *(("adversarial", seed) for seed in range(6))]
SLOTS = 2
CALLS = 50


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load through buffers that are filled many times."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 2048)


@dataclass(eq=False)
class Lane:
    """A sequence: its adapter's name ("" for none), its source, and what its decoder was given."""

    seq: SequenceState
    name: str
    source: list[int]
    fed: list[int]


@dataclass(frozen=True)
class Seen:
    """A row, and what it must be the logits of."""

    name: str
    source: tuple[int, ...]
    fed: tuple[int, ...]
    row: NDArray[Any]


class Program:
    """Random prefills, steps and loads on several streams, from a seed. Nothing waits, apart from what a load does."""

    def __init__(self, model: NllbModel, shelf: Shelf, seed: int) -> None:
        self._model = model
        self._shelf = shelf
        self._random = random.Random(seed)
        self._streams = [0, *(model.create_stream() for _ in range(3))]
        self._memory = model.alloc_host_pinned(CALLS * 4 * 97 * 4)
        self._live: list[Lane] = []
        self._used = 0
        self.seen: list[Seen] = []
        self.loads = 0

    def run(self) -> list[Seen]:
        """Make the calls, wait, and return what was seen."""
        calls = (self._prefill, self._prefill, self._step, self._step, self._step, self._mixed, self._load, self._load)
        for _ in range(CALLS):
            self._random.choice(calls)()
        for stream in self._streams:
            self._model.synchronize(stream)
        seen = [Seen(one.name, one.source, one.fed, one.row.copy()) for one in self.seen]
        for lane in self._live:
            self._model.free_sequence(lane.seq)
        for stream in self._streams[1:]:
            self._model.destroy_stream(stream)
        self._model.free_host_pinned(self._memory)
        return seen

    def _open(self) -> list[Lane]:
        resident = {-1: "", **{slot: name for name, slot in self._model.adapters().items()}}
        lanes = []
        for _ in range(min(self._random.randint(1, 2), 4 - len(self._live))):
            slot = self._random.choice(list(resident))
            source = [self._random.randrange(3, 97) for _ in range(self._random.randint(1, 6))]
            lanes.append(Lane(begin(self._model, slot), resident[slot], source, []))
        self._live += lanes
        return lanes

    def _slices(self, lanes: list[Lane]) -> list[PrefillSlice]:
        return [PrefillSlice.whole(lane.source, lane.seq) for lane in lanes]

    def _look(self, first: int, lanes: list[Lane], stream: int) -> None:
        """Enqueue the copies of rows from ``first`` on; the next forward that writes them comes after those."""
        for row, lane in enumerate(lanes, first):
            dst = self._memory.array[self._used : self._used + 97 * 4].view(np.float32)
            self._used += dst.nbytes
            ptr = self._model.logits_buffer_ptr().offset(row * self._model.logits_row_bytes())
            self._model.copy_d2h_async(ptr, dst, stream)
            self.seen.append(Seen(lane.name, tuple(lane.source), tuple(lane.fed), dst))
        event = self._model.create_event()
        self._model.record_event(event, stream)
        for other in self._streams:
            self._model.stream_wait_event(other, event)
        self._model.destroy_event(event)

    def _prefill(self) -> None:
        stream = self._random.choice(self._streams)
        if lanes := self._open():
            self._model.prefill_batch_chunk_rows(self._slices(lanes), stream, 0)
            self._end_some()
            if self._random.random() < 0.5:
                self._look(0, lanes, stream)
            else:  # the load comes right after the prefill, with nothing that waits for it in between
                self._load()
                self._look(0, lanes, stream)

    def _to_step(self) -> list[Lane]:
        lanes = [lane for lane in self._live if lane.seq.seq_len < 9]
        return self._random.sample(lanes, self._random.randint(min(1, len(lanes)), len(lanes)))

    def _feed(self, lanes: list[Lane]) -> list[int]:
        tokens = [self._random.randrange(97) for _ in lanes]
        for lane, token in zip(lanes, tokens, strict=True):
            lane.fed.append(token)
        return tokens

    def _step(self) -> None:
        stream = self._random.choice(self._streams)
        if lanes := self._to_step():
            self._model.decode_batch(self._feed(lanes), [lane.seq for lane in lanes], stream)
            self._end_some()
            if self._random.random() < 0.5:
                self._load()
            self._look(0, lanes, stream)

    def _mixed(self) -> None:
        stream, lanes = self._random.choice(self._streams), self._to_step()
        new = self._open()
        if lanes and new:
            seqs, slices = [lane.seq for lane in lanes], self._slices(new)
            self._model.mixed_forward_batch(self._feed(lanes), seqs, slices, stream)
            self._end_some()
            self._load()
            self._look(0, [*lanes, *new], stream)
        else:
            for lane in new:
                self._live.remove(lane)
                self._model.free_sequence(lane.seq)

    def _end_some(self) -> None:
        for lane in self._live[:]:
            if self._random.random() < 0.5:
                self._live.remove(lane)
                self._model.free_sequence(lane.seq)

    def _load(self) -> None:
        absent = [name for name in NAMES if name not in self._model.adapters()]
        name = self._random.choice(absent)
        try:
            self._model.promote_lora_from_disk(self._shelf[name], name)
            self.loads += 1
        except SequenceError:
            assert len({lane.name for lane in self._live} - {""}) == SLOTS


def run(shelf: Shelf, program: int, order: Any, seed: int) -> list[Seen]:
    with HostBackend(check=True, order=order, seed=seed) as gpu, shelf.load(gpu, max_adapters=SLOTS) as model:
        made = Program(model, shelf, program)
        seen = made.run()
        assert made.loads > 10
        return seen


@pytest.fixture(scope="module")
def in_order(shelf: Shelf) -> Callable[[int], list[Seen]]:
    """A function that returns what a program sees that runs in the order of its calls."""
    return functools.cache(lambda program: run(shelf, program, "in_order", 0))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("order", "seed"), draws(ORDERS, 2))
def test_the_same_bits_in_any_order(
    shelf: Shelf, in_order: Callable[[int], list[Seen]], program: int, order: str, seed: int
) -> None:
    expected, got = in_order(program), run(shelf, program, order, seed)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert one.row.tobytes() == other.row.tobytes(), f"row {number}, of adapter {one.name!r}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_row_is_that_of_its_adapter(shelf: Shelf, in_order: Callable[[int], list[Seen]], program: int) -> None:
    """Alone, in a model that has all adapters."""
    with HostBackend() as gpu, shelf.load(gpu, NAMES) as model:
        slots = {"": -1, **model.adapters()}
        for number, one in enumerate(in_order(program)):
            alone = rows_of(model, slots[one.name], one.source, one.fed)[-1]
            assert relative(one.row, alone) < company(model), f"row {number}, of adapter {one.name!r}"
