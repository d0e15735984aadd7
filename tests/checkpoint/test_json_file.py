# SPDX-License-Identifier: MIT OR Apache-2.0
"""JSON files from outside: what is read, and that everything else is one clear error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from metrale.checkpoint import FieldReader, read_json_object
from metrale.errors import CheckpointError


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_an_object_is_read(tmp_path: Path, prefix: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(prefix + '{"größe": [1, 2.5, null, true]}'.encode())
    assert read_json_object(path) == {"größe": [1, 2.5, None, True]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[1]", "holds a JSON array"),
        (b"null", "holds a JSON null"),
        (b"true", "holds a JSON boolean"),
        (b"3", "holds a JSON number"),
        (b'"x"', "holds a JSON string"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is out of range"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' is there twice"),
        (b'{"b": [{"c": {"\\u0061": 1, "a": 2}}]}', "the key 'a' is there twice"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else None,
)
def test_anything_else_is_one_error(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_json_object(path)
    assert caught.value.path == str(path)
    assert len(caught.value.problems) == 1
    assert len(str(caught.value)) < 500


def test_the_size_limit_counts_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": 12}')
    assert read_json_object(path, max_bytes=9) == {"a": 12}
    with pytest.raises(CheckpointError, match="larger than the 8 bytes"):
        read_json_object(path, max_bytes=8)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")  # opening it would block
    for name in ("pipe.json", "."):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            read_json_object(tmp_path / name)
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_json_object(tmp_path / "missing.json")


def test_a_field_reader_collects_every_fault_and_goes_on() -> None:
    problems: list[str] = []
    fields = {
        "bool": 1,
        "int": True,
        "low": -1,
        "null": None,
        "list": [],
        "mixed": [1, False],
        "rows": [[1], []],
        "number": "2",
        "huge": 10**400,
        "zero": 0,
        "name": "\ud800" + "x" * 200,
    }
    reader = FieldReader(fields, "f.json", problems)
    assert reader.boolean("bool", False) is False
    assert reader.integer("int", 7, 0, 9) == 7
    assert reader.integer("low", 7, 0, 9) == 7
    assert reader.integer("null", 7, 0, 9) == 7
    assert reader.integers("list", (7,), 0, 9) == (7,)
    assert reader.integers("mixed", (7,), 0, 9) == (7,)
    assert reader.integer_lists("rows", 0, 9) == ()
    assert reader.number("number", 0.5) == 0.5
    assert reader.number("huge", 0.5) == 0.5
    assert reader.number("zero", 0.5, above=0.0) == 0.5
    assert reader.choice("name", "x", {"x": "x"}) == "x"
    assert [problem.split(":")[1].strip() for problem in problems] == list(fields)
    assert problems[1] == "f.json: int: expected an integer from 0 to 9, got true"
    assert all(len(problem.encode()) < 200 for problem in problems)


def test_a_field_reader_takes_what_is_right() -> None:
    problems: list[str] = []
    fields = {"one": 3, "many": [3, 4], "none": None, "rows": [[1, 2], [3]], "n": 2, "alias": 5, "flag": True, "c": "y"}
    reader = FieldReader(fields, "f.json", problems)
    assert reader.integers("one", (), 0, 9) == (3,)
    assert reader.integers("many", (), 0, 9) == (3, 4)
    assert reader.optional_integer("none", 7, 0, 9) is None
    assert reader.optional_integer("absent", 7, 0, 9) == 7
    assert reader.integer_lists("rows", 0, 9) == ((1, 2), (3,))
    assert reader.number("n", 1.0) == 2.0
    assert reader.integer("key", 7, 0, 9, alias="alias") == 5
    assert reader.integer("n", 7, 0, 9, alias="alias") == 5  # it wins
    assert reader.integer("n", 7, 0, 9, alias="no alias") == 2
    assert reader.boolean("flag", False) is True
    assert reader.choice("c", "z", {"y": "why"}) == "why"
    assert problems == []


@pytest.mark.parametrize("part", [b"[],", b"1,", b'{"":1},', b'"",'])
def test_values_are_counted_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    """Commas, colons and brackets: 1,000 here, of which the object around has three."""
    monkeypatch.setattr("metrale.checkpoint.json_file.MAX_JSON_VALUES", 1000)
    path = tmp_path / "a.json"
    each = sum(map(part.count, (b",", b":", b"[", b"{")))
    fitting = (1000 - 3) // each
    path.write_bytes(b'{"a":[' + part * fitting + b"1]}")
    assert isinstance(read_json_object(path)["a"], list)
    path.write_bytes(b'{"a":[' + part * (fitting + 1) + b"1]}")
    with pytest.raises(CheckpointError, match="too many values: more than 1000 are not read"):
        read_json_object(path)


def test_a_value_as_deep_as_it_may_be_is_shown() -> None:
    """What JSON reads with the last level that there is, it cannot write with one less."""
    value: object = 1
    for _ in range(100_000):
        value = [value]
    problems: list[str] = []
    FieldReader({"a": value}, "config.json", problems).integer("a", 1, 0, 9)
    assert problems == ["config.json: a: expected an integer from 0 to 9, got a deeply nested array"]
    FieldReader({"a": {"b": value}}, "config.json", problems).integer("a", 1, 0, 9)
    assert problems[1].endswith("got a deeply nested object")
