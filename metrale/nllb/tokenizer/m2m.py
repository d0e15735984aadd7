# SPDX-License-Identifier: MIT OR Apache-2.0
"""M2M-100's tokenizer from ``vocab.json`` and ``sentencepiece.bpe.model``.

Ids: those of ``vocab.json``, from ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2 and ``<unk>`` 3 on; then the languages, ``__af__``
first. The rows behind them ("madeup words") have no text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from metrale.checkpoint import read_json_object
from metrale.checkpoint.json_fields import shown
from metrale.errors import CheckpointError, told
from metrale.nllb.m2m_languages import M2M_LANGUAGES, language_token
from metrale.nllb.tokenizer.added import resolve
from metrale.nllb.tokenizer.files import CONFIG, TokenizerFiles
from metrale.nllb.tokenizer.layout import HEAD, Layout
from metrale.nllb.tokenizer.nllb import VOCAB_FILE, sorted_out, too_many
from metrale.nllb.tokenizer.splitting import split_subwords, unsplittable
from metrale.nllb.tokenizer.spm_file import HEAD_PIECES, MODEL_FILE, load_model
from metrale.nllb.tokenizer.spm_subwords import M2mSubwords
from metrale.nllb.tokenizer.subwords import Subwords
from metrale.nllb.tokenizer.tokenizer import Tokenizer

FAMILY: Final = "M2M-100"
CLASS: Final = "M2M100Tokenizer"
LANGUAGE: Final = re.compile(r"__[A-Za-z]{2,3}([_-][A-Za-z0-9]+)*__")
"""What an added token looks like that is a language."""


def open_m2m(folder: Path, vocab_size: int | None) -> Tokenizer:
    """Read the two files and check them against the other tokenizer files of the folder."""
    vocabulary = _read_vocabulary(folder / VOCAB_FILE)
    processor, pieces = load_model(folder / MODEL_FILE)
    files = TokenizerFiles.read(folder)
    problems = list(files.unfit([CLASS]))
    chosen = files.config.get("language_codes", "m2m100")
    if not isinstance(chosen, str) or chosen not in M2M_LANGUAGES:
        problems.append(f"{CONFIG}: language_codes is {shown(chosen)}, expected one of {', '.join(M2M_LANGUAGES)}")
        chosen = "m2m100"
    tokens = {language_token(code): len(vocabulary) + i for i, code in enumerate(M2M_LANGUAGES[chosen])}
    found = resolve(files, {**HEAD, **tokens}, FAMILY, tuple(tokens), vocabulary)
    problems += [*found.problems, *files.moved_pieces(vocabulary, VOCAB_FILE)]
    problems += [
        f"{VOCAB_FILE}: has {told(token)}, expected it behind the vocabulary" for token in tokens if token in vocabulary
    ]
    lacking = [piece for piece in pieces[len(HEAD_PIECES) :] if piece not in vocabulary]
    if 2 * len(lacking) > len(pieces):
        problems.append(f"{VOCAB_FILE}: lacks {len(lacking)} of the {len(pieces)} pieces of {MODEL_FILE}")
    new, plain, silent = sorted_out(found.tokens, LANGUAGE)
    problems += unsplittable(plain, processor)
    tokens |= {token.content: token.number for token in new}
    entries = 1 + max([*tokens.values(), *(token.number for token in found.tokens)])
    problems += too_many(entries, vocab_size, VOCAB_FILE)
    if problems:
        raise CheckpointError(folder, problems)
    numbers = {piece: number for piece, number in vocabulary.items() if piece not in HEAD}
    inner = M2mSubwords(processor, numbers, tuple(sorted(vocabulary, key=vocabulary.__getitem__)))
    subwords: Subwords = inner
    if plain:
        blockers = [(content, False) for content in (*HEAD, *tokens, *(token.content for token in silent))]
        subwords = split_subwords(inner, plain, blockers, None, always_raw=True)
    layout = Layout(
        {token[2:-2]: number for token, number in tokens.items()},
        entries,
        range(len(HEAD), len(vocabulary)),
        frozenset(token.number for token in plain),
        tokens,
    )
    rows = entries if vocab_size is None else vocab_size
    return Tokenizer(f"{FAMILY} by SentencePiece", rows, layout, subwords, files.asks_legacy_order)


def _read_vocabulary(path: Path) -> dict[str, int]:
    content = read_json_object(path)
    problems = list(_wrong_ids(content))
    if problems:
        raise CheckpointError(path, problems)
    return {piece: number for piece, number in content.items() if isinstance(number, int)}


def _wrong_ids(content: Mapping[str, object]) -> Iterator[str]:
    for token, number in HEAD.items():
        if content.get(token) != number:
            yield f"{told(token)} has id {shown(content.get(token))}, expected {number}"
    numbers = {number for number in content.values() if isinstance(number, int) and not isinstance(number, bool)}
    if numbers != set(range(len(content))):
        yield f"expected the ids from 0 to {len(content) - 1}, each once"
