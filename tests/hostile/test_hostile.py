# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hostile input of every kind, each in a process of its own: the right answer, or one documented exception."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hostile.case import Case, Outcome, complaint
from tests.hostile.catalogue import cases


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.more if case.further else ()) for case in cases()]
)
def test_case(case: Case, outcome_of: Callable[[Case], Outcome]) -> None:
    outcome = outcome_of(case)
    wrong = complaint(case, outcome)
    assert wrong is None, f"{wrong}; {outcome.told()}"
