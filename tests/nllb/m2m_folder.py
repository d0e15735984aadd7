# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo model arranged as a checkpoint of M2M-100: the same pieces and weights under other ids."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from metrale import demo_model_path
from metrale.checkpoint import open_checkpoint
from metrale.nllb.languages import near_languages
from metrale.nllb.m2m_languages import M2M_LANGUAGES, language_token
from metrale.nllb.tokenizer import Tokenizer, open_tokenizer
from metrale.nllb.tokenizer.spm_file import MODEL_FILE, load_model

CODES = M2M_LANGUAGES["m2m100"]
MADEUP = 8
"""Rows behind the languages, as in the published checkpoints."""

WITHOUT = ("\u2581Tut", "werkt", "\u2581the", "er", "\u2581open", "\u0434\u043e\u043c")
MORE = ("\u65e5\u672c", "\u2581unused", "\U0001f600")
"""For a vocabulary that does not fit: pieces that it lacks, and runs of characters that SentencePiece does not know."""

ADDED = ("foo", "foobar", "\u65e5", "Bar-X")
"""Tokens of text that are added."""

_HEAD = ("<s>", "<pad>", "</s>", "<unk>")
_SEED = 100


def demo_tokenizer() -> Tokenizer:
    """Return the demo model's own tokenizer."""
    found = open_tokenizer(demo_model_path())
    assert found is not None
    return found


def m2m_vocabulary(*, without: Sequence[str] = (), more: Sequence[str] = ()) -> dict[str, int]:
    """Return a ``vocab.json`` of the demo model's pieces in another order.

    Parameters
    ----------
    without : sequence of str
        Pieces that it lacks.
    more : sequence of str
        Entries that are no pieces.
    """
    _, pieces = load_model(demo_model_path() / MODEL_FILE)
    kept = [piece for piece in pieces[3:] if piece not in without]
    random.Random(_SEED).shuffle(kept)
    return {piece: number for number, piece in enumerate([*_HEAD, *kept, *more])}


def m2m_tokenizer_folder(
    path: Path, vocabulary: Mapping[str, int] | None = None, *, config: Mapping[str, Any] | None = None
) -> Path:
    """Write the tokenizer's files as the published checkpoints have them, and return the folder."""
    path.mkdir(parents=True, exist_ok=True)
    shutil.copy(demo_model_path() / MODEL_FILE, path)
    tokens = [language_token(code) for code in CODES]
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    settings = {**named, "language_codes": "m2m100", "num_madeup_words": MADEUP, "src_lang": None, "tgt_lang": None}
    _put(path / "vocab.json", m2m_vocabulary() if vocabulary is None else vocabulary)
    _put(path / "tokenizer_config.json", {**settings, "tokenizer_class": "M2M100Tokenizer", **(config or {})})
    _put(path / "special_tokens_map.json", {**named, "additional_special_tokens": tokens})
    return path


def m2m_added_folder(path: Path) -> Path:
    """Write the tokenizer's files with tokens of text added, and return the folder."""
    m2m_tokenizer_folder(path)
    tokens = [*map(language_token, CODES), *ADDED]
    _put(path / "added_tokens.json", {token: len(m2m_vocabulary()) + i for i, token in enumerate(tokens)})
    return path


def m2m_folder(path: Path) -> Path:
    """Write the whole checkpoint, weights as float32, and return the folder.

    A language that NLLB-200 has too gets that language's row; one that it lacks, and the rows behind the languages, get
    rows that the demo model never uses.
    """
    vocabulary = m2m_vocabulary()
    m2m_tokenizer_folder(path, vocabulary)
    rows = m2m_rows(vocabulary)
    demo = demo_model_path()
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    size = config["vocab_size"]
    _put(path / "config.json", {**config, "vocab_size": len(rows), "dtype": "float32", "tokenizer_class": None})
    shutil.copy(demo / "generation_config.json", path)
    with open_checkpoint(demo) as checkpoint:
        tensors = {
            name: checkpoint.read_rows(name, 0, info.rows).astype(np.float32)
            for name, info in checkpoint.tensors.items()
        }
    save_file(
        {name: np.ascontiguousarray(value[rows] if len(value) == size else value) for name, value in tensors.items()},
        path / "model.safetensors",
    )
    return path


def m2m_rows(vocabulary: Mapping[str, int]) -> list[int]:
    """Return for each id of the M2M-100 layout the demo model's id of the same entry."""
    _, pieces = load_model(demo_model_path() / MODEL_FILE)
    tokenizer = demo_tokenizer()
    own = {piece: number + 1 for number, piece in enumerate(pieces) if number >= 3}
    own |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    unused = len(tokenizer)
    languages = [near_languages(code, tokenizer.languages, 1) for code in CODES]
    return [
        *(own[piece] for piece in sorted(vocabulary, key=vocabulary.__getitem__)),
        *(tokenizer.language_id(near[0]) if near else unused for near in languages),
        *[unused] * MADEUP,
    ]


def _put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
