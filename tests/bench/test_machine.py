# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a run says of the machine that it ran on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from metrale.bench import machine
from metrale.bench.machine import describe

SMI = """\
#!/bin/sh
echo 'NVIDIA H200, 580.65, 143771 MiB, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700.00 W, 31, P0'
echo 'another one, 1, 1, 1, 1, 1, 1, 1, 1, P8'
"""


def test_clocks_and_driver_are_those_that_nvidia_smi_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI, encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = machine.read_smi()
    assert found["driver_version"] == "580.65"
    assert found["clocks.sm"] == "1980 MHz"
    assert set(found) == set(machine.SMI_FIELDS.split(","))


def test_a_missing_nvidia_smi_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "nvidia-smi" in machine.read_smi()["error"]


def test_versions_and_a_given_commit() -> None:
    found = describe("numpy", "no-such-package", commit="abc")
    assert found["commit"] == "abc"
    assert found["packages"]["numpy"]
    assert found["packages"]["no-such-package"] is None
    assert found["cores"] >= 1


def test_the_commit_is_the_checkouts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed inside of another program's checkout does not have that one's commit."""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "x")):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    inside = tmp_path / "site-packages"
    inside.mkdir()
    monkeypatch.setattr(machine, "_CHECKOUT", tmp_path)
    assert describe()["commit"] == head
    monkeypatch.setattr(machine, "_CHECKOUT", inside)
    assert describe()["commit"] == "unknown"
