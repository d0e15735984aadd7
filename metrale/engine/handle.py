# SPDX-License-Identifier: MIT OR Apache-2.0
"""One submitted request: its tokens as they come and its result, for any number of threads and tasks.

The engine's thread produces: `push`, `finish` and the times. Everybody else consumes. The one lock is held for a few
instructions only, never while anything waits or foreign code runs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Final

from metrale.checks import real
from metrale.engine.errors import EngineError, text_of
from metrale.engine.request import FinishReason, Generated, Request
from metrale.engine.wakeup import LoopWakeup, ThreadWakeup
from metrale.errors import SequenceError
from metrale.model import Hypothesis

_LOG: Final = logging.getLogger(__name__)

Wakeup = ThreadWakeup | LoopWakeup


class RequestHandle:
    """What `Engine.submit` returns.

    Iterating yields the ids as they come, without the language token and EOS, and ends when the request does, however
    it does: `result` says why. Each iterator begins at the first token. A handle can be iterated by ``for`` in any
    thread, except from a callback on the engine's thread, and by ``async for`` in any event loop; ``await handle`` is
    ``await handle.aresult()``. Dropping a handle does not cancel its request.

    Parameters
    ----------
    request : Request
    clock : callable
        Seconds; the engine's.
    engine_thread : threading.Thread or None
        The thread that produces, on which nobody may wait for what it produces.
    on_cancel : callable or None
        Called with the handle when its request is to be cancelled, from any thread, also from a signal handler: it must
        not block. Let go when the request ends.

    Attributes
    ----------
    request : Request
    submitted_at : float
        Time of the clock when the handle was made.
    deadline : float or None
        When the request is to end with "timeout".
    admitted_at : float or None
        When the request first got a lane; the engine writes it.
    cancel_requested : bool
        Whether somebody asked for the request's end.
    first_token_at, finished_at : float or None
    adapter_id : int
        The model's number for the adapter that was in the request's slot when it came.
    place : tuple or None
        The queue's own: where the handle stands in it, and stands again when it comes back.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_clock",
        "_end_waiters",
        "_engine_thread",
        "_eos_id",
        "_error",
        "_found",
        "_lock",
        "_logprobs",
        "_on_cancel",
        "_reason",
        "_token_waiters",
        "_tokens",
        "adapter_id",
        "admitted_at",
        "cancel_requested",
        "deadline",
        "finished_at",
        "first_token_at",
        "place",
        "request",
        "submitted_at",
    )

    def __init__(
        self,
        request: Request,
        *,
        clock: Callable[[], float] = time.monotonic,
        engine_thread: threading.Thread | None = None,
        on_cancel: Callable[[RequestHandle], None] | None = None,
        adapter_id: int = 0,
    ) -> None:
        self.request = request
        self.adapter_id = adapter_id
        self.submitted_at = clock()
        self.deadline = None if request.timeout is None else self.submitted_at + request.timeout
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.place: tuple[float, int] | None = None
        self._clock = clock
        self._engine_thread = engine_thread
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._tokens = array("i")
        self._logprobs = array("d")
        self._found: list[Hypothesis] | None = None
        self._reason: FinishReason | None = None
        self._eos_id: int | None = None
        self._error: str | None = None
        self.cancel_requested = False
        self._token_waiters: list[Wakeup] = []
        self._end_waiters: list[Wakeup] = []
        self._callbacks: list[Callable[[RequestHandle], object]] = []

    def __repr__(self) -> str:
        return f"<RequestHandle {self._reason or 'not done'}, {len(self._tokens)} tokens>"

    # The consumer's side.

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return self._reason

    def cancel(self) -> bool:
        """Ask for the request's end, which comes soon, with "cancelled" and the tokens it has; return at once.

        Works from any thread, from callbacks and event loops, also from a signal handler, and any number of times.

        Returns
        -------
        bool
            False when the request had ended already. After True it may still end in another way that was under way.
        """
        if self._reason is not None:
            return False
        if not self.cancel_requested:
            self.cancel_requested = True  # before the call: whoever is called looks at it
            on_cancel = self._on_cancel
            if on_cancel is not None:
                on_cancel(self)
        return True

    def result(self, timeout: float | None = None) -> Generated:
        """Wait for the request's end, at most ``timeout`` seconds, and return a new copy of what it came to.

        What went wrong with it is in the result: see `Generated.raise_for_error`.

        Raises
        ------
        TimeoutError
            When it has not ended by then. It goes on.
        EngineError
            When it is called on the engine's own thread, in a callback, before the request has ended.
        """
        if timeout is not None:
            timeout = real("timeout", timeout, -math.inf, math.inf, "a finite number of seconds, or None")
        if self._reason is None:
            self._wait(None, timeout)
            if self._reason is None:
                raise TimeoutError(f"the request has not ended after {timeout} seconds")
        return self._generated()

    async def aresult(self) -> Generated:
        """Do as `result` in an event loop. Cancelling the task that waits does not cancel the request."""
        if self._reason is None:
            await self._wait_in_loop(None)
        return self._generated()

    def __await__(self) -> Generator[Any, None, Generated]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[int]:
        return _Tokens(self)

    def __aiter__(self) -> AsyncIterator[int]:
        return _AsyncTokens(self)

    def add_done_callback(self, callback: Callable[[RequestHandle], object]) -> None:
        """Call ``callback(handle)`` once when the request ends, on the engine's thread; here and now if it has ended.

        What it raises is logged and goes no further: it is not the business of whoever ends the request.
        """
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        self._call(callback)

    # The producer's side: the engine's thread alone.

    @property
    def length(self) -> int:
        """Tokens so far, the language token and EOS included."""
        return self.request.counted_from + len(self._tokens) + (self._eos_id is not None)

    def push(self, token: int, logprob: float = math.nan) -> FinishReason | None:
        """Take the next chosen token and wake who waits for it; return why the request has to end now, if it has to.

        The caller then calls `finish` with that reason.

        Parameters
        ----------
        token : int
            EOS counts, but is no token for the consumer.
        logprob : float
            Its log-probability, if the request asks for it.

        Raises
        ------
        SequenceError
            When the request has ended.
        """
        request = self.request
        is_eos = token in request.end_ids
        if self.first_token_at is None:
            self.first_token_at = self._clock()
        waiters: list[Wakeup] = []
        with self._lock:
            if self._reason is not None:
                raise SequenceError(f"push: the request has ended ({self._reason})")
            if request.logprobs:
                self._logprobs.append(logprob)
            if is_eos:
                self._eos_id = token
            else:
                self._tokens.append(token)
                if self._token_waiters:
                    waiters, self._token_waiters = self._token_waiters, waiters
        for waiter in waiters:
            waiter.wake()
        if is_eos:
            return "eos"
        return "length" if self.length >= request.most_tokens else None

    def add(self, token: int) -> None:
        """Do as `push` with a token that is neither the first nor the last of a request that has not ended.

        It takes no lock unless somebody waits: there are many tokens.
        """
        self._tokens.append(token)
        if self._token_waiters:
            with self._lock:
                waiters, self._token_waiters = self._token_waiters, []
            for waiter in waiters:
                waiter.wake()

    def push_hypotheses(self, found: list[Hypothesis]) -> FinishReason:
        """Take what the request's search has found, the best first; return why the request has to end.

        The tokens of the best one are the request's.

        Raises
        ------
        SequenceError
            When the request has ended.
        """
        request, best = self.request, found[0]
        given = 1 + len(request.prefix_tokens)
        is_eos = best.ids[-1] in request.end_ids and len(best.ids) > given
        self.first_token_at = self._clock()
        with self._lock:
            if self._reason is not None:
                raise SequenceError(f"push_hypotheses: the request has ended ({self._reason})")
            self._found = found
            self._eos_id = best.ids[-1] if is_eos else None
            self._tokens.extend(best.ids[given : len(best.ids) - is_eos])
            self._logprobs.extend(best.logprobs[given:])
            waiters, self._token_waiters = self._token_waiters, []
        for waiter in waiters:
            waiter.wake()
        return "eos" if is_eos else "length"

    @property
    def tokens(self) -> list[int]:
        """The tokens so far, without the language token and EOS."""
        with self._lock:
            return self._tokens.tolist()

    def call_on_token(self, token: int) -> str | None:
        """Call the request's ``on_token``, if it has one, unless the token is EOS; return what it raised, as a text.

        Everything that it raises is caught, ``SystemExit`` as well: other requests have nothing to do with it.
        """
        callback = self.request.on_token
        if callback is None or token in self.request.end_ids:
            return None
        try:
            callback(token)
        except BaseException as error:
            return f"on_token raised {text_of(error)}"
        return None

    def finish(self, reason: FinishReason, error: str | None = None) -> bool:
        """End the request, wake all who wait, call the callbacks; return False, and do nothing, if it has ended."""
        with self._lock:
            if self._reason is not None:
                return False
            self.finished_at = self._clock()
            self._error = error
            self._reason = reason  # last: who sees it without the lock sees all the rest
            for_token, for_end, callbacks = self._token_waiters, self._end_waiters, self._callbacks
            self._token_waiters, self._end_waiters, self._callbacks = [], [], []
            self._on_cancel = None
        for waiter in (*for_token, *for_end):
            waiter.wake()
        for callback in callbacks:
            self._call(callback)
        return True

    # What both sides are made of.

    def _generated(self) -> Generated:
        assert self._reason is not None
        asked = self.request.logprobs
        logprob = sum(self._logprobs) if asked else math.nan
        return Generated(
            ids=self._tokens.tolist(),
            finish_reason=self._reason,
            logprob=logprob,
            logprobs=self._logprobs.tolist() if asked else None,
            length=self.length,
            score=self._found[0].score if self._found else logprob / max(self.length, 1),
            hypotheses=None if self._found is None else list(self._found),
            error=self._error,
            eos_id=self._eos_id if self._reason == "eos" else None,
        )

    def _call(self, callback: Callable[[RequestHandle], object]) -> None:
        try:
            callback(self)
        except BaseException:
            _LOG.exception("a done callback of %r raised", self)

    def _from(self, position: int) -> array[int]:
        """Return the tokens there are, from a position."""
        with self._lock:
            return self._tokens[position:]

    def _register(self, waiter: Wakeup, position: int | None) -> bool:
        """Have ``waiter`` woken at the end, or earlier by a token at ``position``; False when that is there already."""
        with self._lock:
            if self._reason is not None:
                return False
            if position is None:
                self._end_waiters.append(waiter)
                return True
            self._token_waiters.append(waiter)  # first: `add` looks for it after the token, and one sees the other
            if position < len(self._tokens):
                self._token_waiters.remove(waiter)
                return False
            return True

    def _unregister(self, waiter: Wakeup) -> None:
        """Forget a waiter that gave up, if it is still there: waits that end early must not add up."""
        with self._lock:
            for waiters in (self._token_waiters, self._end_waiters):
                if waiter in waiters:
                    waiters.remove(waiter)

    def _wait(self, position: int | None, timeout: float | None = None) -> None:
        waiter = ThreadWakeup()
        if self._register(waiter, position):
            try:
                if threading.current_thread() is self._engine_thread:
                    raise EngineError(
                        "a callback waits for a request, which goes on only when the callback has returned"
                    )
                waiter.wait(timeout)
            finally:
                self._unregister(waiter)

    async def _wait_in_loop(self, position: int | None) -> None:
        waiter = LoopWakeup()
        if self._register(waiter, position):
            try:
                await waiter.wait()
            except GeneratorExit:  # comes from the garbage collector, perhaps while this very thread holds the lock
                raise
            except BaseException:
                self._unregister(waiter)
                raise


class _Reader:
    """A position in a handle's tokens."""

    __slots__ = ("_handle", "_next", "_position", "_ready")

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._position = 0
        self._ready = array("i")
        self._next = 0

    def _take(self) -> int | None:
        """Return the next token if there is one."""
        if self._next == len(self._ready):
            self._ready, self._next = self._handle._from(self._position), 0
            if not self._ready:
                return None
        token = self._ready[self._next]
        self._next += 1
        self._position += 1
        return token


class _Tokens(_Reader):
    """The iterator of ``for``."""

    __slots__ = ()

    def __iter__(self) -> _Tokens:
        return self

    def __next__(self) -> int:
        while (token := self._take()) is None:
            if self._handle.done and self._position == len(self._handle._tokens):
                raise StopIteration
            self._handle._wait(self._position)
        return token


class _AsyncTokens(_Reader):
    """The iterator of ``async for``. A task that is cancelled while it waits here has taken no token."""

    __slots__ = ()

    def __aiter__(self) -> _AsyncTokens:
        return self

    async def __anext__(self) -> int:
        while (token := self._take()) is None:
            if self._handle.done and self._position == len(self._handle._tokens):
                raise StopAsyncIteration
            await self._handle._wait_in_loop(self._position)
        return token
