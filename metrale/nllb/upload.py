# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sending many tensors to the device: those that a file has as they are needed, and those that have to be made."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_runtime.backend import GpuBackend
from metrale.nllb.staging import Staging, Transfer


def send(gpu: GpuBackend, transfers: Sequence[Transfer]) -> None:
    """Send all of it; on return it is on the device, whatever the stream that reads it, and no copy runs any more.

    Raises
    ------
    CheckpointError
        When a file is not what it was any more, or a value does not fit the target type. Some of it was sent.
    OutOfMemory, DeviceError
    """
    spans = [
        (one.stored.file.fileno(), one.stored.offset, one.nbytes, one.at) for one in transfers if one.stored is not None
    ]
    made = [one for one in transfers if one.stored is None]
    try:
        gpu.copy_files_h2d(spans)
    except (EOFError, OSError):
        made = list(transfers)  # what reads the file that is to blame says why
    with Staging(gpu, sum(one.nbytes for one in made)) as staging:
        staging.send(made)
