# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200's tokenizer from ``sentencepiece.bpe.model``.

Ids: ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, SentencePiece piece i at i + 1 for i >= 3, then the 202 FLORES-200
codes, then ``<mask>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from metrale.checkpoint import read_json_object
from metrale.errors import CheckpointError
from metrale.nllb.languages import FLORES_200
from metrale.nllb.tokenizer.layout import HEAD, MASK, Layout
from metrale.nllb.tokenizer.spm_file import HEAD_PIECES, MODEL_FILE, OFFSET, load_model
from metrale.nllb.tokenizer.spm_subwords import NllbSubwords
from metrale.nllb.tokenizer.tokenizer import Tokenizer

_FIRST_PIECE = len(HEAD)


def open_nllb(folder: Path, vocab_size: int | None) -> Tokenizer:
    """Read ``sentencepiece.bpe.model`` and check it against the other tokenizer files of the folder."""
    processor, pieces = load_model(folder / MODEL_FILE)
    first_language = len(pieces) + OFFSET
    languages = {code: first_language + i for i, code in enumerate(FLORES_200)}
    mask = first_language + len(FLORES_200)
    entries = mask + 1
    problems = list(_contradictions(folder, {**HEAD, **languages, MASK: mask}, pieces))
    if vocab_size is not None and vocab_size < entries:
        problems.append(
            f"{MODEL_FILE}: the tokenizer has {entries} entries, the model's embedding only {vocab_size} rows"
        )
    if problems:
        raise CheckpointError(folder, problems)
    layout = Layout(languages, entries, range(_FIRST_PIECE, first_language), mask_id=mask)
    rows = entries if vocab_size is None else vocab_size
    return Tokenizer("NLLB-200 by SentencePiece", rows, layout, NllbSubwords(processor))


def _contradictions(folder: Path, special: Mapping[str, int], pieces: Sequence[str]) -> Iterator[str]:
    """What the folder's other tokenizer files say against these ids, one sentence each. Absent files say nothing."""
    if (folder / "vocab.json").exists():
        yield "vocab.json: the folder has the vocabulary of M2M-100, whose ids are others than NLLB-200's"
    config = _read_optional(folder / "tokenizer_config.json")
    yield from _wrong_lists("tokenizer_config.json", config, special)
    yield from _wrong_ids("tokenizer_config.json", _decoder_entries(config.get("added_tokens_decoder")), special)
    if config.get("legacy_behaviour") is True:
        yield "tokenizer_config.json: legacy_behaviour puts the language after the source text, which is not supported"
    yield from _wrong_lists("special_tokens_map.json", _read_optional(folder / "special_tokens_map.json"), special)
    added = _read_optional(folder / "added_tokens.json")
    yield from _wrong_ids("added_tokens.json", added.items(), special)
    whole = _read_optional(folder / "tokenizer.json")
    yield from _wrong_ids("tokenizer.json", _added_entries(whole.get("added_tokens")), special)
    model = whole.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        first = len(HEAD_PIECES)
        wrong = [piece for i, piece in enumerate(pieces[first:], _FIRST_PIECE) if vocab.get(piece) != i]
        if wrong:
            yield f"tokenizer.json: {len(wrong)} pieces of {MODEL_FILE} have another id there or none, as {wrong[0]!r}"


def _read_optional(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}


def _wrong_ids(source: str, entries: Iterable[tuple[object, object]], special: Mapping[str, int]) -> Iterator[str]:
    for content, number in entries:
        expected = special.get(content) if isinstance(content, str) else None
        if expected is None or number != expected:
            wanted = "no such entry" if expected is None else f"id {expected}"
            # One is enough: behind a code put in between, every further id differs.
            yield f"{source}: {content!r} has id {number!r}, expected {wanted} in the layout of NLLB-200"
            return


def _wrong_lists(source: str, config: Mapping[str, object], special: Mapping[str, int]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        contents = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
        unknown = [content for content in contents if not isinstance(content, str) or content not in special]
        listed = [content for content in contents if content in FLORES_200]
        if unknown:
            yield f"{source}: {key} has {unknown[0]!r}, which NLLB-200 does not have; added tokens are not supported"
        elif listed != sorted(listed, key=FLORES_200.index):
            moved = next(a for a, b in zip(listed, sorted(listed, key=FLORES_200.index), strict=True) if a != b)
            yield f"{source}: {key} lists the languages in another order than NLLB-200, from {moved!r} on"


def _decoder_entries(value: object) -> Iterator[tuple[object, object]]:
    for number, entry in value.items() if isinstance(value, dict) else ():
        content = entry.get("content") if isinstance(entry, dict) else entry
        yield content, int(number) if number.isdecimal() and len(number) < 10 else number


def _added_entries(value: object) -> Iterator[tuple[object, object]]:
    for entry in value if isinstance(value, list) else ():
        yield (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (entry, None)
