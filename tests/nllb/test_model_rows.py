# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which row of the logits arena a forward writes, and that it writes no other."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_runtime import dtypes
from gpu_runtime.pointer import DevicePtr
from metrale.errors import InvalidInput, NotSupported
from metrale.model import MixedBatchResult, MixedForwardResult, PrefillSlice
from metrale.nllb.model import NllbModel
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import (
    Case,
    arena,
    begin,
    block,
    changed_rows,
    company,
    prefilled,
    relative,
    row_index,
    state,
)

ONE = Case([5, 6, 7], 80, 81, [])
TWO = Case([30], 82, 83, [])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_padded_and_the_padding_is_minus_infinity(make_tiny: MakeModel, dtype: str) -> None:
    """97 ids in rows of 128 elements; it is there before any forward, and after each of them."""
    model = make_tiny(dtype=dtype)
    itemsize = dtypes.itemsize(dtypes.short_name(dtype))
    assert model.logits_row_bytes() == 128 * itemsize
    assert (model.vocab_size(), model.logits_dtype()) == (97, dtype)
    assert model.logits_ptr_is_fp32(model.logits_buffer_ptr()) is (dtype == "float32")
    assert model.decode_logits_fp32() is (dtype == "float32")
    assert np.all(np.isneginf(arena(model).astype(np.float32)))
    seqs = [begin(model, ONE), begin(model, TWO), prefilled(model, ONE)]
    model.prefill_batch_chunk([PrefillSlice.whole(ONE.tokens, seqs[0]), PrefillSlice.whole(TWO.tokens, seqs[1])])
    model.decode_batch([9, 10, 11], seqs)
    rows = arena(model).astype(np.float32)
    assert np.all(np.isneginf(rows[:, 97:]))
    assert np.flatnonzero(np.isfinite(rows[:, :97]).all(axis=1)).tolist() == [0, 1, 2, 4 + 2]


def test_a_bare_prefill_writes_its_slots_row_past_the_lanes(tiny: NllbModel) -> None:
    seqs = [begin(tiny, ONE) for _ in range(4)]
    for seq in reversed(seqs):
        before = arena(tiny)
        ptr = tiny.prefill(ONE.tokens, seq)
        assert isinstance(ptr, DevicePtr)
        assert ptr == tiny.logits_buffer_ptr().offset((4 + seq.slot_idx) * tiny.logits_row_bytes())
        assert changed_rows(before, arena(tiny)) == [4 + seq.slot_idx]
        assert tiny.copy_logits_to_host(ptr).tobytes() == arena(tiny)[4 + seq.slot_idx, :97].tobytes()


@pytest.mark.parametrize("row_base", [0, 1, 5, 6])
def test_a_batched_prefill_writes_rows_from_its_base(tiny: NllbModel, row_base: int) -> None:
    seqs = [begin(tiny, ONE) for _ in range(3)][1:]
    slices = [PrefillSlice.whole(ONE.tokens, seqs[0]), PrefillSlice.whole(TWO.tokens, seqs[1])]
    before = arena(tiny)
    ptrs = tiny.prefill_batch_chunk_rows(slices, 0, row_base) if row_base else tiny.prefill_batch_chunk(slices)
    assert [row_index(tiny, ptr) for ptr in ptrs] == [row_base, row_base + 1]
    assert changed_rows(before, arena(tiny)) == [row_base, row_base + 1]
    assert all(seq.tokens == [2, 81] for seq in seqs)


@pytest.mark.parametrize("row_base", [-1, 7, 8, 1 << 40, True, 1.0, None])
def test_rows_outside_the_arena_are_refused_before_anything_changes(tiny: NllbModel, row_base: int) -> None:
    seqs = [prefilled(tiny, ONE), begin(tiny, ONE)]
    slices = [PrefillSlice.whole(TWO.tokens, seqs[0]), PrefillSlice.whole(TWO.tokens, seqs[1])]
    before, kv, rows = [state(seq) for seq in seqs], block(tiny.gpu, "KV cache"), arena(tiny)
    with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
        tiny.prefill_batch_chunk_rows(slices, 0, row_base)
    assert refused.value.argument == "row_base"
    assert not trace
    assert [state(seq) for seq in seqs] == before
    assert block(tiny.gpu, "KV cache") == kv
    assert arena(tiny).tobytes() == rows.tobytes()
    tiny.decode(9, seqs[0])  # as if nothing had been asked


def test_decode_lane_i_writes_row_i(tiny: NllbModel) -> None:
    seqs = [prefilled(tiny, case) for case in (ONE, TWO, ONE)]
    for lanes in ([2, 0], [1], [0, 1, 2]):
        before = arena(tiny)
        base = tiny.decode_batch([9 + lane for lane in lanes], [seqs[lane] for lane in lanes])
        assert base == tiny.logits_buffer_ptr() == tiny.decode_logits_ptr()
        assert changed_rows(before, arena(tiny)) == list(range(len(lanes)))
    before = arena(tiny)
    assert tiny.decode(9, seqs[2]) == tiny.logits_buffer_ptr()
    assert changed_rows(before, arena(tiny)) == [0]


def test_an_empty_batch_of_prefills_does_nothing(tiny: NllbModel) -> None:
    with tiny.gpu.launch_trace() as trace:
        assert tiny.prefill_batch_chunk([]) == []
        assert tiny.prefill_batch_chunk_rows([], 0, 3) == []
    assert not trace


