# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tensors of an NLLB model: their canonical names and shapes, and where a checkpoint keeps each one.

Canonical names are those of transformers' ``M2M100ForConditionalGeneration``. A checkpoint of the bare
``M2M100Model`` has them without ``model.``; that is accepted too.

The embedding of both sides and the output head are one matrix. Its canonical name is ``EMBEDDING``, and a checkpoint
may store it under any of ``TIED_NAMES``, or under several when they are equal to the bit.

Extra tensors are refused, except ``IGNORED_NAMES``, which transformers leaves aside as well: tables of positions
(computed, never learned), fairseq's version marks, and the zero bias on logits that related models store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from metrale.checkpoint import FLOAT_DTYPES, Checkpoint, TensorInfo
from metrale.errors import CheckpointError
from metrale.nllb.config import NllbConfig

EMBEDDING = "model.shared.weight"
TIED_NAMES = (EMBEDDING, "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
IGNORED_NAMES = frozenset(
    {
        "final_logits_bias",
        "model.encoder.embed_positions.weights",
        "model.decoder.embed_positions.weights",
        "model.encoder.version",
        "model.decoder.version",
    }
)

_BARE_PREFIXES = ("shared.", "encoder.", "decoder.")
_COMPARE_BYTES = 16 << 20
_BITS: Mapping[int, np.dtype[Any]] = {
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


class Affine(NamedTuple):
    """Canonical names of a linear layer's or a LayerNorm's ``weight`` and ``bias``."""

    weight: str
    bias: str


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """The four projections of one attention block, each ``[d_model, d_model]`` with a bias of ``[d_model]``."""

    q: Affine
    k: Affine
    v: Affine
    out: Affine

    @property
    def qkv(self) -> tuple[Affine, Affine, Affine]:
        """Row blocks of the fused ``[3 * d_model, d_model]`` matrix, in order."""
        return self.q, self.k, self.v

    @property
    def kv(self) -> tuple[Affine, Affine]:
        """Row blocks of the fused ``[2 * d_model, d_model]`` matrix, in order."""
        return self.k, self.v


@dataclass(frozen=True, slots=True)
class EncoderLayerNames:
    """One encoder layer. Each norm comes before the block it is named after; ``ffn_norm`` before ``fc1``."""

    self_attn: AttentionNames
    self_attn_norm: Affine
    fc1: Affine
    fc2: Affine
    ffn_norm: Affine


@dataclass(frozen=True, slots=True)
class DecoderLayerNames:
    """One decoder layer: an encoder layer with attention over the source between the two blocks."""

    self_attn: AttentionNames
    self_attn_norm: Affine
    cross_attn: AttentionNames
    cross_attn_norm: Affine
    fc1: Affine
    fc2: Affine
    ffn_norm: Affine


ENCODER_NORM = Affine("model.encoder.layer_norm.weight", "model.encoder.layer_norm.bias")
DECODER_NORM = Affine("model.decoder.layer_norm.weight", "model.decoder.layer_norm.bias")


def encoder_layer(index: int) -> EncoderLayerNames:
    """Return the canonical names of encoder layer ``index``, from 0."""
    at = f"model.encoder.layers.{index}"
    return EncoderLayerNames(
        self_attn=_attention(f"{at}.self_attn"),
        self_attn_norm=_affine(f"{at}.self_attn_layer_norm"),
        fc1=_affine(f"{at}.fc1"),
        fc2=_affine(f"{at}.fc2"),
        ffn_norm=_affine(f"{at}.final_layer_norm"),
    )


def decoder_layer(index: int) -> DecoderLayerNames:
    """Return the canonical names of decoder layer ``index``, from 0."""
    at = f"model.decoder.layers.{index}"
    return DecoderLayerNames(
        self_attn=_attention(f"{at}.self_attn"),
        self_attn_norm=_affine(f"{at}.self_attn_layer_norm"),
        cross_attn=_attention(f"{at}.encoder_attn"),
        cross_attn_norm=_affine(f"{at}.encoder_attn_layer_norm"),
        fc1=_affine(f"{at}.fc1"),
        fc2=_affine(f"{at}.fc2"),
        ffn_norm=_affine(f"{at}.final_layer_norm"),
    )


def cross_kv(config: NllbConfig) -> Iterator[Affine]:
    """Yield the row blocks of the fused ``[decoder_layers * 2 * d_model, d_model]`` matrix: k then v, layer by layer.

    It gives the cross-attention keys and values of all decoder layers in one product.
    """
    for index in range(config.decoder_layers):
        yield from decoder_layer(index).cross_attn.kv


def canonical_shapes(config: NllbConfig, vocab_size: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return every canonical tensor with its shape, the embedding first, then layer by layer.

    Parameters
    ----------
    config : NllbConfig
    vocab_size : int, optional
        Rows of the embedding, when they are not ``config.vocab_size``.
    """
    d = config.d_model
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab_size or config.vocab_size, d)}
    for index in range(config.encoder_layers):
        encoder = encoder_layer(index)
        _add_attention(shapes, encoder.self_attn, encoder.self_attn_norm, d)
        _add_ffn(shapes, encoder, d, config.encoder_ffn_dim)
    _add(shapes, ENCODER_NORM, d)
    for index in range(config.decoder_layers):
        decoder = decoder_layer(index)
        _add_attention(shapes, decoder.self_attn, decoder.self_attn_norm, d)
        _add_attention(shapes, decoder.cross_attn, decoder.cross_attn_norm, d)
        _add_ffn(shapes, decoder, d, config.decoder_ffn_dim)
    _add(shapes, DECODER_NORM, d)
    return shapes


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Where a checkpoint keeps each canonical tensor.

    Attributes
    ----------
    vocab_size : int
        Rows of the stored embedding: the vocabulary size to use.
    sources : mapping of str to str
        The stored name of every canonical name.
    shapes : mapping of str to tuple of int
        The shape of every canonical name.
    dtypes : frozenset of str
        The dtypes in which they are stored, names of `metrale.checkpoint.FLOAT_DTYPES`; one checkpoint may mix them.
    """

    vocab_size: int
    sources: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: frozenset[str]


def match_weights(config: NllbConfig, checkpoint: Checkpoint) -> WeightMap:
    """Find every tensor of the model in a checkpoint, and nothing else.

    Names, shapes and dtypes are judged by the headers. Data are read only to compare embeddings stored several times.

    Raises
    ------
    CheckpointError
        When tensors are missing, unknown, stored twice, of another shape, or of a dtype that cannot be read; when
        tied embeddings differ; or when the embedding has no row for a special id. All of them are listed.
    """
    problems: list[str] = []
    stored = _by_canonical_name(checkpoint, problems)
    tied = [stored.pop(name) for name in TIED_NAMES if name in stored]
    problems += _tied_problems(config, checkpoint, tied)
    vocab_size = tied[0].rows if tied else config.vocab_size
    expected = canonical_shapes(config, vocab_size)
    sources = {EMBEDDING: tied[0].name} if tied else {}
    for name, shape in expected.items():
        if name == EMBEDDING:
            continue
        info = stored.pop(name, None)
        if info is None:
            problems.append(f"missing tensor {name!r}")
            continue
        sources[name] = info.name
        if info.shape != shape:
            problems.append(
                f"tensor {info.name!r}: shape {list(info.shape)}, expected {list(shape)} by the configuration"
            )
        problems += _dtype_problem(info)
    problems += [f"unknown tensor {info.name!r}" for name, info in stored.items() if name not in IGNORED_NAMES]
    if problems:
        raise CheckpointError(checkpoint.path, problems)
    dtypes = frozenset(checkpoint.tensors[name].dtype for name in sources.values())
    return WeightMap(vocab_size, MappingProxyType(sources), MappingProxyType(expected), dtypes)


def _by_canonical_name(checkpoint: Checkpoint, problems: list[str]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for stored, info in checkpoint.tensors.items():
        name = f"model.{stored}" if stored.startswith(_BARE_PREFIXES) else stored
        if name in found:
            problems.append(f"tensor {stored!r} is stored twice, also as {found[name].name!r}")
        else:
            found[name] = info
    return found


def _tied_problems(config: NllbConfig, checkpoint: Checkpoint, tied: list[TensorInfo]) -> list[str]:
    if not tied:
        return [f"missing tensor {EMBEDDING!r} (it may also be named {', '.join(TIED_NAMES[1:])})"]
    problems: list[str] = []
    for info in tied:
        if len(info.shape) != 2 or info.shape[1] != config.d_model:
            problems.append(
                f"tensor {info.name!r}: shape {list(info.shape)}, "
                f"expected [vocabulary, {config.d_model}] by the configuration"
            )
        problems += _dtype_problem(info)
    if problems:
        return problems
    first = tied[0]
    if first.rows <= max(config.special_ids):
        problems.append(f"tensor {first.name!r}: {first.rows} rows, none for the special id {max(config.special_ids)}")
    for other in tied[1:]:
        difference = _difference(checkpoint, first, other)
        if difference:
            problems.append(
                f"tensors {first.name!r} and {other.name!r} must be equal (they are one matrix in this model), "
                f"but they differ in {difference}"
            )
    return problems


def _difference(checkpoint: Checkpoint, first: TensorInfo, other: TensorInfo) -> str:
    """Return in what two matrices differ, or nothing when they are equal to the bit."""
    if first.shape != other.shape:
        return f"shape ({list(first.shape)}, {list(other.shape)})"
    if first.dtype != other.dtype:
        return f"dtype ({first.dtype}, {other.dtype})"
    bits = _BITS[FLOAT_DTYPES[first.dtype].itemsize]
    for start, rows in checkpoint.iter_chunks(first.name, _COMPARE_BYTES):
        others = checkpoint.read_rows(other.name, start, start + len(rows))
        # As integers: NaNs must compare equal, and zeros of unlike sign must not.
        unequal = (rows.view(bits) != others.view(bits)).any(axis=1)
        if unequal.any():
            return f"values, first in row {start + int(unequal.argmax())}"
    return ""


def _dtype_problem(info: TensorInfo) -> list[str]:
    if info.dtype in FLOAT_DTYPES:
        return []
    return [f"tensor {info.name!r}: dtype {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"]


def _affine(at: str) -> Affine:
    return Affine(f"{at}.weight", f"{at}.bias")


def _attention(at: str) -> AttentionNames:
    return AttentionNames(*(_affine(f"{at}.{part}_proj") for part in ("q", "k", "v", "out")))


def _add(shapes: dict[str, tuple[int, ...]], names: Affine, out: int, *columns: int) -> None:
    shapes[names.weight] = (out, *columns)
    shapes[names.bias] = (out,)


def _add_attention(shapes: dict[str, tuple[int, ...]], names: AttentionNames, norm: Affine, d: int) -> None:
    for projection in (*names.qkv, names.out):
        _add(shapes, projection, d, d)
    _add(shapes, norm, d)


def _add_ffn(
    shapes: dict[str, tuple[int, ...]], names: EncoderLayerNames | DecoderLayerNames, d: int, ffn: int
) -> None:
    _add(shapes, names.fc1, ffn, d)
    _add(shapes, names.fc2, d, ffn)
    _add(shapes, names.ffn_norm, d)
