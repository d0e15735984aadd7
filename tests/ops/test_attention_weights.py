# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `attention_weights` refuses, and that mixing the values with its weights is `decode_attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.limits import MINIMUM
from metrale.ops import attention_weights
from metrale.ops.attention_weights import OP, make_inputs
from metrale.ops.decode_attention import OP as DECODE_ATTENTION
from tests.backends import host_only
from tests.ops.harness import download, run, upload


def test_values_mixed_by_the_weights_are_the_attention(gpu: GpuBackend) -> None:
    """Within 1e-6: values near 1, mixed in float32 by weights that sum to 1, here and there in another order."""
    lengths, heads, head_dim = (9, 33), 2, 16
    inputs: dict[str, Any] = dict(
        make_inputs(np.random.default_rng(0), "f32", lengths=lengths, heads=heads, head_dim=head_dim)
    )
    weights = run(OP, gpu, "f32", inputs)["out"].reshape(len(lengths), heads, -1)
    width, stride = heads * head_dim, inputs["kv_stride"]
    mixed = []
    for row, start in enumerate(inputs["spans"].starts.tolist()):
        values = inputs["spans"].pool[start : start + 33 * stride].reshape(33, stride)[:, inputs["k_offset"] + width :]
        mixed.append(np.einsum("hp,phd->hd", weights[row], values[:, :width].reshape(33, heads, head_dim)).ravel())
    given = {arg.name: inputs.get(arg.name) for arg in DECODE_ATTENTION.spec.args}
    sizes = {"v_offset": inputs["k_offset"] + width, "ancestry_rows": 0, "ancestry_capacity": 0}
    out = np.zeros((len(lengths), width), np.float32)
    expected = run(DECODE_ATTENTION, gpu, "f32", {**given, **sizes, "out": out})["out"]
    assert np.abs(np.stack(mixed) - expected).max() < 1e-6


def test_the_launcher(gpu: GpuBackend) -> None:
    values: Any = make_inputs(np.random.default_rng(0), "f32", lengths=(1,), heads=1, head_dim=4, longest=3)
    q, lengths, out = (upload(gpu, values[name]) for name in ("q", "lengths", "out"))
    spans = upload(gpu, np.array([int(upload(gpu, values["spans"].pool))], np.uint64))
    sizes = {name: values[name] for name in ("rows", "heads", "head_dim", "longest", "q_stride", "k_offset")}
    attention_weights(
        gpu, q, spans, lengths, out, **sizes, kv_stride=values["kv_stride"], scale=values["scale"], dtype="f32"
    )
    assert download(gpu, out, values["out"]).tolist() == [[1, 0, 0]]


@host_only
@pytest.mark.parametrize("lengths", [(4, 0), (4, 8)])
def test_lengths_that_the_result_has_no_room_for_are_refused(gpu: GpuBackend, lengths: tuple[int, int]) -> None:
    inputs = dict(make_inputs(np.random.default_rng(0), "f32", lengths=(4, 8), heads=1, head_dim=4))
    inputs |= {"longest": 7, "out": np.zeros((2, 7), np.float32), "lengths": np.array(lengths, np.int32)}
    with pytest.raises(InvalidPointer, match="attention_weights: lengths: expected 1 to 7 keys a row, got"):
        run(OP, gpu, "f32", inputs)


def test_heads_that_the_kernel_cannot_hold_are_refused() -> None:
    dims = {"rows": 1, "heads": 1, "head_dim": 257}
    assert OP.plan is not None
    with pytest.raises(ValueError, match="head_dim: expected at most 256, got 257"):
        OP.plan(dims, "f32", MINIMUM)
