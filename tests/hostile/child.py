# SPDX-License-Identifier: MIT OR Apache-2.0
"""The forked process that runs one case: limits, a watch over what it changes, and its outcome as JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.hostile.case import MOST_MEMORY, MOST_WALL_S, Case, Outcome

MOST_FILE_BYTES: Final = 256 << 20

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: Final = frozenset(
    {
        *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"),
        *("os.chown", "os.utime", "os.setxattr", "os.removexattr", "os.putenv", "os.unsetenv"),
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen"),
        *("socket.connect", "socket.bind", "socket.getaddrinfo", "webbrowser.open", "ctypes.dlopen"),
    }
)
FIELDS: Final = ("argument", "expected", "got", "path", "problems", "rows")


class Watch:
    """Notes what the process tries to change. An audit hook cannot be taken back: it is for a process that ends soon.

    Parameters
    ----------
    allowed : Path
        The folder in which a case may write.
    """

    def __init__(self, allowed: Path) -> None:
        self._allowed = str(allowed)
        self.noted: list[str] = []
        self._on = False

    def start(self) -> None:
        self._on = True
        sys.addaudithook(self._note)

    def stop(self) -> None:
        self._on = False

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            path, _, flags = args
            if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int) or not flags & _WRITES:
                return
            where = os.path.abspath(os.fsdecode(path))
            if where != os.devnull and not where.startswith(self._allowed):
                self.noted.append(f"opened {where} to write")
        elif event in _CHANGES:
            self.noted.append(f"{event}{args!r}"[:300])


def listing(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return what tells whether anything in a folder has changed; links are not followed, and nothing is opened."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            at = os.lstat(path)
            found[os.path.relpath(path, folder)] = (at.st_mode, at.st_ino, at.st_size, at.st_mtime_ns)
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what a folder has gained, lost or got another content of."""
    names = sorted(before.keys() | after.keys())
    return [f"changed {name}" for name in names if before.get(name) != after.get(name)]


def run_child(case: Case, place: Path, result: Path) -> None:
    """Run a case in this process, which has been forked for it, and write its outcome. Never returns.

    Parameters
    ----------
    case : Case
    place : Path
        A folder of the case's own: ``input`` in it is filled by its ``build``, ``output`` is where it may write.
    result : Path
        Where the outcome goes. Without it the process has died.
    """
    code = 1
    try:
        _settle(place)
        outcome = _outcome(case, place)
        result.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _settle(place: Path) -> None:
    """Give the process its standard streams, its folders and its limits of time."""
    for name in ("input", "output", "home"):
        (place / name).mkdir(parents=True)
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(2)
    os.environ.update(HOME=str(place / "home"), TMPDIR=str(place / "home"))
    os.chdir(place / "home")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MOST_WALL_S)
    faulthandler.dump_traceback_later(max(MOST_WALL_S - 2, 0.5))  # where it hangs


def _outcome(case: Case, place: Path) -> Outcome:
    folder = place / "input"
    try:
        case.build(folder)
    except Exception as error:
        return Outcome("broken", error=type(error).__name__, message=str(error), trace=traceback.format_exc())
    before = listing(place)
    _limit()
    watch = Watch(place / "output")
    warnings.simplefilter("error")
    os.chdir(place / "home")
    watch.start()
    start = time.process_time()
    found: dict[str, Any]
    try:
        found = {"kind": "value", "value": case.run(folder)}
    except BaseException as error:
        found = described(error)
    cpu_s = time.process_time() - start
    watch.stop()
    after = {name: at for name, at in listing(place).items() if not name.startswith("output")}
    before = {name: at for name, at in before.items() if not name.startswith("output")}
    for ignored in ("log",):
        before.pop(ignored, None)
        after.pop(ignored, None)
    return Outcome(**found, trespasses=[*watch.noted, *changes(before, after)], cpu_s=cpu_s)


def _limit() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, size + MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))


def described(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    fields = {name: value for name in FIELDS if isinstance(value := getattr(error, name, None), str | list | tuple)}
    return {
        "kind": "error",
        "error": kind.__name__,
        "message": str(error),
        "fields": {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()},
        "bases": [one.__name__ for one in kind.__mro__],
        "trace": "".join(traceback.format_exception(error))[-3000:],
    }
