# SPDX-License-Identifier: MIT OR Apache-2.0
"""One thing that `metrale doctor` looked for, and how versions are judged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "problem", "unknown"]
Part = Literal["host", "cuda"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes
    ----------
    part : {"host", "cuda"}
        The backend that needs it.
    name, detail : str
    state : {"ok", "missing", "problem", "unknown"}
        ``unknown`` when the probe gave no answer.
    advice : str or None
        What to do about it.
    """

    part: Part
    name: str
    state: State
    detail: str
    advice: str | None = None


def package(part: Part, name: str, version: str | None, oldest: str, too_new: str | None = None) -> Finding:
    """Return the finding for a distribution of some version, or of none."""
    wanted = f"{name}>={oldest}" + (f",<{too_new}" if too_new else "")
    advice = f'pip install "{wanted}"'
    if version is None:
        return Finding(part, name, "missing", "not installed", advice)
    if numbers(version) < numbers(oldest) or (too_new and numbers(version) >= numbers(too_new)):
        return Finding(part, name, "problem", f"version {version}, expected {wanted}", advice)
    return Finding(part, name, "ok", version)


def numbers(version: str) -> list[int]:
    """Return the release numbers at the start of a version: ``"13.4.0rc1"`` gives 13, 4, 0."""
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in match.group().split(".")] if match else []


def dotted(version: list[int]) -> str:
    """Return release numbers as people write them."""
    return ".".join(map(str, version))
