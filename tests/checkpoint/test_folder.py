# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checkpoint folders: single and sharded, read by rows, and every damage told apart."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from metrale.checkpoint import FLOAT_DTYPES, TensorInfo, open_checkpoint
from metrale.errors import CheckpointError, InvalidInput
from tests.checkpoint.arrays import Arrays, bits
from tests.checkpoint.torch_files import Storage, Tensor, write_bin

INDEX = "model.safetensors.index.json"


def write_single(folder: Path, arrays: Arrays) -> Path:
    save_file(arrays, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_shards(folder: Path, arrays: Arrays, placed: dict[str, object] | None = None) -> None:
    """Put tensors in two shards by turns; ``placed`` changes the index (None removes a name)."""
    weight_map: dict[str, object] = {}
    for shard in (0, 1):
        part = {name: array for at, (name, array) in enumerate(arrays.items()) if at % 2 == shard}
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    weight_map.update(placed or {})
    weight_map = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_every_tensor_reads_back_to_the_bit(tmp_path: Path, arrays: Arrays, sharded: bool) -> None:
    (write_shards if sharded else write_single)(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.path == tmp_path
        assert set(checkpoint.tensors) == set(arrays)
        names = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
        for name, array in arrays.items():
            assert checkpoint.tensors[name] == TensorInfo(name, array.shape, names[array.dtype])
            rows = checkpoint.read_rows(name, 0, checkpoint.tensors[name].rows)
            assert (rows.dtype, rows.shape, bits(rows)) == (array.dtype, array.shape, bits(array))
            assert not rows.flags.writeable


@pytest.mark.parametrize("max_bytes", [1, 39, 40, 1 << 20])
def test_chunks_are_consecutive_bounded_and_complete(tmp_path: Path, arrays: Arrays, max_bytes: int) -> None:
    write_single(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, array in arrays.items():
            at = 0
            for start, rows in checkpoint.iter_chunks(name, max_bytes):
                assert start == at
                count = len(rows) if rows.shape else 1
                assert bits(rows) == bits(array[start : start + count] if array.shape else array)
                assert rows.nbytes <= max_bytes or count == 1
                at += count
            assert at == checkpoint.tensors[name].rows


def test_rows_are_read_from_the_middle(tmp_path: Path, arrays: Arrays) -> None:
    write_single(tmp_path, arrays)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        for name in ("a", "b", "c", "vector"):
            assert bits(checkpoint.read_rows(name, 2, 5)) == bits(arrays[name][2:5])
        assert checkpoint.read_rows("a", 3, 3).shape == (0, 5)


def test_wrong_requests_are_refused(tmp_path: Path, arrays: Arrays) -> None:
    write_single(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        for start, stop in [(-1, 2), (3, 2), (0, 8)]:
            with pytest.raises(InvalidInput, match="0 <= start <= stop <= 7"):
                checkpoint.read_rows("a", start, stop)
        with pytest.raises(InvalidInput, match="scalar"):
            checkpoint.read_rows("scalar", 1, 1)
        with pytest.raises(InvalidInput, match="name: expected a tensor of this checkpoint, got zz"):
            checkpoint.read_rows("zz", 0, 1)
        with pytest.raises(InvalidInput, match="max_bytes"):
            next(checkpoint.iter_chunks("a", 0))


def test_elements_are_read_into_what_is_there(tmp_path: Path, arrays: Arrays) -> None:
    """Across rows, in C order, by several threads at a time."""
    write_single(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint, ThreadPoolExecutor(8) as threads:
        for name, info in checkpoint.tensors.items():
            flat, read = arrays[name].reshape(-1), checkpoint.reader(name)

            def same(place: tuple[int, int], flat: Any = flat, read: Any = read) -> bool:
                out = np.empty(place[1], flat.dtype)
                read(place[0], out)
                return bits(out) == bits(flat[place[0] : place[0] + place[1]])

            places = [(start, count) for start in range(flat.size + 1) for count in range(flat.size + 1 - start)]
            assert all(threads.map(same, places))
            assert flat.size == info.rows * info.row_elements


@pytest.mark.parametrize("form", ["single", "sharded", "torch"])
def test_where_tensors_are_stored(tmp_path: Path, arrays: Arrays, form: str) -> None:
    """The bytes at a tensor's place are its elements, and a view that has them in another order has no place."""
    if form == "torch":
        whole = Storage(np.arange(24, dtype=np.float32))
        views = {
            "part": Tensor(whole, (2, 3), (3, 1), 5),
            "turned": Tensor(whole, (3, 2), (1, 3)),
            "row": Tensor(whole, (1, 4), (99, 1), 20),
        }
        write_bin(tmp_path / "pytorch_model.bin", {**arrays, **views})
        arrays = {**arrays, "part": whole.values[5:11], "row": whole.values[20:]}
    else:
        (write_shards if form == "sharded" else write_single)(tmp_path, arrays)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, array in arrays.items():
            place = checkpoint.stored_at(name)
            assert place is not None
            found = np.empty(array.nbytes, np.uint8)
            place.file.read(place.offset, found)
            assert found.tobytes() == bits(array)
        if form == "torch":
            assert checkpoint.stored_at("turned") is None
        with pytest.raises(InvalidInput, match="name: expected a tensor of this checkpoint, got zz"):
            checkpoint.stored_at("zz")
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.stored_at("a")
    assert place is not None
    with pytest.raises(CheckpointError, match="cannot be read: I/O operation on closed file"):
        place.file.fileno()


def test_wrong_elements_are_refused(tmp_path: Path, arrays: Arrays) -> None:
    write_single(tmp_path, arrays)
    checkpoint = open_checkpoint(tmp_path)
    read, kind = checkpoint.reader("a"), arrays["a"].dtype
    for start, count in ((-1, 2), (34, 2), (36, 0)):
        with pytest.raises(InvalidInput, match="start: expected a range inside the 35 elements of 'a'"):
            read(start, np.empty(count, kind))
    for out in (np.empty(2, np.int8), np.empty((2, 1), kind), np.empty(4, kind)[::2]):
        with pytest.raises(InvalidInput, match="out: expected one contiguous axis"):
            read(0, out)
    with pytest.raises(InvalidInput, match="name: expected a tensor of this checkpoint, got zz"):
        checkpoint.reader("zz")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(0, np.empty(2, kind))


def test_a_file_that_shrinks_is_an_error_and_no_crash(tmp_path: Path, arrays: Arrays) -> None:
    write_single(tmp_path, arrays)
    path = tmp_path / "model.safetensors"
    with open_checkpoint(tmp_path) as checkpoint:
        places = {name: path.read_bytes().rfind(array.tobytes()) for name, array in arrays.items() if array.size}
        last = max(places, key=lambda name: places[name])
        read = checkpoint.reader(last)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=r"ends at byte \d+, where 1 more should be"):
            read(0, np.empty(arrays[last].size, arrays[last].dtype))


def test_a_closed_checkpoint_keeps_what_was_read(tmp_path: Path, arrays: Arrays) -> None:
    write_single(tmp_path, arrays)
    checkpoint = open_checkpoint(tmp_path)
    rows = checkpoint.read_rows("a", 0, 7)
    checkpoint.close()
    checkpoint.close()
    assert bits(rows) == bits(arrays["a"])
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        checkpoint.read_rows("a", 0, 1)


def test_other_dtypes_are_described_but_not_read(tmp_path: Path) -> None:
    write_single(tmp_path, {"i": np.zeros(2, np.int64), "q": np.zeros(2, ml_dtypes.float8_e4m3fn)})
    with open_checkpoint(tmp_path) as checkpoint:
        assert {name: info.dtype for name, info in checkpoint.tensors.items()} == {"i": "i64", "q": "f8_e4m3"}
        with pytest.raises(CheckpointError, match="'i' has dtype i64; only f32, f16, bf16, f64 are read"):
            checkpoint.read_rows("i", 0, 1)


def test_with_both_forms_the_single_file_is_taken(tmp_path: Path, arrays: Arrays) -> None:
    write_shards(tmp_path, arrays)
    write_single(tmp_path, {"only": arrays["a"]})
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == {"only"}


def test_symbolic_links_of_a_download_cache_are_followed(tmp_path: Path, arrays: Arrays) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_shards(blobs, arrays)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    with open_checkpoint(snapshot) as checkpoint:
        assert set(checkpoint.tensors) == set(arrays)


def refused(path: Path, *reasons: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for reason in reasons:
        assert reason in str(caught.value)
    return caught.value


def test_folders_without_readable_weights(tmp_path: Path) -> None:
    refused(tmp_path / "missing", "there is no such folder")
    refused(tmp_path, "is an empty folder")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "expected model.safetensors or model.safetensors.index.json")
    refused(tmp_path / "config.json", "is a file, expected the folder")
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors: is not a regular file")
    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    refused(tmp_path, "model.safetensors: there is no such file")
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would block
    refused(tmp_path, "model.safetensors: is not a regular file")


def test_damaged_files(tmp_path: Path, arrays: Arrays) -> None:
    path = write_single(tmp_path, arrays)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    damages = {
        b"": "is an empty file",
        whole[:5]: "not a complete safetensors file (5 bytes)",
        whole[: 8 + header // 2]: "not a complete safetensors file",
        whole[:-1]: "not a complete safetensors file",
        whole + b"\0": "not a complete safetensors file",
        whole[:8] + b"x" * header + whole[8 + header :]: "not a complete safetensors file",
        b"\xff" * 8 + whole[8:]: "not a complete safetensors file",
        whole.replace(b"[7,5]", b"[8,5]", 1): "not a complete safetensors file",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n": "is a Git LFS pointer",
    }
    assert len(damages) == 9
    for damaged, reason in damages.items():
        path.write_bytes(damaged)
        assert len(refused(tmp_path, str(path), reason).problems) == 1


def test_random_damage_to_the_header_is_an_error_or_harmless(tmp_path: Path, arrays: Arrays) -> None:
    path = write_single(tmp_path, arrays)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(11)
    refusals = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(end)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            with open_checkpoint(tmp_path) as checkpoint:
                for name, info in checkpoint.tensors.items():
                    if info.dtype in FLOAT_DTYPES:
                        assert checkpoint.read_rows(name, 0, info.rows).shape == info.shape
        except CheckpointError:
            refusals += 1
    assert refusals > 100


@pytest.mark.parametrize(
    "shard", ["/etc/x", "../x", "a/../../x", "..", "", ".", "a\\x", "C:x", "x\0", 3, None, ["x"]], ids=repr
)
def test_an_index_cannot_leave_the_folder(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(tmp_path, "is not the name of a file inside the folder")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": None}], ids=repr)
def test_an_index_without_a_map(tmp_path: Path, index: dict[str, object]) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    refused(tmp_path, INDEX, "weight_map: expected an object")


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    refused(tmp_path, INDEX, "not valid JSON")


def test_index_and_shards_must_agree(tmp_path: Path, arrays: Arrays) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_shards(tmp_path, arrays, {"a": second, "b": None, "ghost": first, "lost": "missing.safetensors"})
    error = refused(tmp_path)
    assert sorted(error.problems) == sorted(
        [
            f"{INDEX} places 'a' in \"{second}\", which lacks it",
            f"{INDEX} places 'ghost' in \"{first}\", which lacks it",
            f"\"{first}\" holds 'a', which {INDEX} does not place there",
            f"\"{second}\" holds 'b', which {INDEX} does not place there",
            '"missing.safetensors": there is no such file',
        ]
    )


def test_shards_may_lie_in_a_folder_inside(tmp_path: Path, arrays: Arrays) -> None:
    (tmp_path / "parts").mkdir()
    save_file({"a": arrays["a"]}, tmp_path / "parts" / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "parts/one.safetensors"}}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert bits(checkpoint.read_rows("a", 0, 7)) == bits(arrays["a"])


def test_a_truncated_shard_is_named(tmp_path: Path, arrays: Arrays) -> None:
    write_shards(tmp_path, arrays)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    refused(tmp_path, '"model-00002-of-00002.safetensors": is not a complete safetensors file')


def test_a_header_of_more_than_eight_megabytes(tmp_path: Path) -> None:
    """It is refused by its length, and one that is not all there as what it is: cut."""
    limit = 8 << 20
    for length, size, reason in (
        (limit, limit, "is not a complete safetensors file"),
        (limit + 1, limit + 1, f"has a header of {limit + 1} bytes, and at most {limit} are read"),
        (limit + 1, limit, "is not a complete safetensors file"),
    ):
        path = tmp_path / "model.safetensors"
        with path.open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(8 + size)
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "path", ["", b"folder", 3, None, ["folder"], type("P", (), {"__fspath__": lambda self: b"x"})()]
)
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(InvalidInput, match="path: expected the path of a folder, got"):
        open_checkpoint(path)


def test_a_link_to_a_device_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_checkpoint(tmp_path)
