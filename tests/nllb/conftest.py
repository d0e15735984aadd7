# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo model, which several test files use; the tiny one is in `tests.conftest`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import metrale
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.conftest import MakeModel
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
