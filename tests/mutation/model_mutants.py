# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the model's rules: positions, languages, slots and rows, KV."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

MODEL_MUTANTS: list[Mutant] = []
