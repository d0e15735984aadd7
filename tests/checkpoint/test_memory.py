# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading a large tensor by chunks keeps anonymous memory small. Linux only: it reads /proc and sets RLIMIT_DATA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.torch_files import Storage, Tensor, write_sparse_bin

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from Linux's /proc")

ROWS, COLUMNS = 102_400, 1024  # 400 MiB of float32
LIMIT = 200 << 20
HOLE = Storage(np.zeros(0, np.float32), claimed=ROWS * COLUMNS)

CHILD = """
import resource, sys
import numpy as np
from metrale.checkpoint import open_checkpoint

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

limit, chunked = int(sys.argv[2]), sys.argv[3] == "chunked"
before = status("RssAnon")
# RLIMIT_DATA bounds anonymous private mappings too: a copy of the whole tensor fails, however short-lived.
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit, resource.RLIM_INFINITY))
rows = grown = 0
with open_checkpoint(sys.argv[1]) as checkpoint:
    total = checkpoint.tensors["w"].rows
    for start, chunk in checkpoint.iter_chunks("w") if chunked else [(0, checkpoint.read_rows("w", 0, total))]:
        assert not np.any(chunk[:, 0]) and not np.any(chunk[:, -1])
        rows += len(chunk)
        grown = max(grown, status("RssAnon") - before)
print(rows, grown)
"""


def write_safetensors(folder: Path) -> None:
    """A checkpoint of zeros that takes no room on the disk: a header and a hole."""
    size = ROWS * COLUMNS * 4
    header = json.dumps({"w": {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)


def run_child(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(folder), str(LIMIT), how]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)


def write_bin_by_rows(folder: Path) -> None:
    write_sparse_bin(folder / "pytorch_model.bin", {"w": Tensor(HOLE, (ROWS, COLUMNS), (COLUMNS, 1))}, HOLE)


def write_bin_by_columns(folder: Path) -> None:
    """Each row is spread over the whole file."""
    write_sparse_bin(folder / "pytorch_model.bin", {"w": Tensor(HOLE, (ROWS, COLUMNS), (1, ROWS))}, HOLE)


@pytest.mark.parametrize("write", [write_safetensors, write_bin_by_rows, write_bin_by_columns])
def test_chunks_of_a_large_tensor_stay_within_the_limit(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    result = run_child(tmp_path, "chunked")
    assert result.returncode == 0, result.stderr
    rows, grown = map(int, result.stdout.split())
    assert rows == ROWS
    # At least one chunk of 64 MiB is seen, else nothing was measured; two are alive while a loop takes the next.
    assert 60 << 20 < grown < LIMIT


@pytest.mark.parametrize("write", [write_safetensors, write_bin_by_rows])
def test_the_limit_would_catch_a_copy_of_the_whole_tensor(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    result = run_child(tmp_path, "whole")
    assert result.returncode != 0
    assert "MemoryError" in result.stderr
