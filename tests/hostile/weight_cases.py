# SPDX-License-Identifier: MIT OR Apache-2.0
"""Safetensors files: headers of every wrong kind, bits turned over, and tensors that are not the model's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save, save_file

from metrale.checkpoint import open_checkpoint
from tests.hostile import stage
from tests.hostile.case import Answer, Case, Refusal
from tests.hostile.safetensors_bytes import READ, assembled, contents, described, taken_apart

_VALUES: Final = np.arange(24, dtype=np.float32)
SOUND: Final = save(
    {
        "a": _VALUES.reshape(2, 3, 4),
        "b": _VALUES.astype(np.float16),
        "count": np.arange(5, dtype=np.int64),
        "scalar": np.array(2.5, np.float32),
        "none": np.zeros((0, 4), np.float32),
    },
    {"format": "pt"},
)
HEADER, DATA = taken_apart(SOUND)
NOT_COMPLETE: Final = "is not a complete safetensors file"


def read_everything(folder: Path) -> dict[str, str]:
    """Open a checkpoint and read every row of it; return what stands for each tensor."""
    found = {}
    with open_checkpoint(folder) as checkpoint:
        for name, info in checkpoint.tensors.items():
            dtype = info.dtype.upper()
            rows = b""
            if dtype in READ:
                rows = b"".join(part.tobytes() for _, part in checkpoint.iter_chunks(name, 32))
            found[name] = described(dtype, list(info.shape), rows)
    return found


def _raw(name: str, file: bytes | Callable[[], bytes], says: str = NOT_COMPLETE) -> Case:
    """Return the case of a file, which the judge must take for one or refuse as metrale does."""
    data = file if isinstance(file, bytes) else None
    expected = None if data is None else contents(data)
    path = f"input/{stage.WEIGHTS}"
    expect = Answer(expected) if expected is not None else Refusal("CheckpointError", says, path=path, problems=1)

    def build(folder: Path) -> None:
        (folder / stage.WEIGHTS).write_bytes(file if isinstance(file, bytes) else file())

    return Case(f"safetensors/{name}", read_everything, expect, build)


def _changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **fields}}


def _headers() -> Iterator[Case]:
    """Headers that say something wrong, and some that say it oddly."""
    length = len(SOUND) - 8 - len(DATA)
    yield _raw("sound", SOUND)
    for claimed in (
        0,
        1,
        2,
        length - 1,
        length + 1,
        len(SOUND),
        100 << 20,
        1 << 32,
        1 << 40,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
    ):
        yield _raw(f"length_{claimed}", assembled(HEADER, DATA, claimed))
    a: dict[str, Any] = HEADER["a"]
    start, stop = a["data_offsets"]
    wrong: dict[str, list[Any]] = {
        "dtype": ["F31", "f32", "", None, 32, ["F32"], "F64", "F16", "C64", "F4", "F8_E4M3"],
        "shape": [
            [2, 3, 5],
            [25],
            [],
            [24, 0],
            [-2, -12],
            [2.0, 12.0],
            ["24"],
            None,
            24,
            {},
            [1 << 64],
            [1 << 63, 2],
            [1 << 33, 1 << 33],
            [1 << 62, 4, 0],
            [[24]],
            [True, 24],
            [10**30],
        ],
        "data_offsets": [
            [stop, start],
            [start, stop + 1],
            [start + 1, stop + 1],
            [start, stop - 1],
            [0, 0],
            [0, 1 << 64],
            [-96, 0],
            [0.0, 96.0],
            ["0", "96"],
            [0],
            [0, 96, 96],
            None,
            96,
            {},
            [10**30, 10**30],
        ],
    }
    for field, values in wrong.items():
        for at, value in enumerate(values):
            yield _raw(f"{field}_{at}", assembled(_changed("a", **{field: value}), DATA))
        without = {**HEADER, "a": {key: value for key, value in a.items() if key != field}}
        yield _raw(f"without_{field}", assembled(without, DATA))
    for label, header in {
        "empty": b"",
        "blank": b"    ",
        "braces": b"{}",
        "array": b"[]",
        "null": b"null",
        "nan": b'{"a": NaN}',
        "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "deep_arrays": b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "utf16": json.dumps(HEADER).encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + json.dumps(HEADER).encode(),
        "bad_utf8": json.dumps(HEADER).encode().replace(b'"scalar"', b'"sc\xff\xfear"'),
        "surrogate": json.dumps(HEADER).encode().replace(b'"scalar"', b'"sc\\ud800r"'),
        "garbage_after": json.dumps(HEADER).encode() + b"x",
        "unterminated": json.dumps(HEADER).encode()[:-1],
    }.items():
        yield _raw(f"header_{label}", assembled(header, DATA))
    for label, value in {
        "number": 3,
        "list": [],
        "values": {"format": 3},
        "null": None,
        "deep": {"a": {"b": "c"}},
    }.items():
        yield _raw(f"metadata_{label}", assembled({**HEADER, "__metadata__": value}, DATA))
    for label, shape in {
        "dimension": [7, 0, 1 << 63],
        "dimension_of_64_bits": [0, (1 << 64) - 1],
        "product": [1 << 31, 0, 1 << 31],
        "dimensions": [0] * 33,
        "dimensions_of_1": [0] + [1] * 100,
    }.items():
        empty = {**HEADER, "none": {"dtype": "F32", "shape": shape, "data_offsets": [len(DATA), len(DATA)]}}
        yield _raw(f"shape_{label}", assembled(empty, DATA), says=f"is larger than any array|{NOT_COMPLETE}")
    odd = {
        "blanks_behind": json.dumps(HEADER).encode() + b" " * 64,
        "more_fields": json.dumps(_changed("a", more=[1, {}])).encode(),
    }
    for name in ("", "\0", "../../etc/passwd", "\u202e", "x" * 100_000, "__metadata", "a\nb"):
        renamed = {name if key == "a" else key: value for key, value in HEADER.items()}
        odd[f"name_{ascii(name)[:20]}"] = json.dumps(renamed).encode()
    for label, header in odd.items():
        yield _raw(f"odd_{label.replace('/', '_')}", assembled(header, DATA))
    for label, more in {"one_more": b"\0", "one_less": None, "file_twice": SOUND}.items():
        yield _raw(f"data_{label}", SOUND[:-1] if more is None else SOUND + more)


def _bombs() -> Iterator[Case]:
    """Headers that are as large as they may be, or say so."""

    def claim(folder: Path) -> None:
        with (folder / stage.WEIGHTS).open("wb") as file:
            file.write((90 << 20).to_bytes(8, "little"))
            file.truncate(128 << 20)  # a sparse file: zeros

    def brackets(folder: Path) -> None:
        (folder / stage.WEIGHTS).write_bytes(assembled(b"[" * (60 << 20), b""))

    def crowd(folder: Path) -> None:
        one = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        header = b"{" + b",".join(one % index for index in range(600_000)) + b"}"
        (folder / stage.WEIGHTS).write_bytes(assembled(header, b""))

    def metadata(folder: Path) -> None:
        text = b'{"__metadata__":{' + b",".join(b'"%d":""' % index for index in range(4_000_000)) + b"}}"
        (folder / stage.WEIGHTS).write_bytes(assembled(text, b""))

    for label, build in {"claim": claim, "brackets": brackets, "crowd": crowd, "metadata": metadata}.items():
        expect = Refusal(
            "CheckpointError", f"{NOT_COMPLETE}|header of .* bytes", path=f"input/{stage.WEIGHTS}", problems=1
        )
        yield Case(f"safetensors/bomb_{label}", read_everything, expect, build)


def _flips() -> Iterator[Case]:
    """Bits turned over in the header, of which the judge says what it is then, and in the data, which stay data."""
    length = len(SOUND) - len(DATA)
    for seed in range(60):
        draw = random.Random(seed)
        data = bytearray(SOUND)
        for _ in range(1 + seed % 2):
            data[draw.randrange(length)] ^= 1 << draw.randrange(8)
        yield _raw(f"header_flip_{seed}", bytes(data))
    for seed in range(6):
        draw = random.Random(seed)
        data = bytearray(SOUND)
        data[draw.randrange(length, len(SOUND))] ^= 1 << draw.randrange(8)
        yield _raw(f"data_flip_{seed}", bytes(data))


Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
_NORM: Final = "model.encoder.layer_norm.bias"
_FC1: Final = "model.encoder.layers.0.fc1.weight"


def _with(change: Callable[[Arrays], object]) -> Callable[[Path], object]:
    """Return a build that saves the pristine tensors after ``change``."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / stage.WEIGHTS)
        change(tensors)
        save_file(tensors, folder / stage.WEIGHTS)

    return stage.copied("whole", damage)


