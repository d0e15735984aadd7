# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every JSON file of a checkpoint: broken, enormous, deep, and in encodings that JSON does not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.hostile import damage, stage
from tests.hostile.case import Answer, Case, Refusal
from tests.hostile.damage import Damage

FILES: Final[dict[str, tuple[str, Callable[[Path], object]]]] = {
    "config.json": ("whole", stage.judged),
    "generation_config.json": ("whole", stage.judged),
    "tokenizer.json": ("whole", stage.judged),
    "tokenizer_config.json": ("whole", stage.judged),
    "special_tokens_map.json": ("whole", stage.judged),
    "added_tokens.json": ("whole", stage.judged),
    stage.INDEX: ("sharded", stage.judged),
    "adapter_config.json": ("adapter", stage.judged_adapter),
}
"""The files, the folder that each is in, and what is done with that folder."""

DEEP: Final = 100_000
BOMB_BYTES: Final = 60 << 20


def without_end(path: Path) -> None:
    path.write_text(path.read_text("utf-8").rstrip()[:-1], "utf-8")


BROKEN: Final[dict[str, tuple[Damage, str]]] = {
    "empty": (damage.replaced(b""), "is not valid JSON"),
    "one_byte": (damage.cut(1), "is not valid JSON"),
    "seven_bytes": (damage.replaced(b'{"a": 1'), "is not valid JSON"),
    "one_byte_short": (without_end, "is not valid JSON"),
    "one_more": (damage.grown(b"}"), "is not valid JSON"),
    "two_objects": (damage.grown(b"{}"), "is not valid JSON"),
    "nul_after": (damage.grown(b"\0"), "is not valid JSON"),
    "array": (damage.replaced(b"[]"), "holds a JSON array, expected an object"),
    "null": (damage.replaced(b"null"), "holds a JSON null, expected an object"),
    "string": (damage.replaced(b'"{}"'), "holds a JSON string, expected an object"),
    "utf16": (damage.replaced('{"a": 1}'.encode("utf-16")), "is not valid JSON"),
    "utf32": (damage.replaced('{"a": 1}'.encode("utf-32")), "is not valid JSON"),
    "latin1": (damage.replaced(b'{"a": "\xe9"}'), "is not valid JSON"),
    "overlong": (damage.replaced(b'{"a": "\xc0\x80"}'), "is not valid JSON"),
    "surrogate_bytes": (damage.replaced(b'{"a": "\xed\xa0\x80"}'), "is not valid JSON"),
    "nan": (damage.replaced(b'{"a": NaN}'), "NaN is not a JSON number"),
    "infinity": (damage.replaced(b'{"a": -Infinity}'), "-Infinity is not a JSON number"),
    "overflow": (damage.replaced(b'{"a": 1e400}'), "is out of range"),
    "long_integer": (damage.replaced(b'{"a": ' + b"9" * 5000 + b"}"), "is not valid JSON"),
    "deep_lists": (damage.replaced(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"), "nested too deeply"),
    "deep_objects": (damage.replaced(b'{"a":' * DEEP + b"1" + b"}" * DEEP), "nested too deeply"),
    "brackets": (damage.repeated(b"", b"[", BOMB_BYTES, b""), "nested too deeply|is larger than|too many"),
    "wide_lists": (damage.repeated(b'{"a":[[]', b",[]", BOMB_BYTES, b"]}"), "is larger than|too many"),
    "wide_numbers": (damage.repeated(b'{"a":[1', b",9e9", BOMB_BYTES, b"]}"), "is larger than|too many"),
    "wide_strings": (damage.repeated(b'{"a":[""', b',"ab"', BOMB_BYTES, b"]}"), "is larger than|too many"),
    "duplicate_key": (damage.replaced(b'{"a": 1, "a": 2}'), "is not valid JSON: the key 'a' is there twice"),
    "duplicate_deep": (damage.replaced(b'{"x": [{"a": 1, "a": 1}]}'), "the key 'a' is there twice"),
    "wide_objects": (damage.repeated(b'{"a":[{}', b',{"":0}', BOMB_BYTES, b"]}"), "is larger than|too many"),
    "git_lfs": (damage.replaced(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "is not valid JSON"),
}


def with_bom(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def with_blanks(path: Path) -> None:
    path.write_bytes(b" \r\n\t" * 1000 + path.read_bytes() + b" \r\n\t" * 1000)


def escaped(path: Path) -> None:
    """Write every character of every string as an escape."""
    text = json.dumps(json.loads(path.read_text("utf-8")))
    path.write_text(text.replace("_", "\\u005f"), encoding="ascii")


ODD: Final[dict[str, Damage]] = {"bom": with_bom, "blanks": with_blanks, "escapes": escaped}


def unknown_key(path: Path) -> None:
    """Add what nobody asks for: lone surrogates, a long integer, and nesting that is just not too deep."""
    fields = json.loads(path.read_text("utf-8"))
    deep: object = "\ud800"
    for _ in range(200):
        deep = [deep, {"\udfff": 10**4000}]
    path.write_text(json.dumps({**fields, "inference_mode": True, "transformers_version": deep}))


def ensure(path: Path) -> None:
    """Make a file that is missing: the optional ones, which say nothing then."""
    if not path.exists():
        path.write_text("{}")


def _on(name: str, change: Damage) -> Damage:
    def change_it(folder: Path) -> None:
        ensure(folder / name)
        change(folder / name)

    return change_it


def _damaged(name: str) -> Iterator[Case]:
    base, run = FILES[name]
    for label, (change, says) in {**BROKEN, **damage.NOT_A_FILE}.items():
        expect = Refusal("CheckpointError", says, path=f"input/{name}", problems=1)
        yield Case(f"json/{name}/{label}", run, expect, stage.copied(base, _on(name, change)))
    for label, change in {**ODD, "link": damage.link_elsewhere}.items():
        yield Case(f"json/{name}/{label}", run, Answer(stage.SAME), stage.copied(base, _on(name, change)))
    if name not in ("added_tokens.json", "adapter_config.json"):
        build = stage.copied(base, _on(name, unknown_key))
        yield Case(f"json/{name}/unknown_key", run, Answer(stage.SAME), build)


def cases() -> Iterator[Case]:
    """Every file with every damage. In a run that asks for no more each file has a third of them, no two the same."""
    for file, name in enumerate(FILES):
        for number, case in enumerate(_damaged(name)):
            yield replace(case, further=(file + number) % 3 != 0)
