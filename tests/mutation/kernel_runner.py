# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the conformance cases of an op on kernels with a fault in them, on a GPU.

A worker process takes one mutant after another: it compiles the mutated source, registers the op with it on a backend
of its own, and runs `tests.ops.test_conformance.test_result` until something differs. A fault may end the process's
CUDA context or never end; the worker is then replaced, and the mutant counts as noticed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import metrale.ops  # noqa: F401  (registers the ops)
from gpu_runtime import kernel_source
from gpu_runtime.op import REGISTRY, Op, OpRegistry
from tests.mutation.attention_mutants import ATTENTION_MUTANTS
from tests.mutation.beam_mutants import BEAM_KERNEL_MUTANTS
from tests.mutation.dense_kernel_mutants import DENSE_KERNEL_MUTANTS
from tests.mutation.kernel_mutants import KERNEL_MUTANTS
from tests.mutation.mutant import ROOT

TIMEOUT_S: Final = 40.0
"""For one mutant; a compilation takes a few seconds, the cases of an op less than one."""

START_S: Final = 60.0
"""For a worker to import everything, open the device, and run an op without a fault."""

MISSED, NOTICED, BROKEN = "missed", "noticed", "broken"


@dataclass(frozen=True, slots=True)
class KernelMutant:
    """One fault: in the source of ``op``, or in a header of it, ``old`` becomes ``new``; None leaves it as it is."""

    op: str
    old: str | None = None
    new: str = ""

    def text(self) -> str:
        """Return the whole mutated source, headers put in.

        Raises
        ------
        ValueError
            When ``old`` does not stand exactly once in the source, or else in the headers.
        """
        op = ops_by_name()[self.op]
        assert op.source is not None
        text = kernel_source.inlined(op.source, op.include)
        if self.old is None:
            return text
        own = op.source.read_text(encoding="utf-8")
        if own.count(self.old) == 1:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, op.source.name)
                file.write_text(own.replace(self.old, self.new), encoding="utf-8")
                return kernel_source.inlined(file, (op.source.parent, *op.include))
        if own.count(self.old) or text.count(self.old) != 1:
            times = own.count(self.old) or text.count(self.old)
            raise ValueError(
                f"{self.op}: expected {self.old!r} once in the source or its headers, found it {times} times"
            )
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.op}: {(self.old or '').strip()!r} -> {self.new.strip()!r}"


def ops_by_name() -> dict[str, Op]:
    """Return the ops that have a kernel."""
    return {op.spec.name: op for op in REGISTRY if not op.spec.library}


def kernel_mutants() -> list[KernelMutant]:
    """Return every mutant of a kernel."""
    tables: Mapping[str, Any] = {
        **KERNEL_MUTANTS,
        **DENSE_KERNEL_MUTANTS,
        **ATTENTION_MUTANTS,
        **BEAM_KERNEL_MUTANTS,
    }
    return [KernelMutant(name, old, new) for name, changes in tables.items() for old, new in changes]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one mutant fared: ``missed``, ``noticed`` or ``broken``, in how many seconds, and what was seen."""

    mutant: KernelMutant
    state: str
    seconds: float
    detail: str


@dataclass(slots=True)
class _Worker:
    """A worker process, the mutant it is at, and since when."""

    process: subprocess.Popen[str]
    mutant: KernelMutant
    since: float = field(default_factory=time.monotonic)
    ready: bool = False

    def give(self, mutant: KernelMutant) -> None:
        assert self.process.stdin is not None
        self.mutant, self.since = mutant, time.monotonic()
        self.process.stdin.write(json.dumps(dataclasses.asdict(mutant)) + "\n")
        self.process.stdin.flush()

    def overdue(self) -> bool:
        return time.monotonic() - self.since > (TIMEOUT_S if self.ready else START_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_all(mutants: Sequence[KernelMutant], workers: int) -> Iterator[Outcome]:
    """Run mutants, ``workers`` at a time; yield outcomes as they come."""
    waiting = list(mutants)[::-1]
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < workers:
                _start(selector, waiting.pop())
            for key, _ in selector.select(timeout=1.0):
                worker: _Worker = key.data
                assert worker.process.stdout is not None
                line = worker.process.stdout.readline()
                worker.ready = True
                yield _outcome(worker, line)
                if line and waiting:
                    worker.give(waiting.pop())
                else:
                    _stop(selector, worker)
            for key in tuple(selector.get_map().values()):
                if key.data.overdue():
                    yield Outcome(key.data.mutant, NOTICED, time.monotonic() - key.data.since, "it did not end")
                    _stop(selector, key.data)


def _start(selector: selectors.BaseSelector, mutant: KernelMutant) -> None:
    command = [sys.executable, "-m", "tests.mutation.kernel_runner"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = _Worker(process, mutant)
    worker.give(mutant)
    selector.register(process.stdout, selectors.EVENT_READ, worker)


def _stop(selector: selectors.BaseSelector, worker: _Worker) -> None:
    assert worker.process.stdout is not None
    selector.unregister(worker.process.stdout)
    worker.end()


def _outcome(worker: _Worker, line: str) -> Outcome:
    seconds = time.monotonic() - worker.since
    if not line:
        code = worker.process.wait()
        return Outcome(worker.mutant, NOTICED if code < 0 else BROKEN, seconds, f"the process ended with {code}")
    state, detail = json.loads(line)
    return Outcome(worker.mutant, state, seconds, detail)


def work() -> None:
    """Be a worker: read mutants, one a line, and answer each with a line ``[state, detail]``."""
    from gpu_runtime.cuda import nvrtc

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed is no answer
    # Only that a mutant compiles matters: one that leaves a variable unused is as good as any.
    nvrtc._WARNING = re.compile("(?!)")  # type: ignore[misc]
    for line in sys.stdin:
        state, detail, lost = judge(KernelMutant(**json.loads(line)))
        print(json.dumps([state, detail]), file=answers, flush=True)
        if lost:
            return


def judge(mutant: KernelMutant) -> tuple[str, str, bool]:
    """Return how a mutant fares, what was seen, and whether the device is lost to this process."""
    from gpu_runtime.cuda.nvrtc import CompileError
    from gpu_runtime.errors import DeviceError

    original = ops_by_name()[mutant.op]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"{mutant.op}.cu")
        source.write_text(mutant.text(), encoding="utf-8")
        op = dataclasses.replace(original, source=source, include=())
        try:
            return (*_run_cases(op), False)
        except CompileError as error:
            return BROKEN, str(error), False
        except DeviceError as error:
            return NOTICED, str(error).split("\n")[0], True


def _run_cases(op: Op) -> tuple[str, str]:
    from tests.backends import open_cuda
    from tests.ops.test_conformance import test_result

    ops = OpRegistry()
    ops.register(op)
    with open_cuda(ops=ops) as gpu:
        for dtype in op.spec.dtypes:
            for index, case in enumerate(op.cases):
                try:
                    test_result(gpu, op, dtype, case)
                except AssertionError as error:
                    return NOTICED, f"{dtype}, case {index}: {error}".split("\n")[0]
                finally:
                    gpu.sweep_unreleased()
    return MISSED, ""


if __name__ == "__main__":
    work()
