# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiled kernels in a folder, one file each, that any number of processes may read and write at once."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger(__name__)
_MAGIC: Final = b"metrale kernel 1\n"
_HEADER: Final = len(_MAGIC) + hashlib.sha256().digest_size


def load(folder: Path, name: str) -> bytes | None:
    """Return what was stored under ``name``; None when it is not there, or not whole, or cannot be read."""
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _report(folder, error.strerror or str(error))
        return None
    content = data[_HEADER:]
    return content if data[:_HEADER] == _MAGIC + hashlib.sha256(content).digest() else None


def store(folder: Path, name: str, content: bytes) -> None:
    """Store ``content`` under ``name``, in the place of what is there.

    A reader sees the old file or the new one, never a part. A folder that cannot be written is reported to this
    module's logger, once, and nothing is stored.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    except OSError as error:
        _report(folder, error.strerror or str(error))
        return
    try:
        with open(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(content).digest() + content)
        os.replace(temporary, folder / name)
    except OSError as error:  # a full disk, for one
        _report(folder, error.strerror or str(error))
        with contextlib.suppress(OSError):
            os.unlink(temporary)


@lru_cache(maxsize=256)
def _report(folder: Path, problem: str) -> None:
    """Log a problem; the same one is not logged again, whatever the number of kernels that meet it."""
    _LOG.warning("kernel cache %s: %s; kernels are compiled in each process", folder, problem)
