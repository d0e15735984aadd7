# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps that take their ids from the device: the bits of ordinary steps, and nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from metrale.errors import InvalidInput, SequenceError
from metrale.model import FeedSource, PrefillSlice, RowMask, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only, open_host
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import (
    Case,
    arena,
    changed_rows,
    poke,
    prefilled,
    results,
    sampled,
    state,
    to_feed,
)

CASES = [Case([5, 6, 7], 80, 81, []), Case([30, 31], 82, 83, []), Case([40] * 5, 84, 85, []), Case([], 86, 87, [])]
ANY = RowMask()
SAMPLED = FeedSource(sampled=True)


def advance(seqs: list[SequenceState]) -> None:
    """Count one fed step, of which the ids are not known."""
    for seq in seqs:
        seq.seq_len += 1


def rows(model: NllbModel, count: int) -> np.ndarray:
    """Return the vocabulary of the first rows."""
    return arena(model)[:count, :97]


def greedy_steps(model: NllbModel, count: int) -> tuple[list[list[int]], list[bytes]]:
    """Decode all cases for some steps by ordinary calls; return each step's ids and its logits."""
    seqs = [prefilled(model, case) for case in CASES]
    base = model.logits_buffer_ptr()
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES, seqs, strict=True)]
    model.prefill_batch_chunk_rows(slices)
    ids, logits = [], []
    for _ in range(count):
        ids.append(model.argmax_batch(base, 4))
        logits.append(rows(model, 4).tobytes())
        model.decode_batch(ids[-1], seqs)
    for seq in seqs:
        model.free_sequence(seq)
    return ids, logits


