# SPDX-License-Identifier: MIT OR Apache-2.0
"""A pickle read by a machine of our own, which can call nothing and knows the few opcodes that a state dict needs.

What a pickle names, calls and loads from outside goes to a `Vocabulary`, which makes plain values of it. There is no
import, no attribute and no call of anything that the pickle chooses. Work and memory are bounded by the pickle's length
and by `MAX_STEPS`; values that share parts are never walked through, so that sharing costs nothing.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

MAX_STEPS: Final = 500_000
"""Most opcodes of one pickle. A tensor takes about 25."""

_LONGEST_NAME: Final = 200
_LONGEST_INTEGER: Final = 8


class RefusedPickle(Exception):
    """Why a pickle is not read: one phrase that follows the pickle's name."""


class Vocabulary(Protocol):
    """What the names in a pickle mean. Each method raises `RefusedPickle` for what it does not know."""

    def find(self, name: str) -> object:
        """Return what stands for a global, ``module.name``."""

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        """Return what a call of something that `find` returned comes to. ``function`` may be any value."""

    def load(self, reference: object) -> object:
        """Return what stands for an object that is kept outside of the pickle."""


def read_pickle(data: bytes, vocabulary: Vocabulary) -> object:
    """Return the value of a pickle: None, booleans, integers of up to 64 bits, floats, text, tuples, lists and
    dictionaries with keys of text or integers, and what the vocabulary makes.

    Raises
    ------
    RefusedPickle
        When it is damaged, or has anything else in it.
    """
    machine = _Machine(data, vocabulary)
    try:
        return machine.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        raise RefusedPickle(f"is damaged near byte {machine.at}") from None


class _Machine:
    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self.at = 0
        self._data = data
        self._vocabulary = vocabulary
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under marks
        self._memo: dict[int, object] = {}

    def run(self) -> object:
        for _ in range(MAX_STEPS):
            code = self._data[self.at]
            self.at += 1
            if code == _STOP:
                return self._stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise RefusedPickle(_unknown(code))
            step(self)
        raise RefusedPickle(f"has more than the {MAX_STEPS} steps that are read")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise IndexError
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def push(self, value: object) -> None:
        self._stack.append(value)

    def text(self, length: int) -> None:
        self._stack.append(self.take(length).decode("utf-8"))

    def long(self) -> None:
        length = self.take(1)[0]
        if length > _LONGEST_INTEGER:
            raise RefusedPickle(f"has an integer of {length} bytes, expected at most {_LONGEST_INTEGER}")
        self._stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def skip(self, count: int) -> None:
        self.take(count)

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def since_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    def tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def tuple_since_mark(self) -> None:
        items = tuple(self.since_mark())
        self._stack.append(items)

    def append_one(self) -> None:
        self.append([self._stack.pop()])

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise RefusedPickle("appends to something else than a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise RefusedPickle("sets items of something else than a dictionary")
        if len(items) % 2:
            raise IndexError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):  # a tuple's hash may take for ever: its parts may be shared
                raise RefusedPickle("has a dictionary with a key that is neither text nor an integer")
            target[key] = value

    def pair(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def named(self) -> None:
        """GLOBAL: two lines."""
        lines = []
        for _ in range(2):
            end = self._data.find(b"\n", self.at, self.at + _LONGEST_NAME)
            if end < 0:
                raise RefusedPickle(f"is damaged near byte {self.at}: no name of a global ends there")
            lines.append(self.take(end - self.at).decode("utf-8"))
            self.at += 1
        self._stack.append(self._vocabulary.find(".".join(lines)))

    def named_by_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str) or len(name) + len(module) > _LONGEST_NAME:
            raise RefusedPickle("names a global by something else than a short text")
        self._stack.append(self._vocabulary.find(f"{module}.{name}"))

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            raise RefusedPickle("calls something with arguments that are no tuple")
        self._stack.append(self._vocabulary.call(function, arguments))

    def build(self) -> None:
        """Drop the attributes of a dictionary: those of a state dict tell the versions of its modules."""
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not dict or type(state) is not dict:
            raise RefusedPickle("sets attributes of something else than a dictionary")

    def load(self) -> None:
        self._stack.append(self._vocabulary.load(self._stack.pop()))


def _unknown(code: int) -> str:
    known = next((opcode for opcode in pickletools.opcodes if opcode.code == chr(code)), None)
    if known is None:
        return f"has the byte {code:#04x} where a pickle's opcode should be"
    return f"uses the pickle opcode {known.name}, which no dictionary of tensors needs"


_U1, _U2, _U4 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP: Final = ord(".")

_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: lambda m: m.skip(1),  # PROTO
    0x95: lambda m: m.skip(8),  # FRAME, of protocol 4: its length is of no use here
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number(_I4)),
    ord("K"): lambda m: m.push(m.number(_U1)),
    ord("M"): lambda m: m.push(m.number(_U2)),
    0x8A: _Machine.long,
    ord("G"): lambda m: m.push(m.number(_F8)),
    ord("X"): lambda m: m.text(m.number(_U4)),  # BINUNICODE
    0x8C: lambda m: m.text(m.number(_U1)),  # SHORT_BINUNICODE
    ord("("): _Machine.mark,
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): _Machine.tuple_since_mark,
    ord("]"): lambda m: m.push([]),
    ord("a"): _Machine.append_one,
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.set_items(m.pair()),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("q"): lambda m: m.remember(m.number(_U1)),  # BINPUT
    ord("r"): lambda m: m.remember(m.number(_U4)),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m.recall(m.number(_U1)),  # BINGET
    ord("j"): lambda m: m.recall(m.number(_U4)),
    ord("c"): _Machine.named,
    0x93: _Machine.named_by_stack,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.load,  # BINPERSID
}
