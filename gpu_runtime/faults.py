# SPDX-License-Identifier: MIT OR Apache-2.0
"""Failures that a test asks for: a backend consults its ``faults`` before it allocates or enqueues anything.

Faults compose: a backend takes any number of them and asks each in turn, so what an earlier one refuses, later ones
neither see nor count. They are deterministic, count from 0, and may be shared by threads. A call that they refuse has
done nothing, and the backend works on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from gpu_runtime import checks
from gpu_runtime.errors import DeviceError, OutOfMemory

CALLS: Final = ("launch", "gemm", "copy_h2d", "copy_d2h", "copy_d2d", "memset", "record_event", "launch_graph")
"""The calls that `Fault.call` hears of. A copy or memset that takes no stream is heard of once, like its async form."""


class Fault:
    """A failure that never happens; the kinds below override one hook or both."""

    def allocate(self, nbytes: int, tag: str, live: int) -> None:
        """Hear of an allocation that is about to be made; the backend calls it under its allocation lock.

        Parameters
        ----------
        nbytes : int
            Bytes asked for.
        tag : str
            What the caller says they are for.
        live : int
            Bytes that are live already.

        Raises
        ------
        OutOfMemory
            To refuse it. The backend raises its own OutOfMemory instead, with this one's message and limit, and with
            the largest holders.
        """

    def call(self, name: str, what: str) -> None:
        """Hear of a call that is about to enqueue something, after its arguments were checked. May raise anything.

        Parameters
        ----------
        name : str
            One of `CALLS`.
        what : str
            A launch's entry point; the tag of the device block that a copy or memset writes (for ``copy_d2h``, that
            it reads); else empty.
        """


class Budget(Fault):
    """A limit on live bytes below the device's own, which may be changed while the backend is in use.

    Parameters
    ----------
    limit : int
        Most bytes that may be live. An allocation past it raises OutOfMemory, with this as its ``limit``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = checks.integer("Budget: limit", limit, low=0)

    def allocate(self, nbytes: int, tag: str, live: int) -> None:
        limit = self.limit
        if live + nbytes > limit:
            message = f"the budget is {limit:,} bytes, of which {live:,} are used"
            raise OutOfMemory(message, requested=nbytes, live=live, limit=limit)


class _Counted(Fault):
    """Fails a run of the calls that match, counted from when it was made or last armed.

    Attributes
    ----------
    seen : int
        Matching calls so far, failed ones included. Arming does not reset it.
    """

    def __init__(self, nth: int | None, times: int | None) -> None:
        self._lock = threading.Lock()
        self.seen = 0
        self.arm(nth, times)

    def arm(self, nth: int | None = 0, times: int | None = 1) -> None:
        """Fail ``times`` matching calls (None: all of them) from number ``nth`` on, counted from now; None: fail none.

        Raises
        ------
        ValueError, TypeError
            When ``nth`` is negative, ``times`` is below 1, or either is not an integer.
        """
        first = None if nth is None else checks.integer("arm: nth", nth, low=0)
        count = None if times is None else checks.integer("arm: times", times, low=1)
        with self._lock:
            self._first, self._times = first, count
            self._since = self.seen

    def _due(self) -> int | None:
        """Count a matching call; return its number since arming when it is to fail."""
        with self._lock:
            number = self.seen - self._since
            self.seen += 1
            if self._first is None or number < self._first:
                return None
            return number if self._times is None or number < self._first + self._times else None


class FailAllocation(_Counted):
    """Refuses allocations by their number, tag or size: OutOfMemory, although there is room.

    Parameters
    ----------
    nth : int or None
        Which of the matching allocations is the first to fail, from 0; None: none until `arm`.
    tag : str or None
        Match this tag alone.
    at_least : int
        Match allocations of at least this many bytes.
    times : int or None
        How many fail one after another; None: every one from the nth on.
    """

    def __init__(
        self, nth: int | None = 0, *, tag: str | None = None, at_least: int = 0, times: int | None = 1
    ) -> None:
        self.tag = tag
        self.at_least = checks.integer("FailAllocation: at_least", at_least, low=0)
        super().__init__(nth, times)

    def allocate(self, nbytes: int, tag: str, live: int) -> None:
        if (self.tag is not None and tag != self.tag) or nbytes < self.at_least:
            return
        number = self._due()
        if number is not None:
            message = f"allocation {number} was to fail (FailAllocation)"
            raise OutOfMemory(message, requested=nbytes, live=live, limit=live)


class FailCall(_Counted):
    """Fails calls that enqueue work, by their number among those of the same kind.

    Parameters
    ----------
    name : str or tuple of str or None
        Match these of `CALLS` (None: all). ValueError when there is no such call.
    what : str or None
        Match this ``what`` alone, for example an entry point.
    nth : int or None
        Which of the matching calls is the first to fail, from 0; None: none until `arm`.
    times : int or None
        How many fail one after another; None: every one from the nth on.
    error : callable
        Makes what is raised out of a message: an exception class will do.
    """

    def __init__(
        self,
        name: str | tuple[str, ...] | None = None,
        what: str | None = None,
        nth: int | None = 0,
        *,
        times: int | None = 1,
        error: Callable[[str], Exception] = DeviceError,
    ) -> None:
        self.names = CALLS if name is None else (name,) if isinstance(name, str) else tuple(name)
        unknown = [one for one in self.names if one not in CALLS]
        if unknown or not self.names:
            raise ValueError(f"FailCall: name: expected one or more of {', '.join(CALLS)}, got {name!r}")
        self.what = what
        self._error = error
        super().__init__(nth, times)

    def call(self, name: str, what: str) -> None:
        if name not in self.names or (self.what is not None and what != self.what):
            return
        number = self._due()
        if number is not None:
            raise self._error(f"{name}: {what + ': ' if what else ''}call {number} was to fail (FailCall)")
