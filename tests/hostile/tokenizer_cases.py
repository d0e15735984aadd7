# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokenizer files: SentencePiece models that are damaged or made to do harm, and JSON files that contradict them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import metrale
from metrale.errors import CheckpointError
from metrale.nllb.tokenizer import open_tokenizer
from tests.hostile import damage, spm_bytes, stage
from tests.hostile.case import Answer, Case, Refusal
from tests.hostile.config_cases import set_fields
from tests.hostile.spm_bytes import NORMALIZER, PIECE, TRAINER, message, varint

TEXTS: Final = (
    "Good morning!",
    "ﬁ Å ｶﾞ \u0300\u0301 zażółć",
    "",
    " \t ",
    "日本語" * 50,
    "\U0001f600\u200d\U0001f600",
    "a" * 3000,
)
NORMAL_FORM: Final = 2
"""The field of the normalizer that holds its table of replacements, a trie and their texts."""


@cache
def sound() -> bytes:
    """Return the demo model's file."""
    return (metrale.demo_model_path() / stage.SPM).read_bytes()


def encodes(folder: Path) -> str:
    """Read the folder's tokenizer and use it on every text; refuse an id that there is not, or a text without end."""
    tokenizer = open_tokenizer(folder)
    assert tokenizer is not None
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert all(0 <= number < len(tokenizer) for number in ids), ids
        assert len(ids) <= 20 * len(text) + 20, len(ids)
        tokenizer.decode(ids)
    return "usable"


def either(folder: Path) -> str:
    """Do as `encodes`, or come to a refusal that names the file: of a damage, nobody can say which of them must be."""
    try:
        return encodes(folder)
    except CheckpointError as error:
        return "usable" if error.path == str(folder / stage.SPM) else f"not a refusal of the file: {error}"


def _written(make: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / stage.SPM).write_bytes(make())


def _flips() -> Iterator[Case]:
    """Bits turned over: a model that is refused, or one that still gives ids for every text."""
    size = 365509
    for seed in range(40):
        start, stop = ((0, size), (0, 4000), (size - 250_000, size), (size - 3000, size))[seed % 4]
        change = damage.flipped(seed, start, stop, (1, 4, 64)[seed % 3])

        def build(folder: Path, change: damage.Damage = change) -> None:
            (folder / stage.SPM).write_bytes(sound())
            change(folder / stage.SPM)

        yield Case(f"spm/flip_{seed}", either, Answer("usable"), build)


def _piece(text: bytes, score: float = -1.0, kind: int = 1) -> spm_bytes.Field:
    content = [(1, 2, text), (2, 5, struct.pack("<f", score)), (3, 0, varint(kind))]
    return PIECE, 2, message(content)


def _table(trie: bytes, texts: bytes) -> bytes:
    return struct.pack("<I", len(trie)) + trie + texts


def _with_table(table: bytes) -> bytes:
    return spm_bytes.replaced(sound(), NORMALIZER, NORMAL_FORM, table)


def _with_pieces(*more: spm_bytes.Field) -> bytes:
    return message([*spm_bytes.fields(sound()), *more])


@cache
def _own_table() -> bytes:
    (normalizer,) = (content for number, _, content in spm_bytes.fields(sound()) if number == NORMALIZER)
    (table,) = (content for number, _, content in spm_bytes.fields(normalizer) if number == NORMAL_FORM)
    return table


def _of_type(kind: int) -> Callable[[], bytes]:
    return lambda: spm_bytes.replaced(sound(), TRAINER, 3, varint(kind), 0)


