# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record what transformers makes of many texts with M2M-100's tokenizer, with added tokens, and in the legacy order.

Needs transformers, which nothing else here does. From the root of the repository::

    python -m tests.record.record_more_tokenizers

writes ``tests/data/more_tokenizer_cases.json``. The texts are those of ``tests/data/tokenizer_cases.json``, in order,
and further ones; what the fields mean is in the file's own ``meta``.
"""

from __future__ import annotations

import importlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.nllb.added_folder import ADDED, FIRST_ADDED, added_folder
from tests.nllb.m2m_folder import ADDED as M2M_ADDED
from tests.nllb.m2m_folder import (
    CODES,
    MORE,
    WITHOUT,
    demo_tokenizer,
    m2m_added_folder,
    m2m_tokenizer_folder,
    m2m_vocabulary,
)

transformers: Any = importlib.import_module("transformers")

DATA = Path(__file__).parents[1] / "data"
OUTPUT = DATA / "more_tokenizer_cases.json"
SEED = 30
MIXED = 400
DECODED = 150

META = {
    "m2m": "M2M-100's ids without language and </s>, with split_special_tokens=True, of the older file's texts",
    "m2m_decoded": "what transformers decodes of them with skip_special_tokens=True, where it is not what NLLB decodes",
    "m2m_decode": "pairs of ids, some special or of languages, and transformers' decode with skip_special_tokens=True",
    "m2m_added": "pairs of a text without special tokens and M2M-100's ids, with tokens of text added",
    "added": "texts and NLLB-200's ids without language and </s>, with split_special_tokens=True and added tokens",
    "added_decode": "pairs of ids and their decode with skip_special_tokens=True",
    "legacy": "texts, their languages and whole input_ids with legacy_behaviour=True",
}


def mixed(rng: random.Random, added: list[str], odd: list[str]) -> Iterator[str]:
    """Yield texts of words, added tokens and odd characters, with and without spaces between them."""
    words = ["open", "the", "caf\xe9", "\u0434\u043e\u043c", "x", "y.", "foob", "fo", "Bar", "\u65e5", "123"]
    joints = ["", "", " ", " ", "  ", "\t", "\u3000"]
    for _ in range(MIXED):
        parts = [
            rng.choice(added if rng.random() < 0.45 else words if rng.random() < 0.7 else odd)
            for _ in range(rng.randint(1, 6))
        ]
        yield "".join(part + rng.choice(joints) for part in parts)


def fullwidth(text: str) -> str:
    """Return ASCII as its wide forms, which are normalised to it."""
    return "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in text)


def m2m(texts: list[str], folder: Path) -> dict[str, Any]:
    """Record M2M-100's tokenizer."""
    vocabulary = m2m_vocabulary(without=WITHOUT, more=MORE)
    theirs = transformers.AutoTokenizer.from_pretrained(m2m_tokenizer_folder(folder / "m2m", vocabulary), src_lang="en")
    assert [theirs.get_lang_id(code) for code in CODES] == [len(vocabulary) + i for i in range(len(CODES))]
    ids = [theirs(text, split_special_tokens=True)["input_ids"] for text in texts]
    assert all(one[0] == theirs.get_lang_id("en") and one[-1] == 2 for one in ids)
    rng = random.Random(SEED)
    size = len(vocabulary) + len(CODES)
    pools = [range(4), range(4, 400), range(4, len(vocabulary)), range(len(vocabulary) - 3, size)]
    pairs = [[rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 12))] for _ in range(DECODED)]
    return {
        "m2m": [one[1:-1] for one in ids],
        "m2m_decoded": [theirs.decode(one, skip_special_tokens=True) for one in ids[:400]],
        "m2m_decode": [[one, theirs.decode(one, skip_special_tokens=True)] for one in pairs],
        "m2m_added": m2m_added(folder),
    }


