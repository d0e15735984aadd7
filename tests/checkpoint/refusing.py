# SPDX-License-Identifier: MIT OR Apache-2.0
"""What tests of files that are refused share."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from metrale.checkpoint.torch_file import TorchFile
from metrale.errors import CheckpointError

SECONDS = 5.0
"""The most that any file may take to be refused, of the processor's time: a busy machine is no fault of the file."""


def refusal(path: Path) -> str:
    """Return why a file is refused, which must not take long."""
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path)
    assert time.process_time() - start < SECONDS
    return str(caught.value)
