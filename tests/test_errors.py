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
from metrale.errors import CheckpointError, InvalidInput, NonFiniteLogits, NotSupported, UnknownLanguage

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
