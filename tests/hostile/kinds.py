# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kinds of arguments: for each a value that is fine, and values that no argument of the kind may have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

HUGE: Final = 10**5000
"""An int that has no text: Python refuses to write so many digits."""


class Unshown:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True)
class Kind:
    """One argument.

    Attributes
    ----------
    valid : object
        A value that it may have.
    wrong : mapping of str to object
        Values that it may not have, by label.
    alike : mapping of str to object
        Values that must do exactly what ``valid`` does.
    """

    valid: Any
    wrong: Mapping[str, Any]
    alike: Mapping[str, Any] = field(default_factory=dict)

    def also(self, **wrong: Any) -> Kind:
        """Return the kind with more values that it may not have."""
        return dataclasses.replace(self, wrong={**self.wrong, **wrong})

    def but(self, *labels: str) -> Kind:
        """Return the kind without some of its wrong values."""
        return dataclasses.replace(self, wrong={key: value for key, value in self.wrong.items() if key not in labels})


_ANYTHING: Final[dict[str, Any]] = {"object": object(), "unshown": Unshown(), "array": np.zeros((2, 2)), "complex": 1j}


_INTEGERS: Final = (np.int8, np.uint16, np.uint64)


def _none(optional: bool) -> dict[str, Any]:
    return {} if optional else {"none": None}


def whole(valid: int, low: int, high: int | None = None, *, optional: bool = False) -> Kind:
    """Return the kind of an int from ``low`` to ``high``."""
    wrong = {
        "str": "3",
        "bytes": b"3",
        "bool": True,
        "np_bool": np.True_,
        "float": float(valid),
        "np_float": np.float64(valid),
        "nan": float("nan"),
        "list": [valid],
        "below": low - 1,
        "minus_huge": -HUGE,
        **_none(optional),
        **_ANYTHING,
    }
    if high is not None:
        wrong |= {"above": high + 1, "huge": HUGE, "int64": 1 << 64}
    fitting = (kind for kind in _INTEGERS if np.iinfo(kind).min <= valid <= np.iinfo(kind).max)
    alike = {kind.__name__: kind(valid) for kind in fitting}
    return Kind(valid, wrong, alike)


def real(valid: float, below: float | None, above: float | None, *, optional: bool = False) -> Kind:
    """Return the kind of a finite number that is neither ``below`` nor ``above``."""
    wrong = {
        "str": "1.0",
        "bool": True,
        "nan": float("nan"),
        "inf": float("inf"),
        "list": [valid],
        "huge": HUGE,
        **_none(optional),
        **_ANYTHING,
    }
    wrong |= {} if below is None else {"below": below}
    wrong |= {} if above is None else {"above": above}
    return Kind(valid, wrong, {"float64": np.float64(valid), "float32": np.float32(valid)})


def flag(valid: bool) -> Kind:
    """Return the kind of True or False."""
    wrong = {"str": "false", "zero": 0, "one": 1, "list": [], "float": 0.0, "none": None, **_ANYTHING}
    return Kind(valid, wrong, {"np_bool": np.bool_(valid)})


def ids(valid: tuple[int, ...], past: int | None, *, optional: bool = False, empty: bool = True) -> Kind:
    """Return the kind of a sequence of ids below ``past``."""
    wrong = {
        "int": 5,
        "str": "56",
        "bytes": b"56",
        "floats": [5.0],
        "np_floats": np.array([5.0]),
        "bools": [True],
        "strings": ["5"],
        "negative": [-1],
        "nones": [None],
        "nested": [[5]],
        "array_2d": np.array([[5, 6]]),
        "huge": [HUGE],
        "int64": [1 << 63],
        "object": object(),
        "unshown": Unshown(),
        "unshown_item": [Unshown()],
        "scalar_array": np.array(5),
        **_none(optional),
    }
    if past is not None:
        wrong |= {"past": [past], "last_past": [*valid, past], "int32": [(1 << 31) - 1]}
    if not empty:
        wrong["empty"] = []
    alike: dict[str, Any] = {"list": list(valid), "generator": _Again(valid), "range": _Again(valid)}
    alike |= {kind.__name__: np.array(valid, kind) for kind in (np.int8, np.int32, np.uint64)}
    alike["items"] = [np.int16(one) for one in valid]
    return Kind(valid, wrong, alike)


class _Again:
    """Stands for an iterator, which could be used up once for all cases: `made` makes a new one."""

    def __init__(self, items: tuple[int, ...]) -> None:
        self.items = items


def made(value: Any) -> Any:
    """Return a value of a kind as it is passed."""
    return iter(value.items) if isinstance(value, _Again) else value


def text(valid: str, **wrong: Any) -> Kind:
    """Return the kind of a str."""
    found = {"int": 3, "bytes": b"text", "surrogate": "a\ud800b", "none": None, **_ANYTHING, **wrong}
    return Kind(valid, found)


def choice(valid: Any, **wrong: Any) -> Kind:
    """Return the kind of one of a few values."""
    return Kind(valid, {"int": 3, "str": "other", "list": [valid], "none": None, **_ANYTHING, **wrong})


def instance(valid: Any, *, optional: bool = False) -> Kind:
    """Return the kind of an object of one class."""
    wrong = {"int": 3, "str": "text", "list": [], "dict": {}, "class": type(valid), **_ANYTHING, **_none(optional)}
    return Kind(valid, wrong)
