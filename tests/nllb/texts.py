# SPDX-License-Identifier: MIT OR Apache-2.0
"""Real text in hundreds of languages, hostile strings, and the recorded digests of their token ids.

``tests/data/udhr/NOTICE.md`` says where the text is from, `tests.record.record_udhr` makes it, and
`tests.record.record_texts` records the ids.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from sentencepiece import SentencePieceProcessor

from metrale.nllb.languages import FLORES_200
from metrale.nllb.tokenizer import Tokenizer, open_tokenizer
from tests.nllb.m2m_folder import m2m_tokenizer_folder
from tests.nllb.strings import HOSTILE

DATA: Final = Path(__file__).parents[1] / "data" / "udhr"
DEMO: Final = Path(__file__).parents[2] / "metrale" / "demo_model"
MODEL_FILE: Final = "sentencepiece.bpe.model"
DEMO_JSON: Final = DEMO / "tokenizer.json"
LANGUAGES_FILE: Final = "languages.tsv"
TEXTS_FILE: Final = "texts.tsv"
VOCABULARY_FILE: Final = "vocabulary.model.xz"
RECORD_FILE: Final = "recorded.json"
DIGEST_BYTES: Final = 8
VOCABULARY_SEED: Final = 8


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


KINDS: Final = ("nllb demo", "nllb udhr", "m2m udhr")
"""Tokenizers by SentencePiece: of which family, with the pieces of which vocabulary, the demo model's or that of
`read_vocabulary`."""


def tokenizer_folder(kind: str, folder: Path) -> Path:
    """Write the files of a tokenizer into a folder, and return that.

    Parameters
    ----------
    kind : str
        One of `KINDS`, or ``json`` and a vocabulary: NLLB's tokenizer as ``tokenizer.json`` alone.
    folder : path
    """
    family, vocabulary = kind.split()
    folder.mkdir(parents=True, exist_ok=True)
    model = (DEMO / MODEL_FILE).read_bytes() if vocabulary == "demo" else read_vocabulary()
    if family == "m2m":
        m2m_tokenizer_folder(folder, m2m_vocabulary(model))
    if family == "json":
        (folder / "tokenizer.json").write_bytes(
            tokenizer_json(model) if vocabulary == "udhr" else DEMO_JSON.read_bytes()
        )
    else:
        (folder / MODEL_FILE).write_bytes(model)
    return folder


def m2m_vocabulary(model: bytes) -> dict[str, int]:
    """A ``vocab.json`` that has the pieces of a model in another order, lacks some of them, and has some more."""
    pieces = pieces_of(model)[3:]
    kept = [piece for number, piece in enumerate(pieces) if number % 50 != 49]
    random.Random(VOCABULARY_SEED).shuffle(kept)
    entries = ["<s>", "<pad>", "</s>", "<unk>", *kept, "\u2581unused", "\ufffc\ufffc"]
    return {piece: number for number, piece in enumerate(entries)}


def tokenizer_json(model: bytes) -> bytes:
    """NLLB's ``tokenizer.json`` of a SentencePiece model, as transformers converts it.

    All but the pieces is the demo model's, whose normaliser is the same. A piece is made of any two others, the pair of
    the better pieces first; so the merges, in the order of the pieces they make, are SentencePiece's.
    """
    whole = json.loads(DEMO_JSON.read_bytes())
    vocab = {piece: number + (1 if number > 2 else 0) for number, piece in enumerate(pieces_of(model))}
    vocab |= {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    merges = []
    for piece in vocab:
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += sorted(
            (one for one in pairs if set(one) <= vocab.keys()), key=lambda pair: [vocab[one] for one in pair]
        )
    languages = {code: len(vocab) + number for number, code in enumerate((*FLORES_200, "<mask>"))}
    whole["model"] |= {"vocab": {**vocab, **languages}, "merges": [list(pair) for pair in merges]}
    whole["added_tokens"] = [{**one, "id": languages.get(one["content"], one["id"])} for one in whole["added_tokens"]]
    return json.dumps(whole).encode()


def pieces_of(model: bytes) -> list[str]:
    """All pieces of a SentencePiece model."""
    processor = SentencePieceProcessor(model_proto=model)
    return [str(processor.id_to_piece(number)) for number in range(len(processor))]


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
