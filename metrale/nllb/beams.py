# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam searches: what the device keeps of each, one selection for any number of them, and what they found.

The beams of a search hold a slot each. Per slot the device has a beam's ids so far (the history), the log-probability
of each, its ancestry (for each position, the beam that wrote its keys and values), its score, and one finished
hypothesis of the search's pool. No keys or values are ever copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import open_ranges, ranged
from gpu_runtime.streams import StreamLike
from metrale import ops
from metrale.errors import InvalidInput, SequenceError
from metrale.model import BeamParams, FeedSource, Hypothesis, SamplingParams, SequenceState
from metrale.nllb.admission import given_len
from metrale.nllb.checks import pinned_results, require_event
from metrale.nllb.limits import WORD_ROOM, ModelShape
from metrale.nllb.logits import LogitsRows
from metrale.nllb.passes import Passes
from metrale.nllb.search import Search, kept_candidates
from metrale.nllb.selections import SearchColumns, Selection
from metrale.nllb.slot_rules import SlotRules
from metrale.nllb.slots import Batch, SlotColumns
from metrale.nllb.workspace import Workspace, beam_state, feed_state
from metrale.ops.beam_candidates import MAX_CANDIDATES, ROW_COLUMNS
from metrale.ops.beam_layout import IDS, LENGTH, ORDER, SCORE, pool_width

_WORD: Final = 4

_STAND_IN: Final = -1e9
"""Summed log-probability of the beams that stand in for those that do not exist, where an id has too few successors.
They may end up in the pool, as copies of others; nobody wants them."""


class _Run(NamedTuple):
    """So many neighbouring rows of logits, and the first of as many rows of candidates that they give."""

    logits: DevicePtr
    first: int
    rows: int


