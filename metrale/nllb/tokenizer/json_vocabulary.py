# SPDX-License-Identifier: MIT OR Apache-2.0
"""A tokenizer from ``tokenizer.json`` alone, by the tokenizers library: its ids are the library's own."""

from __future__ import annotations

import importlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from metrale.checkpoint.json_fields import shown
from metrale.errors import CheckpointError, told
from metrale.nllb.tokenizer import m2m, nllb
from metrale.nllb.tokenizer.files import WHOLE, TokenizerFiles
from metrale.nllb.tokenizer.json_parts import served_parts, unfit_parts
from metrale.nllb.tokenizer.layout import HEAD, MASK, Layout
from metrale.nllb.tokenizer.spm_file import MODEL_FILE
from metrale.nllb.tokenizer.subwords import Span
from metrale.nllb.tokenizer.tokenizer import Tokenizer

EXTRA: Final = "pip install 'metrale[tokenizers]'"
_MOST_ID: Final = 1 << 24
_UNKNOWN: Final = HEAD["<unk>"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JsonSubwords:
    """Subwords by the tokenizers library, which releases the GIL for batches and is only read after loading."""

    path: Path
    library: Any

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        with contained(self.path):
            return list(self.library.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, computed on several threads."""
        with contained(self.path):
            return [list(found.ids) for found in self.library.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        with contained(self.path):
            return str(self.library.decode(list(ids), skip_special_tokens=False))

    def unknown_spans(self, text: str) -> Iterator[Span]:
        """Yield what of the text became ``<unk>``."""
        with contained(self.path):
            if _UNKNOWN not in self.library.encode(text, add_special_tokens=False).ids:
                return
            kept = self._kept(text)
            found = self.library.encode("".join([text[at] for at in kept]), add_special_tokens=False)
        for number, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if number == _UNKNOWN:
                yield _with_marks(text, kept[start], kept[stop - 1] + 1)

    def _kept(self, text: str) -> list[int]:
        """Return where the code points are that do not normalise to nothing.

        With one of the others at the beginning of what it encodes, the library's positions are of another place. One
        that keeps a mark from the letter before it stays.
        """
        normalizer = self.library.normalizer
        nothing = {one for one in set(text) if normalizer is not None and not normalizer.normalize_str(one)}
        return [at for at, one in enumerate(text) if one not in nothing or _is_mark(text, at + 1)]


def _with_marks(text: str, start: int, stop: int) -> Span:
    """Return a span with the rest of the letters and marks at its ends: the library's positions may leave marks out."""
    while start > 0 and _is_mark(text, start):
        start -= 1
    while _is_mark(text, stop):
        stop += 1
    return start, stop


def _is_mark(text: str, at: int) -> bool:
    return at < len(text) and unicodedata.category(text[at]).startswith("M")


@contextmanager
def contained(path: Path) -> Iterator[None]:
    """Turn what the library raises about a file into `CheckpointError`: also a panic, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(path, f"the tokenizers library cannot use it: {text}") from error


def open_tokenizer_json(folder: Path, vocab_size: int | None) -> Tokenizer:
    """Open a folder that has ``tokenizer.json`` and no SentencePiece model."""
    files = TokenizerFiles.read(folder)
    if files.config.get("tokenizer_class") == m2m.CLASS:
        wanted = f"{nllb.VOCAB_FILE} and {MODEL_FILE}"
        raise CheckpointError(folder, f"holds {WHOLE} alone, and {m2m.FAMILY}'s tokenizer is made of {wanted}")
    path = folder / WHOLE
    problems = [*files.unfit([nllb.CLASS]), *(f"{WHOLE}: {phrase}" for phrase in unfit_parts(files.whole))]
    if problems:
        raise CheckpointError(folder, problems)
    library = _load(path, files.whole)
    with contained(path):
        ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
    problems += [
        f"{WHOLE}: {told(token)} has id {shown(ids.get(token))}, expected {number}"
        for token, number in HEAD.items()
        if ids.get(token) != number
    ]
    if max(ids.values(), default=0) >= _MOST_ID:
        problems.append(f"{WHOLE}: has an id of {max(ids.values())}, expected less than {_MOST_ID}")
    problems += _contradictions(files, ids)
    entries = 1 + max(ids.values(), default=-1)
    problems += nllb.too_many(entries, vocab_size, WHOLE)
    if problems:
        raise CheckpointError(folder, problems)
    rows = entries if vocab_size is None else vocab_size
    return Tokenizer(
        "tokenizer.json by tokenizers",
        rows,
        _layout(library, ids),
        JsonSubwords(path, library),
        files.asks_legacy_order,
    )


def _load(path: Path, whole: Mapping[str, object]) -> Any:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise CheckpointError(
            path.parent,
            f"holds its vocabulary in {WHOLE} alone, which is read by the package tokenizers: {EXTRA} ({error})",
        ) from error
    text = json.dumps(served_parts(whole, _is_language))
    with contained(path):
        library = tokenizers.Tokenizer.from_str(text)
        library.encode_special_tokens = True  # special tokens in a text are text
        library.encode(" a ", add_special_tokens=False)
    return library


def _is_language(token: str) -> bool:
    return any(pattern.fullmatch(token) for pattern in (nllb.LANGUAGE, m2m.LANGUAGE))


def _contradictions(files: TokenizerFiles, ids: Mapping[str, int]) -> Iterator[str]:
    """Yield where a file gives a token another id than the library made of ``tokenizer.json``."""
    for claims in files.claims():
        for claim in claims:
            found = ids.get(claim.content) if isinstance(claim.content, str) else None
            if found is None or isinstance(claim.number, bool) or claim.number != found:
                said = f"{claim.source}: {shown(claim.content)} has id {shown(claim.number)}"
                yield f"{said}, and " + (
                    f"{WHOLE} lacks it" if found is None else f"{found} by the vocabulary of {WHOLE}"
                )
                break
    for source, key, contents in files.lists():
        unknown = [content for content in contents if not isinstance(content, str) or content not in ids]
        if unknown:
            yield f"{source}: {key} has {shown(unknown[0])}, which {WHOLE} does not have"


def _layout(library: Any, ids: Mapping[str, int]) -> Layout:
    added = {token.content: token.special for token in library.get_added_tokens_decoder().values()}
    ordered = sorted((content for content in added), key=ids.__getitem__)
    languages = {token: ids[token] for token in ordered if nllb.LANGUAGE.fullmatch(token)}
    other: dict[str, int] = {}
    if not languages:
        other = {token: ids[token] for token in ordered if m2m.LANGUAGE.fullmatch(token)}
        languages = {token[2:-2]: number for token, number in other.items()}
    silent = {*HEAD.values(), *(ids[token] for token, special in added.items() if special)}
    text = frozenset(ids.values()) - silent
    return Layout(languages, 1 + max(ids.values()), text, other_spellings=other, mask_id=ids.get(MASK))
