# SPDX-License-Identifier: MIT OR Apache-2.0
"""A run: the model is loaded, in float32 too, and its cases are gone through."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import metrale
from gpu_runtime import GpuBackend
from gpu_runtime.errors import BackendUnavailable
from metrale import factory
from metrale.bench.cases import Case
from metrale.bench.check import Judge, exact_logits
from metrale.bench.decode import Busy
from metrale.bench.floors import Rates
from metrale.bench.machine import describe_gpu, read_smi
from metrale.bench.measuring import Bench, instruments, measure, stays_in_l2
from metrale.bench.protocol import CHECK_SOURCES, CHECK_STEPS, Array
from metrale.bench.rates import floor_rates
from metrale.bench.tables import case_label
from metrale.bench.timing import open_device
from metrale.nllb.model import NllbModel


def open_named(name: str, note: Callable[[str], None]) -> GpuBackend:
    """Open a device with the benchmarks' own kernel; "auto" is a GPU, or else the host, of which ``note`` is told.

    Raises
    ------
    BackendUnavailable
        When the one that is named cannot be opened.
    """
    wanted = "cuda" if name == "auto" else name
    try:
        factory.open_device(wanted).close()  # it says best why a device cannot be opened
    except BackendUnavailable as error:
        if name != "auto":
            raise
        note(f"measuring the host, as no GPU can be used: {error}")
        wanted = "host"
    return open_device(wanted)


class Run:
    """One run over the cases of one model.

    Parameters
    ----------
    gpu : GpuBackend
        From `open_named`.
    folder : Path
        Of the checkpoint; nothing is written to it.
    dtype : str
        By its long name.
    cases : sequence of Case
    runs : int
        Timed calls of each.
    found : dict
        From `metrale.bench.report.empty`; it grows as the run goes on.
    batch_invariant : bool
        Whether the model computes each sequence to the same bits in any batch.
    profiles : bool
        Whether the launches of a step are timed as well.
    trace : callable or None
        What is told of each of them then.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        folder: Path,
        dtype: str,
        cases: Sequence[Case],
        runs: int,
        found: dict[str, Any],
        *,
        batch_invariant: bool = False,
        profiles: bool = False,
        trace: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._gpu, self._folder, self._dtype = gpu, folder, dtype
        self._cases, self._runs, self._found = cases, runs, found
        self._profiles, self._trace = profiles, trace
        self._limits: dict[str, Any] = {
            "max_batch": max(CHECK_SOURCES, *(case.lanes for case in cases)),
            "max_source_len": max(case.lengths.source for case in cases),
            "max_new_tokens": max(CHECK_STEPS, *(case.lengths.new for case in cases)) + 2,
            "batch_invariant": batch_invariant,
        }

    def entries(self, note: Callable[[str], None]) -> Generator[Mapping[str, Any], None, None]:
        """Go through the cases; yield each when it is in the report. Closing it frees the model."""
        gpu, found = self._gpu, self._found
        found["dtype"], found["device"] = self._dtype, describe_gpu(gpu)
        with instruments(gpu) as (clock, reader):
            found["floors"] = floor_rates(gpu, self._dtype, clock, reader, self._runs)
            rates = Rates(found["floors"]["read_bytes_per_s"], found["floors"]["flop_per_s"])
            exact = self._exact(note)
            start = time.perf_counter()
            with metrale.load(self._folder, gpu, self._dtype, **self._limits) as model:
                self._describe(model, time.perf_counter() - start, note)
                judge = Judge(model, self._dtype, exact)
                bench = Bench(clock, reader, Busy(clock, reader), rates, self._runs, self._profiles, self._trace)
                for case in self._cases:
                    entry, problems = measure(model, case, self._dtype, judge, bench)
                    found["cases"].append(entry)
                    found["problems"] += [f"{case_label(entry)}: {problem}" for problem in problems]
                    yield entry
                damaged = [str(block) for block in gpu.scan_redzones()]
                if damaged:
                    found["problems"].append(f"bytes were written beside {damaged}")
        if gpu.kind() == "cuda":
            found["device"]["nvidia_smi_after"] = read_smi()

    def _exact(self, note: Callable[[str], None]) -> dict[int, Array]:
        """Return what float32 gives, unless it does not fit on the device."""
        limits = {**self._limits, "max_batch": CHECK_SOURCES}
        needed, free = metrale.memory_plan(self._folder, self._gpu, "float32", **limits).total, self._gpu.free_memory()
        self._found["float32_check"] = needed <= free
        if needed > free:
            note(f"not compared with float32, which takes {needed:,} bytes, and {free:,} are free")
            return {}
        return exact_logits(
            self._folder, self._gpu, self._limits, sorted({case.lengths.source for case in self._cases})
        )

    def _describe(self, model: NllbModel, seconds: float, note: Callable[[str], None]) -> None:
        plan = model.memory_plan()
        small = stays_in_l2(plan.weights)
        self._found["model"] |= {
            "load_s": round(seconds, 3),
            "memory_bytes": {part: getattr(plan, part) for part in ("weights", "kv", "logits", "workspace")},
            "weights_may_stay_in_l2": small,
        }
        if small and self._gpu.limits().runs_ahead:
            note(
                f"the weights, {plan.weights:,} bytes, may stay in the L2 from step to step; they come from memory in "
                "the steps of the device alone, before each of which the L2 is emptied"
            )