def m2m_added(folder: Path) -> list[Any]:
    """Record M2M-100's tokenizer with tokens of text."""
    path = m2m_added_folder(folder / "m2m_added")
    numbers = {token: len(m2m_vocabulary()) + len(CODES) + i for i, token in enumerate(M2M_ADDED)}
    theirs = transformers.AutoTokenizer.from_pretrained(path, src_lang="en")
    assert theirs.convert_tokens_to_ids(list(numbers)) == list(numbers.values())
    texts = mixed(
        random.Random(SEED + 1), list(numbers), ["\u0301", "\U0001f600", "\u200b", "\u2581", "\uff46\uff4f\uff4f"]
    )
    return [[text, theirs(text)["input_ids"][1:-1]] for text in texts]


def added(texts: list[str], folder: Path) -> dict[str, Any]:
    """Record NLLB-200's tokenizer with added tokens, and see that the ids do not depend on which files there are."""
    theirs = transformers.AutoTokenizer.from_pretrained(added_folder(folder / "added"), src_lang="xyz_Latn")
    contents = [str(one["content"]) for one in ADDED]
    assert theirs.convert_tokens_to_ids(contents) == list(range(FIRST_ADDED, FIRST_ADDED + len(ADDED)))
    assert theirs("a")["input_ids"][0] == FIRST_ADDED
    special = ["<mask>", "ask>", "</s>", "a/s>", "eng_Latn", "<ent>", "xyz_Latn", "<mas"]
    odd = [*special, *"\u337f\u0301\u200b\x01\u2581", *(fullwidth(one) for one in ("foo", "Bar-X")), "Zoe\u0308"]
    found = [*mixed(random.Random(SEED + 2), contents[3:], odd), *contents, *texts[:300]]
    ids = [theirs(text, split_special_tokens=True)["input_ids"][1:-1] for text in found]
    alone = transformers.AutoTokenizer.from_pretrained(added_folder(folder / "alone", whole=False))
    assert [alone(text, split_special_tokens=True)["input_ids"][1:-1] for text in found] == ids
    rng = random.Random(SEED + 3)
    # Without the language that is no special token: transformers has a text for it.
    end = FIRST_ADDED + len(ADDED)
    pools = [range(4), range(4, 8028), range(8028, FIRST_ADDED + 1), range(FIRST_ADDED + 2, end)]
    pairs = [[rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 12))] for _ in range(DECODED)]
    return {
        "added": [[text, one] for text, one in zip(found, ids, strict=True)],
        "added_decode": [[one, theirs.decode(one, skip_special_tokens=True)] for one in pairs],
    }


def legacy(texts: list[str], folder: Path) -> dict[str, Any]:
    """Record the legacy order."""
    path = added_folder(folder / "legacy", ())
    theirs = transformers.NllbTokenizer.from_pretrained(path, src_lang="fra_Latn", legacy_behaviour=True)
    tokenizer = demo_tokenizer()
    cases = []
    for i, text in enumerate(texts[:60]):
        theirs.src_lang = tokenizer.languages[i]
        ids = theirs(text, split_special_tokens=True)["input_ids"]
        cases.append([text, theirs.src_lang, ids])
    return {"legacy": cases}


def main() -> None:
    """Write the file."""
    cases = json.loads((DATA / "tokenizer_cases.json").read_text(encoding="ascii"))["cases"]
    texts = [case["text"] for case in cases]
    same = [case["text"] for case in cases if "difference" not in case and case["text"].strip()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {**m2m(texts, folder), **added(same, folder), **legacy(same, folder)}
    meta = {"transformers": transformers.__version__, "seed": SEED, **META}
    with OUTPUT.open("w", encoding="ascii", newline="\n") as file:
        file.write(f'{{"meta": {json.dumps(meta, indent=1)}')
        for key, values in found.items():
            file.write(
                f',\n"{key}": [\n' + ",\n".join(json.dumps(one, separators=(",", ":")) for one in values) + "\n]"
            )
        file.write("\n}\n")
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes, { {key: len(values) for key, values in found.items()} }")


if __name__ == "__main__":
    main()
