# SPDX-License-Identifier: MIT OR Apache-2.0
"""What tests of the Hub say of folders and of refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metrale.errors import CheckpointError
from metrale.hub import resolve

TOKENIZER = {
    name: name.encode()
    for name in (
        "sentencepiece.bpe.model",
        "vocab.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    )
}
"""Files of a tokenizer, whose contents nobody reads."""


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(path: str) -> str:
    """Return the one problem for which a path is refused."""
    with pytest.raises(CheckpointError) as caught:
        resolve(path)
    assert caught.value.path == path
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


def shards(form: str) -> dict[str, bytes]:
    """An index and its two shards, whose contents nobody reads."""
    stem, suffix = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", "bin")
    names = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    placed = {"a": names[1], "b": names[0], "c": names[0]}
    index = json.dumps({"weight_map": placed}).encode()
    return {f"{stem}.{suffix}.index.json": index, **{name: name.encode() for name in names}}
