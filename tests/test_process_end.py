# SPDX-License-Identifier: MIT OR Apache-2.0
"""The interpreter ends although much is open: soon, with exit code 0, and without a word on stderr."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Final

import pytest

from tests.backends import ON_CUDA

ROOT: Final = Path(__file__).parents[1]
SOON: Final = 10.0
"""Seconds from the script's last line to the end of the process: it takes one or two. What hangs is stopped later."""

HEAD: Final = """
import atexit, gc, sys, threading, time, weakref
import numpy as np
import metrale
from gpu_runtime.op import REGISTRY
from metrale.engine import Engine, Request
from tests.backends import open_cuda, open_host
from tests.gpu_runtime import hold, toy
from tests.gpu_runtime.toy import SLOW, launch, values

kind, folder = sys.argv[1:]
for op in (toy.OP, hold.OP):
    REGISTRY.register(op)
X = np.ones(4, np.float32)

def opened(**options):
    return open_cuda() if kind == "cuda" else open_host(**options)

def uploaded(gpu):
    ptr = gpu.alloc(16)
    gpu.copy_h2d(X, ptr)
    return ptr

def loaded(gpu):
    return metrale.load(folder, gpu, "float32", max_batch=2, max_source_len=12, max_new_tokens=64)

def asked():
    return Request([5, 6, 7], 80, 81, 64, eos_ids=())
"""

OPEN: Final[dict[str, str]] = {
    "handles": """
        gpu = opened(order="deferred")
        ptr, stream, event, pinned = uploaded(gpu), gpu.create_stream(), gpu.create_event(), gpu.alloc_host_pinned(16)
        gpu.alloc_managed(8)
        gpu.begin_capture(stream)
        launch(gpu, values(ptr, ptr), stream)
        graph = gpu.end_capture(stream)
        gpu.launch_graph(graph, stream)
        gpu.record_event(event, stream)
        gpu.copy_d2h_async(ptr, pinned.array, stream)
    """,
    "a capture and a trace": """
        gpu = opened()
        ptr, trace = uploaded(gpu), gpu.launch_trace()
        trace.__enter__()
        gpu.begin_capture()
        launch(gpu, values(ptr, ptr))
    """,
    "several backends in a cycle": """
        gpus = [opened(), opened()]
        gpus.append(gpus)
        uploaded(gpus[0])
        del gpus
    """,
    "a thread that waits for the device": """
        gpu = opened(order="deferred")
        held, waits = hold.Held(gpu), threading.Event()
        def wait():
            waits.set()
            gpu.synchronize()
        threading.Thread(target=wait, daemon=True).start()
        waits.wait()
        time.sleep(0.1)
        if kind == "cuda":
            held.let_go()  # it would run for ten seconds, and what the driver makes of that is its affair
    """,
    "threads that go on calling": """
        gpu = opened()
        def call():
            while True:
                ptr = uploaded(gpu)
                launch(gpu, values(ptr, ptr))
                gpu.copy_d2h(ptr, np.empty(4, np.float32))
                gpu.free(ptr)
        for _ in range(4):
            threading.Thread(target=call, daemon=True).start()
        time.sleep(0.3)
    """,
    "exports, and memory of others": """
        from gpu_runtime import view, wrap
        gpu = opened(order="deferred")
        ptr = uploaded(gpu)
        launch(gpu, values(ptr, ptr))
        if kind == "cuda":
            import cupy
            mine = cupy.zeros(4, np.float32)
            take, address = (cupy.from_dlpack, cupy.asarray), mine.data.ptr
        else:
            mine = np.zeros(4, np.float32)
            take, address = (np.from_dlpack, np.asarray, lambda buffer: buffer.memoryview()), mine.ctypes.data
        arrays = [one(view(gpu, ptr, 4, "f32")) for one in take]
        capsule = view(gpu, ptr, 4, "f32").__dlpack__(max_version=(1, 0))
        wrapped = wrap(gpu, address, 16, mine)
        gpu.copy_d2d_async(wrapped.ptr, ptr, 16)
    """,
    "a model and its sequences": """
        model = loaded(opened(order="deferred"))
        seq = model.alloc_sequence()
        seq.src_lang_id, seq.tgt_lang_id = 80, 81
        ptr = model.prefill([5, 6, 7], seq)
        model.decode(5, seq)
    """,
    "an engine with requests, and a thread that waits for one": """
        engine = Engine(loaded(opened()))
        handles = [engine.submit(asked()) for _ in range(6)]
        threading.Thread(target=handles[-1].result, daemon=True).start()
        next(iter(handles[0]))
    """,
    "a thread that waits for a model": """
        model = loaded(opened())
        lock = model.exclusive()
        lock.__enter__()
        threading.Thread(target=model.copy_logits_to_host, args=(model.logits_buffer_ptr(),), daemon=True).start()
        time.sleep(0.1)
    """,
    "atexit closes": """
        gpu = opened()
        atexit.register(gpu.close)
        ptr = uploaded(gpu)
        atexit.register(gpu.free, ptr)
        launch(gpu, values(ptr, ptr))
    """,
    "a finalizer frees": """
        gpu = opened()
        class Owner:
            def __init__(self):
                self.gpu, self.ptr = gpu, uploaded(gpu)
            def __del__(self):
                self.gpu.free(self.ptr)
        owner, kept = Owner(), Owner()
        weakref.finalize(owner, gpu.free, uploaded(gpu))
        cycle = [Owner()]
        cycle.append(cycle)
    """,
}

AFTER_THE_MODULES: Final = """
    gpu = opened()
    sys.modules["kept"] = type(sys)("kept")
    class Last:
        def __init__(self):
            self.gpu, self.ptr, self.stream = gpu, uploaded(gpu), gpu.create_stream()
        def __del__(self, ended=sys.is_finalizing):
            os_write(1, b"%d " % ended())
            for call in (
                lambda: self.gpu.copy_d2h(self.ptr, bytearray(16)),
                lambda: launch(self.gpu, values(self.ptr, self.ptr)),
                lambda: self.gpu.alloc(16),
                lambda: self.gpu.free(self.ptr),
                lambda: self.gpu.synchronize(self.stream),
                self.gpu.close,
            ):
                try:
                    call()
                except Exception as error:
                    pass
    from os import write as os_write
    sys.modules["kept"].last = Last()
    del gpu
"""


@pytest.fixture(params=["host", ON_CUDA])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("what", OPEN)
def test_the_interpreter_ends(tiny_folder: Path, kind: str, what: str) -> None:
    done = run(OPEN[what], kind, tiny_folder)
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, "")
    assert ended - float(done.stdout) < SOON


def test_calls_after_the_modules_are_gone_do_not_crash(tiny_folder: Path, kind: str) -> None:
    """A finalizer that Python runs as the last thing of all may find that NumPy cannot import what it needs."""
    done = run(AFTER_THE_MODULES, kind, tiny_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("1 "), "it ran too early"


def run(script: str, kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # What CuPy and others say of themselves when they are imported is theirs.
    options = ["-X", "dev", "-W", "error"] if kind == "host" else ["-X", "faulthandler", "-W", "ignore"]
    return subprocess.run(
        [sys.executable, *options, "-c", HEAD + textwrap.dedent(script) + "print(time.time())\n", kind, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
