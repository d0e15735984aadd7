# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo model's tokenizer with tokens added to it, as fine-tunes have them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metrale import demo_model_path
from metrale.nllb.tokenizer.spm_file import MODEL_FILE

FIRST_ADDED = 8231
"""The id behind the demo model's own entries."""


def entry(content: str, *, special: bool = False, normalized: bool | None = None, **options: bool) -> dict[str, Any]:
    """Return a token as ``tokenizer.json`` has it, without its id."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    shown = not special if normalized is None else normalized
    return {"content": content, **plain, "normalized": shown, "special": special, **options}


ADDED = (
    entry("xyz_Latn", special=True),
    entry("tyv_Cyrl"),
    entry("<ent>", special=True),
    entry("foo"),
    entry("foobar"),
    entry("Bar-X", normalized=False),
    entry("Zo\xeb"),
    entry("\u65e5\u672c"),
    entry("/s>", normalized=False),
    entry("sk>"),
    entry("http://"),
)
"""Languages, a special token, and tokens of text: some begin as others do, or overlap with a special token."""


def added_folder(
    path: Path, tokens: Sequence[Mapping[str, Any]] = ADDED, *, model: bool = True, whole: bool = True
) -> Path:
    """Write the files of a tokenizer with added tokens.

    Parameters
    ----------
    path : Path
    tokens : sequence of mapping
        What is added, in the order of the ids.
    model : bool
        Whether the folder has the SentencePiece model.
    whole : bool
        Whether it has ``tokenizer.json``; ``tokenizer_config.json`` has the ids as well.
    """
    path.mkdir(parents=True, exist_ok=True)
    demo = demo_model_path()
    file = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    numbered = [{"id": FIRST_ADDED + i, **token} for i, token in enumerate(tokens)]
    file["added_tokens"] += numbered
    decoder = {
        str(one["id"]): {name: value for name, value in one.items() if name != "id"} for one in file["added_tokens"]
    }
    config = {"tokenizer_class": "NllbTokenizer", "added_tokens_decoder": decoder}
    if whole:
        (path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    if model:
        shutil.copy(demo / MODEL_FILE, path)
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
