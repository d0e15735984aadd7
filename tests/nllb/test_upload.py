# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sending what files have as it is, and what is made: all of it arrives, and a file that changed is named."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from gpu_runtime import DevicePtr, GpuBackend
from metrale.checkpoint import Checkpoint, open_checkpoint
from metrale.errors import CheckpointError
from metrale.nllb.staging import Transfer
from metrale.nllb.upload import send
from tests.backends import Device
from tests.ops.harness import download

VALUES = {
    "a": np.arange(1000, dtype=np.float32),
    "b": np.arange(7, dtype=np.float32) + 0.5,
    "c": np.arange(30, dtype=np.float32)[::-1].copy(),
}


@pytest.fixture
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend
        backend.sweep_unreleased()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    save_file(VALUES, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as opened:
        yield opened


def transfers_of(checkpoint: Checkpoint, base: DevicePtr, made: Iterable[str] = ()) -> list[Transfer]:
    """Return the transfers of every tensor, one after another; ``made`` ones as if they had to be converted."""
    found, at = [], base
    for name, values in VALUES.items():
        place = None if name in made else checkpoint.stored_at(name)
        found.append(Transfer(len(values), "f32", at, checkpoint.reader(name), place))
        at = at.offset(values.nbytes)
    return found


EXPECTED: NDArray[Any] = np.concatenate(list(VALUES.values()))


@pytest.mark.parametrize("made", [(), ("a",), ("b", "c"), tuple(VALUES)])
def test_all_of_it_arrives(gpu: GpuBackend, checkpoint: Checkpoint, made: tuple[str, ...]) -> None:
    base = gpu.alloc(EXPECTED.nbytes)
    send(gpu, transfers_of(checkpoint, base, made))
    assert np.array_equal(download(gpu, base, EXPECTED), EXPECTED)


def test_a_file_that_became_shorter_is_named(gpu: GpuBackend, checkpoint: Checkpoint, tmp_path: Path) -> None:
    base = gpu.alloc(EXPECTED.nbytes)
    transfers = transfers_of(checkpoint, base)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends at byte \d+, where 10 more should be"):
        send(gpu, transfers)


def test_a_closed_checkpoint(gpu: GpuBackend, checkpoint: Checkpoint) -> None:
    transfers = transfers_of(checkpoint, gpu.alloc(EXPECTED.nbytes))
    checkpoint.close()
    with pytest.raises(CheckpointError, match="cannot be read: I/O operation on closed file"):
        send(gpu, transfers)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), EOFError("ends")])
def test_what_fails_once_is_read_again(
    gpu: GpuBackend, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(spans: Any) -> None:
        raise error

    base = gpu.alloc(EXPECTED.nbytes)
    transfers = transfers_of(checkpoint, base)
    monkeypatch.setattr(gpu, "copy_files_h2d", fail)
    send(gpu, transfers)
    assert np.array_equal(download(gpu, base, EXPECTED), EXPECTED)
