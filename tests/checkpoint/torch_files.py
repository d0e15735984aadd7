# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes files as ``torch.save`` does, without PyTorch: sound ones, and ones that no ``torch.save`` would write.

`write_bin` takes arrays, or `Tensor` for views of storages; its parts (`pickled`, `write_archive`, `Pickle`) make the
rest.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

STORAGES: Mapping[np.dtype[Any], str] = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.int16): "ShortStorage",
    np.dtype(np.int8): "CharStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
    np.dtype(np.complex64): "ComplexFloatStorage",
    np.dtype(np.complex128): "ComplexDoubleStorage",
}
"""The class of storages that PyTorch writes for an element type."""

UNTYPED: Mapping[np.dtype[Any], str] = {
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn",
    np.dtype(ml_dtypes.float8_e5m2): "float8_e5m2",
    np.dtype(np.uint16): "uint16",
    np.dtype(np.uint32): "uint32",
    np.dtype(np.uint64): "uint64",
}
"""Element types whose storages are bytes, with the name of the dtype."""

ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Storage:
    """A row of elements, which several tensors may view: an array of one axis.

    ``claimed`` is the number of elements that the pickle says, if not the true one; ``key`` the name of the entry.
    """

    values: NDArray[Any]
    claimed: int | None = None
    key: str | None = None


@dataclass(frozen=True, eq=False)
class Tensor:
    """A view of a storage; numbers count elements. ``metadata`` is what conjugated tensors have behind the hooks."""

    storage: Storage
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int = 0
    parameter: bool = False
    metadata: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Global:
    """A name, as the pickle's opcode has it."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """A call, as REDUCE makes it."""

    function: object
    arguments: object


@dataclass(frozen=True, eq=False)
class Raw:
    """Opcodes as they are, which leave one value on the stack."""

    opcodes: bytes


def view(array: NDArray[Any], storage: Storage | None = None) -> Tensor:
    """Return a tensor of an array's values: contiguous, in a storage of its own, or one that begins ``storage``."""
    flat = np.ascontiguousarray(array)
    strides = [stride // array.itemsize for stride in flat.strides] if array.ndim else []
    return Tensor(storage or Storage(flat.reshape(-1)), array.shape, strides)


class Pickle:
    """Writes a pickle as protocol 2 does; with ``memo``, what comes again is taken from it, as in PyTorch's pickles."""

    def __init__(self, *, memo: bool = True) -> None:
        self._remembers = memo
        self._parts: list[bytes] = [b"\x80\x02"]
        self._memo: dict[object, int] = {}
        self.storages: dict[str, NDArray[Any]] = {}
        self._keys: dict[int, str] = {}
        self._kept: list[Storage] = []  # ids stay taken

    def dump(self, value: object) -> bytes:
        """Return the pickle of a value."""
        self._put(value)
        return b"".join([*self._parts, b"."])

    def _put(self, value: object) -> None:
        add = self._parts.append
        match value:
            case Raw():
                add(value.opcodes)
            case None:
                add(b"N")
            case bool():
                add(b"\x88" if value else b"\x89")
            case int():
                self._integer(value)
            case float():
                add(b"G" + struct.pack(">d", value))
            case str():
                text = value.encode("utf-8", "surrogatepass")
                self._once(value, b"X" + struct.pack("<I", len(text)) + text)
            case Global():
                self._once(value, f"c{value.module}\n{value.name}\n".encode())
            case Call():
                self._put(value.function)
                self._put(value.arguments)
                add(b"R")
            case tuple():
                add(b"(")
                for item in value:
                    self._put(item)
                add(b"t")
            case list():
                add(b"](")
                for item in value:
                    self._put(item)
                add(b"e")
            case Tensor():
                self._tensor(value)
            case Mapping():
                add(b"}(")
                for key, item in value.items():
                    self._put(key)
                    self._put(item)
                add(b"u")
            case _:
                raise TypeError(f"nothing is written for {type(value)}")

    def _once(self, value: object, opcodes: bytes) -> None:
        if value in self._memo:
            self._parts.append(b"j" + struct.pack("<I", self._memo[value]))
            return
        if not self._remembers:
            self._parts.append(opcodes)
            return
        self._memo[value] = len(self._memo)
        self._parts.append(opcodes + b"r" + struct.pack("<I", self._memo[value]))

    def _integer(self, value: int) -> None:
        if 0 <= value < 256:
            self._parts.append(b"K" + bytes([value]))
        elif -(1 << 31) <= value < 1 << 31:
            self._parts.append(b"J" + struct.pack("<i", value))
        else:
            size = value.bit_length() // 8 + 1
            self._parts.append(b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True))

    def _tensor(self, tensor: Tensor) -> None:
        untyped = UNTYPED.get(tensor.storage.values.dtype)
        function = Global("torch._utils", "_rebuild_tensor_v2" if untyped is None else "_rebuild_tensor_v3")
        hooks = Call(Global("collections", "OrderedDict"), ())
        arguments = [self._reference(tensor.storage), tensor.offset, tuple(tensor.shape), tuple(tensor.strides)]
        arguments += [False, hooks]
        if untyped is not None:
            arguments.append(Global("torch", untyped))
        if tensor.metadata is not None:
            arguments.append(tensor.metadata)
        built = Call(function, tuple(arguments))
        if tensor.parameter:
            built = Call(Global("torch._utils", "_rebuild_parameter"), (built, True, hooks))
        self._put(built)

    def _reference(self, storage: Storage) -> Raw:
        """The persistent id of a storage, which is noted with its values."""
        values = storage.values
        key = self._keys.setdefault(id(storage), storage.key or str(len(self._keys)))
        self._kept.append(storage)
        self.storages[key] = values
        if values.dtype in UNTYPED:
            kind, elements = Global("torch.storage", "UntypedStorage"), values.nbytes
        else:
            kind, elements = Global("torch", STORAGES[values.dtype]), values.size
        if storage.claimed is not None:
            elements = storage.claimed
        return Raw(self.opcodes(("storage", kind, key, "cpu", elements)) + b"Q")

    def opcodes(self, value: object) -> bytes:
        """Return what puts a value on the stack."""
        parts, self._parts = self._parts, []
        self._put(value)
        opcodes = b"".join(self._parts)
        self._parts = parts
        return opcodes


