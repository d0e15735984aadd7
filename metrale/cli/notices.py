# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a run says of translations that one should not rely on, without a line of it for each of a million lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from metrale.cli.console import Console
from metrale.translator import UnknownSpan

MOST_OF_A_KIND: Final = 5
"""So many lines are named; of the others, the end of the run says how many there were."""

_MOST_SPANS: Final = 3
_MOST_CHARACTERS: Final = 20


class Notices:
    """Notes of one run: the first few of each kind by line, the number of the others in the end.

    Parameters
    ----------
    console : Console
    unit : str
        What a line of the run is called.
    """

    def __init__(self, console: Console, unit: str = "line") -> None:
        self._console = console
        self._unit = unit
        self._counts: Counter[str] = Counter()
        self._said_prefix = False

    def unknown(self, place: str, spans: Sequence[UnknownSpan], *, of_prefix: bool = False) -> None:
        """Say what the model does not know of a text; of a prefix that all texts have, once.

        Parameters
        ----------
        place : str
            Which line it is.
        spans : sequence of UnknownSpan
        of_prefix : bool
            Whether those of the target are of a prefix.
        """
        own = [span for span in spans if not (of_prefix and span.where == "target")]
        if len(own) < len(spans) and not self._said_prefix:
            self._said_prefix = True
            lost = _listed([span for span in spans if span.where == "target"])
            self._console.note(f"the model does not know {lost} of --target-prefix")
        if own and self._is_to_be_named("unknown"):
            self._console.note(f"{place}: the model does not know {_listed(own)}")

    def repeats(self, place: str) -> None:
        """Say that a translation is a loop."""
        if self._is_to_be_named("repeats"):
            self._console.warn(f"{place}: the translation repeats itself over and over")

    def end(self) -> None:
        """Say how many lines were not named. Calling it again says nothing."""
        for kind, say, what in self._sums():
            if (more := self._counts.pop(kind, 0) - MOST_OF_A_KIND) > 0:
                say(f"{more} more {self._unit}{'' if more == 1 else 's'} {what}")

    def _sums(self) -> tuple[tuple[str, Callable[[str], None], str], ...]:
        return (
            ("unknown", self._console.note, "with characters that the model does not know"),
            ("repeats", self._console.warn, "whose translation repeats itself"),
        )

    def _is_to_be_named(self, kind: str) -> bool:
        self._counts[kind] += 1
        return self._counts[kind] <= MOST_OF_A_KIND


def _listed(spans: Sequence[UnknownSpan]) -> str:
    """Return what is unknown in words, not all of it if it is much."""
    texts = list(dict.fromkeys(span.text for span in spans))
    more = len(texts) - _MOST_SPANS
    named = [_quoted(text) for text in texts[:_MOST_SPANS]]
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _quoted(text: str) -> str:
    """Return a text in quotes; what would not be seen there is escaped."""
    shown = repr(text[:_MOST_CHARACTERS])
    return shown if len(text) <= _MOST_CHARACTERS else f"{shown}..."
