# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which matrices embed the source, embed the target and give the logits: one for all three, or up to three.

The published models have one, under any of the names in `STORED_NAMES`, or under several. What counts is what
transformers makes of a checkpoint:

- A matrix that is stored under the name of its own is used, whatever ``tie_word_embeddings`` says.
- One that is not is another's where ``tie_word_embeddings`` is true: the first stored of `STORED_NAMES`. Where it is
  false, transformers would draw it at random, and the checkpoint is refused.

Matrices that are equal to the bit are kept once, however they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from metrale.checkpoint import FLOAT_DTYPES, Checkpoint, TensorInfo
from metrale.nllb.config import NllbConfig

EMBEDDING: Final = "model.shared.weight"
ENCODER_EMBEDDING: Final = "model.encoder.embed_tokens.weight"
DECODER_EMBEDDING: Final = "model.decoder.embed_tokens.weight"
HEAD: Final = "lm_head.weight"

STORED_NAMES: Final = (EMBEDDING, HEAD, DECODER_EMBEDDING, ENCODER_EMBEDDING)
"""Where a checkpoint may keep a matrix of these, in the order in which transformers looks for one that others share."""

_COMPARE_BYTES: Final = 16 << 20
_BITS: Final[Mapping[int, np.dtype[Any]]] = MappingProxyType(
    {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
)


class Tables(NamedTuple):
    """The canonical names of the three matrices; the encoder's is always `EMBEDDING`, and so are those equal to it.

    Attributes
    ----------
    encoder, decoder : str
        What the ids of source and target are embedded with.
    head : str
        What the hidden state is multiplied with.
    """

    encoder: str = EMBEDDING
    decoder: str = EMBEDDING
    head: str = EMBEDDING

    @property
    def names(self) -> tuple[str, ...]:
        """Each name once, the encoder's first."""
        return tuple(dict.fromkeys(self))


TIED: Final = Tables()
"""One matrix for all three."""

_OWN_NAMES: Final = Tables(ENCODER_EMBEDDING, DECODER_EMBEDDING, HEAD)


class FoundTables(NamedTuple):
    """The matrices of a checkpoint.

    Attributes
    ----------
    tables : Tables
    sources : dict of str to TensorInfo
        What is stored for each of ``tables.names``.
    needed : tuple of str
        The stored names without which it would be another model.
    """

    tables: Tables
    sources: dict[str, TensorInfo]
    needed: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Rows of each matrix."""
        return self.sources[EMBEDDING].rows


def find_tables(
    config: NllbConfig, checkpoint: Checkpoint, stored: dict[str, TensorInfo], problems: list[str]
) -> FoundTables | None:
    """Take the matrices out of ``stored``, which has tensors by canonical names, and say which is used for what.

    Data are read only to compare matrices that are stored several times. Faults go to ``problems``; with any of its
    own it returns None.
    """
    given: dict[str, TensorInfo] = {name: stored.pop(name) for name in STORED_NAMES if name in stored}
    if not config.tie_word_embeddings:
        given.pop(EMBEDDING, None)  # nothing reads it
    found = list(_problems(config, given))
    if found:
        problems += found
        return None
    used = _used(config, checkpoint, given)
    tables: list[str] = []
    sources: dict[str, TensorInfo] = {}
    for own, info in zip(_OWN_NAMES, used, strict=True):
        equal = next((name for name, other in sources.items() if _same(checkpoint, info, other)), None)
        name = equal or (own if sources else EMBEDDING)
        sources.setdefault(name, info)
        tables.append(name)
    return FoundTables(Tables(*tables), sources, tuple(dict.fromkeys(info.name for info in used)))


def _used(config: NllbConfig, checkpoint: Checkpoint, given: Mapping[str, TensorInfo]) -> list[TensorInfo]:
    """Return what is stored for each of the three: the shared one where there is no other, or only a copy of it."""
    if not config.tie_word_embeddings:
        return [given[own] for own in _OWN_NAMES]
    shared = next(iter(given.values()))
    own_or_shared = [given.get(own, shared) for own in _OWN_NAMES]
    return [shared if _same(checkpoint, info, shared) else info for info in own_or_shared]


def _problems(config: NllbConfig, given: Mapping[str, TensorInfo]) -> Iterator[str]:
    if config.tie_word_embeddings and not given:
        yield f"missing tensor {EMBEDDING!r} (it may also be named {', '.join(STORED_NAMES[1:])})"
    elif not config.tie_word_embeddings:
        for own in _OWN_NAMES:
            if own not in given:
                yield f"missing tensor {own!r} (tie_word_embeddings is false, so no other matrix stands for it)"
    faulty = False
    for info in given.values():
        if len(info.shape) != 2 or info.shape[1] != config.d_model:
            faulty = True
            yield (
                f"tensor {info.name!r}: shape {list(info.shape)}, "
                f"expected [vocabulary, {config.d_model}] by the configuration"
            )
        if info.dtype not in FLOAT_DTYPES:
            yield f"tensor {info.name!r}: dtype {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
    if faulty or not given:
        return
    first, *others = given.values()
    most = max(config.special_ids)
    if first.rows <= most:
        yield f"tensor {first.name!r}: {first.rows} rows, none for the special id {most}"
    for info in others:
        if info.rows != first.rows:
            yield f"tensor {info.name!r}: {info.rows} rows, expected {first.rows} as {first.name!r} has"


def _same(checkpoint: Checkpoint, first: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two matrices of one shape are equal to the bit."""
    if first.name == other.name or checkpoint.are_one(first.name, other.name):
        return True
    if first.dtype != other.dtype:
        return False
    bits = _BITS[FLOAT_DTYPES[first.dtype].itemsize]
    for start, rows in checkpoint.iter_chunks(first.name, _COMPARE_BYTES):
        others = checkpoint.read_rows(other.name, start, start + len(rows))
        # As integers: NaNs must compare equal, and zeros of unlike sign must not.
        if (rows.view(bits) != others.view(bits)).any():
            return False
    return True
