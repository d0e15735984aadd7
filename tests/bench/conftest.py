# SPDX-License-Identifier: MIT OR Apache-2.0
"""One run that many tests look at."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale.bench import rates, shapes
from tests.bench.running import bench


@pytest.fixture(autouse=True, scope="session")
def _little_to_do() -> Iterator[None]:
    """Draw few weights, and measure the host with little work: each run would take a second for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "POOL", 1_000_003)
        patch.setattr(rates, "HOST_READ_BYTES", 1 << 20)
        patch.setattr(rates, "HOST_PRODUCT_SIZE", 64)
        yield


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    status, _ = bench(folder)
    assert status == 0
    return folder / "out.json"


@pytest.fixture
def saved(_finished: Path) -> Path:
    """The file of a run of four cases: batches of 1 and 3, greedy and with 2 beams."""
    return _finished


@pytest.fixture
def report(saved: Path) -> dict[str, Any]:
    """What is in it, to be changed at will."""
    return copy.deepcopy(json.loads(saved.read_text(encoding="utf-8")))
