# SPDX-License-Identifier: MIT OR Apache-2.0
"""The process that runs the cases, shared by all tests of the session."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.case import Case, Outcome

ROOT = Path(__file__).parents[2]
MARK = "hostile_case"


@pytest.fixture(scope="session")
def outcome_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Outcome]]:
    """A function that returns what became of a case. All cases that were collected run ahead of it."""
    names = [
        item.callspec.params["case"].name  # type: ignore[attr-defined]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_case"
    ]
    command = [sys.executable, "-m", "tests.hostile.zygote", str(tmp_path_factory.mktemp("hostile"))]
    found: dict[str, Outcome] = {}
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(names), file=process.stdin, flush=True)
        lines = process.stdout

        def outcome_of(case: Case) -> Outcome:
            while case.name not in found:
                line = lines.readline()
                assert line, "the process that forks has ended: what it printed says why"
                told = json.loads(line)
                found[told["name"]] = Outcome(**told["outcome"])
            return found[case.name]

        yield outcome_of
        process.kill()
