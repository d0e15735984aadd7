# SPDX-License-Identifier: MIT OR Apache-2.0
"""A process that imports everything once and forks for each case, as starting an interpreter for each is too slow.

It has no thread but one, as only such a process may fork and go on. The names of the cases come as one line of JSON on
standard input; each outcome goes as one line to standard output when it is there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from tests.hostile.case import Case, Outcome
from tests.hostile.child import run_child


def serve(cases: dict[str, Case], names: list[str], place: Path, workers: int) -> None:
    """Run cases, ``workers`` at a time, and print their outcomes."""
    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a process with several threads cannot fork and go on")
    waiting = names[::-1]
    running: dict[int, tuple[str, Path]] = {}
    count = 0
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            count += 1
            folder = place / str(count)
            folder.mkdir()
            running[_fork(cases[name], folder)] = (name, folder)
        pid, status = os.wait()
        name, folder = running.pop(pid)
        outcome = _collect(folder, os.waitstatus_to_exitcode(status))
        shutil.rmtree(folder)
        print(json.dumps({"name": name, "outcome": asdict(outcome)}), flush=True)


def run_one(case: Case, place: Path) -> Outcome:
    """Run one case in a fork of this process, which may have other threads as long as the case needs none of them."""
    folder = place / "one"
    folder.mkdir()
    pid = _fork(case, folder)
    _, status = os.waitpid(pid, 0)
    outcome = _collect(folder, os.waitstatus_to_exitcode(status))
    shutil.rmtree(folder)
    return outcome


def _fork(case: Case, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    run_child(case, folder / "place", folder / "outcome.json")
    raise AssertionError("it has ended")


def _collect(folder: Path, code: int) -> Outcome:
    log = folder / "place" / "log"
    text = log.read_bytes()[-3000:].decode("utf-8", "backslashreplace") if log.exists() else ""
    result = folder / "outcome.json"
    if code or not result.exists():
        return Outcome("signal", exit_code=code, log=text)
    fields = json.loads(result.read_text("utf-8"))
    return Outcome(**{**fields, "log": text})


def main(place: Path) -> None:
    """Serve what standard input asks for, in a folder for the files of all cases."""
    sys.dont_write_bytecode = True  # else a case that is the first to import a module would write it, and be blamed
    os.environ["METRALE_DEVICE"] = "host"
    names = json.loads(sys.stdin.readline())
    from tests.hostile import calls, catalogue, stage

    stage.prepare(place)
    calls.prepare()
    os.mkdir(place / "cases")
    workers = len(os.sched_getaffinity(0))
    serve({case.name: case for case in catalogue.cases()}, names, place / "cases", workers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
