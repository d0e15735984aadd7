# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is asked of CUDA while a model works, noted at CuPy's and cuda-bindings' functions: copies, waits of the host.

A trace of the backend says what the backend meant to do; this says which functions were called, and with what. Small
copies are launches of a kernel, and are noted where those are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

from gpu_runtime.backend import GpuBackend


@dataclass(frozen=True, slots=True)
class Seen:
    """One call.

    Attributes
    ----------
    name : str
        Of the function; ``small_copy`` for that kernel.
    kind : {"h2d", "d2h", "d2d", "h2h", ""}
        Of an asynchronous copy, where it leads; of anything else, nothing.
    nbytes : int
        Of an asynchronous copy.
    pinned : bool
        Whether the host's end of it is page-locked memory of the backend: from and to other memory the driver copies
        through a buffer of its own, and may wait.
    """

    name: str
    kind: str = ""
    nbytes: int = 0
    pinned: bool = False


def is_watched(name: str) -> bool:
    """Return whether a function copies memory, or waits for the device."""
    return name.startswith(("memcpy", "cuMemcpy")) or name.endswith("Synchronize")


@contextmanager
def watched(
    gpu: GpuBackend, modules: Sequence[ModuleType | Any], is_pinned: Callable[[int], bool]
) -> Iterator[list[Seen]]:
    """Give a list to which every watched function of ``modules`` that is called inside the context adds what it saw.

    Device memory is what the backend holds when the context begins.
    """
    from gpu_runtime.cuda.small_copies import SmallCopies

    blocks = sorted((int(entry.ptr), entry.nbytes) for entry in gpu.alloc_report())
    seen: list[Seen] = []

    def on_device(address: int) -> bool:
        index = bisect_right(blocks, (address, 1 << 63)) - 1
        return index >= 0 and address < sum(blocks[index])

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in ("memcpyAsync", "small_copy"):
            seen.append(Seen(name))
            return
        dst, src, nbytes = map(int, arguments[:3])
        ends = ["d" if on_device(address) else "h" for address in (src, dst)]
        host = [address for address, end in zip((src, dst), ends, strict=True) if end == "h"]
        seen.append(Seen(name, "2".join(ends), nbytes, all(map(is_pinned, host))))

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            note(name, arguments)
            return function(*arguments)

        call.__name__ = name
        return call

    enqueue = SmallCopies.enqueue

    def small(copies: SmallCopies, *arguments: int, early: bool) -> None:
        note("small_copy", arguments)
        enqueue(copies, *arguments, early=early)

    patches: list[Any] = [patch.object(SmallCopies, "enqueue", small)]
    patches += [
        patch.object(module, name, noting(name, getattr(module, name)))
        for module in modules
        for name in dir(module)
        if is_watched(name) and callable(getattr(module, name))
    ]
    assert len(patches) > 1
    try:
        for one in patches:
            one.start()
        yield seen
    finally:
        for one in reversed(patches):
            one.stop()
