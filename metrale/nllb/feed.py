# SPDX-License-Identifier: MIT OR Apache-2.0
"""The token feed: ids that are chosen on the device and taken in by the next step there, without the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import open_ranges, ranged
from gpu_runtime.streams import StreamLike
from metrale.checks import integer
from metrale.errors import InvalidInput
from metrale.model import GREEDY, FeedSource, RowMask, SamplingParams, SequenceState
from metrale.nllb.admission import given_len
from metrale.nllb.checks import pinned_results, require_event, token_id
from metrale.nllb.limits import WORD_ROOM, ModelShape
from metrale.nllb.logits import LogitsRows
from metrale.nllb.passes import Copy, Passes
from metrale.nllb.slot_rules import SlotRules
from metrale.nllb.slots import ANYWHERE, NOTHING, Batch, SlotColumns, Step
from metrale.nllb.workspace import Workspace, arrivals_bytes, feed_state
from metrale.ops.head_linear import block_count
from metrale.ops.join_maxima import join_maxima
from metrale.ops.processing import SUPPRESS
from metrale.ops.sample import COUNT_COLUMNS, KEEP, LOGPROB, SETTING_COLUMNS, sample

_SLOT, _LENGTH, _MODE, _MASK, _CELL, _FORCED = map(
    COUNT_COLUMNS.index, ("slot", "length", "mode", "mask0", "cell", "forced")
)
_LATE: Final = ("given", "least", "withheld", "last", "last_id")
"""For each slot what depends on how many ids were generated: the ids that do not count; how many there must be before
EOS may come, and the bits of the mode until then; the count at which an id is forced, and which."""
_GIVEN, _LEAST, _WITHHELD, _LAST, _LAST_ID = range(len(_LATE))
_NEVER: Final = -(1 << 31)

_UNSET: Final = 1
_REMEMBERS: Final = 2
_CHANGES: Final = 4
_ADJUSTS: Final = 8
_DRAWS: Final = 16
"""Bits of what a slot asks for, so that a step whose slots do not ask for it passes it over: its settings are another
sequence's; its ids depend on those before; what it does depends on how many there are; its scores are processed; its
ids are drawn."""


class TokenFeed:
    """Cells with the ids to be fed, and per slot: how ids are chosen, which ones came before, which are forbidden.

    There is a cell for each logits row, for `argmax`, and one for each slot, for `sample`: the latter go with the
    sequence, so that callers who share a model do not meet in them.

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
        They are told for which slots an id waits.
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
        slots = shape.limits.max_batch
        self._capacity = shape.limits.target_positions
        self._columns = columns
        self._greedy_rows = 0  # rows of the last argmax
        self._asks = np.full(slots, _UNSET)
        self._counts = np.zeros((slots, len(COUNT_COLUMNS)), dtype=np.int32)
        self._late = np.zeros((slots, len(_LATE)), dtype=np.int32)
        self._settings = np.zeros((slots, len(SETTING_COLUMNS)), dtype=np.float32)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        names = (*feed_state(shape), "feed.results", "feed.parts", "feed.arrivals")
        self._places = {name: space[name] for name in names}
        for name, size in feed_state(shape).items():
            gpu.memset(space[name], 0, size)
        gpu.memset(space["feed.arrivals"], 0, arrivals_bytes(shape))
        open_ranges(self, gpu.ranges)

    # cells

    def cell(self, source: FeedSource, seq: SequenceState, argument: str) -> int:
        """Return the cell that a source stands for; -1 for a token of its own. An error names ``argument``.

        Raises
        ------
        InvalidInput
            When no id has been chosen for it.
        """
        if not isinstance(source, FeedSource):
            raise InvalidInput(argument, "a FeedSource", source)
        if source.sampled:
            if self._columns.waiting[seq.slot_idx] != ANYWHERE:
                raise InvalidInput(
                    argument, "a sequence for which sample_batch_to_feed has chosen an id", "sampled=True"
                )
            return int(self._columns.cells[seq.slot_idx])
        if source.token is not None:
            token_id(f"{argument}.token", source.token, self._shape.vocab)
            return -1
        expected = f"a row of the last argmax_batch_to_feed, which had {self._greedy_rows}"
        return integer(f"{argument}.from_row", source.from_row, 0, self._greedy_rows - 1, expected)

    # how ids are chosen

    def begin(self, seq: SequenceState, params: SamplingParams, stream: StreamLike) -> None:
        """Set how the ids of a prefilled sequence are chosen, and tell the device what it must know for that."""
        self._rules.check(params)
        self._rules.send(seq, params, stream)
        self._set(seq, params)
        self._columns.waiting[seq.slot_idx] = NOTHING

    def _set(self, seq: SequenceState, params: SamplingParams) -> None:
        slot = seq.slot_idx
        mode = self._rules.mode(params, withhold_eos=False) | (KEEP if params.needs_history else 0)
        top_k, cell = min(params.top_k, self._shape.vocab), self._columns.cells[slot]
        self._counts[slot] = (slot, 0, top_k, params.no_repeat_ngram_size, mode, -1, -1, cell, -1)
        least, last, last_id = params.min_new_tokens, _NEVER, -1
        if params.forced_eos_id is not None and params.max_new_tokens is not None:
            last, last_id = params.max_new_tokens - 1, params.forced_eos_id
        withheld = self._rules.mode(params, withhold_eos=True)
        self._late[slot] = (given_len(seq.prompt_len), least, withheld, last, last_id)
        self._settings[slot] = (params.temperature, params.top_p, params.min_p, params.repetition_penalty)
        self._seeds[slot] = params.seed
        changes = last != _NEVER or (least and withheld)
        adjusts = mode & ~KEEP or params.needs_history
        bits = (_REMEMBERS, _CHANGES, _ADJUSTS, _DRAWS)
        asked = (params.needs_history, changes, adjusts, params.temperature > 0)
        self._asks[slot] = sum(bit for bit, one in zip(bits, asked, strict=True) if one)

    def fed_history(self, step: Step) -> list[Copy]:
        """Return the copies that put a step's ids into the histories, but for ids that `sample` has put there."""
        if step.all_waited:
            return []  # so it is as a rule
        remembering = self._asks[step.slots] & _REMEMBERS != 0
        copies = []
        ids, cells = self._space.tables["decoder"].places["ids"], self._space["feed.cells"]
        for row in np.flatnonzero(remembering & (step.cells != self._columns.cells[step.slots])).tolist():
            slot, position, _, cell = (int(column[row]) for column in step[:4])
            source = ids.offset(4 * row) if cell < 0 else cells.offset(4 * cell)
            place = self._space["feed.history"].offset(4 * (slot * self._capacity + position))
            copies.append(Copy(source, place, 4))
        return copies

    def forget(self, seq: SequenceState) -> None:
        """Choose greedily again for a live sequence that begins anew, or ends."""
        self._asks[seq.slot_idx] = _UNSET

    def move(self, seq: SequenceState, new: int) -> None:
        """Let what is kept for ``seq`` go ahead of it to slot ``new``."""
        old = seq.slot_idx
        if self._asks[old] == _UNSET:
            return
        self._passes.refuse_capture(0)
        self._passes.decoding.wait(0)  # a step may still read the cell of the new slot's former owner
        with self._passes.feeding.use(0):
            for name, size in feed_state(self._shape).items():
                first = self._shape.logits_rows if name == "feed.cells" else 0
                item = 4 if name == "feed.cells" else size // self._shape.limits.max_batch
                base = self._space[name]
                self._gpu.copy_d2d_async(base.offset((first + old) * item), base.offset((first + new) * item), item)
        for kept in (self._counts, self._late, self._settings, self._seeds, self._asks):
            kept[new] = kept[old]
        self._counts[new, [_SLOT, _CELL]] = new, self._columns.cells[new]
        self.forget(seq)

    # choosing

    @ranged("sample")
    def sample(
        self,
        logits: int,
        seqs: Sequence[SequenceState],
        batch: Batch,
        dst: NDArray[Any],
        event: int,
        stream: StreamLike,
        logprobs: bool,
        untouched: bool,
    ) -> None:
        """See `metrale.model.ModelDeviceFeed.sample_batch_to_feed`. Those of ``batch`` have been checked."""
        slots = batch.slots
        pinned_results(dst, (3, len(slots)))
        asks = int(np.bitwise_or.reduce(self._asks[slots]))
        if asks & _UNSET:
            for index in np.flatnonzero(self._asks[slots] == _UNSET).tolist():
                self._set(seqs[index], GREEDY)
        counts = self._counts[slots]
        counts[:, _LENGTH] = batch.lengths
        if asks & _CHANGES:
            self._change(counts, self._late[slots])
        if logprobs:
            counts[:, _MODE] |= LOGPROB
        adjust = asks & _ADJUSTS != 0 or (asks & _CHANGES != 0 and bool((counts[:, _MODE] & SUPPRESS).any()))
        greedy = not adjust and asks & _DRAWS == 0
        how = {"adjust": adjust, "greedy": greedy, "join": greedy and untouched and not logprobs}
        self._choose(logits, counts, self._settings[slots], self._seeds[slots], dst, event, stream, **how)
        self._columns.waiting[slots] = ANYWHERE

    @staticmethod
    def _change(counts: NDArray[np.int32], late: NDArray[np.int32]) -> None:
        """Let rows withhold EOS, or force an id, by how many ids there are so far."""
        generated = counts[:, _LENGTH] - late[:, _GIVEN]
        counts[:, _MODE] |= np.where(generated < late[:, _LEAST], late[:, _WITHHELD], 0)
        counts[:, _FORCED] = np.where(generated == late[:, _LAST], late[:, _LAST_ID], -1)

    @ranged("score")
    def score(self, logits: int, ids: Sequence[int], dst: NDArray[Any], event: int, stream: StreamLike) -> None:
        """Enqueue the log-probability of ``ids[i]`` in row ``i`` from ``logits``, under the unprocessed logits.

        ``dst`` is as for `sample`. Nothing is kept.
        """
        pinned_results(dst, (3, len(ids)))
        counts = np.zeros((len(ids), len(COUNT_COLUMNS)), dtype=np.int32)
        counts[:, _MODE], counts[:, _FORCED] = LOGPROB, ids
        counts[:, _CELL] = counts[:, _MASK] = counts[:, _MASK + 1] = -1
        self._choose(logits, counts, *_plain(len(ids)), dst, event, stream, greedy=True)

    @ranged("argmax")
    def argmax(self, logits: int, masks: Sequence[RowMask], dst: NDArray[Any], event: int, stream: StreamLike) -> None:
        """See `metrale.model.ModelDeviceFeed.argmax_batch_to_feed`."""
        pinned_results(dst, (len(masks),))
        counts = np.zeros((len(masks), len(COUNT_COLUMNS)), dtype=np.int32)
        counts[:, _MASK : _MASK + RowMask.MAX_IDS] = -1
        counts[:, _CELL] = np.arange(len(masks))
        counts[:, _FORCED] = -1
        for index, mask in enumerate(masks):
            if not isinstance(mask, RowMask):
                raise InvalidInput(f"masks[{index}]", "a RowMask", mask)
            for place, token in enumerate(mask.banned):
                counts[index, _MASK + place] = token_id(f"masks[{index}].banned", token, self._shape.vocab)
        greedy = not any(mask.banned for mask in masks)
        self._choose(logits, counts, *_plain(len(masks)), dst, event, stream, greedy=greedy)
        self._greedy_rows = len(masks)

    def _choose(
        self,
        logits: int,
        counts: NDArray[Any],
        settings: NDArray[Any],
        seeds: NDArray[Any],
        dst: NDArray[Any],
        event: int,
        stream: StreamLike,
        *,
        greedy: bool,
        adjust: bool = False,
        join: bool = False,
    ) -> None:
        """Enqueue the choice of ids. ``join``: the rows' maxima suffice, if the model has them."""
        shape, space, arena = self._shape, self._space, self._logits.arena
        rows = len(counts)
        first = self._logits.index(logits, rows)
        maxima = self._logits.maxima(first, rows) if join else DevicePtr.NULL
        require_event(self._gpu, event)
        results = self._places["feed.results"]
        passes = self._passes
        passes.refuse_capture(stream)
        passes.decoding.wait(stream)
        passes.prefilling.wait(stream)
        with passes.feeding.use(stream):
            table = space.tables["feed"].upload(
                stream, counts=counts.reshape(-1), settings=settings.reshape(-1), seeds=seeds
            )
            chosen = (
                self._places["feed.history"],
                self._places["feed.cells"],
                results,
                results.offset(4 * rows),
                results.offset(8 * rows),
            )
            sizes: dict[str, Any] = {
                "rows": rows,
                "slot_count": shape.limits.max_batch,
                "capacity": self._capacity,
                "cell_count": shape.feed_cells,
                "stream": stream,
            }
            if not maxima.is_null:
                blocks = block_count(shape.head_rows, self._gpu.limits())
                join_maxima(self._gpu, maxima, table["counts"], *chosen, blocks=blocks, **sizes)
            else:
                sample(
                    self._gpu,
                    logits,
                    table["counts"],
                    table["settings"],
                    table["seeds"],
                    self._places["feed.bans"],
                    self._places["feed.words"],
                    *chosen,
                    self._places["feed.parts"],
                    self._places["feed.arrivals"],
                    vocab=shape.vocab,
                    stride=arena.row_elements,
                    words=shape.ban_words,
                    word_room=WORD_ROOM,
                    adjust=adjust,
                    greedy=greedy,
                    dtype=arena.dtype,
                    **sizes,
                )
            self._gpu.copy_d2h_async(results, dst, stream)
            self._gpu.record_event(event, stream)


def _plain(rows: int) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Return settings and seeds of rows that draw nothing."""
    settings = np.broadcast_to(np.array([0, 1, 0, 1], dtype=np.float32), (rows, len(SETTING_COLUMNS)))
    return settings, np.zeros(rows, dtype=np.uint64)
