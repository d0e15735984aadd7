# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the host does for a decode step: microseconds of Python, and calls of the device, without a device.

    python -m benchmarks.host_steps [--lanes 1,8,64] [--step-graphs off] [--profile]

The device does nothing and answers at once. So what is timed is the model's and the engine's part of a step: checks,
tables, bookkeeping. The calls are counted, because on a GPU each of them takes some microseconds more. Times are the
processor's, the best of some rounds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

import metrale
from gpu_runtime.handles import KernelHandle
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.engine import Engine, Request
from metrale.model import BeamParams, FeedSource, Model, PrefillSlice, SamplingParams, SequenceState

LANGUAGE: Final = 4
SOURCE: Final = (5, 6, 7, 8)
MOST: Final = 400
"""Target positions: enough for all steps that are made of a sequence."""
BEAMS: Final = 4
WARM: Final = 8
ROUNDS: Final = 5

SILENT: Final = (
    "copy_d2d_async",
    "copy_d2h_async",
    "copy_h2d_async",
    "event_query",
    "event_synchronize",
    "gemm",
    "launch",
    "launch_graph",
    "record_event",
    "stream_is_capturing",
    "stream_wait_event",
)
"""The calls that a step may make, and that do nothing while the device is silent."""


class Silent(HostBackend):
    """A device that pads steps and replays graphs as a GPU does, and can be told to do nothing at all.

    Attributes
    ----------
    calls : Counter
        Calls of each kind that it has answered without doing anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def limits(self) -> Limits:
        return replace(super().limits(), pad_batches=True, runs_ahead=True)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Do nothing inside the context, but count."""
        limits = self.limits()
        handle = KernelHandle("", "")
        answers: dict[str, Any] = {name: self._answer(name, name == "event_query") for name in SILENT}
        answers |= {"limits": lambda: limits, "kernel": lambda module, name: handle}  # what takes a GPU no time
        vars(self).update(answers)
        try:
            yield
        finally:
            for name in answers:
                del vars(self)[name]

    def _answer(self, name: str, result: bool) -> Callable[..., bool]:
        calls = self.calls

        def answer(*args: Any, **options: Any) -> bool:
            calls[name] += 1
            return result

        return answer


@contextmanager
def model_steps(model: Model, lanes: int, beams: int) -> Iterator[Callable[[], None]]:
    """Give a function that makes a fed step of so many rows: one sequence for each, or searches of ``beams``."""
    with ExitStack() as stack:
        seqs: list[SequenceState] = []
        for _ in range(lanes // beams):
            seq = model.alloc_beams(beams, len(SOURCE) + 2, MOST) if beams > 1 else model.alloc_sequence()
            stack.callback(model.free_sequence, seq)
            seq.src_lang_id = seq.tgt_lang_id = LANGUAGE
            seqs.append(seq)
        model.prefill_batch_chunk([PrefillSlice.whole(SOURCE, seq) for seq in seqs])
        memory, event = model.alloc_host_pinned(12 * lanes), model.create_event()
        stack.callback(model.free_host_pinned, memory)
        stack.callback(model.destroy_event, event)
        words = memory.array[: 12 * len(seqs)].view(np.int32)
        base, row_bytes = model.logits_buffer_ptr(), model.logits_row_bytes()
        if beams > 1:
            for seq in seqs:
                model.begin_beams(seq, BeamParams(beams), SamplingParams(eos_ids=(), max_new_tokens=MOST))

        def choose(width: int) -> None:
            if beams > 1:
                rows = [base.offset(index * width * row_bytes) for index in range(len(seqs))]
                model.select_beams_to_feed(rows, seqs, words[: len(seqs)], event)
            else:
                model.sample_batch_to_feed(base, seqs, words.reshape(3, -1), event, untouched=True)

        def step() -> None:
            model.decode_batch_fed([FeedSource(sampled=True)] * len(seqs), seqs)
            for seq in seqs:
                seq.seq_len += 1
            choose(beams)
            model.event_synchronize(event)

        choose(1)
        yield step


def repeated(step: Callable[[], None], steps: int) -> None:
    """Make so many steps."""
    for _ in range(steps):
        step()


def timed(gpu: Silent, step: Callable[[], None], steps: int) -> tuple[float, dict[str, int]]:
    """Return the microseconds of a step, the best of some rounds, and the calls that one makes."""
    for _ in range(WARM):
        step()
    gpu.calls.clear()
    step()
    calls = dict(sorted(gpu.calls.items()))
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        repeated(step, steps)
        times.append(1e6 * (time.thread_time() - start) / steps)
    return round(min(times), 1), calls


def engine_us(model: Model, lanes: int, tokens: int) -> float:
    """Return the microseconds of a step of the engine with so many requests: processor time, the callers' included."""

    def run(count: int) -> float:
        with Engine(model, max_lanes=lanes) as engine:
            requests = [
                Request(SOURCE, LANGUAGE, LANGUAGE, max_new_tokens=count, eos_ids=frozenset()) for _ in range(lanes)
            ]
            start = time.process_time()
            with model.exclusive():  # all of them are there when the first step begins
                handles = [engine.submit(one) for one in requests]
            for handle in handles:
                assert len(handle.result().raise_for_error().ids) == count - 1
            return 1e6 * (time.process_time() - start)

    run(tokens)
    return round(min((run(2 * tokens) - run(tokens)) / tokens for _ in range(ROUNDS)), 1)


def measure(gpu: Silent, model: Model, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was found for each number of lanes."""
    for lanes in options.lanes:
        row: dict[str, Any] = {"lanes": lanes}
        for beams in (1, BEAMS):
            if lanes % beams:
                continue
            name = "model" if beams == 1 else f"model, {beams} beams"
            with gpu.silence(), model_steps(model, lanes, beams) as step:
                row[f"{name}: us"], row[f"{name}: calls"] = timed(gpu, step, options.steps)
                if options.profile:
                    profile = cProfile.Profile()
                    profile.runcall(repeated, step, options.steps)
                    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
        with gpu.silence():
            row["engine: us"] = engine_us(model, lanes, options.steps)
        yield row


def main(words: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each number of lanes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="1,8,64", help="numbers of lanes")
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    parser.add_argument("--step-graphs", choices=("on", "off"), default="on", help="whether steps are replayed")
    parser.add_argument("--profile", action="store_true", help="show which functions take the time")
    options = parser.parse_args(words)
    options.lanes = [int(one) for one in options.lanes.split(",")]
    with tempfile.TemporaryDirectory() as work, Silent() as gpu:
        write_checkpoint(Path(work, "tiny"), SHAPES["tiny"], "float32")
        limits: dict[str, Any] = {"max_batch": max(*options.lanes, 4), "max_source_len": 16, "max_new_tokens": MOST}
        replayed = options.step_graphs == "on"
        with metrale.load(Path(work, "tiny"), gpu, "float32", step_graphs=replayed, **limits) as model:
            for row in measure(gpu, model, options):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
