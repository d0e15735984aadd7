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

from tests.nllb.texts import DATA, DEMO, MODEL_FILE, RECORD_FILE, TEXTS_FILE, Text, digests, model_folder, text_sets
from tests.nllb.their_tokenizers import TheirNllb, tokenizers, transformers

META = {
    "digests": "of transformers' subword ids with split_special_tokens=True, of each group's texts that SentencePiece "
    "gives the same",
    "differing": "the other texts: transformers' ids, the classes of docs/tokenizer.md, and the text as transformers "
    "normalises it",
}


def nllb(folder: Path, texts: list[Text]) -> dict[str, Any]:
    """What is recorded of a set of texts and NLLB's tokenizer of a folder."""
    theirs = TheirNllb(folder)
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
        folders = {"demo": DEMO, "udhr": model_folder("udhr", Path(work) / "udhr")}
        for name, folder in folders.items():
            meta[f"{name}_sha256"] = sha256((folder / MODEL_FILE).read_bytes())
            record[f"nllb {name}"] = {kind: nllb(folder, texts) for kind, texts in sets.items()}
    (DATA / RECORD_FILE).write_bytes(
        json.dumps(record, ensure_ascii=False, indent=0, separators=(",", ":")).encode() + b"\n"
    )
    print(f"{DATA / RECORD_FILE}: {(DATA / RECORD_FILE).stat().st_size} bytes")
    for name in record.keys() - {"meta"}:
        for kind, found in record[name].items():
            counts = Counter(" + ".join(one["classes"]) for one in found["differing"].values())
            print(f"{name}, {kind}: {len(sets[kind])} texts, {dict(counts)}")


if __name__ == "__main__":
    main()
