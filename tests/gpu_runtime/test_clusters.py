# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launches in clusters: which are refused, where there are none, and what becomes of a plan that asks for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM, PORTABLE_CLUSTER
from gpu_runtime.op import OpRegistry
from tests.backends import Device, cuda_only
from tests.gpu_runtime import toy
from tests.gpu_runtime.toy import values
from tests.ops.harness import download, upload

LARGE: Final = replace(MINIMUM, compute_capability=(9, 0), max_cluster=PORTABLE_CLUSTER)
X: Final = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, np.int32(4)])
def test_grids_of_whole_clusters(cluster: int) -> None:
    """Along x; the other axes do not matter."""
    assert check_geometry((24, 3, 5), 32, 0, LARGE, cluster) == ((24, 3, 5), (32, 1, 1))
    assert check_geometry(int(cluster), 32, 0, LARGE, cluster) == ((int(cluster), 1, 1), (32, 1, 1))


@pytest.mark.parametrize(
    ("grid", "cluster", "message"),
    [
        (24, 0, "cluster: expected 1 to 8, got 0"),
        (24, -2, "cluster: expected 1 to 8, got -2"),
        (32, 16, "cluster: expected 1 to 8, got 16"),
        (24, 3, "cluster: expected a power of two, got 3"),
        (3, 2, r"grid: expected whole clusters of 2 blocks along x, got \(3, 1, 1\)"),
        ((12, 8), 8, r"grid: expected whole clusters of 8 blocks along x, got \(12, 8, 1\)"),
        (1, 4, r"grid: expected whole clusters of 4 blocks along x, got \(1, 1, 1\)"),
    ],
)
def test_clusters_that_are_refused(grid: Any, cluster: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_geometry(grid, 32, 0, LARGE, cluster)


def test_a_cluster_past_the_limit(gpu: GpuBackend) -> None:
    most = gpu.limits().max_cluster
    with pytest.raises(ValueError, match=f"^cluster: expected 1 to {most}, got {2 * most}$"):
        gpu.launch(gpu.kernel("toy", "toy_f32"), 2 * most, 32, 0, 0, values(16, 32), cluster=2 * most)


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, (1,), {1}, np.float32(1)])
def test_a_cluster_of_another_type(gpu: GpuBackend, wrong: Any) -> None:
    with pytest.raises(TypeError, match="cluster: expected an integer"):
        gpu.launch(gpu.kernel("toy", "toy_f32"), 1, 32, 0, 0, values(16, 32), cluster=wrong)


def test_a_kept_launch_does_not_stand_for_another_cluster(gpu: GpuBackend) -> None:
    """One that would be refused by itself is refused after its like has come without a cluster."""
    x, out = upload(gpu, X), upload(gpu, np.zeros_like(X))
    handle = gpu.kernel("toy", "toy_f32")
    for _ in range(2):
        gpu.launch(handle, 1, 32, 0, 0, values(x, out))
    gpu.memset(out, 0, X.nbytes)
    with pytest.raises(ValueError, match=r"cluster: expected 1 to 1|grid: expected whole clusters of 2"):
        gpu.launch(handle, 1, 32, 0, 0, values(x, out), cluster=2)
    gpu.synchronize()
    assert not download(gpu, out, X).any()


@pytest.mark.parametrize(("programmatic", "cluster"), [(False, 4), (True, 4), (True, 1), (False, 1)])
def test_a_plan_says_what_an_op_is_launched_with(device: Device, programmatic: bool, cluster: int) -> None:
    """The launch itself is not made: the host has no clusters."""

    def plan(*sizes: Any) -> Any:
        return replace(toy.plan(*sizes), programmatic=programmatic, cluster=cluster)

    ops = OpRegistry()
    op = ops.register(replace(toy.OP, plan=plan))
    with device.open(ops=ops) as gpu, patch.object(gpu, "launch") as launch:
        op.launch(gpu, "f32", values(16, 32))
    asked = launch.call_args.kwargs
    assert (asked.get("programmatic", False), asked.get("cluster", 1)) == (programmatic, cluster)


@pytest.mark.parametrize("wrong", [0, -2, 1.5, "1", None])
def test_a_plan_of_no_cluster_is_refused_as_a_launch_is(device: Device, wrong: Any) -> None:
    def plan(*sizes: Any) -> Any:
        return replace(toy.plan(*sizes), cluster=wrong)

    ops = OpRegistry()
    op = ops.register(replace(toy.OP, plan=plan))
    with device.open(ops=ops) as gpu, pytest.raises((TypeError, ValueError), match=r"^cluster: expected"):
        op.launch(gpu, "f32", values(16, 32))


@cuda_only
@pytest.mark.parametrize("arch", [None, "compute_80"])
def test_where_there_are_clusters(device: Device, arch: str | None) -> None:
    """Where kernels are compiled so that they can know of them."""
    with device.open(arch=arch) as gpu:
        limits = gpu.limits()
        there = arch is None and limits.compute_capability >= (9, 0)
        assert limits.max_cluster == (PORTABLE_CLUSTER if there else 1)


@cuda_only
def test_each_launch_has_the_cluster_that_it_asks_for(device: Device) -> None:
    """The same arguments, one size after the other, twice each: what the driver is told, and that it obeys."""
    from gpu_runtime.cuda.kernels import ExtendedLaunch

    as_it_is = patch.object(ExtendedLaunch, "__call__", autospec=True, side_effect=ExtendedLaunch.__call__)
    with device.open(ops=toy.REGISTRY, arch=None) as gpu, as_it_is as extended:
        most = gpu.limits().max_cluster
        sizes = [size for size in (1, 2, 4, 8, 2, 1, 8) if size <= most]
        x, out = upload(gpu, X), upload(gpu, X)
        handle = gpu.kernel("toy", "toy_f32")
        for size in sizes:
            for _ in range(2):
                gpu.memset(out, 0, X.nbytes)
                gpu.launch(handle, most, 32, 0, 0, values(x, out), cluster=size)
                gpu.synchronize()
                assert download(gpu, out, X).tolist() == [2, 4, 6, 8]
        told = [call.args[0]._attributes.cluster for call in extended.call_args_list]
        assert told == [size for size in sizes for _ in range(2) if size > 1]
        gpu.sweep_unreleased()
