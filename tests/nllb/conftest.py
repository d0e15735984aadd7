# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models that several test files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.nllb.decoding import DEMO, LIMITS
from tests.reference.nllb_float64 import NllbFloat64
from tests.reference.tiny import write_tiny

MakeModel = Callable[..., NllbModel]


@pytest.fixture(scope="session")
def demo_model(device: Device) -> Iterator[NllbModel]:
    """The demo model in float32 with 32 lanes. A test that uses it frees its sequences."""
    with device.open() as gpu, metrale.load(DEMO, gpu, "float32", max_batch=32, **LIMITS) as model:
        yield model


@pytest.fixture(scope="session")
def shared_gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend that no test closes."""
    with device.open() as gpu:
        yield gpu


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    """A backend without live blocks. On a GPU always the same one: another would load every kernel again."""
    backend = device.open() if device.is_host else shared_gpu
    yield backend
    backend.sweep_unreleased()


@pytest.fixture
def demo(demo_model: NllbModel) -> Iterator[NllbModel]:
    """`demo_model`, with a check that the test gave all its sequences back."""
    yield demo_model
    seqs = [demo_model.alloc_sequence() for _ in range(32)]
    for seq in seqs:
        demo_model.free_sequence(seq)


@pytest.fixture(scope="session")
def demo_judge() -> NllbFloat64:
    return NllbFloat64.load(DEMO)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint: 97 ids, width 32, 2 and 3 layers."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model", 21)


@pytest.fixture(scope="session")
def tiny_judge(tiny_folder: Path) -> NllbFloat64:
    return NllbFloat64.load(tiny_folder)


@pytest.fixture
def make_tiny(tiny_folder: Path, gpu: GpuBackend) -> Iterator[MakeModel]:
    """A function that loads the tiny checkpoint with small limits, on the test's backend unless another is given."""
    models: list[NllbModel] = []

    def make(on: GpuBackend | None = None, dtype: str = "float32", **options: Any) -> NllbModel:
        limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
        model = metrale.load(tiny_folder, on or gpu, dtype, **limits | options)
        models.append(model)
        return model

    yield make
    for model in models:
        model.close()
    for model in models:
        assert model.gpu.live_alloc_count() == 0


@pytest.fixture
def tiny(make_tiny: MakeModel) -> NllbModel:
    """A tiny model with 4 lanes, sources of up to 12 tokens and targets of up to 8, without default languages."""
    return make_tiny()
