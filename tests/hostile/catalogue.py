# SPDX-License-Identifier: MIT OR Apache-2.0
"""All cases, by generator."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Final

from tests.hostile import (
    adapter_cases,
    command_cases,
    config_cases,
    id_cases,
    json_cases,
    limit_cases,
    option_cases,
    place_cases,
    text_cases,
    tokenizer_cases,
    torch_cases,
    weight_cases,
)
from tests.hostile.case import Case

GENERATORS: Final[tuple[ModuleType, ...]] = (
    adapter_cases,
    command_cases,
    config_cases,
    id_cases,
    json_cases,
    limit_cases,
    option_cases,
    place_cases,
    text_cases,
    tokenizer_cases,
    torch_cases,
    weight_cases,
)


def cases() -> list[Case]:
    """Return every case; their names are different."""
    found = [case for module in GENERATORS for case in _named(module)]
    assert len({case.name for case in found}) == len(found)
    return found


def _named(module: ModuleType) -> Iterator[Case]:
    yield from module.cases()
