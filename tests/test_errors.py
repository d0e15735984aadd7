# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every exception of the project survives pickling and copying, as process pools need."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import gpu_runtime.errors
import metrale.errors
from gpu_runtime import OutOfMemory
from gpu_runtime.errors import MOST_VALUE, cut
from metrale.errors import CheckpointError, InvalidInput, NonFiniteLogits, NotSupported, UnknownLanguage, told

ERRORS: list[BaseException] = [
    InvalidInput("argument", "an int", "x"),
    UnknownLanguage("target", "fr", ("fra_Latn",)),
    CheckpointError("folder", ["one", "two"]),
    NotSupported("Model", "method", "why"),
    NonFiniteLogits((1, 5)),
    OutOfMemory("full", requested=3, live=2, limit=4),
    *(
        kind("message")
        for module in (gpu_runtime.errors, metrale.errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and "__init__" not in vars(kind)
        if not issubclass(kind, InvalidInput)
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_copies_are_equal(error: BaseException, again: Any) -> None:
    other = again(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("x", "'x'"),
        (10**5000, "an int of 16610 bits"),
        (-(10**5000), "an int of 16610 bits"),
        (Unshown(), "a Unshown that cannot be shown"),
        ([10**5000], "a list that cannot be shown"),
        ([Unshown()], "a list that cannot be shown"),
    ],
    ids=["int", "str", "huge", "minus huge", "object", "list of huge", "list of objects"],
)
def test_any_value_can_be_told(value: object, text: str) -> None:
    assert told(value) == text
    assert InvalidInput("count", "a number", value).got == (value if isinstance(value, str) else text)


def test_long_values_are_cut_and_keep_their_ends() -> None:
    text = "a" * 500 + "b" * 500
    assert cut(text, 1000) == text
    assert cut(text, 999) == "a" * 500 + "b" * 166 + " [...] " + "b" * 249
    assert len(told(["x" * 10**6])) < MOST_VALUE + 10
    assert len(InvalidInput("text", "a short one", "x" * 10**6).got) < MOST_VALUE + 10


def test_a_message_has_the_first_hundred_problems() -> None:
    for count in (100, 101, 5000):
        error = CheckpointError("folder", [f"<{index}>" for index in range(count)])
        assert len(error.problems) == count
        assert ("<99>" in str(error), "<100>" in str(error)) == (True, False)
        assert (f"and {count - 100} more" in str(error)) is (count > 100)
    (problem,) = CheckpointError("folder", "a" * 10**6 + " is wrong").problems
    assert len(problem) < 1100
    assert problem.endswith("a is wrong")
