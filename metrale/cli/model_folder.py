# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's folder that is written anew: it has its name when it is whole, and not before."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from metrale.checkpoint import read_json_object
from metrale.cli.failure import USAGE, Failure
from metrale.cli.output_file import sync_folder
from metrale.nllb.config import CONFIG_FILE

_COPIED: Final = frozenset({".json", ".model", ".txt", ".md", ".jinja"})
_INDEX: Final = ".index.json"
_LICENSES: Final = ("license", "licence", "notice")
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")  # the latter is what transformers wrote before version 4.56
_SPARE_BYTES: Final = 1 << 20


def require_new(name: str) -> Path:
    """Return the path of a folder that can be made.

    Raises
    ------
    Failure
        When there is something under the name that is no empty folder.
    OSError
        When the folder that it is to be in cannot be read.
    """
    if not name:
        raise Failure(USAGE, "DST: expected a new folder, got ''")
    path = Path(os.path.abspath(name))
    if not os.path.lexists(path):
        os.stat(path.parent)
    elif path.is_symlink() or not path.is_dir():
        raise Failure(USAGE, f"DST: expected a new folder, {name} is none")
    elif any(path.iterdir()):
        raise Failure(USAGE, f"DST: expected a new or an empty folder, {name} has files in it")
    return path


def require_space(path: Path, nbytes: int) -> None:
    """Refuse, with `Failure`, what does not fit on the disk that a new folder will be on."""
    free = shutil.disk_usage(path.parent).free
    if nbytes + _SPARE_BYTES > free:
        raise Failure(USAGE, f"DST: {path} needs {nbytes:,} bytes, and {free:,} are free there")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write to, beside ``path``; it gets that name in the end, and is removed after an exception.

    Raises
    ------
    OSError
        When it cannot be made, or there is a folder with files under its name by now.
    """
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)


def files_beside(folder: Path) -> list[Path]:
    """Return the files of a model besides its weights: configuration, tokenizer, model card and licence."""
    return sorted(path for path in folder.iterdir() if _is_beside(path.name) and path.is_file())


def _is_beside(name: str) -> bool:
    lower = name.lower()
    if name.startswith(".") or lower.endswith(_INDEX):
        return False
    return Path(lower).suffix in _COPIED or lower.startswith(_LICENSES)


def copy_others(paths: list[Path], folder: Path, dtype: str | None) -> None:
    """Copy files to a folder; the configuration says ``dtype`` there, if one is given."""
    for path in paths:
        target = folder / path.name
        if path.name == CONFIG_FILE and dtype is not None:
            config = read_json_object(path)
            keys = [key for key in _DTYPE_KEYS if key in config] or [_DTYPE_KEYS[0]]
            written = json.dumps(config | dict.fromkeys(keys, dtype), indent=2, ensure_ascii=False)
            target.write_text(written + "\n", encoding="utf-8")
        else:
            shutil.copyfile(path, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
