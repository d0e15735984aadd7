# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the layers of both sides have in common: norms, dense layers and the feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale import ops
from metrale.nllb.device_weights import Dense, LowRank
from metrale.nllb.limits import ModelShape
from metrale.nllb.workspace import GemmSpace, Workspace
from metrale.ops.dense import DTYPES as THIN_DTYPES
from metrale.ops.thin_linear import MOST_ROWS

LAYER_NORM_EPS: Final = 1e-5
"""Epsilon of every LayerNorm of the family."""

THIN_ROWS: Final = 8
CLUSTER_ROWS: Final = {1024: 64, 2048: 32}
THIN_WEIGHTS: Final = 1 << 22
"""For one row `metrale.ops.gemv` is faster than the library's product. Up to so many elements of weights
`metrale.ops.thin_linear` is, up to `THIN_ROWS`; and past these `metrale.ops.cluster_linear`, up to so many rows by the
longest that the smaller side of the weights may be (measured on an H200; docs/performance.md)."""

PINNED: Final = 0
"""The library's algorithm where a row's bits must be its own: the best for the one shape there is then."""


def _most_clustered(side: int) -> int:
    """Return up to how many rows `cluster_linear` is faster where the smaller side of the weights is so long."""
    return max((rows for longest, rows in CLUSTER_ROWS.items() if side <= longest), default=0)


def launches(count: int) -> Iterator[tuple[int, int]]:
    """Yield the first row, and how many, of each launch for ``count`` rows whose bits must be their own."""
    for first in range(0, count, MOST_ROWS):
        yield first, min(MOST_ROWS, count - first)


class KvPlaces(NamedTuple):
    """Where the last columns of a product go in the KV cache, as `metrale.ops.kv_scatter` takes it.

    Attributes
    ----------
    spans, positions : DevicePtr
        Of each row.
    offset : int
        Of the first of them in a position, in elements.
    width : int
        How many they are.
    """

    spans: DevicePtr
    positions: DevicePtr
    offset: int
    width: int


class _Product(NamedTuple):
    """A product as `Rows.dense` is asked for it: ``source`` is ``[count, k]``, ``out`` is ``[count, n]``.

    ``norm`` and ``kv`` are None where what makes the product has no part in them.
    """

    source: DevicePtr
    weights: Dense
    out: DevicePtr
    n: int
    k: int
    norm: Dense | None
    activation: str
    residual: bool
    kv: KvPlaces | None


