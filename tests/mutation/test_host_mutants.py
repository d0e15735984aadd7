# SPDX-License-Identifier: MIT OR Apache-2.0
"""The mutants of Python that are written by hand are up to date: each changes text that is there, and into another."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutation.__main__ import LEAST_PER_GROUP
from tests.mutation.model_mutants import MODEL_MUTANTS
from tests.mutation.mutant import Mutant
from tests.mutation.op_mutants import OP_MUTANTS

MUTANTS: list[Mutant] = [*OP_MUTANTS, *MODEL_MUTANTS]
COUNTS = Counter(mutant.group for mutant in MUTANTS)


@pytest.mark.parametrize("group", sorted(COUNTS))
def test_mutants_change_what_is_there(group: str) -> None:
    assert COUNTS[group] >= LEAST_PER_GROUP
    outdated = []
    for mutant in (one for one in MUTANTS if one.group == group):
        try:
            mutant.source()
        except ValueError as error:
            outdated.append(str(error))
    assert outdated == []
