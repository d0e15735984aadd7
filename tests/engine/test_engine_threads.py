# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many threads and tasks on one engine: everybody gets his own, and nothing grows. Linux only where memory is read."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_runtime.host import HostBackend
from metrale.engine import Engine, EngineClosed, RequestHandle
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.conftest import MakeModel
from tests.engine.conftest import RunSolo
from tests.engine.oracle import Solo
from tests.engine.patience import PATIENCE, Gate, until
from tests.engine.serving import LIMITS, ask, draw_request, serving

pytestmark = host_only

THREADS, REQUESTS = 32, 2000


def resident() -> int:
    """Return the process's anonymous memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def handles_alive() -> int:
    gc.collect()
    return sum(isinstance(one, RequestHandle) for one in gc.get_objects())


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    """A model with 32 lanes on a backend that does not check, which is faster."""
    return make_tiny(HostBackend(), max_batch=32, **LIMITS)


@pytest.fixture(scope="module")
def short(solo: RunSolo) -> list[Solo]:
    """Forty different requests of a few tokens, greedy and sampled, that come to the same in any company."""
    rng = random.Random(8)
    drawn = [solo(draw_request(rng, max_new_tokens=rng.randint(2, 6))) for _ in range(48)]
    kept = [one for one in drawn if one.clear][:40]
    assert len({tuple(one.ids) for one in kept}) > 25, "one that got the ids of another would show"
    return kept


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.more
def test_two_thousand_requests_from_many_threads(model: NllbModel, short: list[Solo], eager_switching: None) -> None:
    """All are answered, none has the tokens of another, and device memory is what it was.

    Host memory grows by 0.4 MiB from the first two thousand to the next, which is what percentiles are taken from and
    arenas of threads; a handle is 2 KiB and more, so that it would be 4 MiB if they stayed.
    """
    report, sizes = model.gpu.alloc_report(), []
    ways = Counter[str]()

    def use(engine: Engine, worker: int) -> None:
        rng = random.Random(worker)
        for _ in range(REQUESTS // THREADS // 2):
            one = rng.choice(short)
            way = rng.choice(("result", "iterate", "callback", "batch"))
            if way == "callback":
                ended = threading.Event()
                handle = engine.submit(one.request)
                handle.add_done_callback(lambda _, ended=ended: ended.set())  # type: ignore[misc]
                assert ended.wait(PATIENCE)
                one.check(handle)
            elif way == "iterate":
                assert list(engine.submit(one.request)) == one.tokens
            elif way == "batch":
                batch = rng.sample(short, 5)
                for other, handle in [(other, engine.submit(other.request)) for other in batch]:
                    other.check(handle)
            else:
                one.check(engine.submit(replace(one.request, priority=rng.choice((0, 0, 1)))))
            ways[way] += 1

    def use_all(engine: Engine) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            for future in [threads.submit(use, engine, worker) for worker in range(THREADS)]:
                future.result(6 * PATIENCE)
        gc.collect()
        sizes.append(resident() if sys.platform == "linux" else 0)

    with serving(model, max_queue=64) as engine:
        use_all(engine)
        use_all(engine)
        stats = engine.stats()
        assert model.gpu.alloc_report() == report
    assert stats.submitted == sum(stats.finished.values()) > REQUESTS
    assert stats.finished["error"] == stats.finished["cancelled"] == 0
    assert min(ways.values()) > 100
    assert sizes[1] - sizes[0] < 2 << 20


def test_a_producer_that_never_reads(model: NllbModel, short: list[Solo]) -> None:
    """Its handles are dropped as they come. With a queue of 16, there are never more than those and the lanes."""
    sizes, most, count = [], 0, 3000
    before = handles_alive()
    requests = [replace(one.request, max_new_tokens=2) for one in short]
    with serving(model, max_queue=16) as engine:
        for number in range(count):
            engine.submit(requests[number % len(requests)])
            most = max(most, len(engine._queue) + len(engine._worker._lanes))
            if number % 1000 == 999:
                assert handles_alive() - before <= 16 + 2 * 32, "those in the queue, in lanes, and in a step in flight"
                sizes.append(resident() if sys.platform == "linux" else 0)
    assert most <= 16 + 32
    assert engine.stats().finished["length"] + engine.stats().finished["eos"] == count
    assert sizes[-1] - sizes[0] < 1 << 20, "a handle of each request would be 4 MiB"


def test_a_consumer_that_stops_reading_holds_nobody_up(model: NllbModel, solo: RunSolo) -> None:
    """Its request goes on without it, and it finds everything when it comes back."""
    slow, go_on = ask(max_new_tokens=20), threading.Event()
    read: list[int] = []

    def consume(handle: RequestHandle) -> None:
        for token in handle:
            read.append(token)
            assert go_on.wait(PATIENCE)

    with serving(model) as engine:
        handle = engine.submit(slow)
        consumer = threading.Thread(target=consume, args=(handle,))
        consumer.start()
        until(lambda: len(read) == 1)
        for index in range(8):
            solo(ask(10 + index, max_new_tokens=6)).check(engine.submit(ask(10 + index, max_new_tokens=6)))
        solo(slow).check(handle)
        assert len(read) == 1
        go_on.set()
        consumer.join(PATIENCE)
        assert read == solo(slow).ids


def test_many_tasks(model: NllbModel, short: list[Solo]) -> None:
    """Three hundred tasks on one loop, through a queue of 8; some give up, some only wait, and no thread is needed."""

    async def use(engine: Engine, number: int) -> str:
        one = short[number % len(short)]
        handle = await engine.asubmit(one.request)
        if number % 7 == 3:
            handle.cancel()
            return (await handle).finish_reason
        if number % 7 == 5:
            assert [token async for token in handle] == one.tokens
        one.check_result(await handle)
        return "served"

    async def use_all(engine: Engine) -> list[str]:
        threads = threading.active_count()
        tasks = [asyncio.create_task(use(engine, number)) for number in range(300)]
        while not engine._queue.blocked:
            await asyncio.sleep(0)
        given_up = [task for number, task in enumerate(tasks) if number % 20 == 19]
        for task in given_up:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert threading.active_count() == threads
        return ["gave up" if isinstance(one, asyncio.CancelledError) else str(one) for one in results]

    with serving(model, max_queue=8) as engine:
        results = Counter(asyncio.run(use_all(engine)))
        until(lambda: engine.stats().submitted == sum(engine.stats().finished.values()))
    assert set(results) <= {"served", "gave up", "cancelled", "length", "eos"}
    assert results["served"] > 200
    assert results["gave up"] > 5


def test_threads_and_loops_share_a_handle(model: NllbModel, solo: RunSolo) -> None:
    request = ask(max_new_tokens=20)

    async def collect(handle: RequestHandle) -> list[int]:
        return [token async for token in handle]

    with serving(model) as engine, Gate(at=2) as gate, ThreadPoolExecutor(8) as threads:
        handle = engine.submit(replace(request, on_token=gate))
        gate.reach()
        readers = [threads.submit(list, handle) for _ in range(4)]
        readers += [threads.submit(asyncio.run, collect(handle)) for _ in range(4)]
        gate.open()
        assert [reader.result(PATIENCE) for reader in readers] == [solo(request).ids] * 8


@pytest.mark.parametrize("drain", [True, False])
def test_closing_amid_many_producers(model: NllbModel, short: list[Solo], eager_switching: None, drain: bool) -> None:
    """Whoever has a handle has a request that ends, as it should; everybody else is told that the engine is closed."""
    handles: list[tuple[Solo, RequestHandle]] = []

    def produce(engine: Engine, worker: int) -> int:
        rng = random.Random(worker)
        for _ in range(10_000):
            one = rng.choice(short)
            try:
                handles.append((one, engine.submit(one.request)))
            except EngineClosed:
                return 1
        return 0

    with serving(model, max_queue=8) as engine, ThreadPoolExecutor(16) as threads:
        producers = [threads.submit(produce, engine, worker) for worker in range(16)]
        until(lambda: engine.stats().generated_tokens > 200)
        engine.close(drain=drain)
        assert sum(producer.result(PATIENCE) for producer in producers) == 16
        stats = engine.stats()
    assert stats.submitted == sum(stats.finished.values()) == len(handles)
    for one, handle in handles:
        result = handle.result(0)
        if drain or result.finish_reason != "cancelled":
            one.check_result(result)
        else:
            assert result.ids == one.tokens[: len(result.ids)]