def pickled(tensors: Mapping[Any, object], *, metadata: bool = True) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """Return the pickle of a state dict and its storages by key: an OrderedDict, whose attributes are its versions.

    Parameters
    ----------
    tensors : mapping of str to ndarray, Tensor, Call, Raw or plain value
    metadata : bool
        False for a dictionary without attributes.
    """
    values = {name: view(value) if isinstance(value, np.ndarray) else value for name, value in tensors.items()}
    pickle = Pickle()
    if not metadata:
        return pickle.dump(values), pickle.storages
    state = pickle.opcodes(Call(Global("collections", "OrderedDict"), ()))
    state += pickle.opcodes(values)[1:]  # without EMPTY_DICT: the items go into the OrderedDict
    state += pickle.opcodes({"_metadata": {"": {"version": 1}}}) + b"b"
    return pickle.dump(Raw(state)), pickle.storages


def write_archive(
    path: Path,
    entries: Iterable[tuple[str, bytes | memoryview]],
    *,
    root: str = "archive",
    compression: int = zipfile.ZIP_STORED,
    align: int = ALIGNMENT,
    zip64: bool = False,
) -> None:
    """Write a zip archive with every entry's bytes at a multiple of ``align``, as PyTorch does.

    Parameters
    ----------
    path : Path
    entries : pairs of a name, without the root, and bytes
    root : str
        The folder in the archive that everything is in.
    compression : int
        Of `zipfile`.
    align : int
    zip64 : bool
        Whether to write every size in the 64-bit form, as PyTorch does for large ones.
    """
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries:
            info = zipfile.ZipInfo(f"{root}/{name}")
            info.compress_type = compression
            size = 30 + len(info.filename.encode()) + (20 if zip64 else 0)
            assert archive.fp is not None
            padding = -(archive.fp.tell() + size + 4) % align
            info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
            with archive.open(info, "w", force_zip64=zip64) as file:
                file.write(data)


def write_bin(
    path: Path,
    tensors: Mapping[str, Any],
    *,
    root: str = "archive",
    byteorder: str | None = "little",
    metadata: bool = True,
    compression: int = zipfile.ZIP_STORED,
    zip64: bool = False,
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Write ``tensors`` as ``torch.save(state_dict, path)`` does.

    Parameters
    ----------
    path : Path
        The file, for example ``folder / "pytorch_model.bin"``.
    tensors : mapping of str to ndarray or other
        Arrays of any element type in `STORAGES` or `UNTYPED` are contiguous tensors, each in a storage of its own.
        `Tensor` is a view; several may have one storage. `Call`, `Raw` and plain values are written as they are.
    root : str
        The folder in the archive; PyTorch takes the file's name, or ``archive``.
    byteorder : str or None
        What the entry of this name says; PyTorch before 2.1 wrote none.
    metadata : bool
        Whether it is an OrderedDict with versions, as of a module, or a bare dictionary.
    compression, zip64
        See `write_archive`.
    more : mapping of str to bytes
        Entries that are written besides, or in the place of others.
    """
    data, storages = pickled(tensors, metadata=metadata)
    entries: dict[str, bytes | memoryview] = {"data.pkl": data}
    if byteorder is not None:
        entries["byteorder"] = byteorder.encode()
    for key, values in storages.items():
        entries[f"data/{key}"] = np.ascontiguousarray(values).view(np.uint8).data
    entries["version"] = b"3\n"
    entries.update(more or {})
    write_archive(path, entries.items(), root=root, compression=compression, zip64=zip64)


def write_bin_shards(folder: Path, tensors: Mapping[str, Any], count: int = 2) -> None:
    """Write ``pytorch_model-0000N-of-0000M.bin`` by turns, and their index."""
    placed = {}
    for shard in range(count):
        name = f"pytorch_model-{shard + 1:05}-of-{count:05}.bin"
        part = {key: value for at, (key, value) in enumerate(tensors.items()) if at % count == shard}
        write_bin(folder / name, part)
        placed.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def write_sparse_bin(path: Path, tensors: Mapping[str, Any], hole: Storage) -> None:
    """Write a file in which a large storage, of as many elements as ``hole`` claims, is a hole: zeros without room.

    `zipfile` writes the header before the hole, and the list of entries behind it.
    """
    data, storages = pickled(tensors)
    key = next(key for key, values in storages.items() if values is hole.values)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        info = zipfile.ZipInfo(f"archive/data/{key}")
        assert hole.claimed is not None
        info.file_size = info.compress_size = hole.claimed * hole.values.itemsize
        info.CRC = 0
        assert archive.fp is not None
        info.header_offset = archive.fp.tell()
        archive.fp.write(info.FileHeader())
        archive.fp.seek(info.file_size, os.SEEK_CUR)
        archive.filelist.append(info)
        archive.start_dir = archive.fp.tell()
        for other, values in storages.items():
            if other != key:
                archive.writestr(f"archive/data/{other}", values.tobytes())
