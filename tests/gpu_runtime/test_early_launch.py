# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launches that ask for more: what the driver is told; when kernels start early; that streams and threads share one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from metrale.ops import layer_norm
from metrale.ops.layer_norm import OP
from tests.backends import Device, cuda_only, needs_cupy
from tests.hammering import eager_switching, hammer
from tests.ops.harness import download, run, upload

GEOMETRY: Final = (7, 2, 3, 64, 2, 1, 4096)
STREAMS: Final = 40  # more than a launch keeps something of
THREADS: Final = 8


def inputs_of(rows: int, width: int) -> dict[str, Any]:
    return dict(OP.make_inputs(np.random.default_rng(rows), "bf16", rows=rows, width=width))


@needs_cupy
@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ((True, False, 1), {"PROGRAMMATIC_STREAM_SERIALIZATION": 1}),
        ((False, True, 1), {"COOPERATIVE": 1}),
        ((False, False, 4), {"CLUSTER_DIMENSION": (4, 1, 1)}),
        ((True, False, 8), {"PROGRAMMATIC_STREAM_SERIALIZATION": 1, "CLUSTER_DIMENSION": (8, 1, 1)}),
        (
            (True, True, 2),
            {"PROGRAMMATIC_STREAM_SERIALIZATION": 1, "COOPERATIVE": 1, "CLUSTER_DIMENSION": (2, 1, 1)},
        ),
    ],
)
def test_the_driver_is_told_what_a_launch_asks_for(attributes: tuple[Any, ...], expected: dict[str, Any]) -> None:
    from cuda.bindings import driver as bindings

    from gpu_runtime.cuda import kernels

    told: list[dict[str, Any]] = []

    def record(config: Any, *_: Any) -> tuple[Any]:
        found = {}
        for one in config.attrs[: config.numAttrs]:
            name, value = one.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"), one.value
            found[name] = {
                "PROGRAMMATIC_STREAM_SERIALIZATION": value.programmaticStreamSerializationAllowed,
                "COOPERATIVE": value.cooperative,
                "CLUSTER_DIMENSION": (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z),
            }[name]
        told.append(found)
        return (bindings.CUresult.CUDA_SUCCESS,)

    recording = SimpleNamespace(**{**vars(bindings), "cuLaunchKernelEx": record})
    with patch.object(kernels, "bindings", recording):
        kernels.ExtendedLaunch(0x5000, GEOMETRY, kernels.Attributes(*attributes))(16, 0, 0)
    assert told == [expected]


@needs_cupy
def test_each_stream_is_launched_on_with_the_geometry() -> None:
    """By many threads at once, which share one launch; all that the driver is told is looked at, without a driver."""
    from cuda.bindings import driver as bindings

    from gpu_runtime.cuda import kernels

    early = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    told: list[tuple[int, ...]] = []

    def record(config: Any, function: Any, params: int, extra: int) -> tuple[Any]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        assert (*grid, *block, config.sharedMemBytes) == GEOMETRY
        assert config.numAttrs == 1
        assert config.attrs[0].id == early
        assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
        told.append((int(function), int(config.hStream), params, extra))
        return (bindings.CUresult.CUDA_SUCCESS,)

    launch = kernels.ExtendedLaunch(0x5000, GEOMETRY, kernels.Attributes(early=True, cooperative=False, cluster=1))

    def work(index: int) -> None:
        for turn in range(3 * STREAMS):
            launch(16 + (index + turn) % STREAMS, index, 0)

    recording = SimpleNamespace(**{**vars(bindings), "cuLaunchKernelEx": record})
    with patch.object(kernels, "bindings", recording), eager_switching():
        hammer(work, THREADS)
    expected = [
        (0x5000, 16 + (index + turn) % STREAMS, index, 0) for index in range(THREADS) for turn in range(3 * STREAMS)
    ]
    assert sorted(told) == sorted(expected)


