# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which cases there are, and what they are held to."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.host import HostBackend
from metrale.bench import rates
from metrale.bench.cases import SWEEPS, Case, plan
from metrale.bench.floors import FLOP_PER_S, H200, READ_BYTES_PER_S, Cost, Rates
from metrale.bench.protocol import STANDARD, Lengths


def test_batches_come_greedy_first() -> None:
    assert plan([1, 8], 4, STANDARD) == [
        Case(1, 1, STANDARD),
        Case(8, 1, STANDARD),
        *(Case(n, 4, STANDARD) for n in (1, 8)),
    ]
    assert plan([3], 0, STANDARD, "batch") == [Case(3, 1, STANDARD)]
    assert Case(8, 4, STANDARD).lanes == 32


@pytest.mark.parametrize(("sweep", "ends"), [("batch", (1, 256)), ("source", (8, 1000)), ("produced", (1, 500))])
def test_sweeps_go_from_end_to_end(sweep: str, ends: tuple[int, int]) -> None:
    assert (SWEEPS[sweep][0], SWEEPS[sweep][-1]) == ends
    assert list(SWEEPS[sweep]) == sorted(set(SWEEPS[sweep]))


def test_a_sweep_of_lengths_is_made_for_each_batch() -> None:
    found = plan([1, 2], 0, Lengths(5, 6), "source")
    assert [(case.batch, case.lengths.source) for case in found] == [(n, s) for n in (1, 2) for s in SWEEPS["source"]]
    assert {case.lengths.new for case in found} == {6}
    found = plan([1], 2, Lengths(5, 6), "produced")
    assert [(case.beams, case.lengths.new) for case in found] == [(b, n) for b in (1, 2) for n in SWEEPS["produced"]]
    assert {case.lengths.source for case in found} == {5}


def test_floors_follow_from_rates() -> None:
    cost = Cost(weights=1000, flop=10**6)
    assert Rates(READ_BYTES_PER_S, FLOP_PER_S) == H200
    assert cost.floor_us() == cost.floor_us(H200)
    assert cost.floor_us(Rates(1e6, 1e30)) == pytest.approx(1000)
    assert cost.floor_us(Rates(1e30, 1e6)) == pytest.approx(1e6)


@pytest.mark.parametrize(
    ("name", "dtype", "fixed"),
    [("NVIDIA H200", "float16", True), ("NVIDIA H200", "float32", False), ("NVIDIA A100", "bfloat16", False)],
)
def test_the_rates_of_an_h200_are_fixed(name: str, dtype: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(clock: Any, reader: Any, short: str, repeats: int) -> dict[str, float]:
        return {"read_gb_per_s": 2.0, f"product_{short}_tflop_per_s": 3.0}

    class Gpu(HostBackend):
        def kind(self) -> Literal["cuda"]:
            return "cuda"

        def name(self) -> str:
            return name

    monkeypatch.setattr(rates, "ceilings", measured)
    gpu: GpuBackend = Gpu()
    nothing: Any = None
    found = rates.floor_rates(gpu, dtype, nothing, nothing, 2)
    gpu.close()
    expected = H200 if fixed else Rates(2e9, 3e12)
    assert Rates(found["read_bytes_per_s"], found["flop_per_s"]) == expected
    assert found["origin"] == ("fixed for an H200" if fixed else "measured in this run")
    assert found["ceilings"]["read_gb_per_s"] == 2.0


def test_the_host_is_held_to_what_it_reaches() -> None:
    found = rates.host_ceilings(2)
    assert found["read_gb_per_s"] > 0
    assert found["product_f32_tflop_per_s"] > 0
