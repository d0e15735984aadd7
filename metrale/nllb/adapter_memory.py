# SPDX-License-Identifier: MIT OR Apache-2.0
"""The device memory of a pool of adapter slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gpu_runtime.arena import Arena
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from metrale.nllb.device_weights import DeviceWeights, LowRank
from metrale.nllb.limits import ModelShape
from metrale.nllb.lora import AdapterImage, Target, adapter_layout, slot_parts, targets
from metrale.nllb.staging import Staging, Transfer


class AdapterMemory:
    """The pool's allocation, zeroed. Nothing is allocated when there is room for no adapter.

    Parameters
    ----------
    gpu : GpuBackend
    shape : ModelShape

    Raises
    ------
    OutOfMemory
        When it does not fit; nothing stays allocated.
    """

    def __init__(self, gpu: GpuBackend, shape: ModelShape) -> None:
        self._gpu = gpu
        self._shape = shape
        self._parts = slot_parts(shape)
        self._arena: Arena | None = None
        layout = adapter_layout(shape)
        if layout.nbytes:
            self._arena = Arena(gpu, layout, tag="adapters")
            try:
                gpu.memset(self._arena.base, 0, layout.nbytes)
            except BaseException:
                self.free()
                raise

    def attach(self, weights: DeviceWeights) -> DeviceWeights:
        """Return the weights with what adapters add to each product."""
        if self._arena is None:
            return weights
        arena = self._arena
        added = {target.region: self._low_rank(arena, target) for target in targets(self._shape.config)}

        def layers(side: str, of: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(replace(layer, **dict(products(f"{side}.{index}", layer))) for index, layer in enumerate(of))

        def products(at: str, owner: Any) -> list[tuple[str, Any]]:
            return [
                (field.name, replace(getattr(owner, field.name), low_rank=added[f"{at}.{field.name}"]))
                for field in fields(owner)
                if f"{at}.{field.name}" in added
            ]

        return replace(
            weights,
            encoder=layers("encoder", weights.encoder),
            decoder=layers("decoder", weights.decoder),
            **dict(products("decoder", weights)),
        )

    def _low_rank(self, arena: Arena, target: Target) -> LowRank:
        limits = self._shape.limits
        return LowRank(
            ranks=arena[f"{target.region}.ranks"],
            scales=arena[f"{target.region}.scales"],
            a=arena[f"{target.region}.a"],
            b=arena[f"{target.region}.b"],
            slots=limits.max_adapters,
            segments=len(target.modules),
            room=limits.max_lora_rank,
            width=target.width,
        )

    def staging(self, image: AdapterImage) -> Staging:
        """Return buffers to `write` an image through."""
        return Staging(self._gpu, image.nbytes)

    def write(self, slot: int, image: AdapterImage, staging: Staging) -> None:
        """Send an image to a slot. Rows of a former adapter that it does not replace are not read any more."""
        assert self._arena is not None
        transfers = []
        for piece in image.pieces:
            part = self._parts[piece.region]
            start = slot * part.slot_bytes + piece.start * piece.values.itemsize
            at = self._arena[piece.region].offset(start)
            transfers.append(Transfer(len(piece.values), part.dtype, at, partial(_copy, piece.values)))
        staging.send(transfers)

    @property
    def base(self) -> DevicePtr:
        """Address of the pool; NULL when there is none."""
        return DevicePtr.NULL if self._arena is None else self._arena.base

    def free(self) -> None:
        """Free the pool. Work that is enqueued may still use it. Calling it again does nothing."""
        if self._arena is not None:
            self._arena.free()


def _copy(values: NDArray[Any], start: int, room: NDArray[Any]) -> None:
    room[:] = values[start : start + len(room)]
