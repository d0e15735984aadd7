# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps that are replayed as graphs: a backend that pads them, making them often enough, and counting calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_runtime.backend import GpuBackend
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.nllb.backends import Padding
from tests.nllb.decoding import prefilled
from tests.nllb.stepping import LANES, case, step_of

LIMITS: dict[str, Any] = {"max_batch": LANES, "max_new_tokens": 8}


def padding_gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    """A backend that pads steps; on the host one that checks memory, also when a graph is replayed."""
    if not device.is_host:
        yield shared_gpu
        shared_gpu.sweep_unreleased()
        return
    with Padding(check=True) as backend:
        yield backend


def graphs_of(model: NllbModel) -> int:
    assert model._graphs is not None
    return len(model._graphs)


def warm(model: NllbModel, lanes: int = 1) -> None:
    """Make steps of so many lanes until they are replayed."""
    seqs = [prefilled(model, case(lane)) for lane in range(lanes)]
    for turn in range(2):
        step_of(model, seqs, turn)
    for seq in seqs:
        model.free_sequence(seq)


SAID = ("kernel", "limits")
"""Calls that only tell something the backend knows."""


@contextmanager
def counting(gpu: GpuBackend) -> Iterator[Counter[str]]:
    """Give a counter of the calls of the device that are made inside the context."""
    counts: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*args, **options)

        return call

    names = [name for name in GpuBackend.__abstractmethods__ if name not in SAID and callable(getattr(gpu, name))]
    vars(gpu).update({name: counted(name, getattr(gpu, name)) for name in names})
    try:
        yield counts
    finally:
        for name in names:
            del vars(gpu)[name]