def test_a_mixed_step_keeps_the_decode_rows(tiny: NllbModel) -> None:
    """Prefill rows begin after the decode rows, and both sides compute what they compute by themselves."""
    decoding = [prefilled(tiny, ONE), prefilled(tiny, TWO)]
    fresh = [begin(tiny, TWO), begin(tiny, ONE)]
    slices = [PrefillSlice.whole(TWO.tokens, fresh[0]), PrefillSlice.whole(ONE.tokens, fresh[1])]
    alone = [tiny.copy_logits_to_host(ptr) for ptr in tiny.prefill_batch_chunk(slices)]
    base = tiny.decode_batch([9, 10], decoding)
    steps = [tiny.copy_logits_to_host(base.offset(i * tiny.logits_row_bytes())) for i in range(2)]
    for seq, case in zip(decoding, (ONE, TWO), strict=True):
        tiny.prefill(case.tokens, seq)
    result = tiny.mixed_forward_batch([9, 10], decoding, slices)
    assert isinstance(result, MixedBatchResult)
    assert [row_index(tiny, p) for p in (result.decode_logits, *result.prefill_logits)] == [0, 2, 3]
    rows = arena(tiny)[:4, :97]
    assert relative(rows, np.stack([*steps, *alone])) <= company(tiny)
    assert tiny.mixed_forward_batch([], [], slices).decode_logits == DevicePtr.NULL


def test_a_mixed_step_of_one_prefill(tiny: NllbModel) -> None:
    decoding, fresh = prefilled(tiny, ONE), begin(tiny, TWO)
    result = tiny.mixed_forward([9], [decoding], TWO.tokens, fresh, 0, len(TWO.tokens), True)
    assert isinstance(result, MixedForwardResult)
    assert (row_index(tiny, result.decode_logits), row_index(tiny, result.prefill_logits)) == (0, 4 + fresh.slot_idx)
    assert (decoding.tokens, fresh.tokens) == ([2, 81, 9], [2, 83])


def test_prefill_in_one_chunk_is_prefill(tiny: NllbModel) -> None:
    seq = begin(tiny, ONE)
    row = tiny.copy_logits_to_host(tiny.prefill(ONE.tokens, seq))
    for ptr in (
        tiny.prefill_chunk(ONE.tokens, seq, 0, 3, True),
        tiny.prefill_twophase(ONE.tokens, seq, 2),
    ):
        assert row_index(tiny, ptr) == 4 + seq.slot_idx
        assert tiny.copy_logits_to_host(ptr).tobytes() == row.tobytes()
        assert (seq.tokens, seq.seq_len, seq.prompt_len) == ([2, 81], 2, 2)


@pytest.mark.parametrize(
    "chunk", [(0, 2, True), (1, 2, True), (0, 3, False), (0, 2, False), (1, 3, True), (0, 4, True)]
)
def test_a_part_of_a_source_is_refused(tiny: NllbModel, chunk: tuple[int, int, bool]) -> None:
    """The encoder reads in both directions."""
    seq, other = begin(tiny, ONE), begin(tiny, ONE)
    with tiny.gpu.launch_trace() as trace:
        with pytest.raises(InvalidInput) as refused:
            tiny.prefill_chunk(ONE.tokens, seq, *chunk)
        assert refused.value.argument == "tokens: chunk"
        with pytest.raises(InvalidInput) as refused:
            tiny.prefill_batch_chunk([PrefillSlice.whole(ONE.tokens, other), PrefillSlice(ONE.tokens, seq, *chunk)])
        assert refused.value.argument == "streams[1]: chunk"
    assert not trace
    assert seq.tokens == other.tokens == []


def test_what_a_translation_model_is_not(tiny: NllbModel) -> None:
    seq = prefilled(tiny, ONE)
    refused = (
        lambda: tiny.decode_verify([1], seq),
        lambda: tiny.decode_verify_graphed([1, 2], seq),
        lambda: tiny.decode_verify_graphed_k3([1, 2, 3], seq),
        lambda: tiny.decode_verify_graphed_k4([1, 2, 3, 4], seq),
        lambda: tiny.generate_speculative([1], None, 2),
        lambda: tiny.decode_draft(1, seq),
        lambda: tiny.prepare_vision_embed([object()]),
        lambda: tiny.prepare_vision_embed_batched([[], [object()]]),
        lambda: tiny.set_active_lora("a"),
    )
    names = []
    for call in refused:
        with pytest.raises(NotSupported, match=r"^NllbModel does not support ") as error:
            call()
        names.append(error.value.method)
    assert names == [
        "decode_verify",
        "decode_verify_graphed",
        "decode_verify_graphed_k3",
        "decode_verify_graphed_k4",
        "generate_speculative",
        "decode_draft",
        "prepare_vision_embed",
        "prepare_vision_embed_batched",
        "set_active_lora",
    ]
    assert tiny.has_proposer() is tiny.has_self_speculative() is False
    assert tiny.run_mtp_propose(1, 2, seq) is None
    assert tiny.run_mtp_propose_multi(1, 2, 3, seq) == []
    assert tiny.prepare_vision_embed_batched([[], []]) == []
    tiny.prepare_vision_embed([])
    before = state(seq)
    tiny.save_hidden_for_mtp(0)
    tiny.trim_proposer_state(seq, 1)
    tiny.checkpoint_ssm_states(seq)
    tiny.rollback_ssm_states(seq, 1)
    tiny.cache_sequence(seq)
    tiny.bind_gpu_to_thread()
    assert state(seq) == before
    assert (tiny.num_free_blocks(), tiny.num_total_blocks(), tiny.kv_block_bytes()) == (1 << 20, 0, 0)
