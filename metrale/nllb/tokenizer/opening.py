# SPDX-License-Identifier: MIT OR Apache-2.0
"""One way in: which tokenizer a checkpoint's folder has."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from metrale.checkpoint import require_folder
from metrale.checks import integer
from metrale.errors import CheckpointError
from metrale.nllb.tokenizer.files import ADDED, CONFIG, SPECIAL_MAP, WHOLE
from metrale.nllb.tokenizer.json_vocabulary import open_tokenizer_json
from metrale.nllb.tokenizer.m2m import open_m2m
from metrale.nllb.tokenizer.nllb import VOCAB_FILE, open_nllb
from metrale.nllb.tokenizer.spm_file import MODEL_FILE
from metrale.nllb.tokenizer.tokenizer import Tokenizer

TOKENIZER_FILES: Final = (MODEL_FILE, VOCAB_FILE, WHOLE, CONFIG, SPECIAL_MAP, ADDED)
"""Every file of a tokenizer."""

VOCABULARIES: Final = f"{MODEL_FILE} or {WHOLE}"
"""The files that hold a vocabulary, in words."""


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint's folder has any tokenizer files."""
    # lexists: a dangling link, as an interrupted download leaves it, is a file that is missing, not an absent one.
    return any(os.path.lexists(os.path.join(path, name)) for name in TOKENIZER_FILES)


def open_tokenizer(
    path: str | os.PathLike[str], *, vocab_size: int | None = None, legacy_order: bool = False
) -> Tokenizer | None:
    """Open the tokenizer of a checkpoint's folder.

    Parameters
    ----------
    path : path
        The checkpoint's folder.
    vocab_size : int, optional
        Rows of the checkpoint's embedding. More rows than the tokenizer has entries are fine. Without it, the
        number of entries.
    legacy_order : bool
        Whether ``encode_source`` puts the language after the text, as `metrale.load` says.

    Returns
    -------
    Tokenizer or None
        None when the folder has no tokenizer files at all.

    Raises
    ------
    CheckpointError
        When the folder is missing, a file is not whole or not one of the family, ``vocab_size`` is too small, or files
        of the folder contradict each other. Every reason is listed.
    """
    if vocab_size is not None:
        vocab_size = integer("vocab_size", vocab_size, 1)
    folder = require_folder(path)
    tokenizer = _open(folder, vocab_size) if has_tokenizer(folder) else None
    return replace(tokenizer, legacy_order=True) if tokenizer is not None and legacy_order else tokenizer


def _open(folder: Path, vocab_size: int | None) -> Tokenizer:
    found = {name for name in TOKENIZER_FILES if os.path.lexists(folder / name)}
    if VOCAB_FILE in found:
        return open_m2m(folder, vocab_size)
    if MODEL_FILE in found:
        return open_nllb(folder, vocab_size)
    if WHOLE in found:
        return open_tokenizer_json(folder, vocab_size)
    raise CheckpointError(folder, f"holds {', '.join(sorted(found))} and no vocabulary: expected {VOCABULARIES}")
