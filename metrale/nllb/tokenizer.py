# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text to the token ids of NLLB-200 and back, with SentencePiece.

Ids: ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, SentencePiece piece i at i + 1 for i >= 3, then the 202 FLORES-200
codes, then ``<mask>``. ``docs/tokenizer.md`` compares the result with transformers' tokenizer.
"""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sentencepiece import SentencePieceProcessor

from metrale.checkpoint import read_file, read_json_object, require_folder
from metrale.checks import integer
from metrale.errors import CheckpointError, InvalidInput, UnknownLanguage, told
from metrale.nllb.languages import FLORES_200, near_languages

MODEL_FILE = "sentencepiece.bpe.model"
MAX_MODEL_BYTES = 256 << 20

# SentencePiece has <unk>, <s> and </s> at 0, 1 and 2, NLLB four special tokens: the pieces move up by one.
_HEAD_PIECES = ("<unk>", "<s>", "</s>")
_OFFSET = 1
_FIRST_PIECE = len(_HEAD_PIECES) + _OFFSET
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NllbTokenizer:
    """The tokenizer of an NLLB-200 checkpoint. ``from_dir`` makes one.

    Immutable, and safe to share between threads without a lock: after loading, the SentencePiece processor is only
    read (its encode and lookup calls are const), and it releases the GIL while it encodes.

    Attributes
    ----------
    languages : tuple of str
        The language codes, in the order of their ids.
    vocab_size : int
        Rows of the model's embedding, at least ``len(tokenizer)``. Rows past ``len(tokenizer)`` have no text.
    bos_id, pad_id, eos_id, unk_id : int
        The ids of ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``.
    """

    bos_id: ClassVar[int] = 0
    pad_id: ClassVar[int] = 1
    eos_id: ClassVar[int] = 2
    unk_id: ClassVar[int] = 3

    languages: tuple[str, ...]
    vocab_size: int
    _processor: SentencePieceProcessor
    _language_ids: Mapping[str, int]

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str], *, vocab_size: int | None = None) -> NllbTokenizer:
        """Read ``sentencepiece.bpe.model`` and check it against the other tokenizer files of the folder.

        Parameters
        ----------
        path : path
            The checkpoint's folder.
        vocab_size : int, optional
            Rows of the checkpoint's embedding. More rows than the tokenizer has entries are fine. Without it, the
            number of entries.

        Raises
        ------
        CheckpointError
            When the folder or the file is missing, the file is not a whole SentencePiece model or not one of NLLB,
            ``vocab_size`` is too small, or another tokenizer file contradicts the ids that this class gives.
        """
        if vocab_size is not None:
            vocab_size = integer("vocab_size", vocab_size, 1)
        folder = require_folder(path)
        processor, pieces = _load_model(folder / MODEL_FILE)
        first_language = len(pieces) + _OFFSET
        language_ids = {code: first_language + i for i, code in enumerate(FLORES_200)}
        entries = first_language + len(FLORES_200) + 1
        named = {"<s>": cls.bos_id, "<pad>": cls.pad_id, "</s>": cls.eos_id, "<unk>": cls.unk_id, "<mask>": entries - 1}
        problems = list(_contradictions(folder, {**named, **language_ids}, pieces))
        if vocab_size is not None and vocab_size < entries:
            problems.append(
                f"{MODEL_FILE}: the tokenizer has {entries} entries, the model's embedding only {vocab_size} rows"
            )
        if problems:
            raise CheckpointError(folder, problems)
        return cls(FLORES_200, entries if vocab_size is None else vocab_size, processor, language_ids)

    def __len__(self) -> int:
        """Return the number of entries: pieces, special tokens and languages."""
        return self.mask_id + 1

    def __repr__(self) -> str:
        return f"NllbTokenizer({len(self)} entries, {len(self.languages)} languages, vocab_size={self.vocab_size})"

    @property
    def mask_id(self) -> int:
        """The id of ``<mask>``, the last entry."""
        return self._first_language + len(self.languages)

    @property
    def _first_language(self) -> int:
        return len(self._processor) + _OFFSET

    def encode(self, text: str) -> list[int]:
        """Return the subword ids of ``text``, without language and ``</s>``, however many they are.

        The text is plain: ``</s>``, ``<mask>`` or ``eng_Latn`` in it are characters like any others. Text without
        anything visible gives no ids.

        Raises
        ------
        InvalidInput
            When ``text`` is not a str or holds a lone surrogate, which no UTF-8 can express.
        """
        _require_text("text", text)
        return _to_model_ids(self._processor.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ``[encode(text) for text in texts]``, computed on several threads.

        Raises
        ------
        InvalidInput
            As ``encode``; the argument's name says which text it was.
        """
        if isinstance(texts, str):
            raise InvalidInput("texts", "a sequence of str", "one str")
        try:
            listed = list(texts)
        except TypeError:
            raise InvalidInput("texts", "a sequence of str", reprlib.repr(texts)) from None
        for i, text in enumerate(listed):
            _require_text(f"texts[{i}]", text)
        return [_to_model_ids(ids) for ids in self._processor.encode(listed)]

    def encode_source(self, text: str, language: str) -> list[int]:
        """Return the encoder's input: the id of ``language``, the ids of ``text``, ``</s>``.

        Raises
        ------
        InvalidInput
            As ``encode``, and UnknownLanguage as ``language_id``.
        """
        return [self.language_id(language), *self.encode(text), self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, as transformers does with ``skip_special_tokens=True``.

        Special tokens, ``<unk>`` and ``<mask>`` among them, language codes, and ids from ``len(tokenizer)`` up to
        ``vocab_size``, which are padding of the embedding, give no text.

        Parameters
        ----------
        ids : iterable of int
            Python or NumPy integers in ``[0, vocab_size)``.

        Raises
        ------
        InvalidInput
            When an id is not an integer or is outside the vocabulary.
        """
        try:
            numbers = [operator.index(number) for number in ids]
        except TypeError:
            raise InvalidInput("ids", "a sequence of integers", reprlib.repr(ids)) from None
        for i, number in enumerate(numbers):
            if not 0 <= number < self.vocab_size:
                raise InvalidInput(f"ids[{i}]", f"an id from 0 to {self.vocab_size - 1}", number)
        end = self._first_language
        pieces = self._processor.id_to_piece([number - _OFFSET for number in numbers if _FIRST_PIECE <= number < end])
        if pieces:
            # The space that SentencePiece puts before a text is none of the text's.
            pieces[0] = pieces[0].replace(_SPACE, "")
        return "".join(pieces).replace(_SPACE, " ")

    def is_special(self, token: int) -> bool:
        """Return whether an id gives no text: a special token, a language code, or a padding row."""
        return not _FIRST_PIECE <= token < self._first_language

    def language_id(self, code: str, argument: str = "language") -> int:
        """Return the id of a language code.

        Parameters
        ----------
        code : str
            One of ``languages``, spelt exactly so.
        argument : str
            The name of the caller's argument, for the error.

        Raises
        ------
        UnknownLanguage
            With up to three codes that may have been meant, for ISO 639 codes and English names too.
        """
        found = self._language_ids.get(code) if isinstance(code, str) else None
        if found is None:
            near = near_languages(code, self.languages) if isinstance(code, str) else ()
            raise UnknownLanguage(argument, code[:80] if isinstance(code, str) else code, near)
        return found

    def language_code(self, language_id: int) -> str:
        """Return the language code that has this id.

        Raises
        ------
        InvalidInput
            When it is not the id of a language.
        """
        first = self._first_language
        try:
            index = operator.index(language_id) - first
        except TypeError:
            index = -1
        if not 0 <= index < len(self.languages):
            expected = f"the id of a language, from {first} to {first + len(self.languages) - 1}"
            raise InvalidInput("language_id", expected, reprlib.repr(language_id))
        return self.languages[index]


def _require_text(argument: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidInput(argument, "a str", type(text).__name__)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}"
        raise InvalidInput(argument, "text that UTF-8 can express", got) from None


def _to_model_ids(ids: list[int]) -> list[int]:
    # Encoding gives no piece below 3 but 0, the unknown one; </s> in a text is made of ordinary pieces.
    return [number + _OFFSET if number else NllbTokenizer.unk_id for number in ids]


def _load_model(path: Path) -> tuple[SentencePieceProcessor, list[str]]:
    """Return the processor and every piece's text, or raise CheckpointError."""
    data = read_file(path, MAX_MODEL_BYTES, "a SentencePiece model")
    if not data:
        raise CheckpointError(path, "is an empty file, expected a SentencePiece model")
    try:
        processor = SentencePieceProcessor(model_proto=data)
        numbers = list(range(len(processor)))
        pieces: list[str] = processor.id_to_piece(numbers)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"is not a whole SentencePiece model: {error}") from error
    if not _has_specs(data):
        raise CheckpointError(path, "is not a whole SentencePiece model: it ends before its last parts")
    if tuple(pieces[: len(_HEAD_PIECES)]) != _HEAD_PIECES:
        head = ", ".join(pieces[: len(_HEAD_PIECES)])
        raise CheckpointError(path, f"expected the first pieces {', '.join(_HEAD_PIECES)}, got {head}")
    if any(processor.is_byte(numbers)):
        raise CheckpointError(path, "has byte pieces, which NLLB's tokenizer does not have")
    return processor, pieces


