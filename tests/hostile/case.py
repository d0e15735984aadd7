# SPDX-License-Identifier: MIT OR Apache-2.0
"""One hostile input: how it is made, what is done with it, and what must come of that."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MOST_CPU_S: Final = 5.0
"""Processor time that a case may take: judging an input is no long work. Wall time would judge the machine's load."""

MOST_WALL_S: Final = 60
"""Seconds after which a case hangs."""

MOST_MEMORY: Final = 768 << 20
"""Address space that a case may take beyond what the process has when it begins."""

MOST_MESSAGE: Final = 20_000
"""Characters of an error that somebody can still read. Only lists of many problems come near it."""


@dataclass(frozen=True)
class Answer:
    """The case gives this value, as JSON has it."""

    value: Any

    def complaint(self, outcome: Outcome) -> str | None:
        if outcome.kind != "value":
            return f"expected the value {self.value!r}"
        return (
            None if outcome.value == self.value else f"expected the value {self.value!r}, got {outcome.value!r:.2000}"
        )


@dataclass(frozen=True)
class Refusal:
    """The case raises one documented exception, and it says what it should.

    Attributes
    ----------
    kind : str
        The name of its class, or several with bars between.
    says : str or tuple of str
        Regular expressions, each found in the message.
    argument, path : str or None
        What its attributes of these names must be: a regular expression for the whole of the former, and the end of
        the latter.
    problems : int or None
        How many a CheckpointError must list.
    """

    kind: str
    says: str | tuple[str, ...] = ()
    argument: str | None = None
    path: str | None = None
    problems: int | None = None

    def complaint(self, outcome: Outcome) -> str | None:
        if outcome.kind != "error" or outcome.error not in self.kind.split("|"):
            return f"expected {self.kind}"
        for pattern in (self.says,) if isinstance(self.says, str) else self.says:
            if not re.search(pattern, outcome.message, re.DOTALL):
                return f"expected a message with {pattern!r}"
        fields = outcome.fields
        if self.argument is not None and not re.fullmatch(self.argument, fields.get("argument", ""), re.DOTALL):
            return f"expected the argument {self.argument!r}, got {fields.get('argument')!r}"
        if self.path is not None and not fields.get("path", "").endswith(self.path):
            return f"expected a path that ends in {self.path!r}, got {fields.get('path')!r}"
        if self.problems is not None and len(fields.get("problems", ())) != self.problems:
            return f"expected {self.problems} problems, got {fields.get('problems')!r:.2000}"
        return None


def nothing(folder: Path) -> None:
    """Leave the case's folder as it is: empty."""


@dataclass(frozen=True)
class Case:
    """What a child process does.

    Attributes
    ----------
    name : str
        Its id, which no other case has.
    run : callable
        Given the case's folder, it returns what JSON can hold, or raises.
    expect : Answer or Refusal
    build : callable
        Fills the folder, before anything is measured.
    further : bool
        Its likes are enough for a run that does not ask for more.
    """

    name: str
    run: Callable[[Path], object]
    expect: Answer | Refusal
    build: Callable[[Path], object] = nothing
    further: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes
    ----------
    kind : {"value", "error", "signal", "broken"}
        "signal" is a process that ended without a word; "broken" a case whose folder could not be made.
    value : object
        What it returned.
    error, message : str
        The class of what it raised, and the text.
    fields : dict
        ``argument``, ``expected``, ``got``, ``path`` and ``problems`` of the exception, those that it has.
    bases : list of str
        The names of all its classes.
    trace : str
        The end of its traceback.
    trespasses : list of str
        What it changed, or tried to, outside of what it may.
    cpu_s : float
    exit_code : int
        As `os.waitstatus_to_exitcode` gives it.
    log : str
        The end of what it printed.
    """

    kind: str
    value: Any = None
    error: str = ""
    message: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)
    trace: str = ""
    trespasses: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    exit_code: int = 0
    log: str = ""

    def told(self) -> str:
        """Return it as text for a failed test."""
        if self.kind == "signal":
            return f"the process ended by itself with {self.exit_code} (negative: the signal)\n{self.log}"
        if self.kind == "value":
            return f"returned {self.value!r:.2000}\n{self.log}"
        return f"{self.kind}: {self.error}: {self.message:.4000}\n{self.trace}\n{self.log}"


def complaint(case: Case, outcome: Outcome) -> str | None:
    """Return what is wrong with an outcome, or None."""
    if outcome.kind in ("signal", "broken"):
        return "expected a value or an exception"
    if outcome.trespasses:
        return f"left its bounds: {outcome.trespasses}"
    if outcome.cpu_s > MOST_CPU_S:
        return f"took {outcome.cpu_s:.1f} s of processor time, at most {MOST_CPU_S} are allowed"
    if outcome.kind == "error" and len(outcome.message) > MOST_MESSAGE:
        return f"a message of {len(outcome.message)} characters"
    return case.expect.complaint(outcome)
