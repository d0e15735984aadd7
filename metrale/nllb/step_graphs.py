# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode steps as captured graphs: one call enqueues what else takes a launch for each op of each layer.

A graph holds launches with their arguments, so only what a graph's key says may differ from one step to another; all
else comes from tables on the device, which are at fixed addresses and filled before the launch, outside the graph.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Final

from gpu_runtime.backend import GpuBackend
from gpu_runtime.streams import StreamLike

log = logging.getLogger(__name__)

MOST_GRAPHS: Final = 64
"""Graphs that are kept; past this many, the one that was used longest ago is destroyed. It bounds the device memory
that the driver takes for them. A model has at most a few for each size of its steps, and is asked for some of them."""

Enqueue = Callable[[StreamLike], None]
"""Enqueues the work of a step on a stream."""


class StepGraphs:
    """The graphs of a model's steps, by what their launches depend on. The caller has the model's lock.

    A step is captured when its key comes for the second time. The first time its launches are enqueued one by one,
    which also loads kernels and chooses the algorithms of products; so what comes once costs no capture.

    Parameters
    ----------
    gpu : GpuBackend
    most : int
        Graphs that are kept.
    """

    def __init__(self, gpu: GpuBackend, most: int = MOST_GRAPHS) -> None:
        self._gpu = gpu
        self._most = most
        self._graphs: OrderedDict[Hashable, int] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._failed: set[Hashable] = set()
        with ExitStack() as undo:
            self._stream = gpu.create_stream()  # nobody's work ever comes to it: what it captures is the step alone
            undo.callback(gpu.destroy_stream, self._stream)
            undo.callback(self._destroy_all)
            self._teardown = undo.pop_all()

    def __len__(self) -> int:
        """Return how many graphs there are."""
        return len(self._graphs)

    def run(self, key: Hashable, enqueue: Enqueue, stream: StreamLike) -> None:
        """Enqueue a step on ``stream``: as a graph, or launch by launch where a graph would be in somebody's way.

        That is so while the backend `is_watched`, the first time that ``key`` comes, and for a key whose capture has
        failed, which the log says. ``enqueue`` must enqueue equal launches for equal keys, and nothing on any other
        stream than the one it is given.
        """
        if self._gpu.is_watched():
            enqueue(stream)
            return
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        elif key in self._seen and key not in self._failed:
            graph = self._capture(key, enqueue)
        self._seen.add(key)
        if graph is None:
            enqueue(stream)
        else:
            self._gpu.launch_graph(graph, stream)

    def _capture(self, key: Hashable, enqueue: Enqueue) -> int | None:
        """Return a new graph, or None when the device cannot capture the step."""
        try:
            self._gpu.begin_capture(self._stream)
            enqueue(self._stream)
            graph = self._gpu.end_capture(self._stream)
        except BaseException as error:
            self._gpu.abort_capture_if_active(self._stream)
            if not isinstance(error, Exception):
                raise
            self._failed.add(key)
            log.warning("steps of the kind %s are not replayed as a graph, which is slower: %s", key, error)
            return None
        self._graphs[key] = graph
        if len(self._graphs) > self._most:
            _, oldest = self._graphs.popitem(last=False)
            self._gpu.destroy_graph(oldest)  # launches of it that are enqueued still run
        return graph

    def _destroy_all(self) -> None:
        while self._graphs:
            self._gpu.destroy_graph(self._graphs.popitem()[1])

    def free(self) -> None:
        """Destroy the graphs. Launches that are enqueued still run. Calling it again does nothing."""
        self._teardown.close()
