# SPDX-License-Identifier: MIT OR Apache-2.0
"""What both sides of the comparison are given: a model, how its checkpoint is written, and what is fed to it.

Nothing here needs torch. A model is made from its spec alone, so that no weights are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.family.forms import write_weights
from tests.reference.tiny import DTYPES, tiny_tensors

Tensors = dict[str, npt.NDArray[Any]]

SHARED = "model.shared.weight"
ENCODER = "model.encoder.embed_tokens.weight"
DECODER = "model.decoder.embed_tokens.weight"
HEAD = "lm_head.weight"

CASTS: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    **{name: partial(np.asarray, dtype=dtype) for name, dtype in DTYPES.items()},
    "float64": lambda x: x.astype(np.float64) * (1.0 + 2.0**-28),  # not what float32 has, and rounded when it is read
}
"""How float32 tensors are stored."""

EXTRAS: Tensors = {
    "model.encoder.embed_positions.weights": np.full((3, 4), 9.0, np.float32),
    "model.decoder.embed_positions._float_tensor": np.full(1, 9.0, np.float32),
    "model.encoder.version": np.full(1, 3, np.int64),
    "final_logits_bias": np.full((1, 5), 9.0, np.float32),
}
"""Tensors that old checkpoints have, and that nothing may come of."""


@dataclass(frozen=True)
class Embeddings:
    """How the matrices of embedding and head are stored.

    Attributes
    ----------
    tied : bool
        ``tie_word_embeddings``.
    stored : dict of str to int
        The stored names, with numbers: equal numbers are equal matrices.
    """

    tied: bool
    stored: dict[str, int]


EMBEDDINGS: dict[str, Embeddings] = {
    "one, as shared": Embeddings(True, {SHARED: 0}),
    "one, as the encoder's": Embeddings(True, {ENCODER: 0}),
    "one, as the decoder's": Embeddings(True, {DECODER: 0}),
    "one, as the head": Embeddings(True, {HEAD: 0}),
    "one, under all names": Embeddings(True, {SHARED: 0, ENCODER: 0, DECODER: 0, HEAD: 0}),
    "one, but not tied": Embeddings(False, {ENCODER: 0, DECODER: 0, HEAD: 0}),
    "a head of its own": Embeddings(True, {SHARED: 0, HEAD: 1}),
    "an encoder's of its own": Embeddings(True, {SHARED: 0, ENCODER: 1}),
    "a decoder's of its own": Embeddings(True, {SHARED: 0, DECODER: 1}),
    "encoder and head, no shared": Embeddings(True, {ENCODER: 1, HEAD: 0}),
    "encoder and decoder, no shared": Embeddings(True, {ENCODER: 1, DECODER: 0}),
    "three that say they are tied": Embeddings(True, {SHARED: 3, ENCODER: 0, DECODER: 1, HEAD: 2}),
    "three": Embeddings(False, {ENCODER: 0, DECODER: 1, HEAD: 2}),
    "three, and an unused one": Embeddings(False, {SHARED: 3, ENCODER: 0, DECODER: 1, HEAD: 2}),
    "two, not tied": Embeddings(False, {ENCODER: 0, DECODER: 0, HEAD: 1}),
}


@dataclass(frozen=True)
class Feed:
    """One sequence: its source without language and end, its languages, and the ids that are decoded one by one."""

    source: list[int]
    src: int
    tgt: int
    steps: list[int]


@dataclass(frozen=True)
class Family:
    """One model.

    Attributes
    ----------
    name : str
    seed : int
        Of the weights.
    config : dict
        The truth about the model, by the names of ``M2M100Config``, complete.
    stated : dict
        ``config.json``, which may leave out, rename or misstate some of it.
    generation : dict or None
        ``generation_config.json``.
    eos, start : int
        The id that ends a source, and the one that starts a target.
    embeddings : str
        A key of `EMBEDDINGS`.
    prefix : str
        A key of `PREFIXES`.
    extras : bool
        Whether `EXTRAS` are stored too.
    dtype : str
        A key of `CASTS`, or ``"mixed"``: all of them by turns.
    form : str
        A key of `tests.family.forms.FORMS`.
    feeds : list of Feed
    """

    name: str
    seed: int
    config: dict[str, Any]
    stated: dict[str, Any]
    generation: dict[str, Any] | None
    eos: int
    start: int
    embeddings: str
    prefix: str
    extras: bool
    dtype: str
    form: str
    feeds: list[Feed]

    def tensors(self) -> Tensors:
        """Return what is stored, by stored names."""
        found = {name: x for name, x in tiny_tensors(self.seed, self.config).items() if name != SHARED}
        layerless = self.config | {"encoder_layers": 0, "decoder_layers": 0}
        for name, number in EMBEDDINGS[self.embeddings].stored.items():
            found[name] = tiny_tensors(10_000 + 10 * self.seed + number, layerless)[SHARED]
        kinds = list(CASTS) if self.dtype == "mixed" else [self.dtype]
        cast = {name: CASTS[kinds[at % len(kinds)]](x) for at, (name, x) in enumerate(found.items())}
        return {PREFIXES[self.prefix](name): x for name, x in (cast | (EXTRAS if self.extras else {})).items()}

    def source(self, feed: Feed) -> list[int]:
        """Return the whole input of the encoder."""
        return [feed.src, *feed.source, self.eos]

    def target(self, feed: Feed) -> list[int]:
        """Return the whole input of the decoder."""
        return [self.start, feed.tgt, *feed.steps]

    def write(self, folder: Path, form: str | None = None) -> Path:
        """Write the checkpoint, in its own form or another, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.stated), encoding="utf-8")
        if self.generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(self.generation), encoding="utf-8")
        write_weights(folder, self.tensors(), form or self.form)
        return folder


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _half(name: str) -> str:
    return _bare(name) if ".decoder." in name else name


PREFIXES: dict[str, Callable[[str], str]] = {
    "model.": lambda name: name,
    "none": _bare,
    "some": _half,
    "model.model.": lambda name: f"model.{name}",
}
"""What stands before the names of a whole model, and of the parts of it."""
