# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random programs of model calls among which beam searches run, several at once and beside other sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.pointer import DevicePtr
from metrale.errors import NoFreeSlot
from metrale.model import BEAM_DONE_FLAG, BeamParams, FeedSource, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.lanes import SLOTS, Lane, seqs_of, slices_of
from tests.nllb.programs import Program
from tests.nllb.searching import SELECTED, rows_after, select, step


@dataclass(eq=False)
class Search:
    """One search: what was asked, the results of its selections, and what was taken of it in the end."""

    seq: SequenceState
    source: list[int]
    beams: BeamParams
    params: SamplingParams
    prefix: tuple[int, ...]
    flags: list[tuple[int, int]] = field(default_factory=list)
    taken: Any = None

    @property
    def at_limit(self) -> bool:
        assert self.params.max_new_tokens is not None
        counted = 0 if self.prefix else 1
        return counted + len(self.flags) >= self.params.max_new_tokens


class BeamProgram(Program):
    """A program that also opens searches, goes on with them, gives them up, and takes what they found.

    Attributes
    ----------
    searches : list of Search
        Every search there was.
    """

    def __init__(self, model: NllbModel, seed: int) -> None:
        super().__init__(model, seed)
        self.searches: list[Search] = []
        self._open_searches: list[Search] = []

    def _calls(self) -> dict[Callable[[], bool], int]:
        return {
            self._open_search: 3,
            self._open_behind_a_step: 3,
            self._go_on: 20,
            self._begin_search_again: 3,
            self._replace_search: 3,
            self._finish_search: 6,
            self._prefill: 2,
            self._join: 2,
            self._step: 5,
            self._choose: 5,
            self._begin: 2,
            self._free: 4,
            self._read: 2,
            self._wait: 2,
        }

    def _others(self) -> tuple[Callable[[], bool], ...]:
        return self._open_search, self._go_on, self._prefill, self._step, self._free

    # opening

    def _drawn(self, width: int) -> tuple[BeamParams, SamplingParams]:
        draw = self.random
        most = draw.randint(3, 4)
        return (
            BeamParams(width, draw.choice((0.0, 1.0)), draw.choice((False, True, "never")), num_return_sequences=width),
            SamplingParams(
                repetition_penalty=draw.choice((1.0, 1.5)),
                no_repeat_ngram_size=draw.choice((0, 1)),
                suppress_tokens=tuple(draw.sample(range(3, 97), draw.choice((0, 50)))),
                eos_ids=(2, *draw.sample(range(3, 97), 20)),
                min_new_tokens=draw.choice((0, 3)),
                max_new_tokens=most,
            ),
        )

    def _open_search(self) -> bool:
        width = self.random.randint(1, 3)
        beams, params = self._drawn(width)
        source = [self.random.randrange(3, 97) for _ in range(self.random.randint(0, 4))]
        prefix = tuple(self.random.randrange(3, 97) for _ in range(self.random.choice((0, 0, 2))))
        assert params.max_new_tokens is not None
        try:
            seq = self.model.alloc_beams(
                width, len(source) + 2, params.max_new_tokens + (len(prefix) + 1 if prefix else 0)
            )
        except (NoFreeSlot, OutOfMemory):
            self._make_room()
            return False
        seq.src_lang_id, seq.tgt_lang_id = self.random.randrange(60, 97), self.random.randrange(60, 97)
        seq.prefix_tokens = prefix
        self._start(Search(seq, source, beams, params, prefix))
        return True

    def _make_room(self) -> None:
        """Give up what is there, of either kind."""
        if self._open_searches and self.random.random() < 0.5:
            self._drop(self.random.choice(self._open_searches))
        elif self._live:
            self._give_up(self.random.choice(self._live))

    def _start(self, search: Search) -> None:
        """Prefill a search, begin it and make its first selection, each on some stream."""
        self.searches.append(search)
        self._open_searches.append(search)
        stream, row = self._stream(), self.random.randrange(2 * SLOTS)
        self._clear([row], stream)
        slices = [PrefillSlice.whole(search.source, search.seq)]
        [ptr] = self.model.prefill_batch_chunk_rows(slices, stream, row)
        self.model.begin_beams(search.seq, search.beams, search.params, self._stream())
        self._select([search], [ptr])

    def _open_behind_a_step(self) -> bool:
        """A search gets the slots, the KV or the rows of those that a step is busy with."""
        if not self._step():
            return False
        for lane in self._live[:]:
            self._give_up(lane)
        return self._open_search()

    # going on

    def _clear(self, rows: Sequence[int], *streams: int) -> None:
        """Let what is about to write rows, which are no lane's, come after those who read them by themselves."""
        self._write({row: Lane(SequenceState(-1), [], 0, []) for row in rows}, *streams)
        for row in rows:
            del self._rows[row]

    def _select(self, searches: list[Search], ptrs: list[DevicePtr]) -> None:
        dst, (number, _), event = self._room(len(searches))
        self.model.select_beams_to_feed(ptrs, [search.seq for search in searches], dst, event, self._stream())
        self._waiting[number] = event
        for column, search in enumerate(searches):
            search.flags.append((number, column))

    def _go_on(self) -> bool:
        """Make a step of some searches, with ordinary sequences before or after them, perhaps beside a prefill."""
        searches = self._some_searches()
        if not searches:
            return False
        lanes = self._some([lane for lane in self._live if lane.seq.seq_len < lane.room], 0)
        first = self.random.random() < 0.5
        widths = [search.beams.num_beams for search in searches]
        before, after = (lanes, []) if first else ([], lanes)
        rows = dict(enumerate(before)) | dict(enumerate(after, len(before) + sum(widths)))
        new = self._open(1) if self.random.random() < 0.3 else []
        rows |= dict(enumerate(new, len(lanes) + sum(widths)))
        stream = self._stream()
        on = 0 if new else stream
        self._clear(range(len(before), len(before) + sum(widths)), on)
        self._write(rows, on, stream)
        seqs = [*seqs_of(before), *(search.seq for search in searches), *seqs_of(after)]
        sources: list[FeedSource] = [*self._sources(before), *[SELECTED] * len(searches), *self._sources(after)]
        if new:
            base = self.model.mixed_forward_batch_fed(sources, seqs, slices_of(new), stream).decode_logits
        else:
            base = self.model.decode_batch_fed(sources, seqs, stream)
        for seq in seqs:
            seq.seq_len += 1
        self._joined(new)
        ptrs = rows_after(self.model, base, [*([1] * len(before)), *widths])[len(before) :]
        self._select(searches, ptrs)
        return True

    def _some_searches(self) -> list[Search]:
        searches = [search for search in self._open_searches if not search.at_limit]
        return self.random.sample(searches, self.random.randint(min(1, len(searches)), len(searches)))

    def _begin_search_again(self) -> bool:
        """A sequence is prefilled and searched again while the last selection is under way."""
        if not self._open_searches:
            return False
        search = self.random.choice(self._open_searches)
        self._open_searches.remove(search)
        beams, params = self._drawn(search.beams.num_beams)
        params = replace(params, max_new_tokens=search.params.max_new_tokens)  # what there is KV for
        self._start(Search(search.seq, search.source[::-1], beams, params, search.prefix))
        return True

    # ends

    def _drop(self, search: Search) -> None:
        self._open_searches.remove(search)
        self.model.free_sequence(search.seq)

    def _replace_search(self) -> bool:
        """A search is given up while a step of it is under way, and another has its slots at once."""
        if not self._go_on():
            return False
        self._drop(self.random.choice(self._open_searches))
        return self._open_search()

    def _finish_search(self) -> bool:
        """Take what a search found, as soon as the host knows that it has ended."""
        if not self._open_searches:
            return False
        search = self.random.choice(self._open_searches)
        while not self._has_ended(search):
            self._go_on_with(search)
        self._drop(search)
        return True

    def _has_ended(self, search: Search) -> bool:
        number, column = search.flags[-1]
        self._wait_for(number)
        if not self.results[number][column] & BEAM_DONE_FLAG:
            return False
        search.taken = self.model.take_beams(search.seq)
        return True

    def _go_on_with(self, search: Search) -> None:
        stream = self._stream()
        self._clear(range(search.beams.num_beams), stream)
        base = self.model.decode_batch_fed([SELECTED], [search.seq], stream)
        search.seq.seq_len += 1
        self._select([search], [base])

    def _end(self) -> None:
        for search in self._open_searches[:]:
            self._drop(search)
        super()._end()


def assert_search_as_alone(model: NllbModel, search: Search, results: Sequence[Any]) -> None:
    """Ask the same of a sequence that has the model for itself, by calls that wait: the same becomes of it."""
    target = search.params.max_new_tokens
    assert target is not None
    given = len(search.prefix)
    seq = model.alloc_beams(search.beams.num_beams, len(search.source) + 2, target + (given + 1 if given else 0))
    seq.src_lang_id, seq.tgt_lang_id = search.seq.src_lang_id, search.seq.tgt_lang_id
    seq.prefix_tokens = search.prefix
    row = model.prefill(search.source, seq)
    model.begin_beams(seq, search.beams, search.params)
    for place, (number, column) in enumerate(search.flags):
        if place:
            row = step(model, [seq])
        assert select(model, [row], [seq]) == [results[number][column]]
    if search.taken is not None:
        found = model.take_beams(seq)
        assert [one.ids for one in found] == [one.ids for one in search.taken]
    model.free_sequence(seq)
