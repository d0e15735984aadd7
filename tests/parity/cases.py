# SPDX-License-Identifier: MIT OR Apache-2.0
"""What both sides of the comparison are given: a small model made from a seed, and a beam search on it.

Nothing here needs torch. Both are plain data, so that a recorded file holds them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.reference.nllb_float64 import NllbFloat64
from tests.reference.tiny import tiny_config, tiny_tensors, write_tiny

PAD = 1
EOS = 2  # of the configuration: ends every source, and starts every target
START = 2
NEVER = -40.0  # added to a logit that must not be among any beam's candidates

Tensors = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ModelSpec:
    """A tiny model with a say in how sharp its distributions are and how often it ends a sequence.

    Attributes
    ----------
    seed : int
        Of ``tiny_tensors``.
    overrides : dict
        Keys of ``TINY_CONFIG``.
    sharpness : float
        Factor on the logits.
    boost : dict of str to float
        What is added to the logits of an id (as text, because JSON keys are). A model of random weights hardly ever
        prefers the id that ends a sequence; with 2 or 3 more it does so now and then.
    generation_eos : list of int or None
        ``eos_token_id`` of ``generation_config.json`` when that is not the configuration's.
    """

    seed: int
    overrides: dict[str, Any] = field(default_factory=dict)
    sharpness: float = 1.0
    boost: dict[str, float] = field(default_factory=dict)
    generation_eos: list[int] | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(tiny_config(**self.overrides)["vocab_size"])

    def tensors(self) -> Tensors:
        """Return the weights. The first column of the embedding is a bias of the logits.

        The decoder's last LayerNorm gives 1 in that column whatever comes in, so a row's entry there is added to its
        logit. ``<pad>`` gets `NEVER`: where a sequence contains it, transformers gives it the position of padding.
        """
        tensors = tiny_tensors(self.seed, tiny_config(**self.overrides))
        norm = "model.decoder.layer_norm"
        for name, first in ((f"{norm}.weight", 0.0), (f"{norm}.bias", 1.0)):
            tensors[name] = tensors[name] * np.float32(self.sharpness)
            tensors[name][0] = first
        embedding = tensors["model.shared.weight"]
        embedding[:, 0] = 0.0
        embedding[PAD] = 0.0
        for key, value in (self.boost | {str(PAD): NEVER}).items():
            embedding[int(key), 0] = value
        return tensors

    def judge(self) -> NllbFloat64:
        """Return the model in float64."""
        weights = {name: tensor.astype(np.float64) for name, tensor in self.tensors().items()}
        return NllbFloat64(tiny_config(**self.overrides), weights)

    def write(self, path: Path) -> Path:
        """Write the checkpoint into folder ``path`` and return the folder."""
        folder = write_tiny(path, self.seed, **self.overrides)
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        if self.generation_eos is not None:
            file = folder / "generation_config.json"
            content = json.loads(file.read_text(encoding="utf-8")) | {"eos_token_id": self.generation_eos}
            file.write_text(json.dumps(content), encoding="utf-8")
        return folder


@dataclass(frozen=True)
class Case:
    """One search.

    Attributes
    ----------
    name : str
        Says where it comes from; no two of a draw are equal.
    model : int
        Index into the list of models.
    prompt : list of int
        Subword ids of the source, without language and EOS.
    src, tgt : int
        Language ids.
    options : dict
        Arguments of ``metrale.BeamReq`` by name, only those that are not its defaults, ``num_beams`` and ``max_new``
        always.
    """

    name: str
    model: int
    prompt: list[int]
    src: int
    tgt: int
    options: dict[str, Any]

    @property
    def num_beams(self) -> int:
        """Width of the search."""
        return int(self.options["num_beams"])

    def eos_ids(self, spec: ModelSpec) -> list[int]:
        """Return the ids that end a sequence: the request's, else the model's."""
        given = self.options.get("eos_ids")
        return list(given) if given is not None else spec.generation_eos or [EOS]

    def replace(self, name: str, **options: Any) -> Case:
        """Return the case under another name with some options changed; None takes an option out."""
        changed = {key: value for key, value in (self.options | options).items() if value is not None}
        return Case(name, self.model, self.prompt, self.src, self.tgt, changed)


@dataclass(frozen=True)
class Answer:
    """What transformers returned for a case.

    Attributes
    ----------
    ids : list of list of int
        Each hypothesis from the language id on, best first.
    scores : list of float
        One for each hypothesis; empty for one beam, which has none.
    transitions : list of float
        What each generated id added to the sum of the best hypothesis, ids of a prefix left out; empty for one beam.
    margin : float
        The smallest distance by which anything was decided, less what float32 may make of it; see
        `tests.parity.margins`.
    """

    ids: list[list[int]]
    scores: list[float]
    transitions: list[float]
    margin: float


@dataclass(frozen=True)
class Draw:
    """Models, and cases on them."""

    models: list[ModelSpec]
    cases: list[Case]

    def of(self, model: int) -> list[Case]:
        """Return the cases of one model."""
        return [case for case in self.cases if case.model == model]


def as_json(item: ModelSpec | Case | Answer) -> dict[str, Any]:
    """Return the fields, without those that are empty."""
    return {key: value for key, value in asdict(item).items() if value not in (None, {})}


def model_from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Return the model that `as_json` was given."""
    return ModelSpec(**fields)


def case_from_json(fields: Mapping[str, Any]) -> tuple[Case, Answer]:
    """Return a case and its answer from the fields of both in one mapping."""
    case = Case(*(fields[key] for key in ("name", "model", "prompt", "src", "tgt", "options")))
    return case, Answer(*(fields[key] for key in ("ids", "scores", "transitions", "margin")))
