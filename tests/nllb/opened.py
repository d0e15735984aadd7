# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokenizers for tests: a folder's, which must have one, and one of every kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from metrale import demo_model_path
from metrale.nllb.tokenizer import Tokenizer, open_tokenizer
from tests.nllb.added_folder import added_folder
from tests.nllb.m2m_folder import MORE, WITHOUT, m2m_added_folder, m2m_tokenizer_folder, m2m_vocabulary


def opened(path: Path, **options: Any) -> Tokenizer:
    """Return the tokenizer of a folder that has one."""
    found = open_tokenizer(path, **options)
    assert found is not None
    return found


KINDS: Mapping[str, Callable[[Path], Path]] = {
    "nllb": lambda path: demo_model_path(),
    "nllb added": added_folder,
    "json": lambda path: added_folder(path, (), model=False),
    "json added": lambda path: added_folder(path, model=False),
    "m2m": m2m_tokenizer_folder,
    "m2m that does not fit": lambda path: m2m_tokenizer_folder(path, m2m_vocabulary(without=WITHOUT, more=MORE)),
    "m2m added": m2m_added_folder,
}
"""For each kind of tokenizer what writes its folder."""
