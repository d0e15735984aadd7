# SPDX-License-Identifier: MIT OR Apache-2.0
"""What cases start from: whole folders that they damage a copy of, and models that are loaded before the forks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from safetensors.numpy import load_file, save_file

import metrale
from gpu_runtime.backend import GpuBackend
from metrale import Translator
from metrale.nllb.model import NllbModel
from tests.backends import open_host
from tests.reference.adapters import Recipe, write_adapter
from tests.reference.tiny import write_tiny

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SHARDS: Final = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SPM: Final = "sentencepiece.bpe.model"
TOKENIZER_FILES: Final = (SPM, "tokenizer.json", "tokenizer_config.json")

SMALL: Final[dict[str, Any]] = {
    "vocab_size": 8240,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
"""A checkpoint with the vocabulary of the demo model's tokenizer, and little else."""

LIMITS: Final[dict[str, Any]] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
TEXT: Final = "Good morning, my friend."
SAME: Final = "the pristine folder's logits"

_SEED: Final = 21
_place: Path | None = None
_models: dict[str, Any] = {}


def prepare(place: Path) -> None:
    """Write the folders and load the models, in the process that forks."""
    global _place
    _place = place
    whole = write_tiny(place / "whole", _SEED, **SMALL)
    for name in TOKENIZER_FILES:
        shutil.copy(metrale.demo_model_path() / name, whole)
    split(whole, shutil.copytree(whole, place / "sharded"))
    write_adapter(place / "adapter", Recipe(31, settings={"lora_alpha": 4}), **SMALL)
    write_tiny(place / "tiny", _SEED)
    _models["pristine"] = logits_digest(whole)
    _models["adapted"] = logits_digest(whole, place / "adapter")
    assert _models["pristine"] != _models["adapted"]


def split(whole: Path, sharded: Path) -> None:
    """Turn the one file of a folder into two with an index."""
    tensors = load_file(whole / WEIGHTS)
    (sharded / WEIGHTS).unlink()
    names = sorted(tensors)
    placed = {name: SHARDS[at % 2] for at, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if placed[name] == shard}, sharded / shard)
    (sharded / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def folder(name: str) -> Path:
    """Return one of the folders: whole, sharded, adapter or tiny. Nobody may change it."""
    assert _place is not None
    return _place / name


def copied(name: str, damage: Callable[[Path], object] | None = None) -> Callable[[Path], object]:
    """Return a case's ``build``: a copy of one of the folders, which ``damage`` then changes."""

    def build(target: Path) -> None:
        shutil.copytree(folder(name), target, dirs_exist_ok=True)
        if damage is not None:
            damage(target)

    return build


def load_small(path: Path, gpu: GpuBackend, **options: Any) -> NllbModel:
    """Load a folder like ``whole`` with small limits."""
    return metrale.load(path, gpu, **{**LIMITS, "source": "eng_Latn", "target": "fra_Latn", **options})


def logits_digest(path: Path, adapter: Path | None = None) -> str:
    """Load a folder on the checked host, prefill a text, and return what stands for its logits."""
    adapters = None if adapter is None else {"it": adapter}
    with open_host() as gpu, closing(load_small(path, gpu, adapters=adapters, max_lora_rank=8)) as model:
        assert model.tokenizer is not None
        seq = model.alloc_sequence()
        seq.adapter_slot = -1 if adapter is None else 0
        row = model.copy_logits_to_host(model.prefill(model.tokenizer.encode(TEXT), seq))
        return hashlib.sha256(row.tobytes()).hexdigest()


def judged(path: Path) -> str:
    """Load a folder; return `SAME` when it gives the logits of the pristine one, else what stands for them."""
    digest = logits_digest(path)
    return SAME if digest == _models["pristine"] else digest


def judged_adapter(path: Path) -> str:
    """Load the pristine folder with an adapter; return `SAME` when it gives the logits of the pristine adapter."""
    digest = logits_digest(folder("whole"), path)
    return SAME if digest == _models["adapted"] else digest


def tiny_model(**options: Any) -> NllbModel:
    """Return a tiny model without a tokenizer, 97 ids, on the checked host. The process that asks for it keeps it."""
    return metrale.load(folder("tiny"), open_host(), **{**LIMITS, "source": 80, "target": 81, **options})


def demo_translator() -> Translator:
    """Return a translator of the demo model."""
    options: dict[str, Any] = {"max_batch": 4, "max_source_len": 64, "max_new_tokens": 32}
    return Translator(metrale.demo_model_path(), device="host", source="eng_Latn", target="fra_Latn", **options)
