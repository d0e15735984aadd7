# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a mutant is, and how one is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]


class AnyMutant(Protocol):
    """What the runner needs of a mutant: `Mutant` has it, and others may be made in another way."""

    @property
    def group(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def tests(self) -> tuple[str, ...]: ...
    @property
    def path(self) -> Path: ...
    def source(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in the source of ``module``, ``old`` becomes ``new``; ``tests`` must notice.

    Attributes
    ----------
    group : str
        What is mutated: an op's reference, or a rule of the model. Counted by it.
    module : str
        Dotted name.
    old, new : str
        ``old`` stands exactly once in the source.
    tests : tuple of str
        Arguments of pytest that select the tests.
    """

    group: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    def source(self) -> str:
        """Return the mutated source.

        Raises
        ------
        ValueError
            When ``old`` does not stand exactly once in the source: the code has changed, and the mutant must follow.
        """
        text = self.path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.module}: expected {self.old!r} once, found it {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.group}: {self.old.strip()!r} -> {self.new.strip()!r}"
