# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine's worker under a seed: one thread, a clock that the test sets, and every decision drawn.

Two runs of a seed are equal, whatever the machine. The device is a host backend that runs what streams and events leave
open in an order of the seed's.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

from metrale.engine import admission
from metrale.engine.checked import checked_request
from metrale.engine.errors import QueueFull
from metrale.engine.handle import RequestHandle
from metrale.engine.policy import Policy
from metrale.engine.stats import EngineStats, Recorder
from metrale.engine.waiting import WaitingQueue
from metrale.engine.worker import Worker
from metrale.errors import InvalidInput
from metrale.nllb.model import NllbModel
from tests.backends import open_host
from tests.engine.alone import POSITIONS, judge_all, load, products_by_rows
from tests.engine.clock import FakeClock
from tests.engine.job import VOCAB, Job, draw_job
from tests.engine.stranger import Stranger
from tests.engine.watch import check_lanes, in_order, nothing_left, watched_steps

_MOST_TURNS = 3000
"""Turns after which a run is stuck; they need some hundred."""


class Simulation:
    """One run.

    Parameters
    ----------
    folder : Path
        The tiny checkpoint.
    seed : int
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = folder
        self.clock = FakeClock()
        self.gpu = open_host(order=rng.choice(("in_order", "deferred", *["adversarial"] * 4)), seed=seed)
        self.lanes = rng.randint(1, 6)
        self.positions = rng.choice((self.lanes, 2, 1)) * POSITIONS - rng.choice((0, 0, 7))
        self.policy = Policy(
            max_lanes=rng.choice((self.lanes, rng.randint(1, self.lanes))),
            max_prefill_tokens=rng.choice((1, 12, 30, 1000)),
            prefill_interval=rng.randint(1, 4),
            lag=rng.randint(0, 3),
        )
        self.spare = rng.choice((2, 4, 16))
        self.adapters = rng.random() < 0.3
        self.step_graphs = seed % 2 == 1
        widest = self.policy.max_lanes
        self.jobs = [draw_job(rng, widest, adapters=self.adapters) for _ in range(rng.randint(1, 24))]
        self.queue_bound = rng.choice((1, 3, 100))
        self.burst = rng.choice((0.1, 0.5, 1.0))
        self.stop_at = rng.randint(0, 60) if rng.random() < 0.1 else None
        self.events: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Run to the end, check everything, and return how often what happened."""
        with ExitStack() as stack:
            stack.enter_context(products_by_rows())
            # Sequences that outgrow their KV are to be common, also among short ones.
            stack.enter_context(mock.patch.object(admission, "_SPARE", self.spare))
            gpu = stack.enter_context(self.gpu)
            options = {"adapters": self.adapters, "step_graphs": self.step_graphs}
            model = stack.enter_context(load(self.folder, gpu, self.lanes, self.positions, **options))
            stranger = Stranger(model, self.rng) if self.rng.random() < 0.3 else None
            with nothing_left(model):
                stats = self._drive(model, stranger)
                if stranger is not None:
                    stranger.leave()
                    self.events["strangers"] += stranger.check(self.folder)
            assert all(not one.references for one in model._adapters._residents if one is not None)
        self.events += judge_all(self.folder, self.jobs, self.clock.now, self.positions, adapters=self.adapters)
        self._check(stats)
        return self.events

    def _drive(self, model: NllbModel, stranger: Stranger | None) -> EngineStats:
        """Submit, cancel and take turns until everything has ended, or until the engine is stopped."""
        calls: SimpleQueue[RequestHandle | None] = SimpleQueue()
        queue = WaitingQueue(
            self.queue_bound, aging=self.rng.choice((0.05, 0.5, 2.0)), on_arrival=lambda: calls.put(None)
        )
        recorder = Recorder(self.clock)
        worker = Worker(model, queue, calls, recorder, self.policy, self.clock)
        rest, running = list(self.jobs), list[tuple[int, Job]]()
        with watched_steps(model, worker):
            for turn in range(_MOST_TURNS):
                self.clock.now += self.rng.choice((0.0, 0.01, 0.1))
                while rest and self.rng.random() < self.burst and self._submit(rest[0], model, queue, worker, recorder):
                    running.append((turn, rest.pop(0)))
                for since, job in running:
                    if job.cancel_after is not None and turn == since + job.cancel_after:
                        job.cancel()
                if stranger is not None:
                    stranger.act()
                with in_order(queue, worker):
                    worker._turn()
                check_lanes(model, worker, stranger)
                if (not rest and worker._is_idle()) or turn == self.stop_at:
                    break
            else:
                raise AssertionError(f"stuck: {[job for job in self.jobs if not (job.handle and job.handle.done)]}")
            stopped = turn == self.stop_at
            for _, job in running:
                if stopped and job.handle is not None and not job.handle.done:
                    job.cancelled = True
            self.events["stopped"] += stopped
            worker.stop(drain=not stopped)
            worker.run()
        return recorder.snapshot(worker.gauges())

    def _submit(self, job: Job, model: NllbModel, queue: WaitingQueue, worker: Worker, recorder: Recorder) -> bool:
        """Do as `Engine.submit` does."""
        try:
            request = checked_request(job.request, model.capacity(), VOCAB, self.policy.max_lanes)
        except InvalidInput:
            assert job.request.width > self.policy.max_lanes
            self.events["too wide"] += 1
            return True
        adapter = model.adapter_id_for(request.adapter_slot)
        handle = RequestHandle(request, clock=self.clock, on_cancel=worker.cancel, adapter_id=adapter)
        if request.most_tokens == request.counted_from:
            handle.finish("length")
        else:
            try:
                queue.put(handle, block=False)
            except QueueFull:
                self.events["queue full"] += 1
                return False
        recorder.submitted()
        job.handle = handle
        return True

    def _check(self, stats: EngineStats) -> None:
        """The counts are those of what happened."""
        submitted = [job.handle for job in self.jobs if job.handle is not None]
        handles = [one for one in submitted if one.request.most_tokens > one.request.counted_from]
        assert stats.submitted == len(submitted)
        assert sum(stats.finished.values()) == len(handles)
        for reason, count in stats.finished.items():
            assert count == sum(handle.finish_reason == reason for handle in handles)
        generated = {handle: handle.length - handle.request.counted_from for handle in handles}
        assert stats.generated_tokens == sum(generated.values())
        assert stats.time_to_first_token.count == sum(count > 0 for count in generated.values())
        assert stats.queue_wait.count == sum(handle.admitted_at is not None for handle in handles)
        least, most = (sum(bounds) for bounds in zip(*map(self._rows, handles), strict=True)) if handles else (0, 0)
        assert least <= stats.decoded_rows <= most
        assert stats.swapped_in_bytes <= stats.swapped_out_bytes
        assert (stats.now.running, stats.now.waiting, stats.now.swapped_out) == (0, 0, 0)
        self.events["preemptions"] += stats.preemptions
        self.events["mixed steps"] += stats.mixed_steps
        self.events["resumed"] += stats.swapped_in_bytes > 0

    def _rows(self, handle: RequestHandle) -> tuple[int, int]:
        """Return the fewest and the most rows that were decoded for a request; its prefill chose the first token.

        Who ends before its limit has some steps in flight, which nobody needs. A search goes on at least until its
        longest result is complete.
        """
        request, result = handle.request, handle.result(0)
        limit = request.width * (request.most_tokens - request.counted_from - 1)
        if request.beams is None:
            needed = max(0, handle.length - request.counted_from - 1)
            return needed, needed if result.finish_reason == "length" else min(needed + self.policy.lag + 1, limit)
        longest = max((len(one.ids) for one in result.hypotheses or ()), default=0)
        return request.width * max(0, longest - len(request.prefix_tokens) - 2), limit
