# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the LoRA ops leave alone, what they refuse, and that both halves together are the product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend, Op
from gpu_runtime.errors import InvalidPointer
from metrale.ops import lora_down, lora_up
from metrale.ops.linear import ACTIVATION_NAMES
from metrale.ops.lora_down import OP as DOWN
from metrale.ops.lora_up import OP as UP
from tests.backends import host_only
from tests.ops.harness import download, run, upload
from tests.ops.oracles import ACTIVATIONS as EXACT


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def down_inputs(dtype: str = "f32") -> dict[str, Any]:
    return dict(DOWN.make_inputs(rng(), dtype, rows=6, k=12, ranks=((2, 0), (1, 3)), room=3))


def up_inputs(dtype: str = "f32") -> dict[str, Any]:
    return dict(UP.make_inputs(rng(), dtype, rows=6, width=10, ranks=((2, 0), (1, 3)), room=3))


def test_without_adapters_t_is_zero(gpu: GpuBackend) -> None:
    result = run(DOWN, gpu, "f32", {**down_inputs(), "adapters": np.full(6, -1, np.int32)})
    assert not result["t"].any()


def test_a_row_without_adapter_needs_no_x(gpu: GpuBackend) -> None:
    values = down_inputs()
    values["x"][values["adapters"] < 0] = np.nan
    result = run(DOWN, gpu, "f32", values)
    assert np.isfinite(result["t"]).all()
    assert not result["t"][values["adapters"] < 0].any()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_what_no_adapter_touches_keeps_its_bits(gpu: GpuBackend, dtype: str) -> None:
    """Also a segment in which the adapter has no ranks, whatever the scale there is."""
    values = up_inputs(dtype)
    adapters, before = values["adapters"], values["out"].copy()
    values["scales"][0, 1] = np.nan
    out = run(UP, gpu, dtype, values)["out"]
    assert out[adapters < 0].tobytes() == before[adapters < 0].tobytes()
    assert (adapters == 0).any()
    assert out[adapters == 0, 10:].tobytes() == before[adapters == 0, 10:].tobytes()
    assert (out[adapters >= 0, :10] != before[adapters >= 0, :10]).any(axis=1).all()


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_both_halves_are_the_product(gpu: GpuBackend, activation: str) -> None:
    """``activation(out + scale * (x A^T) B^T)`` of small integers, whose sums float32 holds."""
    rows, k, width, room = 5, 7, 9, 4
    draw = rng()
    x, a, b, out = (
        draw.integers(-3, 4, shape).astype(np.float32)
        for shape in ((rows, k), (2, room, k), (2, room, width), (rows, width))
    )
    adapters, ranks = np.array([1, -1, 0, 1, 1], np.int32), np.array([[4], [2]], np.int32)
    scales = np.array([[0.5], [0.25]], np.float32)
    exact = out.astype(np.float64)
    for row, adapter in enumerate(adapters):
        if adapter >= 0:
            rank = ranks[adapter, 0]
            exact[row] += scales[adapter, 0] * (x[row] @ a[adapter, :rank].T @ b[adapter, :rank])
    most = np.abs(exact).max()
    exact = np.vectorize(EXACT[activation], otypes=[np.float64])(exact)

    table, given, which, scale = (upload(gpu, array) for array in (ranks, x, adapters, scales))
    down, up, result = (upload(gpu, array) for array in (a, b, out))
    t = gpu.alloc(4 * rows * room)
    sizes: Any = {"rows": rows, "segments": 1, "room": room, "adapter_count": 2, "dtype": "f32"}
    lora_down(gpu, given, which, table, down, t, k=k, **sizes)
    lora_up(gpu, t, which, table, scale, up, result, width=width, activation=activation, **sizes)
    # nothing is rounded before the activation; in it, a few roundings of numbers up to the largest
    limit = 0 if activation in ("none", "relu") else 4 * 2**-24 * most
    assert np.abs(download(gpu, result, out) - exact).max() <= limit


def test_an_unknown_activation_is_refused(gpu: GpuBackend) -> None:
    with pytest.raises(ValueError, match=r"lora_up: activation: expected one of \('none', .*, got 'tanh'"):
        lora_up(gpu, *[64] * 6, rows=1, segments=1, width=1, room=1, adapter_count=1, dtype="f32", activation="tanh")


@host_only
@pytest.mark.parametrize(("op", "inputs"), [(DOWN, down_inputs), (UP, up_inputs)], ids=["down", "up"])
@pytest.mark.parametrize(
    ("name", "where", "value", "message"),
    [
        ("adapters", 3, 2, r"adapters: expected adapters in \[0, 2\), or less than 0 for none, got 2"),
        ("ranks", (1, 0), 4, r"ranks: expected ranks in \[0, 3\], got 3 to 4 for adapter 1"),
        ("ranks", (1, 1), -1, r"ranks: expected ranks in \[0, 3\], got -1 to 1 for adapter 1"),
    ],
)
def test_what_is_outside_the_adapters_is_refused(
    gpu: GpuBackend, op: Op, inputs: Any, name: str, where: Any, value: int, message: str
) -> None:
    values = inputs()
    values[name][where] = value
    with pytest.raises(InvalidPointer, match=f"{op.spec.name}: {message}"):
        run(op, gpu, "f32", values)


@pytest.mark.parametrize(("op", "inputs"), [(DOWN, down_inputs), (UP, up_inputs)], ids=["down", "up"])
def test_the_tables_of_an_adapter_that_no_row_asks_for_may_hold_anything(gpu: GpuBackend, op: Op, inputs: Any) -> None:
    values = inputs()
    values["adapters"][values["adapters"] == 0] = 1
    expected = run(op, gpu, "f32", values)
    values["ranks"][0] = (99, -1)
    for name in ("t", "out"):
        if name in expected:
            assert run(op, gpu, "f32", values)[name].tobytes() == expected[name].tobytes()
