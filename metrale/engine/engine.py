# SPDX-License-Identifier: MIT OR Apache-2.0
"""Engine: any number of callers, one model, every lane busy."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self

from metrale.checks import flag, integer, real
from metrale.engine.checked import checked_request
from metrale.engine.errors import EngineClosed, EngineError, QueueFull
from metrale.engine.handle import RequestHandle
from metrale.engine.policy import Policy
from metrale.engine.prometheus import prometheus_text
from metrale.engine.request import Request
from metrale.engine.stats import EngineStats, Recorder
from metrale.engine.waiting import AGING_SECONDS, WaitingQueue
from metrale.engine.worker import Worker
from metrale.errors import InvalidInput, NotSupported
from metrale.model import Model

_SECONDS: Final = f"seconds from 0 to {threading.TIMEOUT_MAX:.0f}, or None"


class Engine:
    """Serves requests of any length, submitted at any time from any thread or event loop, in one batch that never ends.

    A lane whose request ends leaves at once, and a request that waits takes its place while the others go on. What a
    request yields does not depend on the others. When the KV cache or the lanes run out, requests of a lower priority
    give way to those of a higher one: their keys and values wait in host memory.

    Several engines, and other callers, may share a model. An engine's thread ends with `close`, with the last reference
    to the engine, or with the interpreter.

    Parameters
    ----------
    model : Model
        Stays the caller's, and must outlive the engine. It needs a device token feed.
    max_queue : int
        Requests that may wait; `submit` holds its caller back while so many do.
    max_lanes : int or None
        Lanes, which all requests that run share: a beam search takes one for each beam, any other request one. None:
        as many as the model has slots.
    max_prefill_tokens : int
        Source tokens that one step prefills (a longer source has a step to itself), which keeps steps short.
    prefill_interval : int
        While requests run, new ones join every so many steps, together: a prefill costs about as much for several as
        for one.
    lag : int or None
        Steps that the device may be ahead of what the engine has read; with 0 it waits for the engine after each. None:
        1 where the device works while the host does, else 0.
    aging : float
        Seconds of waiting that count as much as one priority, so that nobody waits for ever.
    clock : callable
        Seconds; for deadlines and statistics.

    Raises
    ------
    NotSupported
        When the model has no device token feed.
    InvalidInput
        When a number is out of range.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_queue: int = 1024,
        max_lanes: int | None = None,
        max_prefill_tokens: int = 2048,
        prefill_interval: int = 4,
        lag: int | None = None,
        aging: float = AGING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(model, Model):
            raise InvalidInput("model", "a Model", model)
        if not model.supports_device_token_feed():
            raise NotSupported(type(model).__name__, "Engine", "it has no device token feed")
        self._model = model
        self._capacity = model.capacity()
        self._vocab = model.vocab_size()
        slots = self._capacity.max_sequences
        if not callable(clock):
            raise InvalidInput("clock", "a callable", clock)
        policy = Policy(
            max_lanes=slots if max_lanes is None else integer("max_lanes", max_lanes, 1, slots),
            max_prefill_tokens=integer("max_prefill_tokens", max_prefill_tokens, 1),
            prefill_interval=integer("prefill_interval", prefill_interval, 1),
            lag=int(model.runs_ahead()) if lag is None else integer("lag", lag, 0, 64),
        )
        self._lanes = policy.max_lanes
        self._clock = clock
        self._pid = os.getpid()
        self._recorder = Recorder(clock)
        calls: SimpleQueue[RequestHandle | None] = SimpleQueue()
        bound = integer("max_queue", max_queue, 1)
        self._queue = WaitingQueue(bound, aging=aging, on_arrival=partial(_arrived, self._recorder, calls))
        self._worker = Worker(model, self._queue, calls, self._recorder, policy, clock)
        self._thread = threading.Thread(target=self._worker.run, name="metrale engine", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._worker, self._thread, weakref.ref(self))
        try:
            self._thread.start()
        except BaseException:  # no thread can be had: what it would give back at its end is given back here
            self._finalizer.detach()
            self._worker.stop(drain=False)
            self._worker.run()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=kind is None)

    def submit(self, request: Request, *, block: bool = True, timeout: float | None = None) -> RequestHandle:
        """Let a request in and return its handle.

        While the queue is full the caller waits, if ``block``, at most ``timeout`` seconds; not in a callback on the
        engine's thread, which nobody would let go on.

        Raises
        ------
        InvalidInput
            When the model cannot serve the request: too long, too wide, an id outside the vocabulary, or an adapter
            that is not resident.
        QueueFull
            When there was no room in the queue.
        EngineClosed
            When the engine is closed, or was closed meanwhile.
        """
        block = flag("block", block)
        if timeout is not None:
            timeout = real("timeout", timeout, 0.0, math.inf, "a finite number of seconds, 0 at least, or None")
        handle = self._handle(request)
        if not handle.done:
            may_wait = block and threading.current_thread() is not self._thread
            try:
                self._queue.put(handle, block=may_wait, timeout=timeout)
            except QueueFull:
                self._recorder.rejected()
                raise
        return handle

    async def asubmit(self, request: Request, *, block: bool = True) -> RequestHandle:
        """Do as `submit` in an event loop, which goes on while the queue is full.

        A task that is cancelled while it waits takes its request back. Later, nothing cancels a request by itself, not
        the end of the task either: a server calls `RequestHandle.cancel` when its client is gone.
        """
        if not block:
            return self.submit(request, block=False)
        handle = self._handle(request)
        if not handle.done:
            await self._queue.aput(handle)
        return handle

    def _handle(self, request: Request) -> RequestHandle:
        if os.getpid() != self._pid:
            raise EngineError("the engine belongs to another process: a fork has none of its threads")
        if self._queue.closed:
            raise EngineClosed("the engine is closed")
        request = checked_request(request, self._capacity, self._vocab, self._lanes)
        handle = RequestHandle(
            request,
            clock=self._clock,
            engine_thread=self._thread,
            on_cancel=self._worker.cancel,
            adapter_id=self._adapter_id(request.adapter_slot),
        )
        if request.most_tokens == request.counted_from:  # the language token, which is given
            self._recorder.submitted()
            self._recorder.finished("length", 0.0)
            handle.finish("length")
        return handle

    def _adapter_id(self, slot: int) -> int:
        """Return the model's number for the adapter in a slot. `InvalidInput` when none is there."""
        if slot == -1:
            return 0
        with self._model.exclusive():
            resolved = self._model.acquire_adapter_slot(slot)
            try:
                if resolved != slot:
                    raise InvalidInput("adapter_slot", "-1, or the slot of a resident adapter of the model", slot)
                return self._model.adapter_id_for(slot)
            finally:
                self._model.release_adapter_slot(resolved)

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests: it was closed, or a fault of its own ended it."""
        return self._queue.closed

    def stats(self) -> EngineStats:
        """Return what the engine has done and is doing."""
        return self._recorder.snapshot(self._worker.gauges())

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """Return `stats` in Prometheus' text format, with ``labels`` on every sample."""
        return prometheus_text(self.stats(), labels)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and end. Calling it again waits again.

        Parameters
        ----------
        drain : bool
            Whether the requests that are in run to their end; otherwise they end with "cancelled".
        timeout : float or None
            Seconds to wait, after which the requests still in are cancelled all the same.
        """
        if timeout is not None:
            timeout = real("timeout", timeout, 0.0, threading.TIMEOUT_MAX, _SECONDS)
        if os.getpid() != self._pid:  # the thread is the parent's, and locks may be as it held them at the fork
            return
        self._queue.close()
        self._worker.stop(drain=drain)
        if threading.current_thread() is self._thread:  # in a callback; the thread ends after it
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._worker.stop(drain=False)
            self._thread.join()
        self._finalizer.detach()

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Do as `close` in an event loop, which goes on meanwhile."""
        await asyncio.to_thread(self.close, drain=drain, timeout=timeout)


def _arrived(recorder: Recorder, calls: SimpleQueue[RequestHandle | None]) -> None:
    recorder.submitted()
    calls.put(None)


def _stop(worker: Worker, thread: threading.Thread, engine: weakref.ref[Engine]) -> None:
    """End an engine that nobody closed: because nobody has it any more, or, if it is still there, at the exit.

    Only the exit waits for the thread. Garbage is collected anywhere, also in a thread that holds a lock which the
    engine's thread needs to come to its end.
    """
    worker.stop(drain=False)
    if engine() is not None:
        thread.join()
