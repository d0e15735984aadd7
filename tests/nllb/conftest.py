# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo model, which several test files use; the tiny one is in `tests.conftest`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.conftest import MakeModel
from tests.nllb.adapters import Load, Logits, Shelf, rows_of
from tests.nllb.decoding import DEMO, LIMITS
from tests.reference.nllb_float64 import NllbFloat64

__all__ = ["MakeModel"]


@pytest.fixture(scope="session")
def demo_model(device: Device) -> Iterator[NllbModel]:
    """The demo model in float32 with 32 lanes. A test that uses it frees its sequences."""
    with device.open() as gpu, metrale.load(DEMO, gpu, "float32", max_batch=32, **LIMITS) as model:
        yield model


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
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Adapters for a checkpoint of one layer a side, for what is not about numbers."""
    return Shelf(tmp_path_factory.mktemp("adapters"), encoder_layers=1, decoder_layers=1)


@pytest.fixture
def load_adapted(shelf: Shelf, gpu: GpuBackend) -> Iterator[Load]:
    """A function that loads the checkpoint of `shelf` with some of its adapters."""
    models: list[NllbModel] = []

    def make(names: str = "", **options: Any) -> NllbModel:
        models.append(shelf.load(gpu, names, **options))
        return models[-1]

    yield make
    for model in models:
        model.close()
    assert gpu.live_alloc_count() == 0


@pytest.fixture
def adapter_rows(shelf: Shelf, gpu: GpuBackend) -> Logits:
    """The logits with each adapter of `shelf`, by its name, and those of the base model, by ""."""
    with shelf.load(gpu, "abcde") as model:
        return {name: rows_of(model, slot).tobytes() for name, slot in {"": -1, **model.adapters()}.items()}
