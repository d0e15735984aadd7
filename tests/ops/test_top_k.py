# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `top_k` refuses, and what it promises beyond its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from metrale.ops import top_k
from metrale.ops.top_k import MAX_K, OP
from tests.ops.harness import run


@pytest.mark.parametrize(
    ("k", "vocab", "message"),
    [(0, 10, "expected 1 to 64, got 0"), (MAX_K + 1, 100, "got 65"), (11, 10, "at most the 10 elements of a row")],
)
def test_a_k_that_no_row_can_serve_is_refused(gpu: GpuBackend, k: int, vocab: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_k(gpu, 64, 64, 64, 64, 64, rows=1, vocab=vocab, k=k, stride=vocab, dtype="f32")


def test_one_element(gpu: GpuBackend) -> None:
    result = run(OP, gpu, "f32", inputs_of(np.array([[3.5]], np.float32), k=1))
    assert [result[name].item() for name in ("values", "ids", "lse", "flags")] == [3.5, 0, 3.5, 0]


@pytest.mark.parametrize("k", [1, MAX_K])
def test_a_whole_row_of_one_value_gives_the_lowest_ids(gpu: GpuBackend, k: int) -> None:
    result = run(OP, gpu, "f32", inputs_of(np.full((1, 70_000), -2, np.float32), k=k))
    assert result["ids"].tolist() == [list(range(k))]
    assert result["lse"].item() == pytest.approx(-2 + np.log(70_000), rel=1e-6)  # a float32 sum of equal terms


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("vocab", [4096, 4099])
def test_a_row_has_the_same_bits_alone_and_among_others(gpu: GpuBackend, dtype: str, vocab: int) -> None:
    inputs: Mapping[str, Any] = OP.make_inputs(
        np.random.default_rng(0), dtype, rows=5, vocab=vocab, k=9, special=("nan",)
    )
    together = run(OP, gpu, dtype, inputs)
    for row in range(5):
        alone = run(OP, gpu, dtype, inputs_of(inputs["logits"][row : row + 1], k=9))
        for name in ("values", "ids", "lse", "flags"):
            assert alone[name].tobytes() == together[name][row : row + 1].tobytes(), (name, row)


def inputs_of(logits: Any, k: int) -> dict[str, Any]:
    """Return the op's parameters for contiguous rows."""
    rows, vocab = logits.shape
    return {
        "logits": logits,
        "values": np.zeros((rows, k), np.float32),
        "ids": np.zeros((rows, k), np.int32),
        "lse": np.zeros(rows, np.float32),
        "flags": np.zeros(rows, np.int32),
        "rows": rows,
        "vocab": vocab,
        "k": k,
        "stride": vocab,
    }
