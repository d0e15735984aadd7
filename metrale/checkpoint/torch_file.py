# SPDX-License-Identifier: MIT OR Apache-2.0
"""One file of ``torch.save`` in its zip form, read by rows without PyTorch.

Its list of entries and ``data.pkl`` are read when it is opened, elements from their places in the file when they are
asked for. Checksums of the archive are not looked at, as PyTorch does not when it maps a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint import strided
from metrale.checkpoint.file_bytes import FilePlace
from metrale.checkpoint.paths import is_lfs_pointer, require_file
from metrale.checkpoint.pickle_machine import RefusedPickle
from metrale.checkpoint.stored_zip import StoredZip
from metrale.checkpoint.strided import Strided
from metrale.checkpoint.tensor import Reader, TensorInfo
from metrale.checkpoint.torch_pickle import ITEMSIZES, StoredTensor, read_state
from metrale.errors import CheckpointError

SINGLE: Final = "pytorch_model.bin"
INDEX: Final = "pytorch_model.bin.index.json"
MAX_PICKLE_BYTES: Final = 4 << 20
"""Largest ``data.pkl`` that is read; a tensor takes about 100 bytes of it."""
EXPANDED_BYTES: Final = 64 << 20
"""A view that repeats elements may be larger than its file, but only up to this."""

_ZIP: Final = b"PK\x03\x04"
_LEGACY: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_TAR_AT: Final = 257
_TAR: Final = b"ustar"
_PICKLE: Final = "data.pkl"
_RESAVE: Final = "save it anew with PyTorch 1.6 or later: torch.save(torch.load(path, weights_only=True), new_path)"


class TorchFile:
    """An open file of ``torch.save``.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    CheckpointError
        When the file is missing, damaged, of another format, or holds anything but tensors and plain values.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        require_file(path)
        _require_zip(path)
        self._zip = StoredZip(path)
        try:
            self._stored = self._describe()
        except BaseException:
            self._zip.close()
            raise
        self._tensors = {
            name: TensorInfo(name, stored.view.shape, stored.dtype) for name, (stored, _) in self._stored.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the file by name."""
        return MappingProxyType(self._tensors)

    def reader(self, name: str) -> Reader:
        """Return what fills an array with elements from a place on, in C order; the arguments must be right."""
        stored, position = self._stored[name]
        view, itemsize, read_bytes = stored.view, ITEMSIZES[stored.dtype], self._zip.bytes.read

        def read_run(first: int, out: NDArray[Any]) -> None:
            read_bytes(position + first * itemsize, out.view(np.uint8))

        return lambda start, out: strided.read(view, start, out, read_run)

    def stored_at(self, name: str) -> FilePlace | None:
        """Return where the tensor's elements are, one after another in C order; None when they are not."""
        stored, position = self._stored[name]
        if not stored.view.contiguous:
            return None
        return FilePlace(self._zip.bytes, position + stored.view.offset * ITEMSIZES[stored.dtype])

    def place(self, name: str) -> tuple[str, Strided, int]:
        """Return element type, view and storage, which tensors share that PyTorch saved as one."""
        stored, position = self._stored[name]
        return stored.dtype, stored.view, position

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self._zip.close()

    def _describe(self) -> dict[str, tuple[StoredTensor, int]]:
        """Return each tensor with the place of its storage in the file."""
        root = self._root()
        self._require_little_endian(root)
        try:
            tensors, problems = read_state(self._zip.read(root + _PICKLE, MAX_PICKLE_BYTES))
        except RefusedPickle as error:
            raise CheckpointError(self.path, f"{_PICKLE} {error}") from None
        placed = {}
        for name, stored in tensors.items():
            entry = self._zip.entries.get(f"{root}data/{stored.storage.key}")
            needed = stored.view.volume * ITEMSIZES[stored.dtype]
            if entry is None:
                problems.append(f"tensor {name!r}: the archive lacks its storage {stored.storage.key!r}")
            elif entry.size != stored.storage.nbytes:
                problems.append(
                    f"tensor {name!r}: its storage has {entry.size} bytes, expected {stored.storage.nbytes}"
                )
            elif needed > max(self._zip.size, EXPANDED_BYTES):
                problems.append(f"tensor {name!r}: {needed} bytes by its shape, in a file of {self._zip.size}")
            else:
                placed[name] = (stored, entry.start)
        if problems:
            raise CheckpointError(self.path, problems)
        return placed

    def _root(self) -> str:
        """Return the folder of the archive that holds everything, with its slash."""
        roots = [name.removesuffix(_PICKLE) for name in self._zip.entries if name.endswith(f"/{_PICKLE}")]
        roots = [root for root in roots if root.count("/") == 1]
        if len(roots) != 1:
            raise CheckpointError(
                self.path, f"is an archive with {len(roots)} {_PICKLE}, expected one, as torch.save writes"
            )
        if f"{roots[0]}constants.pkl" in self._zip.entries:
            raise CheckpointError(self.path, "is a TorchScript archive, a program, expected a state dict")
        return roots[0]

    def _require_little_endian(self, root: str) -> None:
        name = f"{root}byteorder"
        order = self._zip.read(name, 16) if name in self._zip.entries else b"little"
        if order != b"little":
            raise CheckpointError(self.path, f"has its numbers in byte order {order!r}, expected b'little'")


def _require_zip(path: Path) -> None:
    """Say what a file is that does not begin as a zip archive does."""
    try:
        with path.open("rb") as file:
            head = file.read(_TAR_AT + len(_TAR))
            size = file.seek(0, 2)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    if head.startswith(_ZIP):
        return
    if not head:
        raise CheckpointError(path, "is an empty file, expected an archive of torch.save")
    if is_lfs_pointer(head):
        raise CheckpointError(path, "is a Git LFS pointer, not the data: fetch it with `git lfs pull`")
    if head.startswith(_LEGACY) or head[_TAR_AT:] == _TAR:
        raise CheckpointError(
            path, f"is of the form that PyTorch saved before version 1.6, which is not read; {_RESAVE}"
        )
    raise CheckpointError(path, f"is not a file of torch.save ({size} bytes): expected a zip archive")
