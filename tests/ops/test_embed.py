# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `embed` takes from cells, what it refuses, and that it can do without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.errors import InvalidPointer
from metrale.ops import embed
from metrale.ops.embed import OP
from tests.backends import host_only
from tests.ops.harness import download, run, upload


def inputs_of(ids: list[int], cells: list[int] | None, cell_index: list[int] | None) -> dict[str, Any]:
    """Return the op's parameters for a table whose row ``i`` is ``i``, and positions that add nothing."""
    rows = len(ids)
    return {
        "ids": np.array(ids, np.int32),
        "cells": None if cells is None else np.array(cells, np.int32),
        "cell_index": None if cell_index is None else np.array(cell_index, np.int32),
        "positions": np.zeros(rows, np.int32),
        "table": np.arange(10, dtype=np.float32)[:, None],
        "position_table": np.zeros((1, 1), np.float32),
        "out": np.full((rows, 1), -77, np.float32),
        "rows": rows,
        "width": 1,
        "vocab": 10,
        "position_count": 1,
        "cell_count": 0 if cells is None else len(cells),
        "blank": -1,
        "scale": 1.0,
    }


def test_a_row_with_a_cell_needs_no_id_and_a_cell_without_a_row_may_hold_anything(gpu: GpuBackend) -> None:
    result = run(OP, gpu, "f32", inputs_of([-5, 3, 1 << 30], [1 << 30, 7, 2], [1, -1, 2]))
    assert result["out"].ravel().tolist() == [7, 3, 2]


def test_the_launcher_does_without_cells(gpu: GpuBackend) -> None:
    values = inputs_of([4, 2], None, None)
    pointers = [upload(gpu, values[name]) for name in ("ids", "positions", "table", "position_table", "out")]
    embed(gpu, *pointers, rows=2, width=1, vocab=10, position_count=1, scale=1.0, dtype="f32")
    assert download(gpu, pointers[-1], values["out"]).ravel().tolist() == [4, 2]


@pytest.mark.parametrize("missing", ["cells", "cell_index"])
def test_one_of_cells_and_cell_index_alone_is_refused(gpu: GpuBackend, missing: str) -> None:
    given: Any = {"cells": 64, "cell_index": 64, missing: 0}
    with pytest.raises(ValueError, match=f"embed: {missing}: expected an address"):
        embed(gpu, *[64] * 5, rows=1, width=1, vocab=1, position_count=1, scale=1.0, dtype="f32", cell_count=1, **given)


@host_only
@pytest.mark.parametrize(
    ("ids", "cells", "cell_index", "message"),
    [
        ([0, 1], [2, 3], [0, 2], r"cell_index: expected cells in \[0, 2\).* got 2"),
        ([0, 1], [2, 10], [-1, 1], r"ids: expected rows in \[0, 10\), got 0 to 10"),
        ([0, 1], [2, -1], [-1, 1], r"ids: expected rows in \[0, 10\), got -1 to 0"),
        ([0, 10], [2, 3], [0, -1], r"ids: expected rows in \[0, 10\), got 2 to 10"),
    ],
)
def test_what_is_outside_a_table_is_refused(
    gpu: GpuBackend, ids: list[int], cells: list[int], cell_index: list[int], message: str
) -> None:
    with pytest.raises(InvalidPointer, match=f"embed: {message}"):
        run(OP, gpu, "f32", inputs_of(ids, cells, cell_index))