def _has_specs(data: bytes) -> bool:
    """Whether a ModelProto that parses has its trainer_spec (field 2) and normalizer_spec (field 3) too.

    A file cut between two pieces still parses; the specs come after all pieces. Without them, SentencePiece would take
    another algorithm and no normalisation, and every id from the languages on would be wrong.
    """
    seen: set[int] = set()
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 != 2:  # every field of ModelProto is a length-delimited message
            break
        seen.add(tag >> 3)
        size, position = _varint(data, position)
        position += size
    return {2, 3} <= seen


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _contradictions(folder: Path, special: Mapping[str, int], pieces: Sequence[str]) -> Iterator[str]:
    """What the folder's other tokenizer files say against these ids, one sentence each. Absent files say nothing."""
    if os.path.lexists(folder / "vocab.json"):
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
        first = len(_HEAD_PIECES)
        wrong = [piece for i, piece in enumerate(pieces[first:], _FIRST_PIECE) if vocab.get(piece) != i]
        if wrong:
            yield f"tokenizer.json: {len(wrong)} pieces of {MODEL_FILE} have another id there or none, as {wrong[0]!r}"


def _read_optional(path: Path) -> dict[str, object]:
    return read_json_object(path) if os.path.lexists(path) else {}


def _wrong_ids(source: str, entries: Iterable[tuple[object, object]], special: Mapping[str, int]) -> Iterator[str]:
    for content, number in entries:
        expected = special.get(content) if isinstance(content, str) else None
        if expected is None or number != expected:
            wanted = "no such entry" if expected is None else f"id {expected}"
            # One is enough: behind a code put in between, every further id differs.
            yield f"{source}: {told(content)} has id {told(number)}, expected {wanted} in the layout of NLLB-200"
            return


def _wrong_lists(source: str, config: Mapping[str, object], special: Mapping[str, int]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        entries = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        contents = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
        unknown = [content for content in contents if not isinstance(content, str) or content not in special]
        listed = [content for content in contents if content in FLORES_200]
        if unknown:
            what = f"{key} has {told(unknown[0])}"
            yield f"{source}: {what}, which NLLB-200 does not have; added tokens are not supported"
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
