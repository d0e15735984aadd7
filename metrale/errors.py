# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions of the model layer. Wrong input is refused before any device work is enqueued."""

from __future__ import annotations

from typing import Any, Final

from gpu_runtime.errors import MOST_VALUE, cut, restore, told

_MOST_PROBLEM: Final = 1000
"""Characters of one problem of a checkpoint: a name in a file may have millions."""

_MOST_PROBLEMS: Final = 100
"""Problems that a message has; a configuration of another model may disagree with thousands of tensors."""


__all__ = [
    "CheckpointError",
    "InvalidInput",
    "MetraleError",
    "NoFreeSlot",
    "NonFiniteLogits",
    "NotSupported",
    "SequenceError",
    "UnknownLanguage",
    "told",
]


class MetraleError(Exception):
    """Base of every error that the model layer raises by itself. Errors survive pickling, as process pools need."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (type(self), self.args, self.__dict__)


class InvalidInput(MetraleError, ValueError):
    """One argument that cannot be served.

    Attributes
    ----------
    argument, expected, got : str
        The argument's name, what it may be, and what came. The message joins the three.
    """

    def __init__(self, argument: str, expected: str, got: object) -> None:
        self.argument = argument
        self.expected = expected
        self.got = cut(got, MOST_VALUE) if isinstance(got, str) else told(got)
        super().__init__(f"{argument}: expected {expected}, got {self.got}")


class UnknownLanguage(InvalidInput):
    """A language code that the model's vocabulary does not have. ``near`` holds up to three close codes."""

    def __init__(self, argument: str, code: object, near: tuple[str, ...]) -> None:
        self.near = near
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        super().__init__(argument, "a language code of this model", f"{code!r}{hint}")


class CheckpointError(MetraleError, ValueError):
    """A checkpoint folder that cannot be loaded.

    Attributes
    ----------
    path : str
        The folder, or the file in it.
    problems : list of str
        Every reason found, one sentence each. The message has the first hundred.
    """

    def __init__(self, path: object, problems: str | list[str]) -> None:
        self.path = str(path)
        listed = [problems] if isinstance(problems, str) else problems
        self.problems = [cut(problem, _MOST_PROBLEM) for problem in listed]
        shown = self.problems[:_MOST_PROBLEMS]
        if len(shown) < len(self.problems):
            shown.append(f"and {len(self.problems) - len(shown)} more, which the error's problems list")
        body = shown[0] if len(shown) == 1 else "".join(f"\n  - {problem}" for problem in shown)
        super().__init__(f"{self.path}: {body}")


class NotSupported(MetraleError, NotImplementedError):
    """A method of the Model interface that this model cannot serve. ``model`` and ``method`` say which."""

    def __init__(self, model: str, method: str, why: str = "") -> None:
        self.model = model
        self.method = method
        super().__init__(f"{model} does not support {method}" + (f": {why}" if why else ""))


class SequenceError(MetraleError, RuntimeError):
    """A call that does not fit the state of a sequence or of the model (no slot left, not prefilled, closed)."""


class NoFreeSlot(SequenceError):
    """Every slot of the model is taken: there is room again when a sequence is freed."""


class NonFiniteLogits(MetraleError, ArithmeticError):
    """Logits with a NaN or an infinity: the rows named by ``rows`` have no token to choose, the others are sound.

    ``what`` says what is counted: rows, or the requests of a call.
    """

    def __init__(self, rows: tuple[int, ...], what: str = "rows") -> None:
        self.rows = rows
        super().__init__(
            f"logits: expected finite numbers, got a NaN or an infinity in {what} {', '.join(map(str, rows))}"
        )
