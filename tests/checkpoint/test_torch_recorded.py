# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files that PyTorch itself saved, recorded from two versions, and saved anew where PyTorch is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from metrale.checkpoint import FLOAT_DTYPES, open_checkpoint
from metrale.checkpoint.torch_file import TorchFile
from metrale.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data" / "torch"
VERSIONS = ("1.13", "2.13")

ROW = np.arange(24, dtype=np.float32)
GRID = ROW.reshape(4, 6)
VALUES: dict[str, NDArray[Any]] = {
    "weight": ROW[:6].reshape(2, 3),
    "bias": np.array([0.5, -2], np.float32),
    "shared": GRID,
    "rows": GRID[1:3],
    "transposed": GRID.T,
    "columns": GRID[:, 1::2],
    "cube": ROW.reshape(2, 3, 4).transpose(2, 0, 1),
    "expanded": np.array([[1] * 5, [2] * 5], np.float32),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "float64": ROW[:6].astype(np.float64) / 4,
    "float16": (ROW[:6] / 4).astype(np.float16),
    "bfloat16": (ROW[:6] / 4).astype(ml_dtypes.bfloat16),
    "parameter": ROW[:2],
    "parameter_with_state": ROW[:2],
    "tensor_with_state": ROW[:2],
}
DESCRIBED = {
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
    "complex128": "c128",
}
SINCE_2_1 = {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2", "uint16": "u16"}


def check(folder: Path, described: dict[str, str]) -> None:
    with open_checkpoint(folder) as checkpoint:
        others = {name: info.dtype for name, info in checkpoint.tensors.items() if name not in VALUES}
        assert others == described
        names = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
        for name, values in VALUES.items():
            info = checkpoint.tensors[name]
            assert (info.shape, info.dtype) == (values.shape, names[values.dtype])
            for start in range(info.rows):
                for stop in range(start + 1, info.rows + 1):
                    rows = checkpoint.read_rows(name, start, stop)
                    assert rows.dtype == values.dtype
                    np.testing.assert_array_equal(rows, values[start:stop] if values.shape else values)
        with pytest.raises(CheckpointError, match="tensor 'int64' has dtype i64"):
            checkpoint.read_rows("int64", 0, 1)


@pytest.mark.parametrize("form", ["", "-protocol4"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_file(tmp_path: Path, version: str, form: str) -> None:
    (tmp_path / "pytorch_model.bin").symlink_to(DATA / f"{version}{form}.bin")
    check(tmp_path, DESCRIBED | (SINCE_2_1 if version > "2" else {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_form_before_1_6_is_refused_with_advice(version: str) -> None:
    with pytest.raises(CheckpointError, match=r"before version 1\.6, which is not read; save it anew"):
        TorchFile(DATA / f"{version}-legacy.bin")


def test_what_the_installed_pytorch_saves(tmp_path: Path) -> None:
    torch = pytest.importorskip(
        "torch", reason="asks PyTorch, where it is installed; what it saved once is always read"
    )
    from tests.record.record_torch import everything

    torch.save(everything(), tmp_path / "pytorch_model.bin")
    check(tmp_path, DESCRIBED | SINCE_2_1)


def test_what_the_tests_write_is_what_the_installed_pytorch_reads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="asks PyTorch, where it is installed, to read what the tests write")
    from tests.checkpoint.torch_files import write_bin

    exact = {name: np.ascontiguousarray(values) for name, values in VALUES.items() if name != "bfloat16"}
    write_bin(tmp_path / "a.bin", exact)
    state = torch.load(tmp_path / "a.bin", weights_only=True, mmap=True)
    assert set(state) == set(exact)
    for name, values in exact.items():
        np.testing.assert_array_equal(state[name].numpy(), values)
