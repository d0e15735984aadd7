# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests that need a GPU share. They mark themselves with `tests.backends.cuda_only`, or with ``gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.gpu_runtime.toy import REGISTRY as TOY
from tests.nllb.decoding import DEMO, LIMITS

LANES = 64

Say = Callable[[str], None]


@pytest.fixture(scope="session")
def shared_gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend with all ops that no test closes."""
    with device.open() as backend:
        yield backend


@pytest.fixture
def gpu(shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    """`shared_gpu`, whose memory is taken back after the test."""
    yield shared_gpu
    shared_gpu.sweep_unreleased()


@pytest.fixture
def toy_gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend whose only kernel is the toy one."""
    with device.open(ops=TOY) as backend:
        yield backend
        backend.sweep_unreleased()


@pytest.fixture(scope="session")
def models(device: Device) -> Iterator[Callable[[str], NllbModel]]:
    """A function that returns the demo model in a type, with 64 lanes; loaded once."""
    loaded: dict[str, NllbModel] = {}
    with device.open() as backend:

        def model(dtype: str) -> NllbModel:
            if dtype not in loaded:
                loaded[dtype] = metrale.load(DEMO, backend, dtype, max_batch=LANES, **LIMITS)
            return loaded[dtype]

        yield model
        for one in loaded.values():
            one.close()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """A function that prints a measured figure, past pytest's capture."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\nmeasured: {text}", flush=True)

    return show
