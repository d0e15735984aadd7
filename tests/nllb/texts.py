# SPDX-License-Identifier: MIT OR Apache-2.0
"""Real text in hundreds of languages, hostile strings, and the recorded digests of their token ids.

``tests/data/udhr/NOTICE.md`` says where the text is from, `tests.record.record_udhr` makes it, and
`tests.record.record_texts` records the ids.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from metrale.nllb.tokenizer import Tokenizer, open_tokenizer
from tests.nllb.strings import HOSTILE

DATA: Final = Path(__file__).parents[1] / "data" / "udhr"
DEMO: Final = Path(__file__).parents[2] / "metrale" / "demo_model"
MODEL_FILE: Final = "sentencepiece.bpe.model"
LANGUAGES_FILE: Final = "languages.tsv"
TEXTS_FILE: Final = "texts.tsv"
VOCABULARY_FILE: Final = "vocabulary.model.xz"
RECORD_FILE: Final = "recorded.json"
DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Text:
    """One string.

    Attributes
    ----------
    group : str
        What is recorded by one digest: a translation, or hostile strings of one kind.
    key : str
        Its name, of its own in its set.
    text : str
    """

    group: str
    key: str
    text: str


def read_texts() -> list[Text]:
    """The strings of the declaration as they are written there; groups are the package's codes."""
    lines = (DATA / TEXTS_FILE).read_bytes().decode().split("\n")
    pairs = [line.split("\t") for line in lines[:-1]]
    return [Text(code, str(number), text) for number, (code, text) in enumerate(pairs, 1)]


def decomposed(texts: Iterable[Text]) -> list[Text]:
    """The strings that change when their letters and marks are taken apart (NFD), so changed."""
    apart = [Text(one.group, one.key, unicodedata.normalize("NFD", one.text)) for one in texts]
    return [new for new, old in zip(apart, texts, strict=True) if new != old]


def hostile() -> list[Text]:
    """The strings of `tests.nllb.strings`, grouped by what their names begin with."""
    return [Text(name.split(" U+")[0].rstrip("0123456789 "), name, text) for name, text in HOSTILE.items()]


def text_sets() -> dict[str, list[Text]]:
    """All strings whose ids are recorded."""
    written = read_texts()
    return {"written": written, "decomposed": decomposed(written), "hostile": hostile()}


def read_vocabulary() -> bytes:
    """A SentencePiece model with pieces of all languages of `read_texts`, of NLLB's kind."""
    return lzma.decompress((DATA / VOCABULARY_FILE).read_bytes())


def model_folder(vocabulary: str, folder: Path) -> Path:
    """Put the SentencePiece model of a vocabulary, ``demo`` or ``udhr``, into a folder, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    if vocabulary == "demo":
        shutil.copy(DEMO / MODEL_FILE, folder)
    else:
        (folder / MODEL_FILE).write_bytes(read_vocabulary())
    return folder


def opened(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that has one."""
    found = open_tokenizer(folder)
    assert found is not None
    return found


def read_record() -> dict[str, Any]:
    """What `tests.record.record_texts` wrote; its fields are explained in ``meta``."""
    record: dict[str, Any] = json.loads((DATA / RECORD_FILE).read_bytes())
    return record


def digests(texts: Sequence[Text], ids: Sequence[Sequence[int]], left_out: Iterable[str] = ()) -> dict[str, str]:
    """A digest for each group, by which an id that is wrong, missing, added or moved is noticed.

    Parameters
    ----------
    texts : sequence of Text
    ids : sequence of sequences of int
        Those of each text.
    left_out : iterable of str
        Keys of texts that do not count.
    """
    without, groups = frozenset(left_out), dict[str, Any]()
    for one, row in zip(texts, ids, strict=True):
        if one.key not in without:
            digest = groups.setdefault(one.group, hashlib.blake2b(digest_size=DIGEST_BYTES))
            digest.update(np.asarray([len(row), *row], "<i4").tobytes())
    return {group: digest.hexdigest() for group, digest in groups.items()}
