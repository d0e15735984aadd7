# SPDX-License-Identifier: MIT OR Apache-2.0
"""The interpreter ends although an engine has requests."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.engine.patience import PATIENCE

EXIT = """
    import asyncio, sys, threading, time
    import metrale
    from gpu_runtime.host import HostBackend
    from metrale.engine import Engine, Request

    model = metrale.load(sys.argv[1], HostBackend(), "float32", max_batch=2, max_source_len=12, max_new_tokens=64)
    engine = Engine(model, max_queue=8)
    ask = lambda **options: Request([5, 6, 7], 80, 81, 64, eos_ids=(), **options)
    began = threading.Event()
    handles = [engine.submit(ask(on_token=lambda token: began.set())) for _ in range(6)]
    began.wait(20)
    {last}
"""


@pytest.mark.parametrize(
    "last",
    [
        "print('end')",
        "engine = handles = None; print('end')",
        "cycle = [engine]; cycle.append(cycle); del engine, cycle; print('end')",
        "print('end'); sys.exit(0)",
        "threading.Thread(target=lambda: [print('end') for _ in [handles[0].result(20)]]).start()",
        "asyncio.run(handles[0].aresult()); print('end')",
        "handles[-1].add_done_callback(lambda handle: [time.sleep(0.1), print(handle.finish_reason and 'end')])",
    ],
    ids=["running", "dropped", "garbage", "sys.exit", "a thread waits", "after a loop", "a callback"],
)
def test_the_interpreter_ends_with_requests_running(tiny_folder: Path, last: str) -> None:
    """Soon, with exit code 0, and without a word on stderr."""
    script = textwrap.dedent(EXIT).format(last=last)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, str(tiny_folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert time.monotonic() - began < PATIENCE