@needs_cupy
def test_a_launch_that_fails_raises_as_the_usual_one_does() -> None:
    from cuda.bindings import driver as bindings
    from cupy.cuda import driver

    from gpu_runtime.cuda import kernels

    failed = (bindings.CUresult.CUDA_ERROR_INVALID_VALUE,)
    failing = SimpleNamespace(**{**vars(bindings), "cuLaunchKernelEx": lambda *_: failed})
    with (
        patch.object(kernels, "bindings", failing),
        patch.object(driver, "CUDADriverError", RuntimeError),  # CuPy's asks the driver for its words
        pytest.raises(RuntimeError, match=r"^1$"),
    ):
        kernels.ExtendedLaunch(0x5000, GEOMETRY, kernels.Attributes(early=True, cooperative=False, cluster=1))(0, 0, 0)


@cuda_only
@pytest.mark.parametrize(("arch", "programmatic"), [(None, True), ("compute_80", True), (None, False)])
def test_a_kernel_that_cannot_wait_is_not_launched_early(device: Device, arch: str | None, programmatic: bool) -> None:
    """The wait is an instruction of compute capability 9.0; code that is compiled for an older one has none."""
    from gpu_runtime.cuda.kernels import ExtendedLaunch

    def plan(*sizes: Any) -> Any:
        assert OP.plan is not None
        return replace(OP.plan(*sizes), programmatic=programmatic)

    inputs = inputs_of(5, 1024)
    as_it_is = patch.object(ExtendedLaunch, "__call__", autospec=True, side_effect=ExtendedLaunch.__call__)
    with device.open() as gpu:
        expected = run(OP, gpu, "bf16", inputs)["out"].tobytes()
        gpu.sweep_unreleased()
    with device.open(arch=arch) as gpu, as_it_is as early:
        for _ in range(2):
            assert run(replace(OP, plan=plan), gpu, "bf16", inputs)["out"].tobytes() == expected
            gpu.sweep_unreleased()
        late = not programmatic or arch is not None or gpu.limits().compute_capability < (9, 0)
        assert early.call_count == (0 if late else 2)


@cuda_only
def test_streams_and_threads_share_early_launches(device: Device) -> None:
    """Each thread has a chain of three kernels on one stream after another; all threads share the first one's launch.

    All of them write the same bits to ``shared``, so it does not matter who was last. Only the order within a stream
    makes the rest of a chain right.
    """
    v = inputs_of(64, 1024)
    sizes: Any = {"rows": 64, "width": 1024, "eps": v["eps"], "dtype": "bf16"}
    with device.open() as gpu:
        x, weight, bias, shared = (upload(gpu, v[name]) for name in ("x", "weight", "bias", "out"))
        streams = [gpu.create_stream() for _ in range(STREAMS)]
        ends = [(upload(gpu, v["out"]), upload(gpu, v["out"])) for _ in range(THREADS)]

        def chain(index: int, stream: int) -> None:
            first, second = ends[index]
            layer_norm(gpu, x, weight, bias, shared, **sizes, stream=stream)
            layer_norm(gpu, shared, weight, bias, first, **sizes, stream=stream)
            layer_norm(gpu, first, weight, bias, second, **sizes, stream=stream)

        chain(0, 0)
        gpu.synchronize()
        expected = download(gpu, ends[0][1], v["out"]).tobytes()

        def work(index: int) -> None:
            for turn in range(3 * STREAMS):
                stream = streams[(5 * index + turn) % STREAMS]
                gpu.memset_async(ends[index][0], 0, v["out"].nbytes, stream=stream)
                chain(index, stream)
                gpu.synchronize(stream)
                assert download(gpu, ends[index][1], v["out"]).tobytes() == expected, (index, turn)

        with eager_switching():
            hammer(work, THREADS)
        for stream in streams:
            gpu.destroy_stream(stream)
        gpu.sweep_unreleased()
