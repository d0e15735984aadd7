# SPDX-License-Identifier: MIT OR Apache-2.0
"""transformers' tokenizers beside SentencePiece, and why the two differ where they do. Needs transformers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from tests.nllb.texts import MODEL_FILE

transformers: Any = importlib.import_module("transformers")
tokenizers: Any = importlib.import_module("tokenizers")

UNKNOWN = 3
SPACE = "\u2581"


class Unexplained(Exception):
    """transformers and SentencePiece differ, and not by how they normalise."""


class TheirNllb:
    """transformers' NLLB tokenizer of a folder, and SentencePiece's model there.

    Parameters
    ----------
    folder : path
        With ``sentencepiece.bpe.model``; ``tokenizer.json`` is used if there is one, as transformers does.
    """

    def __init__(self, folder: Path) -> None:
        whole = (folder / "tokenizer.json").exists()
        self.tokenizer = (transformers.AutoTokenizer if whole else transformers.NllbTokenizer).from_pretrained(folder)
        self.processor = SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
        backend = self.tokenizer.backend_tokenizer
        self.normalizer = backend.normalizer
        # The same BPE without a normaliser, to show that nothing but normalisation makes a difference.
        bare = json.loads(backend.to_str())
        bare["normalizer"] = bare["post_processor"] = None
        bare["added_tokens"] = []
        self.bare = tokenizers.Tokenizer.from_str(json.dumps(bare))
        self.space = self.tokenizer.convert_tokens_to_ids(SPACE)

    def ids(self, text: str) -> list[int]:
        """transformers' subword ids, without language and ``</s>``, of a text that is plain."""
        found: list[int] = self.tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        return found

    def pieces(self, text: str) -> list[int]:
        """SentencePiece's ids, moved to NLLB's layout."""
        return [i + 1 if i else UNKNOWN for i in self.processor.encode(text)]

    def normalized(self, text: str) -> str:
        """The text as transformers normalises it."""
        return str(self.normalizer.normalize_str(text))

    def differences(self, text: str, ids: list[int]) -> list[str]:
        """The classes of docs/tokenizer.md that explain why ``ids``, transformers', are not SentencePiece's.

        Raises
        ------
        Unexplained
            When they do not.
        """
        ours = self.pieces(text)
        if ids == ours:
            return []
        normalized = self.processor.normalize(text).replace(SPACE, " ").removeprefix(" ")
        if self.bare.encode(normalized).ids != ours:
            raise Unexplained(ascii(text)[:200])
        theirs = self.normalized(text)
        classes = []
        if theirs.endswith((" ", SPACE)) and ids[-1] == self.space:
            classes.append("trailing_space")
            ids = ids[:-1]
        if self.pieces(theirs) != ours:
            classes.append("marks_lost")
        if ids != self.pieces(theirs):
            classes.append("not_composed")
        return classes


class TheirM2m:
    """transformers' M2M-100 tokenizer of a folder, and SentencePiece's pieces looked up in ``vocab.json``."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, src_lang="en")
        self.processor = SentencePieceProcessor(model_file=str(folder / MODEL_FILE))
        self.vocabulary = json.loads((folder / "vocab.json").read_bytes())

    def ids(self, text: str) -> list[int]:
        """transformers' subword ids, without language and ``</s>``, of a text that is plain."""
        found: list[int] = self.tokenizer(text, split_special_tokens=True)["input_ids"][1:-1]
        return found

    def pieces(self, text: str) -> list[int]:
        """SentencePiece's pieces by their ids."""
        return [self.vocabulary.get(piece, UNKNOWN) for piece in self.processor.encode(text, out_type=str)]

    def normalized(self, text: str) -> str:
        """The text as transformers normalises it, which it leaves to SentencePiece."""
        return text

    def differences(self, text: str, ids: list[int]) -> list[str]:
        """No class of differences is known.

        Raises
        ------
        Unexplained
            When there is one.
        """
        if ids != self.pieces(text):
            raise Unexplained(ascii(text)[:200])
        return []
