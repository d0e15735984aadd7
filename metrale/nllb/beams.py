# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam searches: what the device keeps of each, one selection for any number of them, and what they found.

The beams of a search hold a slot each. Per slot the device has a beam's ids so far (the history), the log-probability
of each, its ancestry (for each position, the beam that wrote its keys and values), its score, and one finished
hypothesis of the search's pool. No keys or values are ever copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

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
from metrale.nllb.decoder import Feed
from metrale.nllb.kv import Span
from metrale.nllb.limits import WORD_ROOM, ModelShape
from metrale.nllb.logits import LogitsRows
from metrale.nllb.passes import Passes
from metrale.nllb.search import Search, kept_candidates
from metrale.nllb.slot_rules import SlotRules
from metrale.nllb.workspace import Workspace, beam_state
from metrale.ops.beam_candidates import MAX_CANDIDATES, ROW_COLUMNS
from metrale.ops.beam_layout import AT_LIMIT, EARLY, IDS, LENGTH, ORDER, SCORE, pool_width

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
    """

    def __init__(
        self,
        gpu: GpuBackend,
        shape: ModelShape,
        space: Workspace,
        logits: LogitsRows,
        passes: Passes,
        rules: SlotRules,
    ) -> None:
        self._gpu = gpu
        self._shape = shape
        self._space = space
        self._logits = logits
        self._passes = passes
        self._rules = rules
        self._searches: dict[int, Search] = {}
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

    def forget(self, seq: SequenceState) -> None:
        """Forget the search of a sequence that begins anew."""
        self._searches.pop(seq.slot_idx, None)

    def searches(self, seq: SequenceState) -> bool:
        """Return whether a live sequence is searched with beams."""
        found = self._searches.get(seq.slot_idx)
        return found is not None and found.seq is seq

    def _search(self, call: str, seq: SequenceState) -> Search:
        if not self.searches(seq):
            raise SequenceError(f"{call}: the sequence in slot {seq.slot_idx} has no search; begin_beams begins one")
        return self._searches[seq.slot_idx]

    def refuse(self, call: str, seq: SequenceState) -> None:
        """Raise SequenceError when a live sequence is searched with beams, and ``call`` is none of theirs."""
        if self.searches(seq):
            raise SequenceError(f"{call}: the sequence in slot {seq.slot_idx} is searched with beams")

    def feeds(self, source: FeedSource, seq: SequenceState, span: Span, argument: str) -> list[Feed]:
        """Return what the beams of a search feed: each the id that the last selection left it."""
        search = self._search("decode", seq)
        if not isinstance(source, FeedSource) or not source.sampled:
            raise InvalidInput(argument, "FeedSource(sampled=True), as its sequence is searched with beams", source)
        if seq.seq_len != search.start + search.selections - 1:
            raise SequenceError(f"decode: no ids were selected for position {seq.seq_len} of slot {seq.slot_idx}")
        return [
            Feed((0,), seq.seq_len, span, self._shape.logits_rows + slot, beam, slot)
            for beam, slot in enumerate(search.slots)
        ]

    # selecting

    @ranged("select beams")
    def select(
        self,
        rows: Sequence[DevicePtr],
        seqs: Sequence[SequenceState],
        dst: NDArray[Any],
        event: int,
        stream: StreamLike,
    ) -> None:
        """See `metrale.model.ModelBeams.select_beams_to_feed`. The sequences are different ones."""
        searches = [self._search("select_beams_to_feed", seq) for seq in seqs]
        for search in searches:
            self._check_turn(search)
        pinned_results(dst, (len(searches),))
        require_event(self._gpu, event)
        runs = self._runs(rows, searches)
        passes = self._passes
        passes.refuse_capture(stream)
        passes.decoding.wait(stream)
        passes.prefilling.wait(stream)
        with passes.feeding.use(stream):
            table = self._space.tables["beams"].upload(stream, **self._columns(searches))
            adjust = any(search.adjusts for search in searches)
            for run in runs:
                self._candidates(run, table, adjust, stream)
            self._choose(searches, runs[-1].first + runs[-1].rows, table, stream)
            for search in searches:  # now, as a selection must not be made again because its results did not come
                search.selections += 1
            self._gpu.copy_d2h_async(self._space["beams.results"], dst, stream)
            self._gpu.record_event(event, stream)

    def _check_turn(self, search: Search) -> None:
        """Refuse a selection that is not the next one: its step was left out, or ``seq_len`` not moved on."""
        length, due = search.seq.seq_len, search.start + search.selections
        if length != due:
            what = f"the search in slot {search.seq.slot_idx} goes on at position {due}"
            raise SequenceError(f"select_beams_to_feed: {what}, and its seq_len is {length}")
        if length - search.given >= search.limit:
            raise SequenceError(f"select_beams_to_feed: the search in slot {search.seq.slot_idx} is at its limit")

    def _runs(self, rows: Sequence[DevicePtr], searches: Sequence[Search]) -> list[_Run]:
        """Return the rows of logits that lie one after the other, in as few runs as there are."""
        if len(rows) != len(searches):
            raise InvalidInput("rows", f"one row for each of {len(searches)} sequences", f"{len(rows)}")
        runs: list[_Run] = []
        first = 0
        for ptr, search in zip(rows, searches, strict=True):
            self._logits.index(ptr, search.rows)
            if runs and int(ptr) == int(runs[-1].logits) + runs[-1].rows * self._logits.arena.row_bytes:
                runs[-1] = runs[-1]._replace(rows=runs[-1].rows + search.rows)
            else:
                runs.append(_Run(DevicePtr(ptr), first, search.rows))
            first += search.rows
        return runs

    def _columns(self, searches: Sequence[Search]) -> dict[str, NDArray[Any]]:
        """Return the table of a selection: a row for each row of candidates, and one for each search."""
        by_row: list[tuple[int, ...]] = []
        groups: list[tuple[int, ...]] = []
        settings: list[tuple[float, float]] = []
        members = [slot for search in searches for slot in search.slots]
        member = 0
        for search in searches:
            length = search.seq.seq_len
            after = length + 1 - search.given  # ids that count, with the one to be selected
            params, home = search.params, search.slots[0]
            last = after == search.limit
            forced = -1 if params.forced_eos_id is None or not last else params.forced_eos_id
            mode = search.modes[after - 1 < params.min_new_tokens]
            fresh = not search.selections
            groups.append(
                (
                    len(by_row),
                    member,
                    len(search.slots),
                    search.kept,
                    fresh,
                    length,
                    (AT_LIMIT if last else 0) | (EARLY if search.beams.early_stopping is True else 0),
                    home,
                )
            )
            settings.append((search.norm(after), search.bound_norm(after)))
            by_row += [
                (slot, length, search.kept, params.no_repeat_ngram_size, mode, forced, home)
                for slot in search.slots[: search.rows]
            ]
            member += len(search.slots)
        penalties = np.repeat([one.params.repetition_penalty for one in searches], [one.rows for one in searches])
        return {
            "row_counts": np.array(by_row, dtype=np.int32).reshape(-1),
            "penalties": penalties.astype(np.float32),
            "group_counts": np.array(groups, dtype=np.int32).reshape(-1),
            "settings": np.array(settings, dtype=np.float32).reshape(-1),
            "members": np.array(members, dtype=np.int32),
        }

    def _candidates(self, run: _Run, table: Mapping[str, DevicePtr], adjust: bool, stream: StreamLike) -> None:
        shape, space, arena = self._shape, self._space, self._logits.arena
        ops.beam_candidates(
            self._gpu,
            run.logits,
            table["row_counts"].offset(run.first * len(ROW_COLUMNS) * _WORD),
            table["penalties"].offset(run.first * _WORD),
            space["feed.bans"],
            space["feed.words"],
            space["feed.history"],
            space["beams.values"].offset(run.first * MAX_CANDIDATES * _WORD),
            space["beams.ids"].offset(run.first * MAX_CANDIDATES * _WORD),
            space["beams.flags"].offset(run.first * _WORD),
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

    def _choose(
        self, searches: Sequence[Search], rows: int, table: Mapping[str, DevicePtr], stream: StreamLike
    ) -> None:
        shape, space = self._shape, self._space
        ops.beam_select(
            self._gpu,
            space["beams.values"],
            space["beams.ids"],
            space["beams.flags"],
            table["group_counts"],
            table["settings"],
            table["members"],
            space["feed.bans"],
            space["beams.running"],
            space["feed.history"],
            space["beams.ancestry"],
            space["beams.logps"],
            space["beams.pool"],
            space["beams.state"],
            space["feed.cells"],
            space["beams.results"],
            groups=len(searches),
            candidate_rows=rows,
            most=MAX_CANDIDATES,
            member_count=sum(len(search.slots) for search in searches),
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
        if not search.selections:
            raise SequenceError(f"take_beams: nothing was selected for the search in slot {seq.slot_idx}")
        width = pool_width(self._shape.limits.target_positions)
        pool = self._taken[: len(search.slots) * width].reshape(len(search.slots), width)
        for row, slot in zip(pool, search.slots, strict=True):
            self._gpu.copy_d2h_async(self._space["beams.pool"].offset(slot * width * _WORD), row, self._copying)
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