MADE: Final[dict[str, Callable[[], bytes]]] = {
    "no_specs": lambda: message([one for one in spm_bytes.fields(sound()) if one[0] == PIECE]),
    "no_pieces": lambda: message([one for one in spm_bytes.fields(sound()) if one[0] != PIECE]),
    "specs_twice": lambda: sound() + message([one for one in spm_bytes.fields(sound()) if one[0] != PIECE]),
    "twice": lambda: sound() * 2,
    "unknown_fields": lambda: sound() + message([(99, 2, b"x" * 1000), (100, 0, b"\1"), (101, 5, b"abcd")]),
    "group": lambda: sound() + varint(200 << 3 | 3) + varint(200 << 3 | 4),
    "endless_varint": lambda: sound() + b"\xff" * 20,
    "huge_length": lambda: sound() + varint(1 << 3 | 2) + varint((1 << 63) - 1),
    "field_zero": lambda: sound() + b"\x02\x00",
    "twin_piece": lambda: _with_pieces(_piece(b"twin"), _piece(b"twin")),
    "empty_piece": lambda: _with_pieces(_piece(b"")),
    "nul_piece": lambda: _with_pieces(_piece(b"a\0b")),
    "bad_utf8_piece": lambda: _with_pieces(_piece(b"\xff\xfe")),
    "surrogate_piece": lambda: _with_pieces(_piece(b"\xed\xa0\x80")),
    "long_piece": lambda: _with_pieces(_piece(b"x" * 5_000_000)),
    "second_unknown": lambda: _with_pieces(_piece(b"<other>", kind=2)),
    "control_piece": lambda: _with_pieces(_piece(b"control", kind=3)),
    "user_piece": lambda: _with_pieces(_piece("\u2581Good".encode() * 3, kind=4)),
    "strange_kind": lambda: _with_pieces(_piece(b"strange", kind=77)),
    "nan_score": lambda: _with_pieces(_piece(b"Goo", float("nan"))),
    "infinite_score": lambda: _with_pieces(_piece(b"Goo", float("inf")), _piece(b"mor", float("-inf"))),
    "huge_score": lambda: _with_pieces(_piece(b"Goo", 3e38), _piece(b"mor", 3e38)),
    "many_pieces": lambda: _with_pieces(*(_piece(b"p%d" % index) for index in range(300_000))),
    **{
        f"model_type_{kind}": _of_type(kind)
        for kind in (0, 1, 2, 3, 4, 99)
    },
    "no_table": lambda: spm_bytes.replaced(sound(), NORMALIZER, NORMAL_FORM, None),
    "empty_table": lambda: _with_table(b""),
    "short_table": lambda: _with_table(b"\1\2"),
    "table_claims": lambda: _with_table(struct.pack("<I", 0xFFFFFFFC) + b"abcd" * 300),
    "table_of_trie_alone": lambda: _with_table(struct.pack("<I", 1024) + b"\0" * 1024),
    "table_odd_trie": lambda: _with_table(_table(b"\1" * 1023, b"x\0")),
    "table_tiny_trie": lambda: _with_table(_table(b"\xff" * 4, b"x\0")),
    "table_wild_offsets": lambda: _with_table(_table(struct.pack("<I", 0x3FFFFC00 | 0x200) * 256, b"x\0")),
    "table_wild_leaves": lambda: _with_table(_table(struct.pack("<I", 0x80000000 | 0x7FFFFFFF) * 1024, b"x\0")),
    "table_all_leaves": lambda: _with_table(_table(struct.pack("<I", 0x80000100) * 1024, b"x" * 999)),
    "table_unended_text": lambda: _with_table(_own_table()[:-1]),
    "table_cut": lambda: _with_table(_own_table()[:100_000]),
    "table_zeroed_texts": lambda: _with_table(_own_table()[:200_000] + b"\xff" * 60_000),
}  # fmt: skip

"""Models that are made to do harm."""

USABLE: Final = frozenset(
    {
        *("specs_twice", "unknown_fields", "group", "control_piece", "user_piece", "strange_kind"),
        *("nan_score", "infinite_score", "huge_score", "many_pieces", "no_table", "empty_table"),
        *(f"model_type_{kind}" for kind in (0, 1, 2, 3, 4, 99)),
    }
)
"""Those that give ids for every text, whatever ids these are: no file says which would be right."""


def _json_cases() -> Iterator[Case]:
    """Files beside the model that say something else than it, in values of every type."""
    wild: dict[str, Any] = {
        "number": 3,
        "text": "x" * 100_000,
        "true": True,
        "deep": [[[[{}]]]],
        "huge": 10**4000,
        "list": [1] * 10_000,
    }
    for label, value in wild.items():
        for name, changes in {
            "added_tokens.json": {"<s>": value},
            "special_tokens_map.json": {"additional_special_tokens": [value]},
            "tokenizer_config.json": {"added_tokens_decoder": {"0": {"content": value}}},
            "tokenizer.json": {"added_tokens": [{"id": value, "content": "<s>"}]},
        }.items():

            def change(folder: Path, name: str = name, changes: dict[str, Any] = changes) -> None:
                if not (folder / name).exists():
                    (folder / name).write_text("{}")
                set_fields(name, changes)(folder)

            expect = Refusal("CheckpointError", rf"{name}: ", path="/input", problems=1)
            yield Case(f"tokenizer/{name}/{label}", stage.judged, expect, stage.copied("whole", change))


def cases() -> Iterator[Case]:
    """Every case of tokenizer files."""
    yield Case("spm/sound", encodes, Answer("usable"), _written(sound))
    yield from _flips()
    broken = Refusal("CheckpointError", "is not a whole SentencePiece model", path=f"input/{stage.SPM}", problems=1)
    for label, make in MADE.items():
        expect = Answer("usable") if label in USABLE else broken
        yield Case(f"spm/{label}", encodes, expect, _written(make))
    yield from _json_cases()
