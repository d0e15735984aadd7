# SPDX-License-Identifier: MIT OR Apache-2.0
"""Slots and sequences: claiming, freeing, moving, detaching, and what a stale sequence cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from metrale.errors import InvalidInput, SequenceError
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, block, prefilled, state

ONE = Case([5, 6, 7], 80, 81, [])
TWO = Case([30, 31], 82, 83, [])


def test_a_new_sequence_is_empty(tiny: NllbModel) -> None:
    seq = tiny.alloc_sequence()
    assert state(seq) == (0, [], 0, 0, 0, 0)
    assert (seq.adapter_slot, seq.is_detached) == (-1, False)


def test_slots_run_out_and_come_back(tiny: NllbModel) -> None:
    seqs = [tiny.alloc_sequence() for _ in range(4)]
    assert [seq.slot_idx for seq in seqs] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(SequenceError, match="all 4 slots are taken"):
            tiny.alloc_sequence()
    tiny.free_sequence(seqs[2])
    tiny.free_sequence(seqs[1])
    assert [tiny.alloc_sequence().slot_idx for _ in range(2)] == [1, 2]
    with pytest.raises(SequenceError):
        tiny.alloc_sequence()


def test_freeing_twice_does_nothing(tiny: NllbModel) -> None:
    first, second = prefilled(tiny, ONE), prefilled(tiny, TWO)
    tiny.free_sequence(first)
    tiny.free_sequence(first)
    assert tiny.alloc_sequence().slot_idx == 0
    assert [tiny.alloc_sequence().slot_idx for _ in range(2)] == [2, 3]
    with pytest.raises(SequenceError):
        tiny.alloc_sequence()
    tiny.decode(9, second)


def uses(tiny: NllbModel, seq: SequenceState) -> list[Callable[[], Any]]:
    """Every call that needs a live sequence."""
    return [
        lambda: tiny.decode(9, seq),
        lambda: tiny.decode_batch([9], [seq]),
        lambda: tiny.prefill(ONE.tokens, seq),
        lambda: tiny.prefill_chunk(ONE.tokens, seq, 0, 3, True),
        lambda: tiny.prefill_batch_chunk([PrefillSlice.whole(ONE.tokens, seq)]),
        lambda: tiny.compact_sequence(seq, 3),
    ]


def assert_useless(tiny: NllbModel, seq: SequenceState) -> None:
    before, kv = state(seq), block(tiny.gpu, "KV cache")
    with tiny.gpu.launch_trace() as trace:
        for use in uses(tiny, seq):
            with pytest.raises(SequenceError, match="expected a live sequence of this model"):
                use()
    assert not trace
    assert state(seq) == before
    assert block(tiny.gpu, "KV cache") == kv


def test_a_stale_sequence_cannot_touch_its_successor(tiny: NllbModel) -> None:
    stale = prefilled(tiny, ONE)
    slot = stale.slot_idx
    tiny.free_sequence(stale)
    assert stale.is_detached
    assert_useless(tiny, stale)
    successor = prefilled(tiny, TWO)
    assert successor.slot_idx == slot
    stale.slot_idx = slot  # as in a caller's own copy of the state
    assert_useless(tiny, stale)
    tiny.free_sequence(stale)
    expected = state(successor)
    assert state(successor) == expected
    tiny.decode(9, successor)
    assert successor.tokens == [2, 83, 9]
    with pytest.raises(SequenceError, match="slot 0 is not held for seq by this model"):
        tiny.detach_slot_for_reuse(stale)
    tiny.decode(10, successor)
    assert tiny.alloc_sequence().slot_idx == 1


@pytest.fixture
def other_gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


def test_a_sequence_of_another_model_is_refused(other_gpu: GpuBackend, make_tiny: MakeModel) -> None:
    one, other = make_tiny(), make_tiny(other_gpu)
    mine, foreign = prefilled(one, ONE), prefilled(other, ONE)
    assert mine.slot_idx == foreign.slot_idx
    assert_useless(one, foreign)
    one.free_sequence(foreign)
    one.decode(9, mine)
    other.decode(9, foreign)


def test_a_sequence_made_by_hand_is_refused(tiny: NllbModel) -> None:
    prefilled(tiny, ONE)
    assert_useless(tiny, SequenceState(0, [2, 81], 2, 2))
    assert_useless(tiny, SequenceState(3))


@pytest.mark.parametrize("seq", [None, 0, "seq"])
def test_what_is_no_sequence_is_refused(tiny: NllbModel, seq: Any) -> None:
    calls = uses(tiny, seq)
    calls += [lambda: tiny.free_sequence(seq), lambda: tiny.detach_slot_for_reuse(seq)]
    for call in calls:
        with pytest.raises(InvalidInput) as refused:
            call()
        assert refused.value.argument == "seq"


def test_detaching_frees_and_disarms(tiny: NllbModel) -> None:
    seq = prefilled(tiny, ONE)
    tiny.detach_slot_for_reuse(seq)
    assert seq.slot_idx == SequenceState.DETACHED
    assert seq.is_detached
    assert_useless(tiny, seq)
    with pytest.raises(SequenceError, match="it was detached"):
        tiny.decode(9, seq)
    assert [tiny.alloc_sequence().slot_idx for _ in range(4)] == [0, 1, 2, 3]
    tiny.free_sequence(seq)
    tiny.detach_slot_for_reuse(seq)
    with pytest.raises(SequenceError):
        tiny.alloc_sequence()


@pytest.mark.parametrize("retire", ["free_sequence", "detach_slot_for_reuse"])
def test_compaction_changes_nothing_but_the_slot(tiny: NllbModel, retire: str) -> None:
    """The survivors' next logits are the same bits, and no byte of KV moves."""
    cases = [ONE, TWO, ONE, TWO]
    plain = [prefilled(tiny, case) for case in cases]
    tiny.decode_batch([20, 21, 22, 23], plain)
    base = tiny.decode_batch([30, 31], [plain[3], plain[1]])
    size = tiny.logits_row_bytes()
    expected = [tiny.copy_logits_to_host(base.offset(i * size)).tobytes() for i in range(2)]
    for seq in plain:
        tiny.free_sequence(seq)

    seqs = [prefilled(tiny, case) for case in cases]
    tiny.decode_batch([20, 21, 22, 23], seqs)
    getattr(tiny, retire)(seqs[0])
    kv = block(tiny.gpu, "KV cache")
    with tiny.gpu.launch_trace() as trace:
        tiny.compact_sequence(seqs[3], 0)
    assert not trace
    assert block(tiny.gpu, "KV cache") == kv
    assert state(seqs[3]) == (0, [2, 83, 23], 3, 2, 82, 83)
    base = tiny.decode_batch([30, 31], [seqs[3], seqs[1]])
    assert [tiny.copy_logits_to_host(base.offset(i * size)).tobytes() for i in range(2)] == expected
    new = prefilled(tiny, TWO)
    assert new.slot_idx == 3
    tiny.free_sequence(seqs[0])  # retired before: it holds nothing
    tiny.decode_batch([32, 33, 34], [seqs[3], seqs[1], new])
    tiny.free_sequence(seqs[3])
    assert tiny.alloc_sequence().slot_idx == 0


