# SPDX-License-Identifier: MIT OR Apache-2.0
"""Rows reached through addresses that a kernel finds in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import InvalidPointer
from gpu_runtime.host.memory import HostMemory

Array = np.ndarray[Any, np.dtype[Any]]
STRIDE, WIDTH = 6, 4


@pytest.fixture(params=["one pool", "uneven starts", "separate blocks"])
def spans(request: pytest.FixtureRequest) -> tuple[HostMemory, Array]:
    """Two spans of five rows each, addressed in each of the ways that the gather tells apart."""
    memory = HostMemory(1 << 20)
    if request.param == "separate blocks":
        addresses = [int(memory.alloc(5 * STRIDE * 4, "")) for _ in range(2)]
    else:
        base = int(memory.alloc(12 * STRIDE * 4, ""))
        addresses = [base, base + 5 * STRIDE * 4 + (8 if request.param == "uneven starts" else 0)]
    for index, address in enumerate(addresses):
        row = np.arange(5 * STRIDE, dtype=np.float32) + 100 * index
        memory.view(address, (5 * STRIDE,), "f32")[...] = row
    return memory, np.array(addresses, dtype=np.uint64)


def gather(memory: HostMemory, addresses: Array, lengths: list[int], **changes: Any) -> Array:
    given: dict[str, Any] = {"offset": 1, "stride": STRIDE, "width": WIDTH, "dtype": "f32"}
    return memory.gather_rows(addresses, np.array(lengths, dtype=np.int32), **(given | changes))


def scatter(memory: HostMemory, addresses: Array, positions: list[int], **changes: Any) -> None:
    values = np.full((len(positions), WIDTH), -1, dtype=np.float32)
    given: dict[str, Any] = {"offset": 1, "stride": STRIDE, "dtype": "f32"}
    memory.scatter_rows(addresses, np.array(positions, dtype=np.int32), values, **(given | changes))


def test_gather(spans: tuple[HostMemory, Array]) -> None:
    rows = gather(*spans, [5, 2])
    assert rows.shape == (2, 5, WIDTH)
    for index, length in enumerate((5, 2)):
        for place in range(5):
            first = 100 * index + min(place, length - 1) * STRIDE + 1
            assert rows[index, place].tolist() == [first, first + 1, first + 2, first + 3]
    wider = gather(*spans, [5, 2], room=8)
    assert wider[:, :5].tolist() == rows.tolist()
    assert wider[:, 5:].tolist() == [[row[4].tolist()] * 3 for row in rows]


def test_scatter(spans: tuple[HostMemory, Array]) -> None:
    memory, addresses = spans
    scatter(memory, addresses, [4, 0])
    for index, position in enumerate((4, 0)):
        expected = np.arange(5 * STRIDE, dtype=np.float32) + 100 * index
        expected[position * STRIDE + 1 :][:WIDTH] = -1
        assert np.array_equal(memory.view(int(addresses[index]), (5 * STRIDE,), "f32"), expected)


@pytest.mark.parametrize("position", [-1, -2, -(1 << 31)])
def test_rows_before_a_span(spans: tuple[HostMemory, Array], position: int) -> None:
    with pytest.raises(InvalidPointer, match="address table"):
        scatter(*spans, [0, position])
    with pytest.raises(InvalidPointer, match="address table"):
        gather(*spans, [1, position + 1])


@pytest.mark.parametrize("position", [12, 1 << 20, (1 << 31) - 1])
def test_rows_past_the_block(spans: tuple[HostMemory, Array], position: int) -> None:
    with pytest.raises(InvalidPointer, match="past"):
        scatter(*spans, [0, position])
    with pytest.raises(InvalidPointer, match="past"):
        gather(*spans, [1, position])


@pytest.mark.parametrize("address", [0, 4096, 1 << 63, (1 << 64) - 4])
def test_dead_addresses(spans: tuple[HostMemory, Array], address: int) -> None:
    memory, addresses = spans
    for table in ([address, addresses[1]], [addresses[0], address]):
        broken = np.array(table, dtype=np.uint64)
        with pytest.raises(InvalidPointer):
            gather(memory, broken, [1, 1])
        with pytest.raises(InvalidPointer):
            scatter(memory, broken, [0, 0])


def test_misaligned_addresses(spans: tuple[HostMemory, Array]) -> None:
    memory, addresses = spans
    with pytest.raises(InvalidPointer, match="aligned to 4 bytes"):
        gather(memory, addresses + np.uint64(2), [1, 1])


def test_negative_stride(spans: tuple[HostMemory, Array]) -> None:
    with pytest.raises(InvalidPointer, match="stride"):
        gather(*spans, [2, 2], stride=-STRIDE)


def test_stride_of_zero_repeats_a_row(spans: tuple[HostMemory, Array]) -> None:
    assert gather(*spans, [3, 1], stride=0)[1].tolist() == [[101, 102, 103, 104]] * 3
