# SPDX-License-Identifier: MIT OR Apache-2.0
"""LoRA adapters for tiny checkpoints in PEFT's format, made from a seed with NumPy alone.

As in `tests.reference.tiny`, the numbers are the same on every machine, because results for them are recorded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.reference.tiny import DTYPES, tensor_shapes, tiny_config, variates

Array = npt.NDArray[Any]

PREFIX = "base_model.model."

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "SEQ_2_SEQ_LM",
    "base_model_name_or_path": None,
    "inference_mode": True,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "layer_replication": None,
    "modules_to_save": None,
    "r": 4,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}


@dataclass(frozen=True)
class Recipe:
    """One adapter.

    Attributes
    ----------
    seed : int
    modules : str
        A regular expression for the names of the modules that it changes, searched for.
    settings : mapping
        What its ``adapter_config.json`` says beyond `CONFIG`.
    ranks : mapping of str to int
        The rank by a regular expression, searched for; the first one counts, and ``r`` for the rest. What the settings'
        ``rank_pattern`` comes to.
    dtype : str
        "float32", "float16" or "bfloat16".
    """

    seed: int
    modules: str = "proj|fc"
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def config(self) -> dict[str, Any]:
        return CONFIG | dict(self.settings)

    def rank(self, module: str) -> int:
        found = (rank for pattern, rank in self.ranks.items() if re.search(pattern, module))
        return int(next(found, self.config["r"]))

    def tensors(self, config: Mapping[str, Any]) -> dict[str, Array]:
        """Return the matrices of the adapter for a checkpoint with this config, by PEFT's names.

        Their deviations let the adapter change a module's output by about as much as the module gives.
        """
        bits = np.random.PCG64(self.seed)
        tensors: dict[str, Array] = {}
        for name, shape in tensor_shapes(config):
            module = name.removesuffix(".weight")
            if len(shape) != 2 or module == "model.shared" or not re.search(self.modules, module):
                continue
            rank = self.rank(module)
            for half, extents, fan in (("A", (rank, shape[1]), shape[1]), ("B", (shape[0], rank), rank)):
                values = variates(bits, extents) / math.sqrt(fan)
                tensors[f"{PREFIX}{module}.lora_{half}.weight"] = values.astype(np.float32).astype(DTYPES[self.dtype])
        return tensors


def write_adapter(path: str | Path, recipe: Recipe, **overrides: Any) -> Path:
    """Write an adapter's folder for `tests.reference.tiny.write_tiny` with these ``overrides``, and return it."""
    return write_raw(path, recipe.config, recipe.tensors(tiny_config(**overrides)))


def write_raw(path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    """Write a folder in PEFT's format with whatever is given, and return it."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(
        {name: np.asarray(value, order="C") for name, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


RECIPES: dict[str, Recipe] = {
    "every module": Recipe(
        1, settings={"target_modules": [*(f"{part}_proj" for part in ("q", "k", "v", "out")), "fc1", "fc2"]}
    ),
    "queries and values": Recipe(
        2, "[qv]_proj", {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 5, "use_rslora": True}
    ),
    "patterns": Recipe(
        3,
        settings={
            "target_modules": r".*(proj|fc1|fc2)",
            "r": 5,
            "lora_alpha": 6,
            "rank_pattern": {
                r"decoder\.layers\.\d+\.encoder_attn\.(k|v)_proj": 7,
                "layers.0.fc1": 1,
                "fc1": 2,
                "model.encoder.layers.1.self_attn.out_proj": 8,
                "ayers.0.fc2": 3,
            },
            "alpha_pattern": {"^model.encoder.*fc2": 9.5, "self_attn.q_proj": -4, "decoder.layers.1.fc1": 0.5},
        },
        ranks={
            r"decoder.*encoder_attn\.[kv]_": 7,
            r"layers\.0\.fc1": 1,
            "fc1": 2,
            r"encoder\.layers\.1\.self_attn\.out": 8,
        },
    ),
    "stabilised patterns": Recipe(
        4,
        "encoder_attn|fc2",
        {
            "target_modules": r".*(encoder_attn\..*|fc2)",
            "r": 6,
            "lora_alpha": 3,
            "use_rslora": True,
            "rank_pattern": {"fc2": 3},
            "alpha_pattern": {"k_proj": 4},
        },
        {"fc2": 3},
    ),
    "float16": Recipe(5, "fc|self_attn.out", {"target_modules": ["fc1", "fc2", "self_attn.out_proj"]}, dtype="float16"),
    "bfloat16": Recipe(6, r"encoder_attn\.[kv]", {"target_modules": r".*encoder_attn\.[kv]_proj"}, dtype="bfloat16"),
}
"""Between them they change every kind of module, and have ranks and scales of every kind."""

RECORDED = Path(__file__).parents[1] / "data" / "peft_logits.safetensors"
"""PEFT's logits for them, which `tests.record.record_peft` wrote."""

BASES: dict[str, dict[str, Any]] = {
    "relu": {},
    "gelu": {"activation_function": "gelu", "encoder_layers": 1, "decoder_layers": 2, "scale_embedding": False},
}
"""Overrides of the tiny checkpoints that the adapters are recorded on."""

BASE_SEED = 21

CASES: tuple[tuple[list[int], list[int]], ...] = (
    ([80, 5, 6, 7, 2], [2, 81, 9, 10, 11]),
    ([82, 40, 3, 96, 17, 33, 5, 2], [2, 83, 50, 4]),
)
"""Complete source and decoder ids."""


def recorded_key(base: str, recipe: str, case: int) -> str:
    """Return the name of one recorded matrix: float32 ``[decoder ids, vocabulary]``."""
    return f"{base}/{recipe}/{case}"
