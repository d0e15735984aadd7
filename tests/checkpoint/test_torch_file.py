# SPDX-License-Identifier: MIT OR Apache-2.0
"""``pytorch_model.bin``, single and sharded: every view reads back, and of several forms the right one is taken."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from metrale.checkpoint import FLOAT_DTYPES, TensorInfo, open_checkpoint
from metrale.errors import CheckpointError
from tests.checkpoint.arrays import Arrays, bits
from tests.checkpoint.torch_files import Storage, Tensor, write_bin, write_bin_shards, write_sparse_bin

BIN, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def refused(path: Path, *reasons: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for reason in reasons:
        assert reason in str(caught.value)


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("metadata", [False, True])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_every_tensor_reads_back_to_the_bit(
    tmp_path: Path, arrays: Arrays, sharded: bool, metadata: bool, zip64: bool
) -> None:
    if sharded:
        write_bin_shards(tmp_path, arrays)
    else:
        write_bin(tmp_path / BIN, arrays, metadata=metadata, zip64=zip64)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert set(checkpoint.tensors) == set(arrays)
        names = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
        for name, array in arrays.items():
            assert checkpoint.tensors[name] == TensorInfo(name, array.shape, names[array.dtype])
            rows = checkpoint.read_rows(name, 0, checkpoint.tensors[name].rows)
            assert (rows.dtype, rows.shape, bits(rows)) == (array.dtype, array.shape, bits(array))
            assert not rows.flags.writeable
            assert b"".join(bits(chunk) for _, chunk in checkpoint.iter_chunks(name, 40)) == bits(array)


@pytest.mark.parametrize("options", [{"byteorder": None}, {"root": "pytorch_model"}, {"root": "a b é"}])
def test_what_versions_write_differently(tmp_path: Path, arrays: Arrays, options: dict[str, Any]) -> None:
    write_bin(tmp_path / BIN, arrays, more={".format_version": b"1", ".data/serialization_id": b"0" * 40}, **options)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(arrays)


def test_tensors_of_one_storage(tmp_path: Path) -> None:
    """Tied matrices, and views of parts, whose elements are stored once."""
    values = np.random.default_rng(5).standard_normal(60).astype(np.float32)
    storage = Storage(values)
    write_bin(
        tmp_path / BIN,
        {
            "all": Tensor(storage, (6, 10), (10, 1)),
            "tied": Tensor(storage, (6, 10), (10, 1), parameter=True),
            "part": Tensor(storage, (2, 10), (10, 1), offset=25),
            "turned": Tensor(storage, (10, 6), (1, 10)),
            "last": Tensor(storage, (1,), (1,), offset=59),
        },
    )
    with zipfile.ZipFile(tmp_path / BIN) as archive:
        assert [name for name in archive.namelist() if "/data/" in name] == ["archive/data/0"]
    with open_checkpoint(tmp_path) as checkpoint:
        expected = {
            "all": values.reshape(6, 10),
            "tied": values.reshape(6, 10),
            "part": values[25:45].reshape(2, 10),
            "turned": values.reshape(6, 10).T,
            "last": values[59:],
        }
        for name, array in expected.items():
            np.testing.assert_array_equal(checkpoint.read_rows(name, 0, len(array)), array)


def test_other_dtypes_are_described_but_not_read(tmp_path: Path) -> None:
    others = {
        "i": np.zeros(2, np.int64),
        "q": np.zeros(2, ml_dtypes.float8_e4m3fn),
        "u": np.zeros(2, np.uint16),
        "z": np.zeros(2, np.complex64),
        "b": np.zeros(2, np.bool_),
    }
    write_bin(tmp_path / BIN, others)
    with open_checkpoint(tmp_path) as checkpoint:
        dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
        assert dtypes == {"i": "i64", "q": "f8_e4m3", "u": "u16", "z": "c64", "b": "bool"}
        for name in others:
            with pytest.raises(CheckpointError, match=r"has dtype .*; only f32, f16, bf16, f64 are read"):
                checkpoint.read_rows(name, 0, 1)


def test_plain_values_are_left_aside(tmp_path: Path, arrays: Arrays) -> None:
    plain: dict[Any, Any] = {
        "epoch": 3,
        "loss": 0.5,
        "name": "é",
        "none": None,
        "list": [1, [2]],
        "settings": {"a": {"b": 1}},
        7: 8,
    }
    write_bin(tmp_path / BIN, plain | arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(arrays)


def test_a_dictionary_in_the_dictionary_is_refused(tmp_path: Path, arrays: Arrays) -> None:
    inner = {"w": Tensor(Storage(np.zeros(4, np.float32)), (4,), (1,))}
    write_bin(tmp_path / BIN, {"state_dict": inner, "optimizer": inner, "epoch": 1, **arrays})
    refused(
        tmp_path,
        "holds a dictionary of tensors under 'state_dict', expected one alone",
        "holds a dictionary of tensors under 'optimizer'",
    )


FORMS = ("model.safetensors", "model.safetensors.index.json", BIN, INDEX)


@pytest.mark.parametrize("best", FORMS)
def test_of_several_forms_the_one_that_transformers_takes(tmp_path: Path, best: str) -> None:
    """Each form has a tensor that is named after it."""
    one = np.zeros(1, np.float32)
    for form in FORMS[FORMS.index(best) :]:
        shard = "shard.safetensors" if "safetensors" in form else "shard.bin"
        if form.endswith("json"):
            (tmp_path / form).write_text(json.dumps({"weight_map": {form: shard}}))
        target = tmp_path / (shard if form.endswith("json") else form)
        if "safetensors" in form:
            save_file({form: one}, target)
        else:
            write_bin(target, {form: one})
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {best}


def test_shards_that_disagree_with_their_index(tmp_path: Path, arrays: Arrays) -> None:
    write_bin_shards(tmp_path, arrays)
    index = json.loads((tmp_path / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {"a": second, "ghost": first, "lost": "missing.bin"}
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(
        tmp_path,
        f"{INDEX} places 'a' in \"{second}\", which lacks it",
        f"\"{first}\" holds 'a', which {INDEX} does not place there",
        f"{INDEX} places 'ghost' in",
        '"missing.bin": there is no such file',
    )
    for name in ("../outside.bin", "/etc/passwd", ""):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        refused(tmp_path, "is not the name of a file inside the folder")


def test_shards_without_an_index_are_no_checkpoint(tmp_path: Path, arrays: Arrays) -> None:
    write_bin_shards(tmp_path, arrays)
    (tmp_path / INDEX).unlink()
    refused(tmp_path, "holds no weights: expected model.safetensors or", f"{BIN} or {INDEX}")


def test_a_closed_checkpoint_keeps_what_was_read(tmp_path: Path, arrays: Arrays) -> None:
    write_bin(tmp_path / BIN, arrays)
    checkpoint = open_checkpoint(tmp_path)
    rows = checkpoint.read_rows("a", 0, 7)
    checkpoint.close()
    checkpoint.close()
    assert bits(rows) == bits(arrays["a"])
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        checkpoint.read_rows("a", 0, 1)


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path, arrays: Arrays) -> None:
    """A mapped file would end the process here."""
    write_bin(tmp_path / BIN, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        os.truncate(tmp_path / BIN, 100)
        with pytest.raises(CheckpointError, match="ends at byte"):
            checkpoint.read_rows("d", 0, 7)


def test_places_beyond_four_gib(tmp_path: Path) -> None:
    """A hole of more than 4 GiB, with a tensor behind it: both have their 64-bit form in the list of entries."""
    rows = (1 << 20) + 3
    hole = Storage(np.zeros(0, np.float32), claimed=rows * 1024)
    last = np.arange(6, dtype=np.float32)
    write_sparse_bin(tmp_path / BIN, {"hole": Tensor(hole, (rows, 1024), (1024, 1)), "last": last}, hole)
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read_rows("last", 0, 6), last)
        assert not checkpoint.read_rows("hole", rows - 2, rows).any()


def test_reads_that_come_in_pieces(tmp_path: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may read less than it is asked for, as it does of more than 2 GiB."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, position: whole(fd, [buffers[0][:7]], position))
    write_bin(tmp_path / BIN, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        assert bits(checkpoint.read_rows("d", 0, 7)) == bits(arrays["d"])
