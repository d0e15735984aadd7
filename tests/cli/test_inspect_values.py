# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale inspect --check-values``: values that are not finite, and the bar while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from metrale.cli import main
from tests.cli.inspecting import (
    FC1,
    NORM,
    inspect,
    tensors,
)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite(
    dtype: Any, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(found: dict[str, Any]) -> None:
        spoilt = found[FC1].astype(dtype)
        spoilt[0, 0], spoilt[-1, -1] = np.nan, -np.nan
        spoilt[3, 3] = np.inf
        found[FC1] = spoilt
        found[NORM] = np.full(256, -np.inf, dtype)
        found["lm_head.weight"] = found["model.shared.weight"].copy()

    tensors(change)(folder)
    monkeypatch.setattr("metrale.cli.value_check._CHUNK_BYTES", 100_000)  # the counts of many chunks are added up
    inspect(folder, capsys, code=0)  # nothing is read without being asked for
    report, problems = inspect(folder, capsys, "--check-values")
    size = 1024 * 256
    assert report["values"] == {
        "tensors": 180,
        "values": 10_797_312 + 8240 * 256,
        "non_finite": [{"tensor": FC1, "nan": 2, "inf": 1}, {"tensor": NORM, "nan": 0, "inf": 256}],
    }
    assert sorted(problems) == [
        ("values", f"tensor '{FC1}': of {size:,} values 2 are NaN, and 1 infinite"),
        ("values", f"tensor '{NORM}': of 256 values 0 are NaN, and 256 infinite"),
    ]


def test_values_that_are_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = inspect(folder, capsys, "--check-values", code=0)
    assert report["values"] == {"tensors": 179, "values": 10_797_312, "non_finite": []}
    main(["inspect", "--check-values", str(folder)])
    assert "values:      10,797,312 in 179 tensors read, all of them finite" in capsys.readouterr().out


def test_values_are_read_whatever_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(found: dict[str, Any]) -> None:
        found[NORM] = np.array(np.nan, np.float32)  # of another shape: a scalar
        found["numbers"] = np.ones(3, np.int64)  # cannot be read

    tensors(change)(folder)
    expected = ["weights", "weights", "values"]
    for _ in range(2):
        report, problems = inspect(folder, capsys, "--check-values")
        assert report["values"]["non_finite"] == [{"tensor": NORM, "nan": 1, "inf": 0}]
        assert report["values"]["tensors"] == 179
        assert [part for part, _ in problems] == expected
        (folder / "config.json").unlink(missing_ok=True)
        expected = ["config", "values"]


def test_reading_values_has_a_bar_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[tuple[int | None, int, str]] = []
    counted: list[int] = []
    monkeypatch.setattr("metrale.cli.console.Console.can_draw", True)
    monkeypatch.setattr("metrale.cli.console.Console.draw", lambda self, *arguments: drawn.append(arguments))
    monkeypatch.setattr("metrale.cli.console.Console.advance", lambda self, count: counted.append(count))
    assert main(["inspect", str(folder)]) == 0
    assert not drawn
    assert not counted
    assert main(["inspect", "--check-values", str(folder)]) == 0
    assert drawn == [(2 * 10_797_312, 0, "B")]
    assert sum(counted) == 2 * 10_797_312
    capsys.readouterr()
