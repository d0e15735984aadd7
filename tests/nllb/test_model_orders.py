# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whatever order a device runs the work in, within what streams and events allow: the same ids, logits and states.

The host backend can run enqueued work late, or in an order that a seed chooses. A wait, an event or a row shift that is
missing in the model shows as a result that differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.host import HostBackend
from metrale.nllb import staging
from metrale.nllb.model import NllbModel
from tests.draws import draws
from tests.nllb.lanes import LIMITS, assert_as_alone
from tests.nllb.programs import Program
from tests.reference.tiny import write_tiny

PROGRAMS = range(4)
ORDERS: list[tuple[str, int]] = [("deferred", 0), *(("adversarial", seed) for seed in range(12))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer a side, so that much can be tried in little time."""
    return write_tiny(tmp_path_factory.mktemp("orders") / "model", 5, encoder_layers=1, decoder_layers=1)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load through buffers that are filled many times."""
    monkeypatch.setattr(staging, "SLOT_BYTES", 2048)


class Unhurried(HostBackend):
    """Frees page-locked memory at its end only, and does not finish the work that may use it, as a GPU does not."""

    def __init__(self, **options: Any) -> None:
        super().__init__(check=True, **options)
        self._kept: list[PinnedMemory] = []

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self._kept.append(memory)

    def close(self) -> None:
        for memory in self._kept:
            super().free_host_pinned(memory)
        super().close()


@contextmanager
def opened(folder: Path, order: str, seed: int) -> Iterator[NllbModel]:
    with Unhurried(order=order, seed=seed) as gpu, metrale.load(folder, gpu, "float32", **LIMITS) as model:
        yield model


def run(folder: Path, program: int, order: str, seed: int) -> Program:
    with opened(folder, order, seed) as model:
        made = Program(model, program)
        made.run()
    return made


@pytest.fixture(scope="module")
def in_order(folder: Path) -> Callable[[int], Program]:
    """A function that returns a program which has run in the order of its calls."""
    return functools.cache(lambda program: run(folder, program, "in_order", 0))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("order", "seed"), draws(ORDERS, 3))
def test_the_same_bits_in_any_order(
    folder: Path, in_order: Callable[[int], Program], program: int, order: str, seed: int
) -> None:
    expected, made = in_order(program), run(folder, program, order, seed)
    assert [lane.log for lane in made.lanes] == [lane.log for lane in expected.lanes]
    for number, (one, other) in enumerate(zip(made.results, expected.results, strict=True)):
        assert one.tobytes() == other.tobytes(), f"result {number}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_sequence_is_what_it_is_alone(folder: Path, in_order: Callable[[int], Program], program: int) -> None:
    """Else a program that hands one's row to another would be wrong in every order alike."""
    made = in_order(program)
    assert len(made.lanes) > 6
    with opened(folder, "in_order", 0) as model:
        for lane in made.lanes:
            assert_as_alone(model, lane, made.results)
