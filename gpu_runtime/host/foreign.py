# SPDX-License-Identifier: MIT OR Apache-2.0
"""Memory of others that the host backend works on: spans that may overlap, each for as long as its user says."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_runtime.errors import InvalidPointer
from gpu_runtime.ledger import Allocation, call_site
from gpu_runtime.pointer import DevicePtr

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class ForeignSpan:
    """A span of foreign memory: what it is in reports, and its bytes."""

    entry: Allocation
    data: Array


class Foreign:
    """The spans in use. Not locked: the memory that has it serialises access."""

    def __init__(self) -> None:
        self._spans: dict[int, ForeignSpan] = {}

    def add(self, address: int, nbytes: int, *, readonly: bool) -> ForeignSpan:
        """Note one more user of a span and return it. InvalidPointer for NULL, and past the end of all addresses."""
        if not 0 < address <= sys.maxsize - nbytes:
            where = "NULL" if not address else f"{nbytes:,} bytes at {address:#x}"
            raise InvalidPointer(f"foreign memory: expected a host address, got {where}")
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        data: Array = np.frombuffer(memory, dtype=np.uint8)
        data.flags.writeable = not readonly
        span = ForeignSpan(Allocation(DevicePtr(address), nbytes, "memory of others", call_site()), data)
        self._spans[id(span.entry)] = span
        return span

    def remove(self, address: int, nbytes: int) -> ForeignSpan:
        """Note one user less of a span and return what `add` had returned for one of them."""
        for key, span in self._spans.items():
            if int(span.entry.ptr) == address and span.entry.nbytes == nbytes:
                return self._spans.pop(key)
        raise KeyError(address)

    def find(self, address: int) -> Allocation | None:
        """Return the span that contains an address and reaches furthest, if any does. A writable one comes first."""
        holding = [
            span
            for span in self._spans.values()
            if int(span.entry.ptr) <= address < int(span.entry.ptr) + span.entry.nbytes
        ]
        if not holding:
            return None
        best = max(holding, key=lambda span: (int(span.entry.ptr) + span.entry.nbytes, span.data.flags.writeable))
        return best.entry

    def data(self, entry: Allocation) -> Array:
        """Return the bytes of a span that `find` returned."""
        return self._spans[id(entry)].data
