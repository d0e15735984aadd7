# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pickles that are no state dict, damaged ones, and ones made to harm: each is refused, soon, and nothing executed."""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metrale.checkpoint.torch_file import TorchFile
from metrale.errors import CheckpointError
from tests.checkpoint.refusing import SECONDS, refusal
from tests.checkpoint.torch_files import Call, Global, Pickle, Raw, Storage, Tensor, write_bin

ONE = np.arange(6, dtype=np.float32)
REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_3 = Global("torch._utils", "_rebuild_tensor_v3")
PARAMETER = Global("torch._utils", "_rebuild_parameter")
NO_DATA = Global("torch._utils", "_rebuild_meta_tensor_no_storage")
OF_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
HOOKS = Call(Global("collections", "OrderedDict"), ())


def refusal_of(path: Path, data: bytes) -> str:
    """Return why a file with this pickle is refused."""
    write_bin(path, {}, more={"data.pkl": data})
    return refusal(path)


def outside(*reference: object) -> Raw:
    """Something outside of the pickle that it refers to, without a memory of its own."""
    return Raw(Pickle(memo=False).opcodes(reference) + b"Q")


def storage(elements: object = 6, kind: str = "FloatStorage", key: object = "0") -> Raw:
    return outside("storage", Global("torch", kind), key, "cpu", elements)


WHOLE = (storage(), 0, (6,), (1,), False, HOOKS)


def rebuilt(*arguments: object, function: Global = REBUILD) -> dict[str, object]:
    return {"w": Call(function, arguments)}


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_a_command(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "harmed"
    reason = refusal_of(tmp_path / "a.bin", pickle.dumps({"w": Harm(mark)}, protocol))
    assert ("asks for 'posix.system'" if protocol else "uses the pickle opcode DICT") in reason
    assert not mark.exists()
    pickle.loads(pickle.dumps(Harm(mark), protocol))  # the test's own pickle is a harmful one
    assert mark.exists()


NAMES = [
    "os.system",
    "builtins.eval",
    "builtins.getattr",
    "__builtin__.eval",
    "torch.load",
    "torch.hub.load",
    "torch.nn.Linear",
    "numpy.core.multiarray._reconstruct",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch.FloatStorage.__init__",
    "collections.OrderedDict.__class__",
    "torch.serialization._get_layout",
    "torch.QInt8Storage",
    "torch.float32.__reduce__",
    "collections.Counter",
    "torch",
    ".",
    "",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_stack", [False, True])
def test_a_name_that_is_no_part_of_a_tensor_is_refused_by_its_name(tmp_path: Path, name: str, by_stack: bool) -> None:
    module, _, attribute = name.rpartition(".")
    if by_stack:
        texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, attribute)]
        found = b"".join(texts) + b"\x93"
    else:
        found = f"c{module}\n{attribute}\n".encode()
    reason = refusal_of(tmp_path / "a.bin", b"\x80\x02" + found + b")R.")
    assert f"asks for {f'{module}.{attribute}'!r}, which is no part of a tensor: nothing was executed" in reason


OPCODES = {
    b"Iten\n": "INT",
    b"(i__main__\nA\n": "INST",
    b"(o": "OBJ",
    b")\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"\x82\x01": "EXT1",
    b"\x83\x01\x00": "EXT2",
    b"\x84\x01\x00\x00\x00": "EXT4",
    b"Pid\n": "PERSID",
    b"\x8b\xff\xff\xff\x7f": "LONG4",
    b"\x8d" + b"\xff" * 7 + b"\x7f": "BINUNICODE8",
    b"\x96" + b"\xff" * 8: "BYTEARRAY8",
    b"\x8e" + b"\xff" * 8: "BINBYTES8",
    b"B\xff\xff\xff\xff": "BINBYTES",
    b"T\xff\xff\xff\x7f": "BINSTRING",
    b"2": "DUP",
    b"0": "POP",
    b"1": "POP_MARK",
    b"\x8f": "EMPTY_SET",
    b"\x97": "NEXT_BUFFER",
    b"\x98": "READONLY_BUFFER",
    b"S'a'\n": "STRING",
    b"Va\n": "UNICODE",
    b"L1L\n": "LONG",
    b"F1\n": "FLOAT",
    b"p0\n": "PUT",
    b"g0\n": "GET",
    b"(l": "LIST",
    b"(d": "DICT",
}


