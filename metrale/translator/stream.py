# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts as they come, translations as they are there: in order, with a bounded number under way."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from metrale.engine import Generated, RequestHandle
from metrale.translator.jobs import Job
from metrale.translator.translation import Translation

_SECONDS_TO_END: Final = 0.1
"""So long may the reading thread take to end; it takes longer only when the source keeps it waiting."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A text that the engine has."""

    job: Job
    handle: RequestHandle


Entry = Submitted | Translation
"""A text under way; one that has nothing to translate is a result already."""


@dataclass(frozen=True, slots=True)
class _End:
    """No more entries come, because of this error or without any."""

    error: BaseException | None = None


class TranslationStream(Iterator[Translation]):
    """What `Translator.stream` returns: an iterator of translations, in the order of the texts.

    The texts are read on a thread of its own, as many ahead as the window allows. So a source that waits, a terminal or
    a queue, holds back no result, and a consumer that waits holds back the source. Any thread may call `cancel` and
    `close`; one at a time iterates. A stream that is dropped is cancelled.

    Parameters
    ----------
    texts : iterable of str
    submit : callable
        Takes a text and its index, and returns its `Entry`.
    finish : callable
        Makes a translation of a job and what the engine generated for it.
    window : int
        Most texts that are read but not given out.
    """

    def __init__(
        self,
        texts: Iterable[str],
        submit: Callable[[int, str], Entry],
        finish: Callable[[Job, Generated], Translation],
        window: int,
    ) -> None:
        self._finish = finish
        self._intake = _Intake(texts, submit, window)
        self._ended = False
        # the thread must not keep the stream alive: it has the intake alone
        self._thread = threading.Thread(target=self._intake.run, name="metrale texts", daemon=True)
        weakref.finalize(self, self._intake.cancel).atexit = False

    def __enter__(self) -> TranslationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> Translation:
        """Return the next text's translation, which is waited for.

        Raises
        ------
        InvalidInput
            When the next text cannot be translated by what it is; those before have been given out.
        BaseException
            What reading the texts raised, in its place in the order as well.
        """
        if self._ended:
            raise StopIteration
        if self._thread.ident is None:
            self._thread.start()
        try:
            entry = self._intake.entries.get()
            if isinstance(entry, _End):
                self._ended = True
                raise StopIteration if entry.error is None else entry.error
            result = entry if isinstance(entry, Translation) else self._finish(entry.job, entry.handle.result())
        except StopIteration:
            raise
        except BaseException:  # an interrupt above all: nobody would wait for the rest
            self.close()
            raise
        self._intake.given_out()
        return result

    def cancel(self) -> None:
        """Read no more texts, and cancel those under way; return at once.

        Iterating goes on: it gives what is finished, then what is not, as ``cancelled``, and ends.
        """
        self._intake.cancel()

    def close(self) -> None:
        """Cancel, and return when nothing is under way any more. Nothing more is given out. May be called again.

        The source is left alone then, unless its next text has been waited for all the while; that one is lost.
        """
        self._ended = True
        self._intake.cancel()
        self._intake.wait()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_SECONDS_TO_END)


class _Intake:
    """The reading side.

    Its lock may be taken again by the thread that has it, and its queues are of the kind whose ``put`` may interrupt
    itself: dropping a stream cancels it from wherever the garbage collector runs.

    Attributes
    ----------
    entries : SimpleQueue
        What the iterator takes: entries in order, then one `_End`.
    """

    def __init__(self, texts: Iterable[str], submit: Callable[[int, str], Entry], window: int) -> None:
        self.entries: SimpleQueue[Entry | _End] = SimpleQueue()
        self._texts = texts
        self._submit = submit
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(window):
            self._places.put(None)
        self._lock = threading.RLock()
        self._cancelled = False
        self._under_way: deque[Entry] = deque()

    def run(self) -> None:
        """Read and submit until the texts end; on a thread of its own."""
        error: BaseException | None = None
        try:
            for index, text in enumerate(self._read()):
                self._put(self._submit(index, text))
        except BaseException as raised:
            error = raised
        self.entries.put(_End(error))

    def _read(self) -> Iterator[str]:
        texts = iter(self._texts)
        while True:
            self._places.get()
            if self._cancelled:
                return
            try:
                text = next(texts)
            except StopIteration:
                return
            if self._cancelled:
                return
            yield text

    def _put(self, entry: Entry) -> None:
        with self._lock:
            self._under_way.append(entry)
            if self._cancelled:
                _cancel(entry)
        self.entries.put(entry)

    def given_out(self) -> None:
        """Make room for one more text."""
        with self._lock:
            self._under_way.popleft()
        self._places.put(None)

    def cancel(self) -> None:
        """Cancel what is under way, and let both sides know."""
        with self._lock:
            self._cancelled = True
            for entry in tuple(self._under_way):
                _cancel(entry)
        self._places.put(None)
        self.entries.put(_End())

    def wait(self) -> None:
        """Return when all that is under way has ended."""
        with self._lock:
            entries = tuple(self._under_way)
        for entry in entries:
            if isinstance(entry, Submitted):
                entry.handle.result()


def _cancel(entry: Entry) -> None:
    if isinstance(entry, Submitted):
        entry.handle.cancel()
