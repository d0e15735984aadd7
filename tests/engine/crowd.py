# SPDX-License-Identifier: MIT OR Apache-2.0
"""An engine with its own thread under a crowd: threads and event loops that submit, wait, read along and cancel.

Unlike a simulation, a run is another one each time: the seed gives the requests, the machine gives the moments.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from metrale.engine import Engine
from metrale.engine.handle import RequestHandle
from tests.backends import open_host
from tests.engine.alone import POSITIONS, judge_all, load, products_by_rows
from tests.engine.job import Job, draw_job
from tests.engine.patience import PATIENCE
from tests.engine.stranger import Stranger
from tests.engine.watch import nothing_left


class Crowd:
    """Four threads, two event loops with a task for each of their requests, and a stranger beside the engine.

    Parameters
    ----------
    folder : Path
        The tiny checkpoint.
    seed : int
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = folder
        self.gpu = open_host(order="adversarial", seed=seed)
        self.lanes = rng.randint(2, 6)
        self.positions = rng.choice((self.lanes, 2)) * POSITIONS
        self.options: dict[str, Any] = {
            "max_queue": rng.choice((1, 4)),
            "max_prefill_tokens": rng.choice((12, 1000)),
            "prefill_interval": rng.randint(1, 3),
            "lag": rng.randint(0, 2),
        }
        self.adapters = rng.random() < 0.3
        self.step_graphs = seed % 2 == 1
        self.shares = [[self._draw() for _ in range(6)] for _ in range(6)]

    def _draw(self) -> Job:
        """Return a job that is not too wide."""
        jobs = iter(lambda: draw_job(self.rng, self.lanes, adapters=self.adapters), None)
        return next(job for job in jobs if job.request.width <= self.lanes)

    def run(self) -> Counter[str]:
        """Run to the end, check everything, and return how often what became of a request."""
        jobs = [job for share in self.shares for job in share]
        with ExitStack() as stack:
            stack.enter_context(products_by_rows())
            gpu = stack.enter_context(self.gpu)
            options = {"adapters": self.adapters, "step_graphs": self.step_graphs}
            model = stack.enter_context(load(self.folder, gpu, self.lanes, self.positions, **options))
            stranger = Stranger(model, self.rng)
            with (
                nothing_left(model),
                Engine(model, **self.options) as engine,
                _busy(stranger),
                ThreadPoolExecutor(6) as pool,
            ):
                work: list[Callable[[], None]] = [
                    *(lambda share=share: _thread(engine, share) for share in self.shares[:4]),
                    *(lambda share=share: asyncio.run(_loop(engine, share)) for share in self.shares[4:]),
                ]
                for future in [pool.submit(one) for one in work]:
                    future.result(3 * PATIENCE)
            stats = engine.stats()
            stranger.check(self.folder)
        assert stats.submitted == len(jobs)
        assert (stats.now.running, stats.now.waiting, stats.now.swapped_out) == (0, 0, 0)
        return judge_all(self.folder, jobs, time.monotonic(), self.positions, adapters=self.adapters)


@contextmanager
def _busy(stranger: Stranger) -> Iterator[None]:
    """Let a stranger use the model in a thread of its own."""
    leave = threading.Event()

    def act() -> None:
        try:
            while not leave.is_set():
                stranger.act()
                if stranger.seq is None:  # who needs all the slots gets a chance
                    leave.wait(0.005)
        finally:
            stranger.leave()  # also after a fault: nobody need wait for its slot

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        try:
            yield
        finally:
            leave.set()
        future.result(PATIENCE)


def _thread(engine: Engine, jobs: list[Job]) -> None:
    """Submit all, then read each to its end; cancel after so many tokens, or from another thread."""
    for job in jobs:
        job.handle = engine.submit(job.request)
        if job.cancel_after is not None and job.cancel_after % 2:
            threading.Timer(job.cancel_after * 1e-3, job.cancel).start()
    for job in jobs:
        assert job.handle is not None
        seen = []
        for token in job.handle:
            seen.append(token)
            if len(seen) == job.cancel_after:
                job.cancel()
        assert job.handle.result(PATIENCE).ids == seen


async def _loop(engine: Engine, jobs: list[Job]) -> None:
    """Do as `_thread`, all at the same time."""

    async def one(job: Job) -> None:
        handle: RequestHandle = await engine.asubmit(job.request)
        job.handle = handle
        seen = []
        async for token in handle:
            seen.append(token)
            if len(seen) == job.cancel_after:
                job.cancel()
        assert (await handle).ids == seen

    tasks: list[Coroutine[Any, Any, None]] = [one(job) for job in jobs]
    async with asyncio.timeout(3 * PATIENCE):
        await asyncio.gather(*tasks)
