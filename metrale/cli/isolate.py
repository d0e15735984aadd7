# SPDX-License-Identifier: MIT OR Apache-2.0
"""Functions run in processes of their own, so that a library that crashes or hangs costs an answer and no more."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# The child finds modules where this process does. Its answer is the last line: libraries may print, too.
_CHILD: Final = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module, _, function = sys.argv[2].partition(":")
try:
    answer = {"data": getattr(importlib.import_module(module), function)()}
except Exception as error:
    answer = {"error": f"{type(error).__name__}: {error}"}
print("\\n" + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function returned, or why there is no answer. One of the two is None."""

    data: dict[str, Any] | None
    error: str | None


def ask_all(functions: Mapping[str, str], seconds: float) -> dict[str, Answer]:
    """Run functions side by side and return their answers by name. Never raises.

    Parameters
    ----------
    functions : mapping of str to str
        ``"module:function"`` by name; the function takes nothing and returns a JSON-ready dict.
    seconds : float
        The most that all of them together may take.
    """
    deadline = time.monotonic() + seconds
    children = {name: _start(function) for name, function in functions.items()}
    return {name: _answer(child, deadline - time.monotonic(), seconds) for name, child in children.items()}


def _start(function: str) -> subprocess.Popen[bytes] | str:
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), function]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}"


def _answer(child: subprocess.Popen[bytes] | str, seconds: float, allowed: float) -> Answer:
    if isinstance(child, str):
        return Answer(None, child)
    try:
        written, _ = child.communicate(timeout=max(seconds, 0.01))
    except subprocess.TimeoutExpired:
        _kill(child)
        return Answer(None, f"no answer within {allowed:g} seconds")
    except BaseException:
        _kill(child)
        raise
    try:
        answer = json.loads(written.splitlines()[-1])
        return Answer(answer.get("data"), answer.get("error"))
    except (IndexError, ValueError, AttributeError):
        return Answer(None, _death(child.returncode))


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel is left behind
        child.wait(timeout=1)


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and no answer"
    with contextlib.suppress(ValueError):
        return f"crashed with {signal.Signals(-code).name}"
    return f"crashed with signal {-code}"
