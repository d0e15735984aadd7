# SPDX-License-Identifier: MIT OR Apache-2.0
"""Probes in processes of their own: whatever they do costs no more than their answer."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from metrale.cli.isolate import Answer, ask_all


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctor_helpers.py").write_text(
        "import ctypes, os, sys, time\n"
        "def good():\n    print('noise')\n    return {'value': 1}\n"
        "def fails():\n    raise OSError('broken\\nlibrary')\n"
        "def crashes():\n    os.abort()\n"
        "def leaves():\n    os._exit(5)\n"
        "def hangs():\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("helpers")
def test_probes_that_fail_crash_or_leave_cost_only_their_answer() -> None:
    names = ("good", "fails", "crashes", "leaves", "absent")
    answers = ask_all({name: f"doctor_helpers:{name}" for name in names}, 60)
    assert answers["good"] == Answer({"value": 1}, None)
    assert answers["fails"] == Answer(None, "OSError: broken\nlibrary")
    assert answers["crashes"] == Answer(None, "crashed with SIGABRT")
    assert answers["leaves"] == Answer(None, "ended with exit code 5 and no answer")
    assert (answers["absent"].error or "").startswith("AttributeError")


@pytest.mark.usefixtures("helpers")
def test_a_probe_that_hangs_is_stopped() -> None:
    start = time.monotonic()
    assert ask_all({"hangs": "doctor_helpers:hangs"}, 0.2)["hangs"].error == "no answer within 0.2 seconds"
    assert time.monotonic() - start < 10


def test_a_python_that_cannot_be_started_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert (ask_all({"x": "m:f"}, 1)["x"].error or "").startswith("cannot be started")
