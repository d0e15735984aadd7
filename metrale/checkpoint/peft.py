# SPDX-License-Identifier: MIT OR Apache-2.0
"""A folder with a LoRA adapter as PEFT saves it: which modules it changes, and by what. Knows no model.

A module's output gains ``scale * (x @ A^T) @ B^T``. Everything else that such a folder can ask for is refused by name,
since leaving it out would give another model's output.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from metrale.checkpoint.folder import Checkpoint
from metrale.checkpoint.json_fields import FieldReader
from metrale.checkpoint.json_file import read_json_object
from metrale.checkpoint.name_patterns import NamePatterns
from metrale.checkpoint.paths import require_folder
from metrale.checkpoint.safetensors_file import SafetensorsFile
from metrale.checkpoint.tensor import FLOAT_DTYPES, TensorInfo
from metrale.errors import CheckpointError

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PICKLE_FILE: Final = "adapter_model.bin"

_READ: Final = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
_NO_MATTER: Final = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",  # the tensors of the file say it, one by one
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",  # of training alone, as is all that follows
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "runtime_config",
        "qalora_group_size",  # use_qalora is what asks for it
    }
)
_SOUND_STARTS: Final = ("gaussian", "eva", "orthogonal")
"""Ways to start the training that leave the base model as it is; the others take from it what they start with."""

_DEFAULT_RANK: Final = 8
_DEFAULT_ALPHA: Final = 8.0
_MOST_RANK: Final = 1 << 20
_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight", re.DOTALL)
_OTHERS: Final = (
    ("lora_embedding_", "an adapter of an embedding"),
    ("lora_magnitude_vector", "a magnitude of DoRA"),
    ("bias", "a bias"),
    ("modules_to_save", "a whole module"),
)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """What an adapter does to one module.

    Attributes
    ----------
    name : str
        The module's name in the base model.
    rank : int
    scale : float
    a : TensorInfo
        ``[rank, k]``, for inputs of ``k`` features.
    b : TensorInfo
        ``[n, rank]``, for outputs of ``n`` features.
    """

    name: str
    rank: int
    scale: float
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An open adapter folder, whose matrices are read when they are asked for; a context manager.

    Attributes
    ----------
    path : Path
        The folder.
    modules : mapping of str to LoraModule
        By the module's name, in order of the names.
    """

    path: Path
    modules: Mapping[str, LoraModule]
    _tensors: Checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. Arrays that were read stay valid; further calls do nothing."""
        self._tensors.close()

    def read(self, tensor: TensorInfo) -> NDArray[Any]:
        """Return a copy of a module's ``a`` or ``b`` in the stored dtype, read-only."""
        return self._tensors.read_rows(tensor.name, 0, tensor.rows)


def open_adapter(path: str | os.PathLike[str]) -> PeftAdapter:
    """Open a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises
    ------
    CheckpointError
        When a file is missing or damaged, when it is no plain LoRA adapter of linear modules, or when its tensors do
        not agree with each other or the configuration. Every reason is listed.
    """
    folder = require_folder(path)
    problems: list[str] = []
    settings = _Settings(read_json_object(folder / CONFIG_FILE), problems)
    if not os.path.lexists(folder / WEIGHTS_FILE) and os.path.lexists(folder / _PICKLE_FILE):
        problems.append(
            f"holds only {_PICKLE_FILE}, a pickle, which is not read. Convert it with PEFT: "
            "PeftModel.from_pretrained(base, folder).save_pretrained(new_folder)"
        )
        raise CheckpointError(folder, problems)
    tensors = Checkpoint(folder, [SafetensorsFile(folder / WEIGHTS_FILE)])
    try:
        modules = _modules(tensors.tensors, settings, problems)
        if problems:
            raise CheckpointError(folder, problems)
    except BaseException:
        tensors.close()
        raise
    return PeftAdapter(folder, MappingProxyType(modules), tensors)


