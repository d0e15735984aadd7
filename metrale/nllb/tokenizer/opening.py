# SPDX-License-Identifier: MIT OR Apache-2.0
"""One way in: which tokenizer a checkpoint's folder has."""

from __future__ import annotations

import os
from typing import Final

from metrale.checkpoint import require_folder
from metrale.checks import integer
from metrale.nllb.tokenizer.nllb import open_nllb
from metrale.nllb.tokenizer.spm_file import MODEL_FILE
from metrale.nllb.tokenizer.tokenizer import Tokenizer

TOKENIZER_FILES: Final = (MODEL_FILE,)
"""Every file of a tokenizer."""

VOCABULARIES: Final = MODEL_FILE
"""The files that hold a vocabulary, in words."""


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint's folder has any tokenizer files."""
    # lexists: a dangling link, as an interrupted download leaves it, is a file that is missing, not an absent one.
    return any(os.path.lexists(os.path.join(path, name)) for name in TOKENIZER_FILES)


def open_tokenizer(path: str | os.PathLike[str], *, vocab_size: int | None = None) -> Tokenizer | None:
    """Open the tokenizer of a checkpoint's folder.

    Parameters
    ----------
    path : path
        The checkpoint's folder.
    vocab_size : int, optional
        Rows of the checkpoint's embedding. More rows than the tokenizer has entries are fine. Without it, the
        number of entries.

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
    if not has_tokenizer(folder):
        return None
    return open_nllb(folder, vocab_size)
