# SPDX-License-Identifier: MIT OR Apache-2.0
"""Graphs: what a capture recorded, ready to be launched, or to become part of another capture."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from typing import Any, Final

import cuda.bindings
from cuda.bindings import driver as bindings
from cupy.cuda import runtime

from gpu_runtime.cuda.driver import Context, attempt_binding

_HANDLES: Final = itertools.count(0x100)
_SET_DEPENDENCIES: Final = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_EDGE_DATA: Final = int(cuda.bindings.__version__.split(".")[0]) >= 13
"""From version 13 on the bindings' calls on captures take and return what kind each dependency is."""


class Graph:
    """A captured graph with its executable form, and what its nodes need to live (buffers, streams, other graphs).

    CUDA's objects are destroyed with the last reference, which must not go before the last launch is done.

    Attributes
    ----------
    launched_on : set of int
        The backend's own streams that it was launched on: nothing else says when those launches are done.
    """

    __slots__ = ("_context", "executable", "handle", "kept", "launched_on", "lock", "template")

    def __init__(self, context: Context, template: int, executable: int, kept: list[Any]) -> None:
        self.handle = next(_HANDLES)
        self.template = template
        self.executable = executable
        self.kept = kept
        self.launched_on: set[int] = set()
        self.lock = threading.Lock()  # CUDA's graphs may be used by one thread at a time
        self._context = context

    def __del__(self) -> None:
        with suppress(Exception):  # after a fork, or an error that ended the context, there is nothing to destroy
            self._destroy()

    def _destroy(self) -> None:
        self._context.call_relaxed(runtime.graphExecDestroy, self.executable)
        self._context.call_relaxed(runtime.graphDestroy, self.template)


def instantiate(context: Context, template: int, kept: list[Any]) -> Graph:
    """Return the launchable form of a captured graph, which takes over ``template``."""
    try:
        executable = int(context.call_relaxed(runtime.graphInstantiate, template))
    except BaseException:
        context.call_relaxed(runtime.graphDestroy, template)
        raise
    return Graph(context, template, executable, kept)


def add_child(context: Context, stream: int, graph: Graph) -> None:
    """Append ``graph`` to the capture of a stream as one node, after everything that the stream has captured."""
    with context.current():
        _, _, parent, before, *rest = attempt_binding(bindings.cuStreamGetCaptureInfo, stream)
        before = list(before or ())[: rest[-1]]
        node = attempt_binding(bindings.cuGraphAddChildGraphNode, parent, before, len(before), graph.template)
        edges = (None,) if _EDGE_DATA else ()
        attempt_binding(bindings.cuStreamUpdateCaptureDependencies, stream, [node], *edges, 1, _SET_DEPENDENCIES)
