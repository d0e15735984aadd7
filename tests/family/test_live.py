# SPDX-License-Identifier: MIT OR Apache-2.0
"""Against transformers itself, on machines that have it: every logit of every drawn model, in every form of file.

`test_recorded` has a digest of the same models.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="asks the real one, where it is installed; records are always compared")
pytest.importorskip("transformers", reason="asks the real one, where it is installed; records are always compared")

from gpu_runtime.gemm import ACTIVATIONS as FUNCTIONS
from metrale.nllb.config import ACTIVATIONS, NllbConfig
from metrale.nllb.embeddings import STORED_NAMES
from tests.family import hf, ours
from tests.family.draw import DEFAULTS, draw
from tests.family.forms import FORMS
from tests.family.official import OFFICIAL, grouped
from tests.family.recorded import TOLERANCE, digest, recorded, worst
from tests.family.refusals import OTHER_ACTIVATIONS
from tests.family.test_recorded import RECORDED_OFFICIAL

DRAWN = draw()
RECORDING = 3e-6
"""How far the recorded numbers may be off on another machine: sums of float32 in another order."""

each = pytest.mark.parametrize("one", DRAWN, ids=lambda one: one.name)
forms = tuple(FORMS)


@each
def test_all_logits_are_transformers_and_the_record_is_right(one: Any, tmp_path: Path) -> None:
    folder = one.write(tmp_path)
    model = hf.load(one, folder)
    expected = hf.logits(one, model)
    assert worst(digest(expected), recorded()[one.name]) <= RECORDING
    assert worst(ours.logits(one, folder, "host"), expected) <= TOLERANCE
    assert hf.start(model, one) in (one.start, None)


@each
def test_the_other_forms_of_file_hold_the_same_model(one: Any, tmp_path: Path) -> None:
    expected = recorded()[one.name]
    for form in set(FORMS) - {one.form}:
        folder = one.write(tmp_path / form, form)
        assert worst(digest(ours.logits(one, folder, "host")), expected) <= TOLERANCE, form


@each
def test_what_transformers_and_torch_save(one: Any, tmp_path: Path) -> None:
    """The whole model in one file and in several, and its state in a ``.bin`` of torch's own making."""
    model = hf.load(one, one.write(tmp_path / "first"))
    expected = hf.logits(one, model)
    for name, most in (("one", "1GB"), ("several", "1KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=most)
    folder = one.write(tmp_path / "torch")
    for file in folder.iterdir():
        if file.suffix != ".json" or ".index." in file.name:
            file.unlink()
    hf.torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    for name in ("one", "several", "torch"):
        assert worst(ours.logits(one, tmp_path / name, "host"), expected) <= TOLERANCE, name


@each
def test_the_configuration_is_read_as_transformers_reads_it(one: Any, tmp_path: Path) -> None:
    folder = one.write(tmp_path)
    theirs, found = hf.transformers.AutoConfig.from_pretrained(folder), NllbConfig.from_dir(folder)
    names = set(NllbConfig.__slots__) - {"activation_function", "dtype", "generation", "forced_bos_token_id"}
    for name in names - {"eos_token_id", "decoder_start_token_id"}:
        assert getattr(found, name) == getattr(theirs, name), name
    assert found.activation_function == ACTIVATIONS[theirs.activation_function]
    assert one.config | {"vocab_size": found.vocab_size} == {
        name: one.config[name] if name in ("model_type", "activation_function", *_IDS) else getattr(found, name)
        for name in one.config
    }


_IDS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")


def test_the_defaults_are_those_of_transformers() -> None:
    theirs = hf.transformers.M2M100Config()
    found = NllbConfig.from_dict({"model_type": "m2m_100"})
    assert {name: getattr(theirs, name) for name in DEFAULTS} == DEFAULTS
    for name in set(NllbConfig.__slots__) - {"dtype", "generation", "eos_token_id", "forced_bos_token_id"}:
        assert getattr(found, name) == getattr(theirs, name), name
    assert found.eos_token_id == (theirs.eos_token_id,)


def test_the_names_of_activations_are_all_those_that_transformers_has() -> None:
    assert {*ACTIVATIONS, *OTHER_ACTIVATIONS} == set(hf.transformers.activations.ACT2FN)


def _is_ours(name: str, kind: str) -> bool:
    x = np.concatenate([np.linspace(-20.0, 20.0, 4001), np.geomspace(1e-6, 1e3, 300)]).astype(np.float32)
    with hf.torch.no_grad():
        theirs = hf.transformers.activations.ACT2FN[name](hf.torch.from_numpy(x)).numpy()
    found = x.copy()
    function: Any = FUNCTIONS[kind]
    result = function(found) if function is not None else found
    found = found if result is None else result
    return bool(np.allclose(found, theirs, rtol=2e-6, atol=2e-6))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_the_function_that_its_name_says(name: str) -> None:
    assert _is_ours(name, ACTIVATIONS[name])


@pytest.mark.parametrize("name", sorted(set(OTHER_ACTIVATIONS) - {"prelu", "xielu"}))  # which have weights
def test_a_refused_activation_is_none_that_we_have(name: str) -> None:
    assert not any(_is_ours(name, kind) for kind in FUNCTIONS)


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_record_of_the_published_models_is_right(name: str) -> None:
    parameters, shapes = hf.contents(OFFICIAL[name])
    assert RECORDED_OFFICIAL[name] == {"parameters": parameters, "shapes": grouped(shapes)}


def test_transformers_looks_for_a_shared_matrix_in_our_order(tmp_path: Path) -> None:
    """Of every set of stored matrices, in ties, it takes what we take: logits tell."""
    one = next(one for one in DRAWN if one.embeddings == "three that say they are tied" and one.dtype != "mixed")
    tensors = one.tensors()
    spelt = {
        name: stored
        for name in STORED_NAMES
        for stored in tensors
        if stored in (name, f"model.{name}", name.removeprefix("model."))
    }
    rest = {name: x for name, x in tensors.items() if name not in spelt.values()}
    for mask in range(1, 1 << len(STORED_NAMES)):
        names = [name for at, name in enumerate(STORED_NAMES) if mask >> at & 1]
        folder = one.write(tmp_path / str(mask), "safetensors")
        FORMS["safetensors"](folder, rest | {spelt[name]: tensors[spelt[name]] for name in names})
        model = hf.load(one, folder)
        assert worst(ours.logits(one, folder, "host"), hf.logits(one, model)) <= TOLERANCE, names
        assert math.isfinite(float(model.lm_head.weight.detach().sum()))
