# SPDX-License-Identifier: MIT OR Apache-2.0
"""Work that goes on until another thread ends it, so that a call which waits for it shows whom it lets run meanwhile.

On a GPU it is a kernel that watches page-locked memory; hold.cu is its source. On the host backend, where work runs on
the thread that waits for it, it is a reference that does the same and sleeps in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpu_runtime.backend import GpuBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import EXACT, LaunchPlan, Op, OpSpec, tensor
from gpu_runtime.streams import StreamLike

Array = np.ndarray[Any, np.dtype[Any]]

SPEC: Final = OpSpec(
    name="hold",
    args=(tensor("flag", "in", "i32", 1), tensor("seen", "out", "i32", 1)),
    tolerance=EXACT,
    dtypes=("f32",),
)
LONGEST: Final = 10.0
"""Seconds after which it ends by itself. No test that passes comes near them."""

STEPS: Final = 1000
"""Calls that another thread makes before it ends the work: more than it could make in one turn of the interpreter."""

HEAD_START: Final = 0.05
"""Seconds that it takes for them at least, so that they do not all come before the call that waits."""


def plan(dims: Mapping[str, int], dtype: str, limits: Limits) -> LaunchPlan:
    return LaunchPlan(SPEC.entry(dtype), (1, 1, 1), (1, 1, 1))


def reference(*, flag: Array, seen: Array) -> None:
    end = time.monotonic() + LONGEST
    while not flag[0] and time.monotonic() < end:
        time.sleep(0.001)
    seen[0] = flag[0]


def make_inputs(rng: np.random.Generator, dtype: str, **case: Any) -> Mapping[str, Any]:
    raise NotImplementedError("it is launched by hand")


OP: Final = Op(SPEC, reference, make_inputs, (), plan=plan, source=Path(__file__).with_suffix(".cu"))


class Held:
    """Work that is held up, on one stream of a backend.

    Parameters
    ----------
    gpu : GpuBackend
        One whose registry has `OP`.
    stream : StreamLike

    Attributes
    ----------
    was_let_go : bool
        Whether somebody has ended the work.
    """

    def __init__(self, gpu: GpuBackend, stream: StreamLike = 0) -> None:
        self._words = gpu.alloc_host_pinned(8)
        flag = gpu.host_ptr_to_device(self._words)
        self._words.array[:] = 0
        self._end = time.monotonic() + LONGEST
        self.was_let_go = False
        OP.launch(gpu, "f32", [flag, flag + 4], stream)

    def let_go(self) -> None:
        """End the work."""
        self.was_let_go = True
        self._words.array[:4] = 1

    def free(self, gpu: GpuBackend) -> None:
        """Free what it holds; the work must be done."""
        gpu.free_host_pinned(self._words)

    @property
    def ended_by_itself(self) -> bool:
        """Whether it has taken so long that it has ended although nobody let it go."""
        return time.monotonic() > self._end

    @contextmanager
    def until_another_thread_has(self, step: Callable[[], Any]) -> Iterator[None]:
        """Let another thread make `STEPS` steps inside the context, then end the work; raise what it raised."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                end = time.monotonic() + HEAD_START
                for _ in range(STEPS):
                    step()
                while time.monotonic() < end:
                    step()
            except BaseException as error:
                errors.append(error)
            self.let_go()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if errors:
            raise errors[0]
