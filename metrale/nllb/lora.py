# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which modules of a model a LoRA adapter may change, and what a slot of device memory holds of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import Layout
from metrale.checkpoint import LoraModule, PeftAdapter, convert, open_adapter, require_path
from metrale.errors import CheckpointError
from metrale.nllb.config import NllbConfig
from metrale.nllb.device_weights import regions
from metrale.nllb.embeddings import EMBEDDING
from metrale.nllb.limits import ModelShape
from metrale.nllb.weights import canonical_shapes

_WEIGHT: Final = ".weight"
_BARE_PREFIXES: Final = ("encoder.", "decoder.")
_CANONICAL_PREFIX: Final = "model."


class Target(NamedTuple):
    """One product of the forward that adapters may add to.

    Attributes
    ----------
    region : str
        The product's name in `metrale.nllb.device_weights`.
    modules : tuple of str
        The modules whose outputs lie side by side in it, by transformers' names: its segments, in order.
    width, k : int
        Outputs and inputs of each module.
    """

    region: str
    modules: tuple[str, ...]
    width: int
    k: int


def targets(config: NllbConfig) -> Iterator[Target]:
    """Yield every product that adapters may add to: all with a matrix, apart from the output head."""
    shapes = canonical_shapes(config)
    for region, names in regions(config):
        if len(shapes[names[0]]) == 2 and names != (EMBEDDING,):
            modules = tuple(name.removesuffix(_WEIGHT) for name in names)
            yield Target(region.removesuffix(_WEIGHT), modules, *shapes[names[0]])


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One region of the pool: what each slot has there.

    Attributes
    ----------
    dtype : str
        Element type.
    elements : int
        Elements of a slot.
    """

    dtype: str
    elements: int

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot's elements to the next slot's."""
        return self.elements * dtypes.itemsize(self.dtype)


def slot_parts(shape: ModelShape) -> dict[str, SlotPart]:
    """Return the regions of a pool by name: for each product ``ranks``, ``scales``, ``a`` and ``b``."""
    room, parts = shape.limits.max_lora_rank, {}
    for target in targets(shape.config):
        segments = len(target.modules)
        parts[f"{target.region}.ranks"] = SlotPart("i32", segments)
        parts[f"{target.region}.scales"] = SlotPart("f32", segments)
        parts[f"{target.region}.a"] = SlotPart(shape.dtype, segments * room * target.k)
        parts[f"{target.region}.b"] = SlotPart(shape.dtype, segments * room * target.width)
    return parts


def adapter_layout(shape: ModelShape) -> Layout:
    """Return the places of a pool's regions; none when there is room for no adapter."""
    layout = Layout()
    if shape.limits.max_adapters:
        for name, part in slot_parts(shape).items():
            layout.add(name, shape.limits.max_adapters * part.slot_bytes)
    return layout


def low_rank_elements(shape: ModelShape, rows: int, cross_rows: int = 0) -> int:
    """Return the elements that the products of a pass have between their two halves, at most.

    Parameters
    ----------
    shape : ModelShape
    rows : int
        Rows of the pass.
    cross_rows : int
        Rows of which the cross-attention keys and values are computed at once.
    """
    per_row = 3 * shape.limits.max_lora_rank  # q, k and v
    per_cross_row = 2 * shape.config.decoder_layers * shape.limits.max_lora_rank
    return max(rows * per_row, cross_rows * per_cross_row)


class Piece(NamedTuple):
    """What one region of a slot gets: ``values``, one axis, from element ``start`` of the slot on."""

    region: str
    start: int
    values: NDArray[Any]


@dataclass(frozen=True, slots=True)
class AdapterImage:
    """An adapter in host memory as a slot of the pool holds it.

    Attributes
    ----------
    pieces : tuple of Piece
    digest : str
        Tells adapters apart by what they compute, whatever room they are given.
    """

    pieces: tuple[Piece, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.values.nbytes for piece in self.pieces)


def read_adapter(path: str | os.PathLike[str], shape: ModelShape) -> AdapterImage:
    """Read an adapter folder, all of it, for a model of this shape.

    Raises
    ------
    CheckpointError
        When the folder cannot be read (`metrale.checkpoint.open_adapter`), is an adapter of another model, has a rank
        above ``max_lora_rank``, or a value that does not fit the model's type.
    InvalidInput
        When ``path`` is no path.
    """
    with open_adapter(require_path("dir", path)) as adapter:
        found = _match(adapter, shape)
        pieces = tuple(piece for target in targets(shape.config) for piece in _pieces(adapter, found, target, shape))
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(f"{piece.region} {piece.values.size}\n".encode())  # the ranks say which segments these are
        digest.update(piece.values.tobytes())
    return AdapterImage(pieces, digest.hexdigest())


def check_adapter(path: str | os.PathLike[str], shape: ModelShape) -> None:
    """Raise what `read_adapter` raises for an adapter's headers, without reading its matrices."""
    with open_adapter(require_path("dir", path)) as adapter:
        _match(adapter, shape)


def _match(adapter: PeftAdapter, shape: ModelShape) -> dict[str, LoraModule]:
    """Return the adapter's modules by the model's own names for them."""
    sizes = {module: target for target in targets(shape.config) for module in target.modules}
    most, problems = shape.limits.max_lora_rank, []
    found: dict[str, LoraModule] = {}
    for name, module in adapter.modules.items():
        canonical = f"{_CANONICAL_PREFIX}{name}" if name.startswith(_BARE_PREFIXES) else name
        if canonical not in sizes:
            problems.append(f"module {name!r}: the model has no such module that an adapter may change")
            continue
        if canonical in found:
            problems.append(f"module {name!r} is there twice, also as {found[canonical].name!r}")
        found[canonical] = module
        target = sizes[canonical]
        got = module.b.shape[0], module.a.shape[1]
        if got != (target.width, target.k):
            problems.append(
                f"module {name!r}: from {got[1]} to {got[0]} features, and the model's from {target.k} to "
                f"{target.width}: it belongs to another base model"
            )
        if module.rank > most:
            problems.append(f"module {name!r}: rank {module.rank}, above the model's max_lora_rank of {most}")
    if problems:
        raise CheckpointError(adapter.path, problems)
    return found


def _pieces(adapter: PeftAdapter, found: dict[str, LoraModule], target: Target, shape: ModelShape) -> Iterator[Piece]:
    """Yield what one product's regions get. Modules that the adapter leaves alone have rank 0."""
    modules = [found.get(name) for name in target.modules]
    ranks = np.array([module.rank if module else 0 for module in modules], np.int32)
    scales = np.array([module.scale if module else 0.0 for module in modules], np.float32)
    yield Piece(f"{target.region}.ranks", 0, ranks)
    yield Piece(f"{target.region}.scales", 0, scales)
    room, path = shape.limits.max_lora_rank, str(adapter.path)
    for segment, module in enumerate(modules):
        if module is not None:
            for half, info, width in (("a", module.a, target.k), ("b", module.b, target.width)):
                matrix = adapter.read(info)
                rows = np.ascontiguousarray(matrix if half == "a" else matrix.T)
                values = convert(rows.reshape(-1), shape.dtype, name=info.name, path=path)
                yield Piece(f"{target.region}.{half}", segment * room * width, values)
