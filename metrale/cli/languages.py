# SPDX-License-Identifier: MIT OR Apache-2.0
"""The languages of a checkpoint's vocabulary, for the commands that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from metrale.cli.failure import UNUSABLE, Failure
from metrale.cli.output import to_json, write_lines
from metrale.nllb.languages import language_name
from metrale.nllb.tokenizer import VOCABULARIES, Tokenizer, has_tokenizer, open_tokenizer

_ENGLISH: Final = ("eng_Latn", "en")


def require_tokenizer(path: Path) -> None:
    """Raise `Failure` when a folder has no tokenizer."""
    if not has_tokenizer(path):
        raise Failure(UNUSABLE, f"{path}: holds no tokenizer ({VOCABULARIES})")


def tokenizer_of(path: Path) -> Tokenizer:
    """Return a folder's tokenizer. `Failure` when it has none, CheckpointError when it cannot be read."""
    require_tokenizer(path)
    tokenizer = open_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def english_of(path: Path) -> str:
    """Return the code that a folder's vocabulary has for English; that of NLLB-200 when it has none."""
    languages = tokenizer_of(path).languages
    return next((code for code in _ENGLISH if code in languages), _ENGLISH[0])


def list_languages(path: Path, *, as_json: bool) -> None:
    """Write the codes of a folder's vocabulary and their English names, one a line."""
    pairs = [(code, language_name(code)) for code in tokenizer_of(path).languages]
    if as_json:
        write_lines([to_json({"code": code, "name": name}) for code, name in pairs])
    else:
        write_lines([f"{code}  {name}".rstrip() for code, name in pairs])
