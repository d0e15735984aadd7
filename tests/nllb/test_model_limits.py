# SPDX-License-Identifier: MIT OR Apache-2.0
"""The limits hold exactly: source and target lengths, budgets, lanes, and the KV pool."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.host import HostBackend
from metrale.errors import InvalidInput, SequenceError
from metrale.model import PrefillSlice
from metrale.nllb.kv import KvPool
from metrale.nllb.limits import ServingLimits
from metrale.nllb.model import NllbModel
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, block, prefilled, relative, state
from tests.reference.nllb_float64 import NllbFloat64

POSITION = 3 * 2 * 32 * 4
"""Bytes of a KV position of the tiny model: keys and values of 3 layers, float32."""


def ids(count: int) -> list[int]:
    return [10 + i for i in range(count)]


def test_a_source_of_exactly_the_limit(tiny: NllbModel, tiny_judge: NllbFloat64) -> None:
    """12 tokens with language and EOS; one more is refused and changes nothing."""
    seq = begin(tiny, Case([], 80, 81, []))
    before, kv = state(seq), block(tiny.gpu, "KV cache")
    for call in (
        lambda: tiny.prefill(ids(11), seq),
        lambda: tiny.prefill_batch_chunk([PrefillSlice.whole(ids(11), seq)]),
    ):
        with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput, match=r"at most 10 ids .*got 11 ids"):
            call()
        assert not trace
    assert (state(seq), block(tiny.gpu, "KV cache")) == (before, kv)
    row = tiny.copy_logits_to_host(tiny.prefill(ids(10), seq))
    assert relative(row, tiny_judge.logits([80, *ids(10), 2], [2, 81])[1]) <= 1e-5


def test_an_empty_source_is_language_and_eos(tiny: NllbModel, tiny_judge: NllbFloat64) -> None:
    row = tiny.copy_logits_to_host(tiny.prefill([], begin(tiny, Case([], 80, 81, []))))
    assert relative(row, tiny_judge.logits([80, 2], [2, 81])[1]) <= 1e-5


def test_a_target_of_exactly_the_limit(tiny: NllbModel, tiny_judge: NllbFloat64) -> None:
    """The start token and 8 more fit, beside the longest source; the next is refused and changes nothing."""
    seq, other = prefilled(tiny, Case(ids(10), 80, 81, [])), prefilled(tiny, Case([5], 80, 81, []))
    for token in range(30, 37):
        ptr = tiny.decode(token, seq)
    assert seq.seq_len == 9
    expected = tiny_judge.logits([80, *ids(10), 2], [2, 81, *range(30, 37)])[-1]
    assert relative(tiny.copy_logits_to_host(ptr), expected) <= 1e-5
    before, kv = state(seq), block(tiny.gpu, "KV cache")
    with tiny.gpu.launch_trace() as trace:
        for tokens, seqs in (([5], [seq]), ([5, 5], [other, seq])):
            with pytest.raises(SequenceError, match="slot 0 is full: it has 9 decoder positions"):
                tiny.decode_batch(tokens, seqs)
    assert not trace
    assert (state(seq), block(tiny.gpu, "KV cache"), other.tokens) == (before, kv, [2, 81])


def test_a_sequence_at_the_limit_does_not_reach_its_neighbours_kv(make_tiny: MakeModel) -> None:
    """Full spans side by side: each decodes as it does alone."""
    model = make_tiny(max_batch=2)
    case = Case(ids(10), 80, 81, [])
    seqs = [prefilled(model, case) for _ in range(2)]
    rows = []
    for seq in seqs:
        for token in range(30, 37):
            row = model.copy_logits_to_host(model.decode(token, seq))
        rows.append(row.tobytes())
    assert rows[0] == rows[1]


def test_a_budget_is_source_and_target_together(tiny: NllbModel) -> None:
    """10 tokens: a source of 6 (4 ids, language and EOS) leaves 4 decoder positions."""
    seq = tiny.alloc_sequence_for(10)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    with pytest.raises(InvalidInput, match="at most 6 ids"):
        tiny.prefill(ids(7), seq)
    tiny.prefill(ids(6), seq)
    with pytest.raises(SequenceError, match="it has 2 decoder positions"):
        tiny.decode(5, seq)
    tiny.prefill(ids(4), seq)
    tiny.decode(5, seq)
    tiny.decode(6, seq)
    with pytest.raises(SequenceError, match="it has 4 decoder positions"):
        tiny.decode(7, seq)
    assert seq.tokens == [2, 81, 5, 6]


def test_a_budget_does_not_lift_the_limits(tiny: NllbModel) -> None:
    seq = tiny.alloc_sequence_for(1000)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    with pytest.raises(InvalidInput, match="at most 10 ids"):
        tiny.prefill(ids(11), seq)
    tiny.prefill([], seq)
    for token in range(30, 37):
        tiny.decode(token, seq)
    with pytest.raises(SequenceError, match="it has 9 decoder positions"):
        tiny.decode(5, seq)


@pytest.mark.parametrize("budget", [3, 0, -1, True, 10.0, "10", None])
def test_a_budget_of_less_than_nothing_is_refused(tiny: NllbModel, budget: Any) -> None:
    """Language and EOS, start and language are 4 tokens."""
    with pytest.raises(InvalidInput) as refused:
        tiny.alloc_sequence_for(budget)
    assert refused.value.argument == "budget_tokens"
    seq = tiny.alloc_sequence_for(4)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    tiny.prefill([], seq)
    assert seq.slot_idx == 0


def test_the_pool_runs_out_and_recovers(make_tiny: MakeModel) -> None:
    """Room for 30 positions: one sequence at the limits (21) and one with a budget of 9."""
    model = make_tiny(kv_bytes=30 * POSITION + POSITION - 1)
    assert model.memory_plan().kv == 31 * POSITION - 1
    first, live = prefilled(model, Case(ids(3), 80, 81, [])), model.gpu.live_bytes()
    before = block(model.gpu, "KV cache")
    for call in (model.alloc_sequence, lambda: model.alloc_sequence_for(10)):
        with pytest.raises(OutOfMemory, match="21 of 30 are in use") as full:
            call()
        assert (full.value.live, full.value.limit) == (21 * POSITION, 31 * POSITION - 1)
    assert full.value.requested == 10 * POSITION
    assert model.gpu.live_bytes() == live
    assert block(model.gpu, "KV cache") == before
    second = model.alloc_sequence_for(9)
    assert second.slot_idx == 1
    second.src_lang_id, second.tgt_lang_id = 80, 81
    model.prefill(ids(4), second)
    model.decode_batch([9, 9], [first, second])
    model.free_sequence(first)
    assert model.alloc_sequence().slot_idx == 0


def test_a_pool_smaller_than_a_sequence_serves_budgets_only(make_tiny: MakeModel) -> None:
    model = make_tiny(kv_bytes=4 * POSITION)
    with pytest.raises(OutOfMemory, match="no 21 positions in a row are free; 0 of 4"):
        model.alloc_sequence()
    model.alloc_sequence_for(4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pool_for_less_than_the_shortest_sequence_is_refused(make_tiny: MakeModel, dtype: str) -> None:
    """Language and EOS, start and language; before anything is allocated."""
    size = 4 * POSITION // (1 if dtype == "float32" else 2)
    with pytest.raises(InvalidInput, match=f"kv_bytes: expected at least {size:,} bytes") as refused:
        make_tiny(dtype=dtype, kv_bytes=size - 1)
    assert refused.value.argument == "kv_bytes"
    make_tiny(dtype=dtype, kv_bytes=size).alloc_sequence_for(4)


def test_spans_are_taken_first_fit_and_never_overlap() -> None:
    with HostBackend() as gpu:
        pool = KvPool(gpu, 100, 10)
        assert pool.capacity == 10
        spans = [pool.take(size) for size in (3, 2, 4)]
        assert [(span.first, span.positions) for span in spans] == [(0, 3), (3, 2), (5, 4)]
        assert [span.ptr - pool.base for span in spans] == [0, 30, 50]
        spans[1].source_len = 2
        assert spans[1].target() - int(pool.base) == 50
        assert pool.used == 9
        with pytest.raises(OutOfMemory, match="9 of 10"):
            pool.take(2)
        pool.give_back(spans[0])
        assert pool.take(2).first == 0
        pool.give_back(spans[1])  # free are 2 to 4, and 9
        with pytest.raises(OutOfMemory, match="no 4 positions in a row are free; 6 of 10"):
            pool.take(4)
        assert [pool.take(size).first for size in (3, 1)] == [2, 9]
        assert pool.used == 10
        pool.free()
        assert gpu.live_bytes() == 0


@pytest.mark.parametrize("limit", ["max_batch", "max_source_len", "max_new_tokens", "max_encoder_tokens", "kv_bytes"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_wrong_limits_are_refused_by_name(limit: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        ServingLimits(**{limit: value})
    assert refused.value.argument == limit


def test_the_least_limits() -> None:
    for wrong in ({"max_source_len": 1}, {"max_new_tokens": 1}, {"max_encoder_tokens": 511}, {"max_batch": 0}):
        with pytest.raises(InvalidInput):
            ServingLimits(**wrong)
    least = ServingLimits(1, 2, 2, 2, 1)
    assert (least.target_positions, least.positions, least.encoder_tokens) == (3, 5, 2)
    assert ServingLimits().encoder_tokens == ServingLimits(33).encoder_tokens == 16384
    assert ServingLimits(2).encoder_tokens == 1024
    assert ServingLimits(2, 20000).encoder_tokens == 20000


def test_a_model_with_the_least_limits(make_tiny: MakeModel, tiny_judge: NllbFloat64) -> None:
    model = make_tiny(max_batch=1, max_source_len=2, max_new_tokens=2)
    seq = prefilled(model, Case([], 80, 81, []))
    row = model.copy_logits_to_host(model.decode(9, seq))
    assert relative(row, tiny_judge.logits([80, 2], [2, 81, 9])[2]) <= 1e-5
    with pytest.raises(SequenceError, match="it has 3 decoder positions"):
        model.decode(9, seq)
