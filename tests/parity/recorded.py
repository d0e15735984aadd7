# SPDX-License-Identifier: MIT OR Apache-2.0
"""The file of recorded searches."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.parity.cases import Answer, Case, Draw, ModelSpec, case_from_json, model_from_json

FILE = Path(__file__).parents[1] / "data" / "beam_parity.json"


@dataclass(frozen=True)
class Recorded:
    """What the file holds.

    Attributes
    ----------
    meta : dict
        What its own ``meta`` says.
    models : list of ModelSpec
    cases, edges : list of Case
        A part of the draw, and the cases of `tests.parity.edges`.
    answers : dict of str to Answer
        By the names of the cases.
    """

    meta: dict[str, Any]
    models: list[ModelSpec]
    cases: list[Case]
    edges: list[Case]
    answers: dict[str, Answer]

    @property
    def everything(self) -> Draw:
        """The cases of both kinds with their models."""
        return Draw(self.models, self.cases + self.edges)


@functools.cache
def recorded() -> Recorded:
    """Return the contents of the file."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    cases, edges = ([case_from_json(fields) for fields in content[key]] for key in ("cases", "edges"))
    models = [model_from_json(fields) for fields in content["models"]]
    answers = {case.name: answer for case, answer in cases + edges}
    return Recorded(content["meta"], models, [case for case, _ in cases], [case for case, _ in edges], answers)