class BeamSearches:
    """The searches of a model. Their sequences and spans have been checked.

    Parameters
    ----------
    gpu : GpuBackend
    shape : ModelShape
    space : Workspace
    logits : LogitsRows
    passes : Passes
        Whose feeding turn orders this.
    rules : SlotRules
    columns : SlotColumns
        They are told which sequences have a row for each beam.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        shape: ModelShape,
        space: Workspace,
        logits: LogitsRows,
        passes: Passes,
        rules: SlotRules,
        columns: SlotColumns,
    ) -> None:
        self._gpu = gpu
        self._shape = shape
        self._space = space
        self._logits = logits
        self._passes = passes
        self._rules = rules
        self._searches: dict[int, Search] = {}
        self._columns = columns
        self._kept = SearchColumns(shape.limits.max_batch, shape.limits.target_positions, columns)
        regions = ("beams.values", "beams.ids", "beams.flags", "beams.results")
        self._places = {name: space[name] for name in (*regions, *beam_state(shape), *feed_state(shape))}
        for name, size in beam_state(shape).items():
            gpu.memset(space[name], 0, size)
        with ExitStack() as undo:
            self._copying = gpu.create_stream()
            undo.callback(gpu.destroy_stream, self._copying)
            self._copied = gpu.create_event()
            undo.callback(gpu.destroy_event, self._copied)
            words = shape.most_beams * pool_width(shape.limits.target_positions)
            memory = gpu.alloc_host_pinned(words * _WORD)
            undo.callback(gpu.free_host_pinned, memory)
            self._taken = memory.array[: words * _WORD].view(np.int32)
            self._teardown = undo.pop_all()
        open_ranges(self, gpu.ranges)

    def free(self) -> None:
        """Free what is not the workspace's. Work that is enqueued may still use it."""
        self._teardown.close()

    def check(self, beams: BeamParams, params: SamplingParams) -> int:
        """Refuse, with `InvalidInput`, what no sequence can be searched with; return the candidates of a selection."""
        kept = kept_candidates(beams, params)
        self._rules.check(params)
        return kept

    def begin(
        self,
        seq: SequenceState,
        slots: tuple[int, ...],
        room: int,
        beams: BeamParams,
        params: SamplingParams,
        stream: StreamLike,
    ) -> None:
        """Set how a prefilled sequence is searched, and tell the device what it must know for that.

        ``room`` is how many decoder positions each of its beams has.
        """
        kept, given = self.check(beams, params), given_len(seq.prompt_len)
        modes = (self._rules.mode(params, withhold_eos=False), self._rules.mode(params, withhold_eos=True))
        search = Search(seq, slots, beams, params, seq.seq_len, given, kept, modes)
        if beams.num_beams != len(slots):
            raise InvalidInput("num_beams", f"{len(slots)}, as the sequence was allocated with", beams.num_beams)
        least, most = seq.seq_len - given + 1, self._shape.limits.target_positions - given
        if not least <= search.limit <= most:
            raise InvalidInput("max_new_tokens", f"an int from {least} to {most}", search.limit)
        needed = given + search.limit - 1  # the last id is not fed
        if needed > room:
            what = f"the sequence in slot {seq.slot_idx} has {room} decoder positions for each beam"
            raise SequenceError(f"begin_beams: {what}, and its search needs {needed}")
        self.forget(seq)  # the search before this one ends, also when the device fails here
        self._rules.send(seq, params, stream, always=True)
        self._searches[slots[0]] = search
        self._columns.search(slots)
        self._kept.begin(search)

    def forget(self, seq: SequenceState) -> None:
        """Forget the search of a live sequence that begins anew, or ends."""
        search = self._searches.pop(seq.slot_idx, None)
        if search is not None:
            self._columns.end_search(search.slots)

    def searches(self, seq: SequenceState) -> bool:
        """Return whether a live sequence is searched with beams."""
        found = self._searches.get(seq.slot_idx)
        return found is not None and found.seq is seq

    def _search(self, call: str, seq: SequenceState) -> Search:
        if not self.searches(seq):
            raise SequenceError(f"{call}: the sequence in slot {seq.slot_idx} has no search; begin_beams begins one")
        return self._searches[seq.slot_idx]

    def refuse(self, call: str, batch: Batch) -> None:
        """Raise SequenceError when one of a batch is searched with beams, and ``call`` is none of theirs."""
        if self._columns.searched(batch):
            slot = batch.slots[self._columns.ancestry[batch.slots] >= 0][0]
            raise SequenceError(f"{call}: the sequence in slot {slot} is searched with beams")

    def check_fed(self, source: FeedSource, seq: SequenceState, argument: str) -> None:
        """Refuse to feed a searched sequence with anything but the ids that the last selection left its beams."""
        if not isinstance(source, FeedSource) or not source.sampled:
            raise InvalidInput(argument, "FeedSource(sampled=True), as its sequence is searched with beams", source)
        if seq.seq_len != self._columns.waiting[seq.slot_idx]:
            raise SequenceError(f"decode: no ids were selected for position {seq.seq_len} of slot {seq.slot_idx}")

    # selecting

    @ranged("select beams")
    def select(
        self,
        rows: Sequence[DevicePtr],
        seqs: Sequence[SequenceState],
        batch: Batch,
        dst: NDArray[Any],
        event: int,
        stream: StreamLike,
    ) -> None:
        """See `metrale.model.ModelBeams.select_beams_to_feed`. The sequences are those of ``batch``."""
        selection = self._kept.selection(batch)
        if selection is None:
            self._refuse_turns(seqs)
        pinned_results(dst, (len(seqs),))
        require_event(self._gpu, event)
        runs = self._runs(rows, selection.rows.tolist())
        passes = self._passes
        passes.refuse_capture(stream)
        passes.decoding.wait(stream)
        passes.prefilling.wait(stream)
        with passes.feeding.use(stream):
            table = self._space.tables["beams"].upload(stream, **selection.columns)
            for run in runs:
                self._candidates(run, table, selection.adjust, stream)
            self._choose(selection, table, stream)
            self._kept.made(batch)  # now, as a selection must not be made again because its results did not come
            self._gpu.copy_d2h_async(self._places["beams.results"], dst, stream)
            self._gpu.record_event(event, stream)

    def _refuse_turns(self, seqs: Sequence[SequenceState]) -> NoReturn:
        """Refuse a selection that is not the next one: its step was left out, or ``seq_len`` not moved on."""
        for search in [self._search("select_beams_to_feed", seq) for seq in seqs]:
            length, due = search.seq.seq_len, search.start + self._kept.selected(search.slots[0])
            if length != due:
                what = f"the search in slot {search.seq.slot_idx} goes on at position {due}"
                raise SequenceError(f"select_beams_to_feed: {what}, and its seq_len is {length}")
            if length - search.given >= search.limit:
                raise SequenceError(f"select_beams_to_feed: the search in slot {search.seq.slot_idx} is at its limit")
        raise AssertionError("a selection is refused for a reason")

    def _runs(self, rows: Sequence[DevicePtr], counts: Sequence[int]) -> list[_Run]:
        """Return the rows of logits that lie one after the other, in as few runs as there are."""
        if len(rows) != len(counts):
            raise InvalidInput("rows", f"one row for each of {len(counts)} sequences", f"{len(rows)}")
        arena = self._logits.arena
        row_bytes, past = arena.row_bytes, int(arena.base) + arena.rows * arena.row_bytes
        begins: list[tuple[DevicePtr, int]] = []
        first, end = 0, -1
        for ptr, count in zip(rows, counts, strict=True):
            after = end + count * row_bytes
            if ptr != end or after > past or type(ptr) is not DevicePtr:
                self._logits.index(ptr, count)
                after = int(ptr) + count * row_bytes
                if ptr != end:
                    begins.append((DevicePtr(ptr), first))
            first, end = first + count, after
        ends = [*(begin for _, begin in begins[1:]), first]
        return [_Run(ptr, begin, end - begin) for (ptr, begin), end in zip(begins, ends, strict=True)]

    def _candidates(self, run: _Run, table: Mapping[str, DevicePtr], adjust: bool, stream: StreamLike) -> None:
        shape, arena = self._shape, self._logits.arena
        ops.beam_candidates(
            self._gpu,
            run.logits,
            table["row_counts"].offset(run.first * len(ROW_COLUMNS) * _WORD),
            table["penalties"].offset(run.first * _WORD),
            self._places["feed.bans"],
            self._places["feed.words"],
            self._places["feed.history"],
            self._places["beams.values"].offset(run.first * MAX_CANDIDATES * _WORD),
            self._places["beams.ids"].offset(run.first * MAX_CANDIDATES * _WORD),
            self._places["beams.flags"].offset(run.first * _WORD),
            rows=run.rows,
            vocab=shape.vocab,
            stride=arena.row_elements,
            slot_count=shape.limits.max_batch,
            words=shape.ban_words,
            word_room=WORD_ROOM,
            capacity=shape.limits.target_positions,
            most=MAX_CANDIDATES,
            adjust=adjust,
            dtype=arena.dtype,
            stream=stream,
        )

    def _choose(self, selection: Selection, table: Mapping[str, DevicePtr], stream: StreamLike) -> None:
        shape = self._shape
        ops.beam_select(
            self._gpu,
            self._places["beams.values"],
            self._places["beams.ids"],
            self._places["beams.flags"],
            table["group_counts"],
            table["settings"],
            table["members"],
            self._places["feed.bans"],
            self._places["beams.running"],
            self._places["feed.history"],
            self._places["beams.ancestry"],
            self._places["beams.logps"],
            self._places["beams.pool"],
            self._places["beams.state"],
            self._places["feed.cells"],
            self._places["beams.results"],
            groups=len(selection.rows),
            candidate_rows=int(selection.rows.sum()),
            most=MAX_CANDIDATES,
            member_count=selection.members,
            slot_count=shape.limits.max_batch,
            words=shape.ban_words,
            capacity=shape.limits.target_positions,
            cell_base=shape.logits_rows,
            cell_count=shape.feed_cells,
            stream=stream,
        )

    # what was found

    def take(self, seq: SequenceState) -> list[Hypothesis]:
        """See `metrale.model.ModelBeams.take_beams`."""
        search = self._search("take_beams", seq)
        if not self._kept.selected(seq.slot_idx):
            raise SequenceError(f"take_beams: nothing was selected for the search in slot {seq.slot_idx}")
        width = pool_width(self._shape.limits.target_positions)
        pool = self._taken[: len(search.slots) * width].reshape(len(search.slots), width)
        for row, slot in zip(pool, search.slots, strict=True):
            self._gpu.copy_d2h_async(self._places["beams.pool"].offset(slot * width * _WORD), row, self._copying)
        self._gpu.record_event(self._copied, self._copying)
        self._gpu.event_synchronize(self._copied)
        order = pool[:, ORDER]
        found = [_hypothesis(pool[member]) for member in order[order >= 0]]
        real = [one for one in found if one.score * search.norm(len(one.ids) + 1 - search.given) > _STAND_IN / 2]
        return real[: search.beams.num_return_sequences]


def _hypothesis(row: NDArray[np.int32]) -> Hypothesis:
    """Return what a row of the pool holds, without the start token."""
    ids, logprobs = np.split(row[IDS:], 2)
    after = slice(1, int(row[LENGTH]))
    return Hypothesis(
        ids=ids[after].tolist(),
        score=float(row[SCORE : SCORE + 1].view(np.float32)[0]),
        logprobs=logprobs[after].view(np.float32).tolist(),
    )