@pytest.mark.parametrize("opcodes", OPCODES, ids=OPCODES.values())
def test_an_opcode_that_is_not_needed_is_refused_by_its_name(tmp_path: Path, opcodes: bytes) -> None:
    reason = refusal_of(tmp_path / "a.bin", b"\x80\x02}" + opcodes + b".")
    assert f"uses the pickle opcode {OPCODES[opcodes]}," in reason


DAMAGED = {
    "nothing": b"",
    "no end": b"\x80\x02}",
    "a text longer than the pickle": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a short text longer than the pickle": b"\x80\x02\x8c\xffabc.",
    "a text that is not UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "a name without an end": b"\x80\x02cos",
    "a name that is far too long": b"\x80\x02c" + b"a" * 5000 + b"\nb\n.",
    "a name that is not UTF-8": b"\x80\x02c\xff\n\xff\n.",
    "a tuple of what is not there": b"\x80\x02N\x87.",
    "no mark": b"\x80\x02Nt.",
    "an append to nothing": b"\x80\x02Na.",
    "an append to None": b"\x80\x02NNa.",
    "an append to a tuple": b"\x80\x02)(NNe.",
    "an item of a list": b"\x80\x02]NaK\x00Ns.",
    "an odd number of items": b"\x80\x02}(K\x01NK\x02u.",
    "a key that is None": b"\x80\x02}NNs.",
    "a key that is a tuple": b"\x80\x02})Ns.",
    "a key that is a list": b"\x80\x02}]Ns.",
    "a memory that is empty": b"\x80\x02h\x05.",
    "a large memory that is empty": b"\x80\x02j\xff\xff\xff\xff.",
    "nothing to remember": b"\x80\x02q\x00.",
    "a call of None": b"\x80\x02N)R.",
    "a call with a list": b"\x80\x02ccollections\nOrderedDict\n]R.",
    "attributes of None": b"\x80\x02N}b.",
    "attributes of a tensor's function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.",
    "attributes that are a tuple": b"\x80\x02})b.",
    "an integer without bytes": b"\x80\x02\x8a\x08abc",
    "a long integer": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "a byte that is no opcode": b"\x80\x02\xfe.",
    "a name on the stack that is none": b"\x80\x02NN\x93.",
    "a long name on the stack": b"\x80\x02X\x88\x13\x00\x00" + b"a" * 5000 + b"\x8c\x01a\x93.",
    "an outside object that is None": b"\x80\x02NQ.",
    "an outside object that is empty": b"\x80\x02)Q.",
}
"""What is wrong with each is told before its end is reached, where an empty dictionary follows."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_pickle(tmp_path: Path, name: str) -> None:
    data = DAMAGED[name]
    if data.endswith(b"."):
        data = data[:-1] + b"}."
    reason = refusal_of(tmp_path / "a.bin", data)
    assert "a.bin: data.pkl " in reason
    if name in ("a name without an end", "a name that is far too long"):
        assert reason.endswith("no name of a global ends there")


@pytest.mark.parametrize("data", [b"\x80\x02.", b"\x80\x02].", b"\x80\x02ctorch\nfloat32\n.", b"\x80\x02N."])
def test_a_pickle_of_something_else(tmp_path: Path, data: bytes) -> None:
    assert "a.bin: data.pkl " in refusal_of(tmp_path / "a.bin", data)


CALLS: Mapping[str, dict[str, object]] = {
    "no arguments": rebuilt(),
    "too few": rebuilt(storage(), 0, (6,)),
    "too many": rebuilt(storage(), 0, (6,), (1,), False, HOOKS, None, None),
    "no storage": rebuilt(None, 0, (6,), (1,), False, HOOKS),
    "a tensor as storage": rebuilt(Call(REBUILD, WHOLE), 0, (6,), (1,), False, HOOKS),
    "an offset that is text": rebuilt(storage(), "0", (6,), (1,), False, HOOKS),
    "an offset that is true": rebuilt(storage(), True, (6,), (1,), False, HOOKS),
    "an offset that is a fraction": rebuilt(storage(), 0.0, (6,), (1,), False, HOOKS),
    "a shape that is a number": rebuilt(storage(), 0, 6, (1,), False, HOOKS),
    "a shape of text": rebuilt(storage(), 0, ("6",), (1,), False, HOOKS),
    "a shape that is a list": rebuilt(storage(), 0, [6], (1,), False, HOOKS),
    "strides of tuples": rebuilt(storage(), 0, (6,), ((1,),), False, HOOKS),
    "a dtype as function": rebuilt(storage(), 0, (6,), (1,), False, HOOKS, function=Global("torch", "float32")),
    "a type as function": rebuilt(storage(), function=Global("torch", "Tensor")),
    "a storage as function": rebuilt(6, function=Global("torch", "FloatStorage")),
    "a tensor as function": {"w": Call(Call(REBUILD, WHOLE), ())},
    "version 3 without a dtype": rebuilt(storage(), 0, (6,), (1,), False, HOOKS, function=REBUILD_3),
    "a parameter of None": rebuilt(None, True, HOOKS, function=PARAMETER),
    "a parameter of a storage": rebuilt(storage(), True, HOOKS, function=PARAMETER),
    "no data": rebuilt(Global("torch", "float32"), (3,), (1,), False, function=NO_DATA),
    "a type of its own": rebuilt(REBUILD, Global("torch", "float32"), WHOLE, {}, function=OF_TYPE),
    "a type that calls itself": rebuilt(
        OF_TYPE, Global("torch", "Tensor"), (REBUILD, Global("torch", "Tensor"), WHOLE, {}), {}, function=OF_TYPE
    ),
    "a size of text": {"s": Call(Global("torch", "Size"), (("a",),))},
    "an ordered dictionary of pairs": {"s": Call(Global("collections", "OrderedDict"), ([("a", 1)],))},
    "negated": rebuilt(storage(), 0, (6,), (1,), False, HOOKS, {"neg": True}),
    "another reference": {"w": outside("module", Global("torch", "FloatStorage"), "0", "cpu", 6)},
    "a storage by a number": rebuilt(storage(key=0), 0, (6,), (1,), False, HOOKS),
    "a storage of a dtype": {"w": outside("storage", Global("torch", "float32"), "0", "cpu", 6)},
    "a storage of negative size": rebuilt(storage(-6), 0, (6,), (1,), False, HOOKS),
    "a storage of a fraction": rebuilt(storage(6.0), 0, (6,), (1,), False, HOOKS),
    "a storage with a long name": rebuilt(storage(key="0" * 101), 0, (6,), (1,), False, HOOKS),
    "a storage of two types": {
        "v": Call(REBUILD, WHOLE),
        "w": Call(REBUILD, (storage(6, "IntStorage"), 0, (6,), (1,), False, HOOKS)),
    },
    "a storage of two sizes": {
        "v": Call(REBUILD, WHOLE),
        "w": Call(REBUILD, (storage(5), 0, (5,), (1,), False, HOOKS)),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_no_tensor_has(tmp_path: Path, name: str) -> None:
    write_bin(tmp_path / "a.bin", CALLS[name], metadata=False, more={"data/0": ONE.tobytes()})
    assert "a.bin: data.pkl " in refusal(tmp_path / "a.bin")


def tensor(*arguments: Any, claimed: int | None = None, key: str | None = None, **more: Any) -> Tensor:
    return Tensor(Storage(ONE, claimed, key), *arguments, **more)


BIG = (1 << 63) - 1
VIEWS: Mapping[str, tuple[Tensor, str]] = {
    "behind the end": (tensor((6,), (1,), 1), "elements up to 7 of a storage of 6"),
    "by its strides": (tensor((3, 2), (3, 1)), "elements up to 8 of a storage of 6"),
    "negative": (tensor((6,), (-1,), 5), "a negative offset, dimension or stride"),
    "far negative": (tensor((6,), (1,), -(1 << 40)), "a negative offset, dimension or stride"),
    "negative shape": (tensor((-6,), (1,)), "a negative offset, dimension or stride"),
    "overflowing": (tensor((BIG, BIG), (BIG, BIG), BIG), "of a storage of 6"),
    "expanded beyond all bounds": (tensor((1 << 40,), (0,)), "4398046511104 bytes by its shape"),
    "empty beyond all bounds": (tensor((1 << 40, 0), (0, 0)), "4398046511104 bytes by its shape"),
    "more dimensions than there are": (tensor((1,) * 33, (1,) * 33), "not integers"),
    "more strides than dimensions": (tensor((6,), (1, 1)), "1 dimensions and 2 strides"),
    "a storage that is said larger": (tensor((7,), (1,), claimed=7), "its storage has 24 bytes, expected 28"),
    "a storage that is said smaller": (tensor((5,), (1,), claimed=5), "its storage has 24 bytes, expected 20"),
    "a storage that is said huge": (tensor((6,), (1,), claimed=BIG), "its storage has 24 bytes, expected 3689"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_leaves_its_storage(tmp_path: Path, name: str) -> None:
    view, reason = VIEWS[name]
    write_bin(tmp_path / "a.bin", {"layer.weight": view, "fine": ONE})
    assert reason in refusal(tmp_path / "a.bin")


def test_every_problem_is_listed(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", {name: view for name, (view, why) in VIEWS.items() if why != "not integers"})
    with pytest.raises(CheckpointError) as caught:
        TorchFile(tmp_path / "a.bin")
    assert len(caught.value.problems) == len(VIEWS) - 1


def test_an_entry_that_is_missing(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", rebuilt(storage(key="../../etc/passwd"), 0, (6,), (1,), False, HOOKS), metadata=False)
    assert "tensor 'w': the archive lacks its storage '../../etc/passwd'" in refusal(tmp_path / "a.bin")


def numbered(value: bytes) -> bytes:
    """Items of a dictionary: very many numbers, each with the same value."""
    return b"".join(b"J" + struct.pack("<i", number) + value for number in range(100_000))


def long_shapes() -> bytes:
    head = b"\x80\x02](ctorch._utils\n_rebuild_tensor_v2\nq\x00" + storage().opcodes + b"q\x02"
    shape = b"(" + b"K\x01" * 100_000 + b"tq\x01"
    return head + shape + b"h\x00(h\x02K\x00h\x01h\x01\x89NtR" * 30_000 + b"e."


def long_metadata() -> bytes:
    head = b"\x80\x02](ctorch._utils\n_rebuild_tensor_v2\nq\x00" + storage().opcodes + b"q\x02"
    return head + b"}(" + numbered(b"\x89") + b"uq\x01" + b"h\x00(h\x02K\x00))\x89Nh\x01tR" * 25_000 + b"e."


def many_names() -> bytes:
    return b"\x80\x02}(X\x01\x00\x00\x00a}(" + numbered(b"N") + b"uq\x00" + numbered(b"h\x00") + b"u."


TUPLE_OF_TWO = b"q\x00h\x00\x86"
"""A tuple of the same two, of the same two, and so on: 2 to the power of the depth, when it is walked through."""

BOMBS: Mapping[str, Callable[[], bytes]] = {
    "as many steps as fit": lambda: b"\x80\x02" + b"N" * 4_000_000 + b".",
    "as many lists as fit": lambda: b"\x80\x02" + b"]" * 4_000_000 + b".",
    "as many marks as fit": lambda: b"\x80\x02" + b"(" * 4_000_000 + b".",
    "nested lists": lambda: b"\x80\x02" + b"]" * 240_000 + b"a" * 239_999 + b".",
    "nested tuples": lambda: b"\x80\x02N" + b"\x85" * 490_000 + b".",
    "shared tuples": lambda: b"\x80\x02}X\x01\x00\x00\x00wN" + TUPLE_OF_TWO * 160_000 + b"s.",
    "shared tuples as a key": lambda: b"\x80\x02}N" + TUPLE_OF_TWO * 60 + b"Ns.",
    "a long shape in many tensors": long_shapes,
    "long metadata in many tensors": long_metadata,
    "one large dictionary under many names": many_names,
    "larger than is read": lambda: b"\x80\x02" + b"N" * (5 << 20) + b".",
}
HARMLESS = ("shared tuples", "one large dictionary under many names")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_harmless_and_soon_over(tmp_path: Path, name: str) -> None:
    data = BOMBS[name]()
    if name not in HARMLESS:
        assert ("500000 steps" in refusal_of(tmp_path / "a.bin", data)) == name.startswith("as many")
        return
    write_bin(tmp_path / "a.bin", {}, more={"data.pkl": data})
    start = time.process_time()
    TorchFile(tmp_path / "a.bin").close()
    assert time.process_time() - start < SECONDS
