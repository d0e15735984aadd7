# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the layers of both sides have in common: norms, dense layers and the feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale import ops
from metrale.nllb.device_weights import Dense
from metrale.nllb.limits import ModelShape
from metrale.nllb.workspace import GemmSpace, Workspace

LAYER_NORM_EPS: Final = 1e-5
"""Epsilon of every LayerNorm of the family."""


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
    """

    gpu: GpuBackend
    shape: ModelShape
    x: DevicePtr
    h: DevicePtr
    wide: DevicePtr
    gemm: GemmSpace
    count: int
    stream: StreamLike

    @classmethod
    def of(
        cls, gpu: GpuBackend, shape: ModelShape, space: Workspace, side: str, count: int, stream: StreamLike
    ) -> Rows:
        """Return the activations of one side of the model (``"encoder"``, ``"prefix"`` or ``"decoder"``)."""
        x, h, wide = (space[f"{side}.{name}"] for name in ("x", "h", "wide"))
        return cls(gpu, shape, x, h, wide, space.gemm[side], count, stream)

    def embed(self, ids: int, positions: int, table: int, position_table: int, **cells: int) -> None:
        """Fill ``x`` with the embeddings of ``ids`` at ``positions``; ``cells`` are those of the op."""
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
        activation: str = "none",
        residual: bool = False,
    ) -> None:
        """Multiply ``source`` (``[count, k]``; ``k`` is ``d`` when None) into ``out`` (``[count, n]``)."""
        ops.linear(
            self.gpu,
            source,
            weights.weight,
            weights.bias,
            out,
            rows=self.count,
            n=n,
            k=self.shape.config.d_model if k is None else k,
            dtype=self.shape.dtype,
            activation=activation,
            residual=residual,
            workspace=self.gemm.workspace,
            workspace_bytes=self.gemm.workspace_bytes,
            stream=self.stream,
        )

    def add_attention(self, out: Dense) -> None:
        """Add the output projection of the attention in ``h`` to ``x``."""
        self.dense(self.h, out, self.x, self.shape.config.d_model, residual=True)

    def add_feed_forward(self, norm: Dense, fc1: Dense, fc2: Dense, width: int) -> None:
        """Add the feed-forward block of ``x`` to ``x``."""
        config = self.shape.config
        self.norm(norm)
        self.dense(self.h, fc1, self.wide, width, activation=config.activation_function)
        self.dense(self.wide, fc2, self.x, config.d_model, width, residual=True)