def _tensors() -> Iterator[Case]:
    """Tensors that are missing, too many, or of another kind than the configuration says."""

    def refused(label: str, change: Callable[[Arrays], object], *says: str, problems: int = 1) -> Case:
        expect = Refusal("CheckpointError", says, path="/input", problems=problems)
        return Case(f"tensors/{label}", stage.judged, expect, _with(change))

    def put(name: str, array: Any) -> Callable[[Arrays], object]:
        return lambda tensors: tensors.update({name: np.ascontiguousarray(array)})

    def drop(*names: str) -> Callable[[Arrays], object]:
        return lambda tensors: [tensors.pop(name) for name in names]

    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"):
        says = f"tensor '{_NORM}': dtype .*, expected one of f32, f16, bf16"
        yield refused(f"dtype_{dtype}", put(_NORM, np.ones(16, dtype)), says)
    for shape in ((15,), (17,), (0,), (16, 1), (1, 16), (4, 4)):
        says = rf"tensor '{_NORM}': shape \[.*\], expected \[16\] by the configuration"
        yield refused(f"shape_{shape}", put(_NORM, np.zeros(shape, np.float32)), says)
    yield refused(
        "shape_scalar", lambda t: t.update({_NORM: np.array(1.0, np.float32)}), r"shape \[\], expected \[16\]"
    )
    yield refused("transposed", put(_FC1, np.zeros((16, 24), np.float32)), r"shape \[16, 24\], expected \[24, 16\]")
    yield refused("missing", drop(_NORM), f"missing tensor '{_NORM}'")
    yield refused("two_missing", drop(_NORM, _FC1), f"missing tensor '{_NORM}'", f"missing tensor '{_FC1}'", problems=2)
    yield refused(
        "all_missing",
        lambda t: [t.pop(n) for n in list(t) if n != _NORM],
        "missing tensor 'model.shared.weight'",
        problems=46,
    )
    yield refused(
        "extra",
        put("model.encoder.layers.0.fc3.weight", np.zeros(3, np.float32)),
        "unknown tensor 'model.encoder.layers.0.fc3.weight'",
    )
    yield refused(
        "head_of_its_own",
        put("lm_head.weight", np.zeros((8240, 17), np.float32)),
        r"'lm_head.weight': shape \[8240, 17\], expected \[vocabulary, 16\] by the configuration",
    )
    yield refused("bare_and_full", put("encoder.layer_norm.bias", np.zeros(16, np.float32)), "is stored twice, also as")
    yield refused(
        "no_rows", put("model.shared.weight", np.zeros((0, 16), np.float32)), "0 rows, none for the special id 2"
    )
    yield refused(
        "two_rows", put("model.shared.weight", np.zeros((2, 16), np.float32)), "2 rows, none for the special id 2"
    )
    yield refused(
        "fewer_rows",
        put("model.shared.weight", np.zeros((8000, 16), np.float32)),
        "8231 entries, the model's embedding only 8000 rows",
    )
    long = "x" * 1_000_000
    yield refused("long_name", put(long, np.zeros(3, np.float32)), "unknown tensor 'xxx")
    many = {f"more.{index}": np.zeros(1, np.float32) for index in range(20_000)}
    yield refused(
        "many_unknown",
        lambda t: t.update(many),
        "unknown tensor 'more.0'",
        "more, which the error's problems list",
        problems=20_000,
    )
    wider = _with(lambda tensors: tensors.update({_NORM: tensors[_NORM].astype(np.float64)}))
    yield Case("tensors/wider", stage.judged, Answer(stage.SAME), wider)
    yield Case(
        "tensors/ignored",
        stage.judged,
        Answer(stage.SAME),
        _with(put("final_logits_bias", np.full((1, 3), np.nan, np.float32))),
    )
    yield Case(
        "tensors/positions",
        stage.judged,
        Answer(stage.SAME),
        _with(put("model.encoder.embed_positions.weights", np.zeros(0, np.int64))),
    )


def cases() -> Iterator[Case]:
    """Every case of safetensors files."""
    yield from _headers()
    yield from _bombs()
    yield from _flips()
    yield from _tensors()
