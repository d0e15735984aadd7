# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saved sequences that are damaged, cut, hostile, or of another model: refused by name, and nothing changes."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import metrale
from metrale.errors import InvalidInput, SequenceError
from metrale.nllb.model import NllbModel
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, arena, block, next_row, prefilled, saved, state
from tests.reference.tiny import write_tiny

ONE = Case([5, 6, 7], 80, 81, [])


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, kv = data.partition(b"\n")
    return json.loads(line), kv


def joined(header: dict[str, Any], kv: bytes) -> bytes:
    return json.dumps(header).encode() + b"\n" + kv


def changed(**values: Any) -> Callable[[bytes], bytes]:
    """Return a change of the header; what is None is left out."""

    def change(data: bytes) -> bytes:
        header, kv = split(data)
        header |= values
        return joined({name: value for name, value in header.items() if value is not None}, kv)

    return change


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "nothing": ("reader", lambda data: b""),
    "no line": ("reader", lambda data: split(data)[1].replace(b"\n", b"x")),
    "no object": ("reader", lambda data: b"[1]\n" + split(data)[1]),
    "no JSON": ("reader", lambda data: b"{" + data),
    "no text": ("reader", lambda data: b"\xff" + data),
    "a line without an end": ("reader", lambda data: data.partition(b"\n")[0]),
    "a number without an end": ("reader", lambda data: b'{"tokens": ' + b"9" * 100_000 + b"}\n"),
    "brackets without an end": ("reader", lambda data: b"[" * 1_000_000 + b"\n"),
    "a header cut": ("reader", lambda data: data[:20]),
    "keys and values cut by a byte": ("reader", lambda data: data[:-1]),
    "only a header": ("reader", lambda data: data.partition(b"\n")[0] + b"\n"),
    "the first byte of the keys and values": ("reader", lambda data: flipped(data, data.index(b"\n") + 1)),
    "a byte in the middle": ("reader", lambda data: flipped(data, len(data) * 2 // 3)),
    "the last byte": ("reader", lambda data: flipped(data, len(data) - 1)),
    "the checksum": ("reader", lambda data: flipped(data, len(data) - 4)),
    "no checksum": ("reader", lambda data: data[:-4]),
    "a header that says the same in other words": ("reader", changed()),
    **{f"another {name}": (f"reader: {name}", changed(**{name: "no"})) for name in ("format", "dtype")},
    **{f"no {name}": (f"reader: {name}", changed(**{name: None})) for name in ("format", "dtype", "d_model", "vocab")},
    **{
        f"{name} {value}": (f"reader: {name}", changed(**{name: value}))
        for name, value in (
            ("d_model", 33),
            ("decoder_layers", 4),
            ("vocab", 96),
            ("tokens", []),
            ("tokens", None),
            ("tokens", "[2, 81]"),
            ("tokens", [2] * 10),
            ("source_len", 0),
            ("source_len", 13),
            ("source_len", -1),
            ("source_len", 1e9),
            ("source_len", 5.0),
            ("source_len", True),
            ("source_len", None),
            ("prompt_len", 0),
            ("prompt_len", 4),
            ("prompt_len", None),
            ("src_lang_id", -1),
            ("src_lang_id", 97),
            ("src_lang_id", None),
            ("tgt_lang_id", 97),
            ("tgt_lang_id", "81"),
        )
    },
    "an id that is none": ("reader: tokens[1]", changed(tokens=[2, 97, 9])),
    "an id that is no number": ("reader: tokens[2]", changed(tokens=[2, 81, "9"])),
    "a longer source than was saved": ("reader", changed(source_len=6)),
    "a shorter source than was saved": ("reader", changed(source_len=4)),
    "fewer tokens than were saved": ("reader", changed(tokens=[2, 81])),
}


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(("argument", "damage"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_bytes_are_refused_and_change_nothing(
    tiny: NllbModel, argument: str, damage: Callable[[bytes], bytes]
) -> None:
    live, fresh = prefilled(tiny, ONE), tiny.alloc_sequence()
    tiny.decode(9, live)
    data = saved(tiny, live)
    before = [state(live), state(fresh), block(tiny.gpu, "KV cache"), arena(tiny).tobytes()]
    with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
        tiny.restore_sequence_state(fresh, 0, io.BytesIO(damage(data)))
    assert refused.value.argument == argument
    assert not trace
    assert [state(live), state(fresh), block(tiny.gpu, "KV cache"), arena(tiny).tobytes()] == before
    with pytest.raises(SequenceError, match="slot 1 has not been prefilled"):
        tiny.decode(9, fresh)
    tiny.restore_sequence_state(fresh, 0, io.BytesIO(data))
    assert next_row(tiny, 10, fresh) == next_row(tiny, 10, live)


def test_a_header_that_does_not_end_is_named_as_such(tiny: NllbModel) -> None:
    """Not as keys and values that are missing, although it is whole."""
    data, fresh = saved(tiny, prefilled(tiny, ONE)), tiny.alloc_sequence()
    with pytest.raises(InvalidInput, match="reader: expected what save_sequence_state wrote, got"):
        tiny.restore_sequence_state(fresh, 0, io.BytesIO(data.partition(b"\n")[0]))


def test_wherever_it_is_cut_it_is_refused(tiny: NllbModel) -> None:
    data, fresh = saved(tiny, prefilled(tiny, ONE)), tiny.alloc_sequence()
    header = data.index(b"\n") + 1
    for end in (*range(header + 2), *range(header, len(data), 501), len(data) - 1):
        with pytest.raises(InvalidInput):
            tiny.restore_sequence_state(fresh, 0, io.BytesIO(data[:end]))
    assert state(fresh) == (1, [], 0, 0, 0, 0)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * (64 << 20),
        b'{"tokens": [' + b"2," * (16 << 20),
        json.dumps({"source_len": 1 << 60}).encode() + b"\n",
    ],
    ids=["brackets", "tokens", "length"],
)
def test_a_hostile_header_takes_little_memory(tiny: NllbModel, header: bytes) -> None:
    """A line of at most a mebibyte is looked at; a length is believed only within the model's limits."""
    data, fresh = saved(tiny, prefilled(tiny, ONE)), tiny.alloc_sequence()
    if header.endswith(b"\n"):
        header = changed(**json.loads(header))(data)
    reader = io.BytesIO(header)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput):
            tiny.restore_sequence_state(fresh, 0, reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    assert reader.tell() <= 1 << 20


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"dtype": "float16"}, "reader: dtype"),
        ({"d_model": 64}, "reader: d_model"),
        ({"decoder_layers": 2}, "reader: decoder_layers"),
        ({"vocab_size": 98}, "reader: vocab"),
    ],
)
def test_a_model_of_another_layout_refuses(
    make_tiny: MakeModel, tmp_path: Path, options: dict[str, Any], argument: str
) -> None:
    model = make_tiny()
    data = saved(model, prefilled(model, ONE))
    dtype = options.pop("dtype", "float32")
    folder = write_tiny(tmp_path / "model", 3, **options)
    limits: dict[str, Any] = {"max_batch": 2, "max_source_len": 12, "max_new_tokens": 8}
    with metrale.load(folder, model.gpu, dtype, **limits) as other:
        seq = other.alloc_sequence()
        with pytest.raises(InvalidInput) as refused:
            other.restore_sequence_state(seq, 0, io.BytesIO(data))
        assert refused.value.argument == argument
        assert state(seq) == (0, [], 0, 0, 0, 0)
