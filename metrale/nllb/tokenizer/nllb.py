# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200's tokenizer from ``sentencepiece.bpe.model``.

Ids: ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, SentencePiece piece i at i + 1 for i >= 3, then the 202 FLORES-200
codes, then ``<mask>``; behind them, or with ``<mask>`` moved, what a fine-tune added.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from metrale.errors import CheckpointError
from metrale.nllb.languages import FLORES_200
from metrale.nllb.tokenizer.added import AddedToken, resolve
from metrale.nllb.tokenizer.files import TokenizerFiles
from metrale.nllb.tokenizer.layout import HEAD, MASK, Layout
from metrale.nllb.tokenizer.splitting import split_subwords, unsplittable
from metrale.nllb.tokenizer.spm_file import HEAD_PIECES, MODEL_FILE, OFFSET, load_model
from metrale.nllb.tokenizer.spm_subwords import NllbSubwords
from metrale.nllb.tokenizer.subwords import SPACE, Subwords
from metrale.nllb.tokenizer.tokenizer import Tokenizer

FAMILY: Final = "NLLB-200"
CLASS: Final = "NllbTokenizer"
LANGUAGE: Final = re.compile(r"[a-z]{2,3}_[A-Z][a-z]{3}(_[A-Za-z0-9]+)*")
"""What an added token looks like that is a language."""

VOCAB_FILE: Final = "vocab.json"


def open_nllb(folder: Path, vocab_size: int | None) -> Tokenizer:
    """Read ``sentencepiece.bpe.model`` and check it against the other tokenizer files of the folder."""
    processor, pieces = load_model(folder / MODEL_FILE)
    files = TokenizerFiles.read(folder)
    first_language = len(pieces) + OFFSET
    languages = {code: first_language + i for i, code in enumerate(FLORES_200)}
    own = {**HEAD, **languages}
    known = pieces[len(HEAD_PIECES) :]
    found = resolve(files, {**own, MASK: first_language + len(FLORES_200)}, FAMILY, FLORES_200, set(known))
    problems = [*files.unfit([CLASS]), *found.problems]
    problems += files.moved_pieces({piece: len(HEAD) + i for i, piece in enumerate(known)}, MODEL_FILE)
    new, plain, silent = sorted_out(found.tokens, LANGUAGE)
    problems += unsplittable(plain, processor)
    languages |= {token.content: token.number for token in new}
    mask = found.mask
    entries = 1 + max([*languages.values(), *(token.number for token in found.tokens), -1 if mask is None else mask])
    problems += too_many(entries, vocab_size, MODEL_FILE)
    if problems:
        raise CheckpointError(folder, problems)
    subwords: Subwords = NllbSubwords(processor)
    if plain:
        blockers = [*((content, False) for content in own), (MASK, True)]
        blockers += [(token.content, token.normalized) for token in (*new, *silent)]
        space = processor.piece_to_id(SPACE)
        subwords = split_subwords(NllbSubwords(processor), plain, blockers, space + OFFSET if space else HEAD["<unk>"])
    layout = Layout(
        languages,
        entries,
        range(len(HEAD), first_language),
        frozenset(token.number for token in plain),
        mask_id=mask,
    )
    rows = entries if vocab_size is None else vocab_size
    return Tokenizer(f"{FAMILY} by SentencePiece", rows, layout, subwords, files.asks_legacy_order)


def sorted_out(
    tokens: tuple[AddedToken, ...], language: re.Pattern[str]
) -> tuple[list[AddedToken], list[AddedToken], list[AddedToken]]:
    """Return added tokens as languages, tokens of text, and others, which have no text."""
    languages = [token for token in tokens if language.fullmatch(token.content)]
    others = [token for token in tokens if not language.fullmatch(token.content)]
    return languages, [one for one in others if not one.special], [one for one in others if one.special]


def too_many(entries: int, vocab_size: int | None, name: str) -> list[str]:
    """Return the problem of more entries than the embedding has rows, if there is one."""
    if vocab_size is None or vocab_size >= entries:
        return []
    return [f"{name}: the tokenizer has {entries} entries, the model's embedding only {vocab_size} rows"]
