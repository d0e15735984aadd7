# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of adapters share: a tiny checkpoint, adapters for it, and models that hold some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.errors import InvalidInput
from metrale.model import SequenceState
from metrale.nllb.model import NllbModel
from tests.reference.adapters import BASE_SEED, Recipe, write_adapter
from tests.reference.tiny import write_tiny

LIMITS: Final[dict[str, Any]] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8, "max_lora_rank": 8}

NAMES: Final = ("a", "b", "c", "d", "e")
"""Adapters of different ranks, of which the first three change every module and the others some."""

RECIPES: Final = {
    "a": Recipe(31, settings={"lora_alpha": 4}),
    "b": Recipe(32, settings={"r": 8, "lora_alpha": 4}),
    "c": Recipe(33, settings={"r": 1, "lora_alpha": 1}),
    "d": Recipe(34, "encoder_attn|fc1", {"r": 3, "lora_alpha": 2, "use_rslora": True}),
    "e": Recipe(35, "encoder.layers.*[qk]_proj", {"r": 5, "lora_alpha": 4}),
}

Load = Callable[..., NllbModel]
Logits = dict[str, bytes]


class Shelf:
    """A folder with a tiny checkpoint and adapters for it.

    Attributes
    ----------
    base : Path
        The checkpoint's folder.
    """

    def __init__(self, path: Path, **overrides: Any) -> None:
        self.base = write_tiny(path / "base", BASE_SEED, **overrides)
        self.overrides = overrides
        self._folders = {name: write_adapter(path / name, recipe, **overrides) for name, recipe in RECIPES.items()}

    def __getitem__(self, name: str) -> Path:
        """Return an adapter's folder."""
        return self._folders[name]

    def load(self, gpu: GpuBackend, names: Sequence[str] = "", dtype: str = "float32", **options: Any) -> NllbModel:
        """Return a model with adapters in slots 0, 1 and so on."""
        adapters = {name: self[name] for name in names}
        return metrale.load(self.base, gpu, dtype, **{**LIMITS, "adapters": adapters, **options})


def begin(model: NllbModel, slot: int = -1) -> SequenceState:
    """Return a new sequence with the adapter in a slot."""
    seq = model.alloc_sequence()
    seq.src_lang_id, seq.tgt_lang_id, seq.adapter_slot = 80, 81, slot
    return seq


def rows_of(model: NllbModel, slot: int, tokens: Sequence[int] = (5, 6, 7), fed: Sequence[int] = (9,)) -> NDArray[Any]:
    """Return a sequence's logits after its prefill and after each of ``fed``, by the single calls; it is freed."""
    seq = begin(model, slot)
    try:
        rows = [model.copy_logits_to_host(model.prefill(list(tokens), seq))]
        rows += [model.copy_logits_to_host(model.decode(token, seq)) for token in fed]
    finally:
        model.free_sequence(seq)
    return np.stack(rows)


def assert_holds(model: NllbModel, rows: Logits, *names: str) -> None:
    """Each slot must have the adapter of this name ("" for none), by what it says and by its logits."""
    assert model.adapters() == {name: slot for slot, name in enumerate(names) if name}
    for slot, name in enumerate(names):
        if name:
            assert rows_of(model, slot).tobytes() == rows[name], f"slot {slot}"
        else:
            with pytest.raises(InvalidInput, match="adapter_slot"):
                rows_of(model, slot)
    assert rows_of(model, -1).tobytes() == rows[""]
