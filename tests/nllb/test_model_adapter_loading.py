# SPDX-License-Identifier: MIT OR Apache-2.0
"""Adapters get into the slots of a model, whole and alone; what does not fit a model is refused, all of it listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.errors import CheckpointError, InvalidInput, NotSupported
from tests.backends import Device, damaged
from tests.nllb.adapters import LIMITS, Load, Logits, Shelf, assert_holds, rows_of
from tests.nllb.adapters import RECIPES as SHELF_RECIPES
from tests.nllb.decoding import block
from tests.reference.adapters import CONFIG, PREFIX, Recipe, write_adapter, write_raw
from tests.reference.tiny import tiny_config


def test_slots_at_load(load_adapted: Load, adapter_rows: Logits) -> None:
    assert_holds(load_adapted("dba", max_adapters=4), adapter_rows, "d", "b", "a", "")


def test_adapters_are_different(adapter_rows: Logits) -> None:
    assert len(set(adapter_rows.values())) == 6


def test_a_slot_takes_one_adapter_after_another(load_adapted: Load, shelf: Shelf, adapter_rows: Logits) -> None:
    """Of larger and smaller ranks, and with fewer modules than the one before: nothing of that one is left."""
    model = load_adapted(max_adapters=2)
    for name in ("b", "c", "e", "a", "d", "c", "b"):
        model.swap_lora_from_disk(shelf[name], name, 1)
        assert_holds(model, adapter_rows, "", name)
    assert damaged(model.gpu) == []


def test_an_adapter_of_infinities_is_forgotten(load_adapted: Load, shelf: Shelf, tmp_path: Path) -> None:
    """Its successor leaves those modules alone: what is still there may not be multiplied with, not even by 0."""
    recipe = Recipe(1, "fc1")
    tensors = {name: value * np.inf for name, value in recipe.tensors(tiny_config(**shelf.overrides)).items()}
    model = load_adapted(adapters={"bad": write_raw(tmp_path / "bad", recipe.config, tensors)})
    assert not np.isfinite(rows_of(model, 0)).any()
    model.swap_lora_from_disk(shelf["e"], "e", 0)
    assert np.isfinite(rows_of(model, 0)).all()


def test_an_adapter_without_effect_changes_nothing(load_adapted: Load, tmp_path: Path, adapter_rows: Logits) -> None:
    """Scale 0: the rows are those of the base model, by other launches."""
    folder = write_adapter(tmp_path / "none", Recipe(1, settings={"lora_alpha": 0}), encoder_layers=1, decoder_layers=1)
    model = load_adapted(adapters={"none": folder})
    base = np.frombuffer(adapter_rows[""], np.float32)
    np.testing.assert_allclose(rows_of(model, 0).reshape(-1), base, rtol=0, atol=1e-5 * np.abs(base).max())


def test_without_room_nothing_is_allocated(load_adapted: Load, gpu: GpuBackend, shelf: Shelf) -> None:
    plain, roomy = load_adapted(), load_adapted(max_adapters=1)
    assert (plain.memory_plan().adapters, "adapters" in str(plain.memory_plan())) == (0, False)
    assert plain.memory_plan().workspace < roomy.memory_plan().workspace
    assert [entry.tag for entry in gpu.alloc_report()].count("adapters") == 1
    assert plain.adapters() == {}
    for call in (
        lambda: plain.set_active_lora("a"),
        lambda: plain.swap_lora_from_disk(shelf["a"], "a", 0),
        lambda: plain.promote_lora_from_disk(shelf["a"], "a"),
    ):
        with pytest.raises(NotSupported, match="without room for adapters"):
            call()
    assert (plain.acquire_adapter_slot(-1), plain.adapter_id_for(-1)) == (-1, 0)
    plain.release_adapter_slot(-1)
    with pytest.raises(InvalidInput, match="adapter_slot: expected -1, as the model was loaded without room"):
        plain.acquire_adapter_slot(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limits", [{"max_adapters": 1, "max_lora_rank": 1}, {"max_adapters": 5, "max_lora_rank": 13}])
def test_the_plan_is_what_is_allocated(shelf: Shelf, gpu: GpuBackend, dtype: str, limits: dict[str, Any]) -> None:
    sizes = {"max_batch": 2, "max_source_len": 8, "max_new_tokens": 4, **limits}
    plan = metrale.memory_plan(shelf.base, gpu, dtype, **sizes)
    with metrale.load(shelf.base, gpu, dtype, **sizes) as model:
        assert model.memory_plan() == plan
        held = {entry.tag: entry.nbytes for entry in gpu.alloc_report()}
        assert (held["adapters"], held["workspace"]) == (plan.adapters, plan.workspace)
        assert gpu.live_bytes() == plan.total
        assert block(gpu, "adapters") == bytes(plan.adapters), "zeroed"
    assert f"adapters {plan.adapters / 2**20:,.1f} MiB, total" in str(plan)
    slots, rank, item = limits["max_adapters"], limits["max_lora_rank"], 4 if dtype == "float32" else 2
    # A and B of: 8 attention projections and, twice, fc1 and fc2, from and to 32 features
    elements = 12 * 2 * 32 + 2 * (32 + 48) + 2 * (32 + 56)
    regions = 4 * (4 + 7)
    assert 0 <= plan.adapters - slots * (rank * elements * item + 16 * 8) < 256 * regions
    # between the halves: q, k and v of 16 source rows, 4 prefix rows, 2 lanes
    without = metrale.memory_plan(shelf.base, gpu, dtype, **{**sizes, "max_adapters": 0}).workspace
    assert 0 <= plan.workspace - without - 4 * 3 * rank * (16 + 4 + 2) < 3 * 256


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"max_adapters": -1}, "max_adapters"),
        ({"max_adapters": 1.0}, "max_adapters"),
        ({"max_lora_rank": 0}, "max_lora_rank"),
        ({"max_lora_rank": 1 << 20}, "max_lora_rank"),
        ({"adapters": ["a"]}, "adapters"),
        ({"adapters": {3: "folder"}}, "adapters"),
        ({"adapters": {"": "folder"}}, "adapters"),
        ({"adapters": {"a": "x", "b": "y"}, "max_adapters": 1}, "max_adapters"),
    ],
)
def test_wrong_arguments_of_load(shelf: Shelf, gpu: GpuBackend, given: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        metrale.load(shelf.base, gpu, "float32", **{**LIMITS, **given})
    assert refused.value.argument == argument
    assert gpu.live_alloc_count() == 0


def test_a_bad_adapter_is_found_before_the_weights_are_read(shelf: Shelf, gpu: GpuBackend, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", Recipe(1), d_model=64)
    with gpu.launch_trace(), pytest.raises(CheckpointError, match="another base model"):
        metrale.load(shelf.base, gpu, "float32", adapters={"a": shelf["a"], "other": other}, **LIMITS)
    assert gpu.live_alloc_count() == 0


def test_a_value_that_does_not_fit_ends_the_load(shelf: Shelf, device: Device, tmp_path: Path) -> None:
    """It is only seen when the matrices are read: the model is given back, and the backend that was opened for it."""
    folder = too_large(shelf, tmp_path / "large")
    with device.open() as gpu:
        with pytest.raises(CheckpointError, match="do not fit in f16"):
            metrale.load(shelf.base, gpu, "float16", adapters={"large": folder}, **LIMITS)
        assert gpu.live_alloc_count() == 0
    with device.open() as gpu, shelf.load(gpu, dtype="float16", max_adapters=1) as model:
        with pytest.raises(CheckpointError, match="do not fit in f16"):
            model.promote_lora_from_disk(folder, "large")
        assert model.adapters() == {}


def too_large(shelf: Shelf, path: Path) -> Path:
    """Write an adapter with a value that float16 does not have, and return its folder."""
    recipe = Recipe(1)
    tensors = recipe.tensors(tiny_config(**shelf.overrides))
    next(reversed(tensors.values()))[-1, -1] = 1e6
    return write_raw(path, recipe.config, tensors)


def test_an_adapter_of_another_base_model(
    load_adapted: Load, shelf: Shelf, tmp_path: Path, adapter_rows: Logits
) -> None:
    """All that does not fit is listed, and the slot keeps what it has."""
    model = load_adapted("a")
    recipe = Recipe(1, "fc1|q_proj", {"r": 2}, {"decoder.*fc1": 9})
    folder = write_adapter(tmp_path / "other", recipe, encoder_layers=2, decoder_layers=1, encoder_ffn_dim=40)
    config = recipe.config | {"rank_pattern": {"decoder.*fc1": 9}}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError) as refused:
        model.swap_lora_from_disk(folder, "b", 0)
    assert refused.value.path == str(folder)
    assert sorted(refused.value.problems) == [
        "module 'model.decoder.layers.0.fc1': rank 9, above the model's max_lora_rank of 8",
        (
            "module 'model.encoder.layers.0.fc1': from 32 to 40 features, and the model's from 32 to 48: "
            "it belongs to another base model"
        ),
        "module 'model.encoder.layers.1.fc1': the model has no such module that an adapter may change",
        "module 'model.encoder.layers.1.self_attn.q_proj': the model has no such module that an adapter may change",
    ]
    assert_holds(model, adapter_rows, "a")


@pytest.mark.parametrize(
    "module", ["lm_head", "model.shared", "model.encoder.layer_norm", "model.encoder.layers.0.self_attn_layer_norm"]
)
def test_modules_that_no_adapter_may_change(load_adapted: Load, shelf: Shelf, tmp_path: Path, module: str) -> None:
    pair = {"A": np.ones((1, 32), np.float32), "B": np.ones((97, 1), np.float32)}
    tensors = {f"{PREFIX}{module}.lora_{half}.weight": value for half, value in pair.items()}
    folder = write_raw(tmp_path / "odd", CONFIG | {"r": 1}, tensors)
    with pytest.raises(CheckpointError, match=f"module '{module}': the model has no such module"):
        load_adapted(max_adapters=1).promote_lora_from_disk(folder, "odd")


def test_an_adapter_of_the_bare_model(load_adapted: Load, shelf: Shelf, tmp_path: Path, adapter_rows: Logits) -> None:
    """`M2M100Model` has the same modules by shorter names. One that has both names for a module is refused."""
    tensors = load_file(shelf["b"] / "adapter_model.safetensors")
    bare = {name.replace(f"{PREFIX}model.", PREFIX): value for name, value in tensors.items()}
    folder = write_raw(tmp_path / "bare", SHELF_RECIPES["b"].config, bare)
    model = load_adapted(max_adapters=1)
    model.promote_lora_from_disk(folder, "b")
    assert_holds(model, adapter_rows, "b")
    both = write_raw(tmp_path / "both", SHELF_RECIPES["b"].config, bare | tensors)
    with pytest.raises(CheckpointError, match="is there twice, also as 'encoder"):
        model.swap_lora_from_disk(both, "b", 0)


@pytest.mark.parametrize("base", ["float16", "bfloat16"])
def test_adapters_of_any_type_are_converted(load_adapted: Load, shelf: Shelf, tmp_path: Path, base: str) -> None:
    """A float32 model with a 16-bit adapter does what it does with that adapter's values in float32."""
    stored = Recipe(5, dtype=base)
    tensors = stored.tensors(tiny_config(**shelf.overrides))
    wide = {name: value.astype(np.float32) for name, value in tensors.items()}
    folders = {
        "stored": write_raw(tmp_path / "stored", stored.config, tensors),
        "wide": write_raw(tmp_path / "wide", stored.config, wide),
    }
    model = load_adapted(adapters=folders)
    assert rows_of(model, 0).tobytes() == rows_of(model, 1).tobytes()
