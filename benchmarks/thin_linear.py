# SPDX-License-Identifier: MIT OR Apache-2.0
"""The dense layers of a decode step by kernels of ours, in every plan, beside layer_norm and the library's product.

Plans of `thin_linear` are named by entry point and warps, those of `cluster_linear` by their kind, "cluster" or
"chained", and the size of a cluster, with a launch of layer_norm ahead where the layer has a norm. One row goes through
every plan of `gemv`, too; its names begin with "gemv". The output head is one of the layers; where there is more than
one row, a step has it by `head_linear`, or by the library's product.

    python -m benchmarks.thin_linear --out thin_linear.json

runs where a GPU is. Each plan's results are first compared with the op's reference, and a row's bits in batches of
different sizes with each other. Then launches with weights that are a different copy each time, more of them than the
L2 holds, run as one graph: once launched in the usual way, once such that each may begin before the one ahead of it
has ended. The exit status is 1 when a result was wrong; `problems` says which.

`--device host` goes through all of it with small layers; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpu_runtime import GpuBackend, LaunchPlan, Op, dtypes
from metrale.bench.machine import describe
from metrale.bench.timing import Clock, open_device, random_buffer
from metrale.ops.cluster_linear import OP as CLUSTER
from metrale.ops.cluster_linear import cluster_of, part_chains
from metrale.ops.cluster_linear import plan as cluster_plan
from metrale.ops.cluster_linear import plans as cluster_plans
from metrale.ops.gemv import OP as GEMV
from metrale.ops.gemv import plan as gemv_plan
from metrale.ops.gemv import plans as gemv_plans
from metrale.ops.layer_norm import OP as LAYER_NORM
from metrale.ops.layer_norm import plan as layer_norm_plan
from metrale.ops.linear import ACTIVATION_NAMES, ANY
from metrale.ops.linear import OP as LINEAR
from metrale.ops.thin_linear import OP, plan, plans

Array = np.ndarray[Any, np.dtype[Any]]

WEIGHT_BYTES: Final = {"cuda": 160 << 20, "host": 1 << 16}
"""Of the copies of a layer's weights together: more than twice the L2 of an H200."""

LEAST_COPIES: Final = 4
ROWS: Final = (1, 4, 8, 16, 32, 64)
WIDTHS: Final = {"cuda": (1024, 2048), "host": (64,)}
HEAD_ROWS: Final = {"cuda": 256_256, "host": 320}
EPS: Final = 1e-5
CLUSTERS: Final = ("cluster", "chained")
"""What names of plans of `cluster_linear` begin with, those of the plain entry points and of the chained."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A dense layer of a decoder of one width, as a step runs it."""

    name: str
    n: int
    k: int
    norm: bool = False
    activation: str = "none"
    residual: bool = False


def layers(width: int, head_rows: int) -> tuple[Layer, ...]:
    """Return the layers of a decoder whose inner width is four times its width, and its output head."""
    return (
        Layer("q, k, v", 3 * width, width, norm=True),
        Layer("out", width, width, residual=True),
        Layer("cross q", width, width, norm=True),
        Layer("fc1", 4 * width, width, norm=True, activation="relu"),
        Layer("fc2", width, 4 * width, residual=True),
        Layer("head", head_rows, width),
    )


@dataclass(frozen=True, slots=True)
class Way:
    """An op and a plan to launch it by."""

    op: Op
    how: LaunchPlan


def norms(op: Op) -> bool:
    """Return whether the op has a LayerNorm."""
    return any(arg.name == "gamma" for arg in op.spec.args)