def test_compaction_into_a_live_slot_is_refused(tiny: NllbModel) -> None:
    first, second = prefilled(tiny, ONE), prefilled(tiny, TWO)
    with pytest.raises(SequenceError, match="slot 0 is held by a live sequence; free or detach that first"):
        tiny.compact_sequence(second, 0)
    tiny.compact_sequence(second, 1)  # its own
    assert (first.slot_idx, second.slot_idx) == (0, 1)
    tiny.decode_batch([9, 9], [first, second])
    assert tiny.alloc_sequence().slot_idx == 2


@pytest.mark.parametrize("slot", [-1, 4, SequenceState.DETACHED, True, 1.0, "1", None])
def test_compaction_into_no_slot_is_refused(tiny: NllbModel, slot: Any) -> None:
    seq = prefilled(tiny, ONE)
    with pytest.raises(InvalidInput) as refused:
        tiny.compact_sequence(seq, slot)
    assert refused.value.argument == "new_slot"
    assert seq.slot_idx == 0
    tiny.compact_sequence(seq, 3)
    assert seq.slot_idx == 3
    tiny.decode(9, seq)
    assert tiny.alloc_sequence().slot_idx == 0


def test_decoding_needs_a_prefill(tiny: NllbModel) -> None:
    seq, ready = begin(tiny, ONE), prefilled(tiny, TWO)
    with tiny.gpu.launch_trace() as trace:
        with pytest.raises(SequenceError, match="slot 0 has not been prefilled"):
            tiny.decode(9, seq)
        with pytest.raises(SequenceError, match="slot 0 has not been prefilled"):
            tiny.decode_batch([9, 9], [ready, seq])
    assert not trace
    assert ready.tokens == [2, 83]
    tiny.free_sequence(ready)
    seq = begin(tiny, ONE)  # where the KV of `ready` lies
    with pytest.raises(SequenceError, match="slot 1 has not been prefilled"):
        tiny.decode(9, seq)


def test_a_sequence_records_what_its_decoder_consumed(tiny: NllbModel) -> None:
    seq = begin(tiny, ONE)
    tiny.prefill(ONE.tokens, seq)
    assert state(seq) == (0, [2, 81], 2, 2, 80, 81)
    tiny.decode(9, seq)
    tiny.decode_batch([10], [seq])
    assert state(seq) == (0, [2, 81, 9, 10], 4, 2, 80, 81)
