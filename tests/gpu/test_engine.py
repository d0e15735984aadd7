# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine on a GPU: many requests at random times, steps that never wait, and sequences that leave and come back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO

import pytest

from gpu_runtime.backend import GpuBackend
from metrale.engine import Engine, Request, RequestHandle
from metrale.model import FeedSource, PrefillSlice, SamplingParams
from metrale.nllb.model import NllbModel
from tests.backends import cuda_only
from tests.gpu.conftest import Say
from tests.nllb.decoding import EOS, GOLDEN, LIMITS, Case, begin, greedy

pytestmark = cuda_only

REQUESTS = 1000
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=5)


def request_of(case: Case, **options: object) -> Request:
    base = Request(case.tokens, case.source, case.target, LIMITS["max_new_tokens"], eos_ids=frozenset({EOS}))
    return replace(base, **options)  # type: ignore[arg-type]


def ids_of(handle: RequestHandle) -> list[int]:
    result = handle.result(60)
    assert result.error is None
    return [*result.ids, *([EOS] if result.finish_reason == "eos" else [])]


@pytest.mark.parametrize("dtype", ["float32"])
def test_a_thousand_requests_at_random_times(models: Callable[[str], NllbModel], dtype: str, say: Say) -> None:
    """In float32 the ids are those of one translation after the other, whoever else is in the batch."""
    model = models(dtype)
    alone = [greedy(model, case)[2:] for case in GOLDEN]
    chosen = [random.Random(1).randrange(len(GOLDEN)) for _ in range(REQUESTS)]
    handles: list[RequestHandle | None] = [None] * REQUESTS

    def submit(engine: Engine, worker: int, workers: int) -> None:
        waits = random.Random(worker)
        for index in range(worker, REQUESTS, workers):
            handles[index] = engine.submit(request_of(GOLDEN[chosen[index]], priority=waits.randrange(3)))
            time.sleep(waits.expovariate(1 / 0.003))

    began = time.perf_counter()
    with Engine(model) as engine:
        threads = [threading.Thread(target=submit, args=(engine, worker, 4)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wrong = [i for i, handle in enumerate(handles) if handle is None or ids_of(handle) != alone[chosen[i]]]
        stats = engine.stats()
    assert wrong == []
    assert stats.mixed_steps > 20, "requests came while others ran"
    say(
        f"engine, {REQUESTS} requests at random times: {time.perf_counter() - began:.2f} s, {stats.steps} steps, "
        f"{stats.generated_tokens} tokens, {stats.decoded_rows / stats.steps:.1f} lanes a step"
    )


def test_a_step_waits_for_nothing(models: Callable[[str], NllbModel]) -> None:
    """Steps with decoding, joining and sampling lanes enqueue kernels, products and asynchronous copies alone."""
    model = models("bfloat16")
    seqs = [begin(model, case) for case in GOLDEN[:6]]
    model.prefill_batch_chunk(
        [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(GOLDEN, seqs[:4], strict=False)]
    )
    memory, event, stream = model.alloc_host_pinned(3 * 4 * 6), model.create_event(), model.create_stream()
    ids = memory.array.view("i4")
    try:
        for seq in seqs[:4]:
            model.begin_sampling(seq, SAMPLED)
        model.sample_batch_to_feed(model.logits_buffer_ptr(), seqs[:4], ids[:12].reshape(3, 4), event)
        with model.gpu.launch_trace() as trace:
            joining = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(GOLDEN[4:], seqs[4:], strict=False)]
            model.mixed_forward_batch_fed([FeedSource(sampled=True)] * 4, seqs[:4], joining, stream)
            for seq in seqs[:4]:
                seq.seq_len += 1
            model.sample_batch_to_feed(model.logits_buffer_ptr(), seqs, ids.reshape(3, 6), event)
        assert {record.kind for record in trace} <= {"kernel", "gemm", "copy", "wait"}
        # the host may wait for a table's slot, which the device read four steps ago
        assert {record.name for record in trace if record.kind == "wait"} <= {"event"}
        assert len({record.stream for record in trace if record.kind != "wait"}) == 2, (
            "decoding and prefilling have streams of their own"
        )
        assert sum(record.name == "d2h" for record in trace) == 1
    finally:
        model.event_synchronize(event)
        for seq in seqs:
            model.free_sequence(seq)
        model.free_host_pinned(memory)
        model.destroy_event(event)
        model.destroy_stream(stream)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_leaving_and_coming_back_changes_nothing(models: Callable[[str], NllbModel], dtype: str, at: int) -> None:
    """A sequence is saved after ``at`` steps, another uses its slot and its KV, and it goes on in a new one."""
    model, case = models(dtype), GOLDEN[0]
    expected = greedy(model, case)
    seq = begin(model, case)
    token = model.argmax_on_device(model.prefill(case.tokens, seq))
    for _ in range(at):
        token = model.argmax_on_device(model.decode(token, seq))
    data = BytesIO()
    model.save_sequence_state(seq, data)
    model.free_sequence(seq)
    other = begin(model, GOLDEN[1])
    model.prefill(GOLDEN[1].tokens, other)
    data.seek(0)
    back = model.alloc_sequence()
    model.restore_sequence_state(back, 0, data)
    while token != EOS:
        token = model.argmax_on_device(model.decode(token, back))
    assert [*back.tokens, token] == expected
    model.free_sequence(other)
    model.free_sequence(back)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_requests_that_give_way_yield_what_they_yield_alone(
    models: Callable[[str], NllbModel], sampling: SamplingParams
) -> None:
    model = models("float32")
    low = [request_of(case, sampling=replace(sampling, seed=i)) for i, case in enumerate(GOLDEN[:12])]
    with Engine(model, max_lanes=4, prefill_interval=1) as engine:
        alone = [ids_of(engine.submit(request)) for request in low]
        running = [engine.submit(request) for request in low]
        while not any(handle.first_token_at for handle in running):
            time.sleep(0.001)
        urgent = [engine.submit(replace(request, priority=9)) for request in low]
        assert [ids_of(handle) for handle in urgent] == alone
        assert [ids_of(handle) for handle in running] == alone
        assert engine.stats().preemptions > 0


def test_a_sample_does_not_depend_on_its_neighbours(models: Callable[[str], NllbModel], gpu: GpuBackend) -> None:
    model = models("float32")
    requests = [request_of(case, sampling=replace(SAMPLED, seed=i)) for i, case in enumerate(GOLDEN)]
    with Engine(model) as engine:
        together = [engine.submit(request) for request in requests]
        assert [ids_of(engine.submit(request)) for request in requests[:8]] == [ids_of(one) for one in together[:8]]
