# SPDX-License-Identifier: MIT OR Apache-2.0
"""DevicePtr: a device address that is also a plain ``int``."""

from __future__ import annotations

from typing import ClassVar, SupportsIndex, overload

from gpu_runtime import checks


class DevicePtr(int):
    """An unsigned 64-bit device address.

    It is an ``int``, so it passes unchanged to ``PyLong_AsVoidPtr`` and to ctypes functions whose ``argtypes`` are
    declared (without ``argtypes`` ctypes cuts an int to 32 bits). Offsets are bytes.

    ``ptr + nbytes`` and ``ptr - nbytes`` are pointers, ``ptr - ptr`` is a plain ``int`` of bytes. Any other arithmetic
    gives a plain ``int``. Keep the pointer on the left of a NumPy scalar: on the right NumPy computes the sum, in a
    type of its own choice.

    Raises
    ------
    ValueError
        When the address, or the result of an addition, is negative or does not fit in 64 bits.
    TypeError
        When the value is not an integer; a bool is not.

    Examples
    --------
    >>> row = DevicePtr(0x1000).offset(64)
    >>> row, row - DevicePtr(0x1000), DevicePtr.NULL.is_null
    (DevicePtr(0x1040), 64, True)
    """

    __slots__ = ()

    NULL: ClassVar[DevicePtr]

    def __new__(cls, address: SupportsIndex = 0) -> DevicePtr:
        return int.__new__(cls, checks.address("DevicePtr", address))

    def offset(self, nbytes: SupportsIndex) -> DevicePtr:
        """Return the address ``nbytes`` bytes further (a negative count goes back)."""
        return DevicePtr(int(self) + checks.integer("DevicePtr: offset", nbytes))

    @property
    def is_null(self) -> bool:
        """Whether this is the null address."""
        return not self

    def __add__(self, nbytes: int) -> DevicePtr:
        if isinstance(nbytes, DevicePtr):
            raise TypeError("DevicePtr + DevicePtr: two addresses have no sum; add a count of bytes")
        return self.offset(nbytes)

    __radd__ = __add__

    @overload  # a pointer is an int as well, so the overloads overlap; the first one that fits is meant
    def __sub__(self, other: DevicePtr) -> int: ...  # type: ignore[overload-overlap]
    @overload
    def __sub__(self, other: int) -> DevicePtr: ...
    def __sub__(self, other: int) -> int:
        if isinstance(other, DevicePtr):
            return int(self) - int(other)
        return self.offset(-checks.integer("DevicePtr: offset", other))

    def __rsub__(self, other: int) -> int:
        raise TypeError("int - DevicePtr: subtract a count of bytes from a pointer, not a pointer from a count")

    def __repr__(self) -> str:
        return f"DevicePtr({int(self):#x})"

    __str__ = __repr__


DevicePtr.NULL = DevicePtr(0)
