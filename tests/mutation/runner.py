# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs pytest on mutated code, each mutant in a forked process, so that the interpreter and NumPy start once."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (imported here once, for every fork)
import numpy as np  # noqa: F401
import pytest
import safetensors  # noqa: F401
import sentencepiece  # noqa: F401

from tests.mutation.mutant import ROOT, AnyMutant

TIMEOUT_S = 120
NOTICED, MISSED = 1, 0  # pytest's exit codes for failed tests and for none


class MutatedLoader(importlib.machinery.SourceFileLoader):
    """Loads a mutant's source instead of its file's."""

    def __init__(self, mutant: AnyMutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self._source = mutant.source()

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self._source, self.path, "exec")


class MutatedFinder(importlib.abc.MetaPathFinder):
    """Finds the mutated module before the ordinary finders do."""

    def __init__(self, mutant: AnyMutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._mutant.path, loader=MutatedLoader(self._mutant))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How pytest ended: its exit code (negative: the process was killed), seconds, and what it printed."""

    mutant: AnyMutant | None
    tests: tuple[str, ...]
    code: int
    seconds: float
    output: str


def run_all(jobs: Iterable[tuple[AnyMutant | None, tuple[str, ...]]], workers: int) -> Iterator[Outcome]:
    """Run every (mutant or None, pytest arguments), ``workers`` at a time; yield outcomes as they come."""
    waiting = list(jobs)[::-1]
    running: dict[int, tuple[AnyMutant | None, tuple[str, ...], float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                mutant, tests = waiting.pop()
                log = os.path.join(folder, str(len(waiting)))
                running[_fork(mutant, tests, log)] = (mutant, tests, time.monotonic(), log)
            pid, status = os.wait()
            mutant, tests, start, log = running.pop(pid)
            with open(log, encoding="utf-8", errors="replace") as file:
                output = file.read()
            yield Outcome(mutant, tests, os.waitstatus_to_exitcode(status), time.monotonic() - start, output)


def _fork(mutant: AnyMutant | None, tests: tuple[str, ...], log: str) -> int:
    if mutant is not None and mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} has been imported: no fork of this process would see its mutants")
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        signal.alarm(TIMEOUT_S)  # a mutant that never ends dies by SIGALRM, which counts as noticed
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if mutant is not None:
            sys.meta_path.insert(0, MutatedFinder(mutant))
        os.chdir(ROOT)
        options = ("-m", "not gpu", "--more", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider")
        code = int(pytest.main([*tests, *options]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