class Bench:
    """One layer's memory on the device: weights in several copies, and x, out and the like for the most rows."""

    def __init__(self, gpu: GpuBackend, layer: Layer, dtype: str, undo: ExitStack) -> None:
        self.gpu, self.layer, self.dtype = gpu, layer, dtype
        self.item = dtypes.itemsize(dtype)
        self.weight_bytes = layer.n * layer.k * self.item
        self.copies = max(LEAST_COPIES, -(-WEIGHT_BYTES[gpu.kind()] // self.weight_bytes))
        most = max(ROWS)

        def buffer(count: int, deviation: float) -> int:
            ptr = random_buffer(gpu, count * self.item, dtype, deviation)
            undo.callback(gpu.free, ptr)
            return int(ptr)

        self.weight = buffer(self.copies * layer.n * layer.k, layer.k**-0.5)
        self.x, self.h, self.out = (buffer(most * size, 1.0) for size in (layer.k, layer.k, layer.n))
        self.bias, self.gamma, self.beta = (buffer(size, 0.3) for size in (layer.n, layer.k, layer.k))
        self.sums = int(gpu.alloc(2 * layer.n * 4, tag="benchmark"))
        undo.callback(gpu.free, self.sums)
        for row, vector in enumerate((self.gamma, self.beta)):  # those of the first copy
            at = self.sums + row * layer.n * 4
            gpu.gemm(vector, self.weight, at, 1, layer.n, layer.k, dtype=dtype, out_dtype="f32")
        self.workspace_bytes = gpu.limits().gemm_workspace_bytes
        self.workspace = 0
        if self.workspace_bytes:
            space = gpu.alloc(self.workspace_bytes, tag="benchmark")
            undo.callback(gpu.free, space)
            self.workspace = int(space)

    def _options(self) -> tuple[int, int]:
        return ACTIVATION_NAMES.index(self.layer.activation), int(self.layer.residual)

    def values(self, op: Op, rows: int, copy: int) -> tuple[Any, ...]:
        """Return the op's arguments."""
        layer = self.layer
        activation, residual = self._options()
        named = {
            "x": self.x if norms(op) or not layer.norm else self.h,
            "gamma": self.gamma if layer.norm else 0,
            "beta": self.beta if layer.norm else 0,
            "sums": self.sums if layer.norm else 0,
            "weight": self.weight + copy * self.weight_bytes,
            "bias": self.bias,
            "out": self.out,
            "rows": rows,
            "n": layer.n,
            "k": layer.k,
            "x_stride": layer.k,
            "out_stride": layer.n,
            "eps": EPS,
            "activation": activation,
            "residual": residual,
            "kv_from": layer.n,
            "part": part_chains(layer.k, cluster_of(layer.n, layer.k, self.gpu.limits())),
        }
        return tuple(named.get(arg.name, 0) for arg in op.spec.args)  # nothing goes into a KV cache

    def _normed(self, rows: int) -> tuple[Any, ...]:
        """Return the arguments of the LayerNorm, which leaves its result in ``h``."""
        return self.x, self.gamma, self.beta, self.h, rows, self.layer.k, EPS

    def ours(self, rows: int, way: Way, programmatic: bool, copies: int) -> Callable[[int], None]:
        """Return what enqueues the layer once with each of the first copies of the weights."""
        calls = []
        for copy in range(copies):
            if self.layer.norm and not norms(way.op):
                dims = {"rows": rows, "width": self.layer.k}
                calls.append((LAYER_NORM, layer_norm_plan(dims, self.dtype, self.gpu.limits()), self._normed(rows)))
            calls.append((way.op, way.how, self.values(way.op, rows, copy)))
        launches = [(self.gpu.kernel(op.spec.name, how.entry), how, values) for op, how, values in calls]

        def enqueue(stream: int) -> None:
            for handle, how, values in launches:
                options: Any = {"programmatic": programmatic, "cluster": how.cluster}
                self.gpu.launch(handle, how.grid, how.block, how.shared_bytes, stream, values, **options)

        return enqueue

    def library(self, rows: int, norm: bool) -> Callable[[int], None]:
        """Return the same by the library's product, with the LayerNorm ahead of it or without."""
        layer = self.layer
        normed = self._normed(rows)
        space = (self.workspace, self.workspace_bytes)
        sizes = (rows, layer.n, layer.k, layer.k, layer.n, *self._options(), *space, ANY)

        def enqueue(stream: int) -> None:
            for copy in range(self.copies):
                if norm:
                    LAYER_NORM.launch(self.gpu, self.dtype, normed, stream)
                weight = self.weight + copy * self.weight_bytes
                LINEAR.launch(self.gpu, self.dtype, (self.h, weight, self.bias, self.out, *sizes), stream)

        return enqueue

    def ways(self, rows: int) -> dict[str, Way]:
        """Return every launch plan by a short name."""
        dims = {"rows": rows, "n": self.layer.n, "k": self.layer.k}
        given = (dims, self.dtype, self.gpu.limits())
        found = {f"{name or 'streamed'} {warps}w": Way(OP, how) for (name, warps), how in plans(*given).items()}
        for chained, name in enumerate(CLUSTERS):
            every = cluster_plans({**dims, "chained": chained}, *given[1:])
            found |= {f"{name} {size}": Way(CLUSTER, how) for size, how in every.items()}
        if rows == 1:
            found |= {f"gemv {name or 'streamed'}": Way(GEMV, how) for name, how in gemv_plans(*given).items()}
        return found

    def chosen(self, rows: int) -> tuple[str, str]:
        """Return the names of the plans that `thin_linear`, or for one row `gemv`, and `cluster_linear` choose."""
        dims = {"rows": rows, "n": self.layer.n, "k": self.layer.k, "chained": 0}
        thin, cluster = (
            choose(dims, self.dtype, self.gpu.limits()) for choose in (gemv_plan if rows == 1 else plan, cluster_plan)
        )
        names = {way.how: name for name, way in self.ways(rows).items()}
        return names[thin], names[cluster]

    # results

    def _host(self, address: int, *shape: int) -> Array:
        array = np.empty(shape, dtype=dtypes.NUMPY[self.dtype])
        self.gpu.copy_d2h(address, array)
        return array

    def _result(self, rows: int, before: Array, way: Way) -> Array:
        self.gpu.copy_h2d(before, self.out)
        self.ours(rows, way, programmatic=False, copies=1)(0)
        self.gpu.synchronize()
        return self._host(self.out, rows, self.layer.n)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the results of each plan."""
        layer, most = self.layer, max(ROWS)
        before = self._host(self.out, most, layer.n)
        out = before.copy()
        names = [arg.name for arg in OP.spec.args]
        values = dict(zip(names, self.values(OP, most, 0), strict=True))
        arrays = {
            "x": self._host(self.x, most, layer.k),
            "weight": self._host(self.weight, layer.n, layer.k),
            "bias": self._host(self.bias, layer.n),
            "gamma": self._host(self.gamma, layer.k) if layer.norm else None,
            "beta": self._host(self.beta, layer.k) if layer.norm else None,
            "out": out,
            **dict.fromkeys(("memory", "spans", "positions")),
        }
        OP.reference(**{**values, **arrays})
        exact = out.astype(np.float64)
        limit = 2 * OP.spec.tolerance.of(self.dtype) * np.abs(exact).max()  # the reference rounds, too
        what = f"{layer.name} {layer.n}x{layer.k}"
        seen: dict[bytes, str] = {}
        for name, way in {**self.ways(1), **self.ways(most)}.items():
            one = way.op is GEMV
            whole = self._result(1 if one else most, before, way)
            error = np.abs(whole.astype(np.float64) - exact[: len(whole)]).max()
            if not error <= limit:
                yield f"{what}, {name}: error {error:.3g}, tolerance {limit:.3g}"
            if self.gpu.kind() != "cuda":  # a BLAS adds in other orders
                continue
            if one and seen.setdefault(whole.tobytes(), name) != next(iter(seen.values())):
                yield f"{what}, {name}: other bits than {next(iter(seen.values()))}"
            for rows in () if one else (1, 5, 8, 16, 33):
                if self._result(rows, before, self.ways(rows)[name]).tobytes() != whole[:rows].tobytes():
                    yield f"{what}, {name}: other bits among {rows} rows than among {most}"
        self.gpu.copy_h2d(before, self.out)


def measure(bench: Bench, clock: Clock, rows: int, repeats: int) -> dict[str, Any]:
    """Time every way to run a layer; microseconds for one run of it."""

    def us(enqueue: Callable[[int], None]) -> float:
        return round(1e3 * clock.graph_ms(enqueue, repeats) / bench.copies, 3)

    found: dict[str, Any] = {"library_us": us(bench.library(rows, norm=False))}
    if bench.layer.norm:
        found["layer_norm_library_us"] = us(bench.library(rows, norm=True))
    found["chosen"], found["chosen_cluster"] = bench.chosen(rows)
    for kind, programmatic in (("thin_us", False), ("thin_programmatic_us", True)):
        found[kind] = {
            name: us(bench.ours(rows, way, programmatic, bench.copies)) for name, way in bench.ways(rows).items()
        }
    return found


def line(layer: Layer, rows: int, case: dict[str, Any]) -> str:
    """Return a line of the table: the library, and the chosen and the best plans in both ways of launching."""
    library = case.get("layer_norm_library_us", case["library_us"])
    cells = [f"{layer.name:8s} {layer.n:6d}x{layer.k:<5d} {rows:4d} {library:9.2f}"]
    for kind in ("thin_us", "thin_programmatic_us"):
        best = min(case[kind], key=case[kind].get)
        thin, cluster = (case[kind][case[choice]] for choice in ("chosen", "chosen_cluster"))
        cells.append(f"{thin:8.2f} {cluster:8.2f} {case[kind][best]:8.2f} ({best:12s})")
    return " | ".join(cells)


def run(gpu: GpuBackend, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time every layer."""
    report: dict[str, Any] = {
        "benchmark": "thin_linear",
        "dtype": options.dtype,
        "machine": describe("metrale", "numpy", commit=options.commit),
        "gpu": {"kind": gpu.kind(), "name": gpu.name(), "sm_count": gpu.sm_count()},
        "layers": [],
        "problems": [],
    }
    clock = Clock(gpu)
    print("layer            n x k   rows   library | chosen: thin, cluster; best | the same, programmatic", flush=True)
    every = (layer for width in WIDTHS[gpu.kind()] for layer in layers(width, HEAD_ROWS[gpu.kind()]))
    for layer in (layer for layer in every if options.layers is None or layer.name in options.layers):
        with ExitStack() as undo:
            bench = Bench(gpu, layer, options.dtype, undo)
            report["problems"] += list(bench.problems())
            floor = round(1e6 * bench.weight_bytes / 4.55e12, 3)
            entry: dict[str, Any] = {"name": layer.name, "n": layer.n, "k": layer.k, "floor_us": floor, "rows": {}}
            report["layers"].append(entry)
            for rows in options.rows:
                entry["rows"][rows] = case = measure(bench, clock, rows, options.repeats)
                print(line(layer, rows, case), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    clock.close()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16", choices=OP.spec.dtypes)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N")
    parser.add_argument("--layers", nargs="+", choices=[layer.name for layer in layers(1, 1)], help="these alone")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", help="what to call the commit where git cannot say")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with open_device(options.device) as gpu:
        report = run(gpu, options)
    for problem in report["problems"]:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
