# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model used from several threads and streams at once, its events, and captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpu_runtime.errors import DeviceError
from metrale.errors import NotSupported
from metrale.model import SequenceState
from metrale.nllb.model import NllbModel
from tests import hammering
from tests.nllb.decoding import EOS, GOLDEN, Case, begin, read


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    with hammering.eager_switching():
        yield


def test_eight_threads_each_with_its_own_sequence(demo: NllbModel, eager_switching: None) -> None:
    """Prefills and steps interleave in any order; every sequence then goes on with the same bits as alone.

    Lane 0's row is everybody's, so the threads only read their prefill's row, which is their slot's own.
    """
    cases = [case for case in GOLDEN if len(case.ids) >= 12][:8]
    expected = []
    for case in cases:
        seq = begin(demo, case)
        first = demo.copy_logits_to_host(demo.prefill(case.tokens, seq)).tobytes()
        for token in case.ids[2:9]:
            ptr = demo.decode(token, seq)
        expected.append((first, demo.copy_logits_to_host(ptr).tobytes()))
        demo.free_sequence(seq)
    barrier = threading.Barrier(8)

    def run(case: Case) -> tuple[SequenceState, bytes]:
        demo.bind_gpu_to_thread()
        barrier.wait()
        seq = begin(demo, case)
        first = demo.copy_logits_to_host(demo.prefill(case.tokens, seq)).tobytes()
        for token in case.ids[2:8]:
            demo.decode(token, seq)
        return seq, first

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, cases))
    assert {seq.slot_idx for seq, _ in results} == set(range(8))
    for case, (seq, first), alone in zip(cases, results, expected, strict=True):
        assert seq.tokens == case.ids[:8]
        last = demo.copy_logits_to_host(demo.decode(case.ids[8], seq)).tobytes()
        assert (first, last) == alone
        demo.free_sequence(seq)


def test_threads_that_share_a_lock_translate(demo: NllbModel, eager_switching: None) -> None:
    """A step and the reading of its row under one lock of the callers': every thread gets the golden ids."""
    lock = threading.Lock()

    def run(case: Case) -> list[int]:
        with lock:
            seq = begin(demo, case)
            token = demo.argmax_on_device(demo.prefill(case.tokens, seq))
        while token != EOS:
            with lock:
                token = demo.argmax_on_device(demo.decode(token, seq))
        demo.free_sequence(seq)
        return [*seq.tokens, token]

    cases = [case for case in GOLDEN if case.ids[-1] == EOS and len(case.ids) < 16][:8]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, cases)) == [case.ids for case in cases]


def test_events_of_the_model_are_those_of_the_backend(tiny: NllbModel) -> None:
    event = tiny.create_event()
    tiny.record_event(event)
    tiny.event_synchronize(event)
    assert tiny.event_query(event)
    tiny.destroy_event(event)
    for call in (tiny.event_query, tiny.event_synchronize, tiny.destroy_event):
        with pytest.raises(DeviceError, match="expected a live event"):
            call(event)
    memory = tiny.alloc_host_pinned(8)
    tiny.copy_d2h_async(tiny.logits_buffer_ptr(), memory.array)
    tiny.synchronize()
    assert memory.array.tobytes() == read(tiny.gpu, tiny.logits_buffer_ptr(), 8, "u8").tobytes()
    tiny.free_host_pinned(memory)


def test_a_forward_in_a_capture_is_refused_and_changes_nothing(tiny: NllbModel) -> None:
    case = Case([5, 6, 7], 80, 81, [])
    seq = begin(tiny, case)
    stream = tiny.create_stream()
    tiny.gpu.begin_capture(stream)
    with pytest.raises(NotSupported, match="capture"):
        tiny.prefill(case.tokens, seq, stream)
    tiny.gpu.end_capture(stream)
    assert (seq.seq_len, seq.tokens) == (0, [])
    tiny.prefill(case.tokens, seq, stream)
    tiny.gpu.begin_capture(stream)
    with pytest.raises(NotSupported, match="capture"):
        tiny.decode(9, seq, stream)
    tiny.gpu.abort_capture_if_active(stream)
    tiny.decode(9, seq, stream)
    assert seq.seq_len == 3