class _Way(NamedTuple):
    """How a product is made.

    Attributes
    ----------
    multiply : callable
    norms : bool
        Whether it takes the norm ahead of it along.
    places : bool
        Whether it brings the last columns to their places in the KV cache.
    """

    multiply: Callable[[_Product], None]
    norms: bool = False
    places: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """The activations of one pass: ``count`` rows of the residual stream, on one stream.

    Attributes
    ----------
    gpu : GpuBackend
    shape : ModelShape
    x : DevicePtr
        Residual stream, ``[count, d]``.
    h : DevicePtr
        What a norm or an attention hands to the next product, ``[count, d]``.
    wide : DevicePtr
        q, k and v, or the inside of the feed-forward block.
    gemm : GemmSpace
        Workspace of the products.
    count : int
    stream : StreamLike
    low : DevicePtr
        What adapters' products hold between their two halves, float32; NULL in a model without room for adapters.
    adapters : DevicePtr
        The slot of each row's adapter, int32 ``[count]``, -1 for none; NULL when no row has one.
    invariant : bool
        Whether a row has the same bits whatever the others are. Buffers have room for `ModelShape.product_rows` then.
    """

    gpu: GpuBackend
    shape: ModelShape
    x: DevicePtr
    h: DevicePtr
    wide: DevicePtr
    gemm: GemmSpace
    count: int
    stream: StreamLike
    low: DevicePtr
    adapters: DevicePtr = DevicePtr.NULL
    invariant: bool = False

    @classmethod
    def of(
        cls, gpu: GpuBackend, shape: ModelShape, space: Workspace, side: str, count: int, stream: StreamLike
    ) -> Rows:
        """Return the activations of one side of the model (``"encoder"``, ``"prefix"`` or ``"decoder"``)."""
        x, h, wide = (space[f"{side}.{name}"] for name in ("x", "h", "wide"))
        low = space[f"{side}.low"] if shape.limits.max_adapters else DevicePtr.NULL
        invariant = shape.batch_invariant and side != "encoder"  # whose passes are of one source each
        return cls(gpu, shape, x, h, wide, space.gemm[side], count, stream, low, invariant=invariant)

    def adapted(self, column: DevicePtr, some: bool) -> Self:
        """Return the rows with their adapters, whose slots the device finds at ``column``, if ``some`` have one.

        Where no row has one, the products are those of the base model, launch for launch.
        """
        return replace(self, adapters=column) if some else self

    def part(self, first: int, count: int) -> Self:
        """Return some of the rows, with ``h`` from row ``first`` on and the whole of ``wide``."""
        h = self.h.offset(first * self.shape.config.d_model * self.shape.itemsize)
        adapters = self.adapters if self.adapters.is_null else self.adapters.offset(4 * first)
        return replace(self, h=h, count=count, adapters=adapters)

    def embed(self, ids: int, positions: int, table: int, position_table: int, **cells: int) -> None:
        """Fill ``x`` with the embeddings of ``ids`` at ``positions``, padding at none; ``cells`` as the op has them."""
        shape = self.shape
        ops.embed(
            self.gpu,
            ids,
            positions,
            table,
            position_table,
            self.x,
            rows=self.count,
            width=shape.config.d_model,
            vocab=shape.vocab,
            position_count=shape.position_count,
            blank=shape.config.pad_token_id,
            scale=shape.config.embed_scale,
            dtype=shape.dtype,
            stream=self.stream,
            **cells,
        )

    def norm(self, weights: Dense, out: DevicePtr | None = None) -> None:
        """Normalise ``x`` into ``h``, or into ``out``."""
        ops.layer_norm(
            self.gpu,
            self.x,
            weights.weight,
            weights.bias,
            self.h if out is None else out,
            rows=self.count,
            width=self.shape.config.d_model,
            eps=LAYER_NORM_EPS,
            dtype=self.shape.dtype,
            stream=self.stream,
        )

    def dense(
        self,
        source: DevicePtr,
        weights: Dense,
        out: DevicePtr,
        n: int,
        k: int | None = None,
        *,
        norm: Dense | None = None,
        activation: str = "none",
        residual: bool = False,
        kv: KvPlaces | None = None,
    ) -> None:
        """Multiply ``source`` (``[count, k]``; ``k`` is ``d`` when None) into ``out`` (``[count, n]``).

        With ``norm`` it is ``x`` that is normalised first, and ``source`` is where that may go: ``h``. With ``kv`` the
        last columns go into the KV cache, and what ``out`` has of them is undefined.
        """
        k = self.shape.config.d_model if k is None else k
        low_rank = None if self.adapters.is_null else weights.low_rank
        way = self._way(weights, n, k, low_rank is not None)
        if norm is not None and not way.norms:
            self.norm(norm, source)
            norm = None
        first = activation if low_rank is None else "none"
        places = kv if way.places else None
        way.multiply(_Product(source, weights, out, n, k, norm, first, residual, places))
        if low_rank is not None:
            self._add_low_rank(source, low_rank, out, k, activation)
        if kv is not None and not way.places:
            self._scatter(out, n, kv)

    def _way(self, weights: Dense, n: int, k: int, adapted: bool) -> _Way:
        """Return how a product is made. Where adapters add to it, it is the plain one."""
        short, clusters = self.shape.dtype in THIN_DTYPES, self.gpu.limits().max_cluster > 1
        single, thin, clustered, library = (
            _Way(self._single, weights.norm_sums is not None, True),
            _Way(self._thin, True, True),
            _Way(self._clustered, False, True),
            _Way(self._multiply),
        )
        if self.invariant and short:  # both give a row the same bits
            way = clustered if clusters and self.count > THIN_ROWS else thin
        elif not short:
            way = library
        elif self.count == 1:
            way = single
        elif self.count <= THIN_ROWS and n * k <= THIN_WEIGHTS:
            way = thin
        elif clusters and n * k <= THIN_WEIGHTS and self.count <= _most_clustered(min(n, k)):
            way = clustered
        else:
            way = library
        return _Way(way.multiply) if adapted else way

    def _multiply(self, p: _Product) -> None:
        """Multiply by the library: all rows at once, or as many at a time as make a row's bits its own."""
        size = self.shape.itemsize
        for first, count in launches(self.count) if self.invariant else [(0, self.count)]:
            ops.linear(
                self.gpu,
                p.source.offset(first * p.k * size),
                p.weights.weight,
                p.weights.bias,
                p.out.offset(first * p.n * size),
                rows=self.shape.product_rows(count) if self.invariant else count,
                n=p.n,
                k=p.k,
                dtype=self.shape.dtype,
                activation=p.activation,
                residual=p.residual,
                workspace=self.gemm.workspace,
                workspace_bytes=self.gemm.workspace_bytes,
                algorithm=PINNED if self.invariant else None,
                stream=self.stream,
            )

    def _clustered(self, p: _Product) -> None:
        for count, options in self._launches(p):
            ops.cluster_linear(self.gpu, **options, rows=count, out_stride=p.n, chained=self.invariant)

    def _single(self, p: _Product) -> None:
        norm: dict[str, Any] = {"eps": LAYER_NORM_EPS}  # without a norm, too: no launch that has a 0.0 is kept
        if p.norm is not None:
            norm |= {"gamma": p.norm.weight, "sums": p.weights.norm_sums}
            p = p._replace(source=self.x)
        for _, options in self._launches(p):
            ops.gemv(self.gpu, **options, **norm)

    def _thin(self, p: _Product) -> None:
        norm: dict[str, Any] = {"eps": LAYER_NORM_EPS}
        if p.norm is not None:
            norm |= {"gamma": p.norm.weight, "beta": p.norm.bias}
            p = p._replace(source=self.x)
        for count, options in self._launches(p):
            ops.thin_linear(self.gpu, **options, **norm, rows=count, out_stride=p.n)

    def _launches(self, p: _Product) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield for each launch of a product how many rows it has, and what our own ops are told all alike."""
        size = self.shape.itemsize
        for first, count in launches(self.count):
            options: dict[str, Any] = {
                "x": p.source.offset(first * p.k * size),
                "weight": p.weights.weight,
                "bias": p.weights.bias,
                "out": p.out.offset(first * p.n * size),
                "n": p.n,
                "k": p.k,
                "dtype": self.shape.dtype,
                "activation": p.activation,
                "residual": p.residual,
                "stream": self.stream,
            }
            if p.kv is not None:
                options |= {
                    "spans": p.kv.spans.offset(8 * first),
                    "positions": p.kv.positions.offset(4 * first),
                    "kv_from": p.n - p.kv.width,
                    "kv_offset": p.kv.offset,
                    "kv_stride": self.shape.kv_width,
                }
            yield count, options

    def _scatter(self, out: DevicePtr, n: int, kv: KvPlaces) -> None:
        ops.kv_scatter(
            self.gpu,
            out.offset((n - kv.width) * self.shape.itemsize),
            kv.spans,
            kv.positions,
            rows=self.count,
            width=kv.width,
            src_stride=n,
            offset=kv.offset,
            kv_stride=self.shape.kv_width,
            dtype=self.shape.dtype,
            stream=self.stream,
        )

    def _add_low_rank(self, source: DevicePtr, weights: LowRank, out: DevicePtr, k: int, activation: str) -> None:
        """Add what the rows' adapters give to the product ``out`` of ``source``, and apply the activation to all."""
        sizes = {
            "rows": self.count,
            "segments": weights.segments,
            "room": weights.room,
            "adapter_count": weights.slots,
        }
        ops.lora_down(
            self.gpu,
            source,
            self.adapters,
            weights.ranks,
            weights.a,
            self.low,
            **sizes,
            k=k,
            dtype=self.shape.dtype,
            stream=self.stream,
        )
        ops.lora_up(
            self.gpu,
            self.low,
            self.adapters,
            weights.ranks,
            weights.scales,
            weights.b,
            out,
            **sizes,
            width=weights.width,
            activation=activation,
            dtype=self.shape.dtype,
            stream=self.stream,
        )

    def add_attention(self, out: Dense) -> None:
        """Add the output projection of the attention in ``h`` to ``x``."""
        self.dense(self.h, out, self.x, self.shape.config.d_model, residual=True)

    def add_feed_forward(self, norm: Dense, fc1: Dense, fc2: Dense, width: int) -> None:
        """Add the feed-forward block of ``x`` to ``x``."""
        config = self.shape.config
        self.dense(self.h, fc1, self.wide, width, norm=norm, activation=config.activation_function)
        self.dense(self.wide, fc2, self.x, config.d_model, width, residual=True)