class _Settings:
    """What the configuration says about ranks and scales.

    Parameters
    ----------
    fields : mapping
    problems : list of str
        Where problems go; empty.

    Attributes
    ----------
    is_sound : bool
        Whether there were none.
    """

    def __init__(self, fields: Mapping[str, object], problems: list[str]) -> None:
        reader = FieldReader(fields, CONFIG_FILE, problems)
        if fields.get("peft_type") != "LORA":
            reader.problem("peft_type", '"LORA"', fields.get("peft_type"))
        if fields.get("bias", "none") != "none":
            reader.problem("bias", '"none"', fields["bias"])
        start = fields.get("init_lora_weights", True)
        if not isinstance(start, bool) and start not in _SOUND_STARTS:
            expected = f"true, false or one of {', '.join(_SOUND_STARTS)} (others change the base model as well: "
            reader.problem("init_lora_weights", expected + "have PEFT convert the adapter when it is saved)", start)
        for name, value in fields.items():
            if value and name not in _READ | _NO_MATTER:
                reader.problem(name, "nothing (only plain LoRA of linear modules is applied)", value)
        self._rank = reader.integer("r", _DEFAULT_RANK, 1, _MOST_RANK)
        self._alpha = reader.number("lora_alpha", _DEFAULT_ALPHA)
        self._is_stabilised = reader.boolean("use_rslora", False)
        self._ranks = self._patterns(reader, fields, "rank_pattern")
        self._alphas = self._patterns(reader, fields, "alpha_pattern")
        self.is_sound = not problems

    @staticmethod
    def _patterns(reader: FieldReader, fields: Mapping[str, object], key: str) -> NamePatterns[float]:
        """Return the values that a pattern gives to modules; in an adapter, ranks and alphas."""
        given = fields.get(key) or {}
        found: dict[str, float] = {}
        if not isinstance(given, dict):
            reader.problem(key, "an object", given)
            given = {}
        values = FieldReader(given, f"{CONFIG_FILE}: {key}", reader.problems)
        for pattern in given:
            if key == "rank_pattern":
                found[pattern] = values.integer(pattern, _DEFAULT_RANK, 1, _MOST_RANK)
            else:
                found[pattern] = values.number(pattern, _DEFAULT_ALPHA)
        return NamePatterns(found, f"{CONFIG_FILE}: {key}", reader.problems)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and the scale of a module."""
        rank = int(self._ranks.value(module, self._rank))
        alpha = self._alphas.value(module, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._is_stabilised else rank)


def _modules(tensors: Mapping[str, TensorInfo], settings: _Settings, problems: list[str]) -> dict[str, LoraModule]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    for name, info in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name)
        if match is None:
            what = next((what for part, what in _OTHERS if part in name), "no A or B of a linear module")
            problems.append(f"tensor {name!r}: {what}, which is not applied")
            continue
        halves.setdefault(match[1], {})[match[2]] = info
        if info.dtype not in FLOAT_DTYPES:
            problems.append(f"tensor {name!r}: dtype {info.dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
    if not tensors:
        problems.append(f"{WEIGHTS_FILE} holds no tensors")
    modules = {}
    for module, pair in halves.items():
        if pair.keys() != {"A", "B"}:
            [half] = pair
            problems.append(f"module {module!r}: has lora_{half} alone, expected lora_A and lora_B")
            continue
        if not settings.is_sound:  # no rank to hold them against
            continue
        rank, scale = settings.rank_and_scale(module)
        modules[module] = LoraModule(module, rank, scale, pair["A"], pair["B"])
        problems += _module_problems(modules[module])
    return modules


def _module_problems(module: LoraModule) -> list[str]:
    problems = []
    for half, info, side in (("A", module.a, 0), ("B", module.b, 1)):
        if len(info.shape) != 2 or info.shape[side] != module.rank or 0 in info.shape:
            expected = f"[{module.rank}, inputs]" if half == "A" else f"[outputs, {module.rank}]"
            problems.append(
                f"module {module.name!r}: lora_{half} has shape {list(info.shape)}, expected {expected} for its rank"
            )
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(np.float32(module.scale)))
    if not is_finite:
        problems.append(f"module {module.name!r}: its scale of {module.scale:g} is not finite in float32")
    return problems