SOURCES: dict[str, list[Callable[[int, int], FeedSource]]] = {
    "token": [lambda lane, token: FeedSource(token=token)] * 4,
    "from_row": [lambda lane, token: FeedSource(from_row=lane)] * 4,
    "sampled": [lambda lane, token: SAMPLED] * 4,
    "mixed": [
        lambda lane, token: FeedSource(from_row=lane),
        lambda lane, token: SAMPLED,
        lambda lane, token: FeedSource(token=token),
        lambda lane, token: SAMPLED,
    ],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_bits_of_ordinary_steps_wherever_the_ids_come_from(tiny: NllbModel, kind: str) -> None:
    """The sequences are their callers' to update."""
    ids, logits = greedy_steps(tiny, 5)
    seqs = [prefilled(tiny, case) for case in CASES]
    base = tiny.logits_buffer_ptr()
    tiny.prefill_batch_chunk_rows([PrefillSlice.whole(c.tokens, s) for c, s in zip(CASES, seqs, strict=True)])
    for step in range(5):
        assert rows(tiny, 4).tobytes() == logits[step]
        assert to_feed(tiny, base, [ANY] * 4) == sampled(tiny, base, seqs).ids == ids[step]
        sources = [source(lane, ids[step][lane]) for lane, source in enumerate(SOURCES[kind])]
        before = [state(seq) for seq in seqs]
        assert tiny.decode_batch_fed(sources, seqs) == base
        assert [state(seq) for seq in seqs] == before
        for seq, token in zip(seqs, ids[step], strict=True):
            seq.tokens.append(token)
            seq.seq_len += 1


def test_rows_may_be_taken_in_any_order_and_more_than_once(tiny: NllbModel) -> None:
    seqs = [prefilled(tiny, case) for case in CASES]
    tokens = to_feed(tiny, tiny.decode_batch([9, 10, 11, 12], seqs), [ANY] * 4)
    assert len(set(tokens)) > 2
    for order in ([3, 1, 0, 2], [2, 2, 2], [1]):
        lanes = seqs[: len(order)]
        tiny.decode_batch_fed([FeedSource(from_row=row) for row in order], lanes)
        fed = rows(tiny, len(order)).tobytes()
        tiny.decode_batch_fed([FeedSource(tokens[row]) for row in order], lanes)
        assert rows(tiny, len(order)).tobytes() == fed
        tokens = to_feed(tiny, tiny.decode_batch_fed([FeedSource(9)] * 4, seqs), [ANY] * 4)
    to_feed(tiny, tiny.logits_buffer_ptr(), [ANY])  # from here on there is one row to take
    tiny.decode_batch_fed([FeedSource(from_row=0)], seqs[:1])
    with pytest.raises(InvalidInput, match="the last argmax_batch_to_feed, which had 1"):
        tiny.decode_batch_fed([FeedSource(from_row=1)], seqs[:1])


@pytest.mark.parametrize("kind", ["from_row", "sampled"])
def test_the_host_may_be_many_steps_ahead(tiny: NllbModel, kind: str) -> None:
    """Six steps are enqueued, and then their ids are read."""
    ids, _ = greedy_steps(tiny, 6)
    seqs = [prefilled(tiny, case) for case in CASES]
    base = tiny.logits_buffer_ptr()
    tiny.prefill_batch_chunk_rows([PrefillSlice.whole(c.tokens, s) for c, s in zip(CASES, seqs, strict=True)])
    with results(tiny, 6, 3, 4) as (dst, last):
        events = [tiny.create_event() for _ in range(6)]
        for step, event in enumerate(events):
            if kind == "from_row":
                tiny.argmax_batch_to_feed(base, [ANY] * 4, dst[step, 0], event)
            else:
                tiny.sample_batch_to_feed(base, seqs, dst[step], event)
            tiny.decode_batch_fed([FeedSource(from_row=i) if kind == "from_row" else SAMPLED for i in range(4)], seqs)
            advance(seqs)
        tiny.record_event(last)
        tiny.event_synchronize(last)
        assert dst[:, 0].tolist() == ids
        for event in events:
            assert tiny.event_query(event)
            tiny.destroy_event(event)
    assert [seq.tokens for seq in seqs] == [[2, case.target] for case in CASES]
    for seq, generated in zip(seqs, np.transpose(ids).tolist(), strict=True):
        seq.tokens += generated
    tiny.decode_batch([5] * 4, seqs)  # and on as ever


def test_a_fed_step_writes_its_own_rows_only(tiny: NllbModel) -> None:
    seqs = [prefilled(tiny, case) for case in CASES]
    tiny.decode_batch([9] * 4, seqs)
    before = arena(tiny)
    tiny.decode_batch_fed([FeedSource(40), FeedSource(41)], seqs[1:3])
    assert changed_rows(before, arena(tiny)) == [0, 1]


def test_rows_are_shared_by_blocks_unless_one_asks_for_more_than_its_largest_logit(tiny: NllbModel) -> None:
    base = tiny.decode_batch([9, 10, 11, 12], [prefilled(tiny, case) for case in CASES])
    for masks, kernel in (
        ([ANY] * 4, "sample_f32_greedy"),
        ([ANY, ANY, RowMask((5,))], "sample_f32"),
        ([RowMask((5,)), ANY], "sample_f32"),
    ):
        with tiny.gpu.launch_trace() as records:
            to_feed(tiny, base, masks)
        assert [record.name for record in records if record.kind == "kernel"] == [kernel]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_ids_are_those_of_argmax_but_for_what_is_masked(make_tiny: MakeModel, dtype: str) -> None:
    """None, one or two ids of each row: the largest and the next, so that it is the third's turn."""
    model = make_tiny(dtype=dtype)
    base = model.decode_batch([9, 10, 11, 12], [prefilled(model, case) for case in CASES])
    order = np.argsort(-rows(model, 4).astype(np.float32), axis=1, kind="stable")
    assert to_feed(model, base, [ANY] * 4) == model.argmax_rows(base, 4)[0] == order[:, 0].tolist()
    one = [RowMask((int(ranked[0]),)) for ranked in order]
    two = [RowMask((int(ranked[1]), int(ranked[0]))) for ranked in order]
    assert to_feed(model, base, one) == order[:, 1].tolist()
    assert to_feed(model, base, two) == order[:, 2].tolist()
    some = [ANY, one[1], two[2], RowMask((int(order[3, 5]),))]
    assert to_feed(model, base, some) == [order[0, 0], order[1, 1], order[2, 2], order[3, 0]]
    assert to_feed(model, base.offset(2 * model.logits_row_bytes()), two[2:]) == order[2:, 2].tolist()
    poke(model, 1, {0: 1000.0})  # the lowest id is not forbidden to a row without a mask
    assert to_feed(model, base, [ANY, ANY, one[2]]) == [order[0, 0], 0, order[2, 1]]


def test_rows_of_prefills_can_be_chosen_from_as_well(tiny: NllbModel) -> None:
    """Rows of slots lie past the lanes'."""
    seqs = [prefilled(tiny, case) for case in CASES]
    first = tiny.logits_buffer_ptr().offset(4 * tiny.logits_row_bytes())
    expected = tiny.argmax_batch(first, 4)
    assert to_feed(tiny, first, [ANY] * 4) == sampled(tiny, first, seqs).ids == expected


@host_only
def test_a_choice_is_there_after_its_event_and_not_waited_for(make_tiny: MakeModel) -> None:
    """On a device that runs nothing until somebody waits."""
    model = make_tiny(open_host(order="deferred"))
    seqs, stream = [prefilled(model, case) for case in CASES[:2]], model.create_stream()
    with results(model, 2, 3, 2) as (dst, event):
        later = model.create_event()
        base = model.decode_batch([9, 10], seqs, stream)
        model.argmax_batch_to_feed(base, [ANY] * 2, dst[0, 0], event, stream)
        model.decode_batch_fed([FeedSource(from_row=0), FeedSource(from_row=1)], seqs)
        model.sample_batch_to_feed(base, seqs, dst[1], later, stream)
        assert not model.event_query(event)
        assert (dst == -77).all()
        model.event_synchronize(event)
        ids = dst[0, 0].tolist()
        assert -77 not in ids
        assert (dst[0, 1:] == -77).all()
        assert (dst[1] == -77).all()
        assert not model.event_query(later)
        model.event_synchronize(later)
        assert -77 not in dst[1].tolist()[0]
        model.destroy_event(later)
    assert ids == model.argmax_batch(model.decode_batch([9, 10], [again(seq) for seq in seqs]), 2)


def again(seq: SequenceState) -> SequenceState:
    """Take back the last step of a sequence."""
    del seq.tokens[-1]
    seq.seq_len -= 1
    return seq


def test_nothing_in_a_step_waits(tiny: NllbModel) -> None:
    """Kernels, products and copies on the streams that were given: a call that had the host wait would be traced."""
    seqs, stream, other = [prefilled(tiny, case) for case in CASES], tiny.create_stream(), tiny.create_stream()
    base = tiny.decode_batch([9] * 4, seqs)
    with results(tiny, 3, 4) as (dst, event):
        with tiny.gpu.launch_trace() as trace:
            tiny.argmax_batch_to_feed(base, [RowMask((5, 6))] * 4, dst[0], event, stream)
        assert [(record.kind, record.name, record.stream) for record in trace] == [
            ("copy", "h2d", stream),
            ("kernel", "sample_f32", stream),
            ("copy", "d2h", stream),
        ]
        with tiny.gpu.launch_trace() as trace:
            tiny.decode_batch_fed([FeedSource(from_row=lane) for lane in range(4)], seqs, other)
        assert {record.kind for record in trace} == {"kernel", "gemm", "copy"}
        assert {record.stream for record in trace} == {other}
        assert [record.name for record in trace if record.kind == "copy"] == ["h2d"]
        advance(seqs)
        seqs[0].tokens.append(9)  # any id will do
        with tiny.gpu.launch_trace() as trace:
            tiny.begin_sampling(seqs[0], SamplingParams(suppress_tokens=(5,), no_repeat_ngram_size=2), other)
            tiny.sample_batch_to_feed(base, seqs, dst, event, stream)
            tiny.free_sequence(seqs[3])
            tiny.compact_sequence(seqs[0], 3)
            tiny.decode_batch_fed([SAMPLED] * 3, seqs[:3], other)
        copies = [(record.name, record.stream) for record in trace if record.kind == "copy"]
        uploads = [("h2d", other)] * 2 + [("h2d", stream), ("d2h", stream)]
        assert copies == [*uploads, *[("d2d", tiny.default_stream())] * 4, ("h2d", other)]
        assert "wait" not in {record.kind for record in trace}
        tiny.synchronize(stream)
    for one in (stream, other):
        tiny.destroy_stream(one)


def test_there_are_no_blocks_to_reserve(tiny: NllbModel) -> None:
    seq = prefilled(tiny, CASES[0])
    assert tiny.supports_device_token_feed()
    assert tiny.reserve_decode_block(seq) == 0
    tiny.release_decode_blocks(seq, 0)
    tiny.fed_step_settled()
    tiny.free_sequence(seq)
    with pytest.raises(SequenceError):
        tiny.reserve_decode_block(seq)


@pytest.mark.parametrize("feed", ["decode", "decode_batch", "fed", "from_row", "mixed", "mixed_fed"])
def test_the_history_has_what_the_decoder_was_given(tiny: NllbModel, feed: str) -> None:
    """Not what was chosen, when the caller feeds another id: that one may be chosen, and this one not again."""
    params = SamplingParams(no_repeat_ngram_size=1)
    seq = prefilled(tiny, CASES[0])
    tiny.begin_sampling(seq, params)
    row = tiny.logits_buffer_ptr().offset((tiny.shape.limits.max_batch + seq.slot_idx) * tiny.logits_row_bytes())
    given = [2, 81]
    for token in (11, 12, 13, 14):
        [chosen] = sampled(tiny, row, [seq]).ids
        if feed == "from_row":
            [token] = to_feed(tiny, row, [RowMask((chosen,))])
            tiny.decode_batch_fed([FeedSource(from_row=0)], [seq])
        elif feed == "decode":
            tiny.decode(token, seq)
        elif feed == "decode_batch":
            tiny.decode_batch([token], [seq])
        elif feed == "mixed":
            tiny.mixed_forward_batch([token], [seq], [])
        elif feed == "mixed_fed":
            tiny.mixed_forward_batch_fed([FeedSource(token=token)], [seq], [])
        else:
            tiny.decode_batch_fed([FeedSource(token=token)], [seq])
        if seq.seq_len == len(given):
            seq.tokens.append(token)
            seq.seq_len += 1
        given.append(token)
        assert seq.tokens == given
        row = tiny.logits_buffer_ptr()
    logits = tiny.copy_logits_to_host(row)
    logits[list(seq.tokens)] = -np.inf
    assert sampled(tiny, row, [seq]).ids[0] == logits.argmax()


def test_histories_are_kept_without_waiting(tiny: NllbModel) -> None:
    """However many lanes have one."""
    seqs = [prefilled(tiny, case) for case in CASES]
    for seq in seqs:
        tiny.begin_sampling(seq, SamplingParams(no_repeat_ngram_size=1))
    tiny.synchronize()
    with tiny.gpu.launch_trace() as trace:
        for _ in range(3):
            tiny.decode_batch([9] * 4, seqs)
    assert "wait" not in {record.kind for record in trace}
    assert sum(record.name == "d2d" for record in trace) == 3 * 4


def test_a_prefill_begins_anew(tiny: NllbModel) -> None:
    seq = prefilled(tiny, CASES[0])
    row = tiny.logits_buffer_ptr().offset((tiny.shape.limits.max_batch + seq.slot_idx) * tiny.logits_row_bytes())
    tiny.begin_sampling(seq, SamplingParams(suppress_tokens=tuple(range(90))))
    assert sampled(tiny, row, [seq]).ids[0] >= 90
    tiny.prefill(CASES[0].tokens, seq)
    with pytest.raises(InvalidInput, match="has chosen an id"):
        tiny.decode_batch_fed([SAMPLED], [seq])
    assert sampled(tiny, row, [seq]).ids[0] == tiny.argmax_on_device(row)
