# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record what transformers' tokenizers make of the strings of `tests.nllb.texts`.

Needs transformers, which nothing else here does. From the root of the repository::

    python -m tests.record.record_texts

writes ``tests/data/udhr/recorded.json`` and refuses to when a difference from SentencePiece has no class of
``docs/tokenizer.md``.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.nllb.texts import (
    DATA,
    KINDS,
    MODEL_FILE,
    RECORD_FILE,
    TEXTS_FILE,
    Text,
    digests,
    text_sets,
    tokenizer_folder,
)
from tests.nllb.their_tokenizers import TheirM2m, TheirNllb, tokenizers, transformers

META = {
    "digests": "of transformers' subword ids with split_special_tokens=True, of each group's texts that SentencePiece "
    "gives the same",
    "differing": "the other texts: transformers' ids, the classes of docs/tokenizer.md, and the text as transformers "
    "normalises it",
}


def recorded(theirs: TheirNllb | TheirM2m, texts: list[Text]) -> dict[str, Any]:
    """What is recorded of a set of texts and a tokenizer."""
    ids = [theirs.ids(one.text) for one in texts]
    classes = [theirs.differences(one.text, row) for one, row in zip(texts, ids, strict=True)]
    differing = {
        one.key: {"ids": row, "classes": found, "normalized": theirs.normalized(one.text)}
        for one, row, found in zip(texts, ids, classes, strict=True)
        if found
    }
    return {"digests": digests(texts, ids, differing), "differing": differing}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    """Write the file and say what is in it."""
    sets = text_sets()
    meta: dict[str, Any] = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__, **META}
    meta["texts_sha256"] = sha256((DATA / TEXTS_FILE).read_bytes())
    record: dict[str, Any] = {"meta": meta}
    with tempfile.TemporaryDirectory() as work:
        for kind in KINDS:
            folder = tokenizer_folder(kind, Path(work) / kind)
            meta[f"{kind} sha256"] = sha256((folder / MODEL_FILE).read_bytes())
            theirs = (TheirM2m if kind.startswith("m2m") else TheirNllb)(folder)
            record[kind] = {name: recorded(theirs, texts) for name, texts in sets.items()}
    (DATA / RECORD_FILE).write_bytes(
        json.dumps(record, ensure_ascii=False, indent=0, separators=(",", ":")).encode() + b"\n"
    )
    print(f"{DATA / RECORD_FILE}: {(DATA / RECORD_FILE).stat().st_size} bytes")
    for kind in KINDS:
        for name, found in record[kind].items():
            counts = Counter(" + ".join(one["classes"]) for one in found["differing"].values())
            print(f"{kind}, {name}: {len(sets[name])} texts, {dict(counts)}")


if __name__ == "__main__":
    main()
