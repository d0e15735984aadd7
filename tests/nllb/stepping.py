# SPDX-License-Identifier: MIT OR Apache-2.0
"""Programs that drive a model through many steps, and return all that comes of them to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

from gpu_runtime.backend import GpuBackend
from metrale.model import BeamParams, FeedSource, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import Case, arena, begin, prefilled, sampled
from tests.nllb.searching import rows_after, select, step

Found = list[Any]
Program = Callable[[NllbModel], Found]

LANES: Final = 7
SIZES: Final = (1, 3, 3, 5, 7, 6, 1, 1, 7, 4, 2, 5, 2, 7)
"""Lanes of one step after another: they grow and shrink, and come again."""

WARM: Final = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.3, seed=11)
BANS: Final = SamplingParams(suppress_tokens=(5, 6), no_repeat_ngram_size=2, eos_ids=(2,), min_new_tokens=3)


def case(lane: int) -> Case:
    return Case([5 + lane, 6, 7, 30][: 1 + lane % 4], 80 - lane, 81 + lane % 3, [])


def rows(model: NllbModel, lanes: int) -> bytes:
    """Return the logits of the first rows."""
    return arena(model)[:lanes].tobytes()


def step_of(model: NllbModel, seqs: Sequence[SequenceState], turn: int) -> bytes:
    """Feed ids that differ from lane to lane and from turn to turn; return the logits."""
    model.decode_batch([9 + (7 * turn + lane) % 60 for lane in range(len(seqs))], seqs)
    return rows(model, len(seqs))


def _again(model: NllbModel, seq: SequenceState, lane: int) -> None:
    """Prefill a sequence once more when it is full."""
    if seq.seq_len >= model.shape.limits.target_positions:
        model.prefill(case(lane).tokens, seq)


def fed_by_the_host(model: NllbModel) -> Found:
    """Steps of all sizes over sequences of different lengths."""
    seqs = [prefilled(model, case(lane)) for lane in range(LANES)]
    found: Found = []
    for turn, lanes in enumerate(SIZES):
        some = [*seqs[turn % 3 :], *seqs[: turn % 3]][:lanes]
        for seq in some:
            _again(model, seq, seqs.index(seq))
        found.append(step_of(model, some, turn))
    for lane in range(3):  # and one alone, by the single call
        _again(model, seqs[lane], lane)
        model.decode(20 + lane, seqs[lane])
        found.append(rows(model, 1))
    _free(model, seqs)
    return found


def sampling(model: NllbModel) -> Found:
    """Fed steps in which lanes choose in their own ways, and the last ones leave."""
    seqs = [begin(model, case(lane)) for lane in range(LANES)]
    slices = [PrefillSlice.whole(case(lane).tokens, seq) for lane, seq in enumerate(seqs)]
    base = model.prefill_batch_chunk(slices)[0]
    for seq, params in zip(seqs, (WARM, BANS), strict=False):
        model.begin_sampling(seq, params)
    found: Found = [sampled(model, base, seqs).ids]
    for turn in range(5):
        live = seqs[: LANES - turn // 2 * 2]
        sources = [FeedSource(sampled=True)] * len(live)
        if turn == 3:
            sources[0] = FeedSource(token=33)  # into the history as well, by a copy within the device
        model.decode_batch_fed(sources, live)
        for seq in live:
            seq.seq_len += 1
        choice = sampled(model, base, live, logprobs=turn > 2)
        found.append((rows(model, len(live)), choice.ids, choice.logprobs.tobytes(), choice.flags))
    _free(model, seqs)
    return found


def searching(model: NllbModel) -> Found:
    """Searches of which the first leaves half way, beside a sequence without beams: as many rows as in steps before."""
    ordinary = [prefilled(model, case(lane)) for lane in range(LANES)]
    for turn in range(2):
        step_of(model, ordinary, turn)
    _free(model, ordinary)
    widths, params = (3, 3), SamplingParams(eos_ids=(2,), max_new_tokens=8)
    seqs: list[SequenceState] = []
    for width in widths:
        seq = model.alloc_beams(width, 5, 8)
        seq.src_lang_id, seq.tgt_lang_id = 80, 81
        model.prefill([5, 6, 7], seq)
        model.begin_beams(seq, BeamParams(width), params)
        seqs.append(seq)
    first = model.logits_buffer_ptr()
    starts = [first.offset((model.shape.limits.max_batch + seq.slot_idx) * model.logits_row_bytes()) for seq in seqs]
    found: Found = [select(model, starts, seqs)]
    plain = prefilled(model, case(4))
    sampled(model, first.offset((model.shape.limits.max_batch + plain.slot_idx) * model.logits_row_bytes()), [plain])
    for turn in range(5):
        live = seqs if turn < 3 else seqs[1:]
        base = step(model, [*live, plain])
        lanes = sum(widths[-len(live) :])
        found.append(rows(model, lanes + 1))
        found.append(select(model, rows_after(model, base, widths[-len(live) :]), live))
        found.append(sampled(model, base.offset(lanes * model.logits_row_bytes()), [plain]).ids)
    for seq in seqs:
        found.append([(one.ids, one.score, one.logprobs) for one in model.take_beams(seq)])
    _free(model, [*seqs, plain])
    return found


def mixed(model: NllbModel) -> Found:
    """Steps beside prefills, whose rows follow those of the step; and then together with what joined."""
    seqs = [prefilled(model, case(lane)) for lane in range(3)]
    stream = model.create_stream()
    found: Found = []
    for turn in range(4):
        fresh = begin(model, case(turn))
        slices = [PrefillSlice.whole(case(turn).tokens, fresh)]
        result = model.mixed_forward_batch([10 + turn, 11, 12][: len(seqs)], seqs[:3], slices, stream)
        model.synchronize(stream)
        found.append(rows(model, 3))
        found.append(model.copy_logits_to_host(result.prefill_logits[0]).tobytes())
        seqs.append(fresh)
        found.append(step_of(model, seqs[3:], turn))
    model.destroy_stream(stream)
    _free(model, seqs)
    return found


PROGRAMS: Final[dict[str, Program]] = {
    "fed by the host": fed_by_the_host,
    "sampling": sampling,
    "searching": searching,
    "mixed": mixed,
}
"""For a model of `LANES` lanes whose targets have up to 8 tokens."""


def _free(model: NllbModel, seqs: Sequence[SequenceState]) -> None:
    for seq in seqs:
        model.free_sequence(seq)


@contextmanager
def replays(gpu: GpuBackend) -> Iterator[list[int]]:
    """Give a list of the graphs that are launched inside the context, in order."""
    launched: list[int] = []
    real = gpu.launch_graph

    def launch_graph(graph: int, stream: Any = 0) -> None:
        real(graph, stream)
        launched.append(graph)

    vars(gpu)["launch_graph"] = launch_graph
    try:
        yield launched
    finally:
        del vars(gpu)["launch_graph"]


class Failing:
    """Takes the place of a method, and raises ``error`` at its calls from number ``first`` on, ``times`` times."""

    def __init__(self, real: Callable[..., Any], error: BaseException, first: int = 0, times: int = 1) -> None:
        self._real, self._error, self._calls = real, error, count()
        self._fails = range(first, first + times)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if next(self._calls) in self._fails:
            raise self._error
        return self._real(*args, **options)
