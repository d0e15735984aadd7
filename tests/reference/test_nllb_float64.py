# SPDX-License-Identifier: MIT OR Apache-2.0
"""The judge is judged: nllb_float64 against recorded transformers values, golden outputs and known mathematics."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from . import nllb_float64, tiny
from .nllb_float64 import NllbFloat64
from .tiny import digest, tiny_config, tiny_tensors, write_tiny

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "metrale" / "demo_model"
GOLDEN: list[dict[str, Any]] = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
RECORDED: dict[str, Any] = json.loads((ROOT / "tests/data/transformers_bf16.json").read_text(encoding="utf-8"))

# Float64 sums in another order differ by about 1e-14 of the largest value; every mistake in a formula moves far more.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def demo() -> NllbFloat64:
    return NllbFloat64.load(DEMO)


def tiny_model(seed: int, **overrides: Any) -> NllbFloat64:
    config = tiny_config(**overrides)
    return NllbFloat64(config, {k: v.astype(np.float64) for k, v in tiny_tensors(seed, config).items()})


def assert_samples(x: nllb_float64.Array, samples: list[tuple[int, int, float]], largest: float) -> None:
    """``x`` has the recorded largest magnitude and the recorded values at the recorded places."""
    assert np.isfinite(x).all()
    assert np.abs(x).max() == pytest.approx(largest, rel=TOLERANCE)
    assert len(samples) >= 4
    for row, column, value in samples:
        assert abs(x[row, column] - value) <= TOLERANCE * largest, (row, column)


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_demo_model(demo: NllbFloat64, index: int) -> None:
    """Transformers' float64 values to 1e-9, its float32 top five, and the greedy path, on one golden input."""
    golden, recorded = GOLDEN[index], RECORDED["cases"][index]
    src, ids = golden["input_ids"], golden["greedy"]["ids"]
    logits = demo.logits(src, ids[:-1])
    assert_samples(demo.encode(src), recorded["encoder_values"], recorded["max_abs_encoder"])
    assert_samples(logits, recorded["values"], recorded["max_abs_logits"])
    assert logits.argmax(axis=1).tolist() == recorded["argmax"]

    # golden.json rounds to 4 decimals (5e-5), and float32 is off by at most 1e-6 of the largest logit, about 15.
    top = golden["first_token_top5"]
    assert [int(i) for i in np.argsort(-logits[1])[:5]] == [token for token, _ in top]
    np.testing.assert_allclose(logits[1, [token for token, _ in top]], [value for _, value in top], rtol=0, atol=1e-4)

    # Row 0 follows the decoder start alone, where generate() forces the language code whatever the logits say.
    assert golden["greedy"]["min_gap"] > 1e-3
    assert logits[1:].argmax(axis=1).tolist() == ids[2:]


@pytest.mark.parametrize("recorded", RECORDED["tiny"], ids=lambda r: f"seed{r['seed']}")
def test_tiny_models(tmp_path: Path, recorded: dict[str, Any]) -> None:
    """Other activations, unscaled embeddings, unequal heads and layers, odd widths, positions past the config's."""
    folder = write_tiny(tmp_path / "model", recorded["seed"], **recorded["overrides"])
    assert digest(load_file(folder / "model.safetensors")) == recorded["sha256"], "the generator changed: record anew"
    model = NllbFloat64.load(folder)
    logits = model.logits(recorded["input_ids"], recorded["decoder_ids"])
    assert_samples(model.encode(recorded["input_ids"]), recorded["encoder_values"], recorded["max_abs_encoder"])
    assert_samples(logits, recorded["values"], recorded["max_abs_logits"])
    assert logits.argmax(axis=1).tolist() == recorded["argmax"]


def test_tiny_cases_cover_the_variants() -> None:
    configs = [tiny_config(**r["overrides"]) for r in RECORDED["tiny"]]
    assert {c["activation_function"] for c in configs} == {"relu", "gelu", "silu", "gelu_new"}
    assert {c["scale_embedding"] for c in configs} == {True, False}
    assert any(c["encoder_attention_heads"] != c["decoder_attention_heads"] for c in configs)
    assert any(c["d_model"] % 2 for c in configs)
    assert any(
        len(r["input_ids"]) > c["max_position_embeddings"] for r, c in zip(RECORDED["tiny"], configs, strict=True)
    )


def test_recorded_errors_are_plausible() -> None:
    """float32 and bfloat16 keep 24 and 8 bits, so their errors differ by about 2**16, and bfloat16's is not lost."""
    assert len(RECORDED["cases"]) == len(GOLDEN)
    for way in ("teacher_forced", "cached"):
        float32, bfloat16 = (RECORDED["overall"][dtype][way] for dtype in ("float32", "bfloat16"))
        assert 2**-24 < float32["max_rel"] < 2**-19
        assert 2**-10 < bfloat16["max_rel"] < 2**-5
        assert float32["flipped"] == 0
        worst = max(case["bfloat16"][way]["max_rel"] for case in RECORDED["cases"])
        assert bfloat16["worst_case"] == worst


def test_later_tokens_do_not_change_earlier_rows() -> None:
    model = tiny_model(3)
    src, dec = [5, 9, 31, 2], [2, 6, 40, 41, 42, 43]
    whole = model.logits(src, dec)
    for length in range(1, len(dec)):
        np.testing.assert_allclose(model.logits(src, dec[:length]), whole[:length], rtol=0, atol=1e-12)
    assert np.abs(model.logits(src, [2, 7, *dec[2:]])[2:] - whole[2:]).max() > 1e-2


def test_every_tensor_matters() -> None:
    """No tensor is ignored, here or by an implementation that is compared on tiny models.

    A key bias adds q·b to all scores of a query, which softmax cancels: it alone changes nothing.
    """
    model = tiny_model(5)
    src, dec = [5, 9, 31, 80, 17, 2], [2, 6, 40, 41, 12, 43, 90]
    logits = model.logits(src, dec)
    for name, tensor in model.weights.items():
        neutral = np.ones_like(tensor) if name.endswith("norm.weight") else np.zeros_like(tensor)
        change = np.abs(NllbFloat64(model.config, {**model.weights, name: neutral}).logits(src, dec) - logits).max()
        if name.endswith("k_proj.bias"):
            assert change <= 1e-12, name
        else:
            assert change >= 1e-3 * np.abs(logits).max(), name


def test_first_position_is_two_and_half_of_a_row_is_sines() -> None:
    np.testing.assert_allclose(
        nllb_float64.sinusoidal_positions(2, 2, 5),
        [
            [math.sin(2.0), math.sin(2e-4), math.cos(2.0), math.cos(2e-4), 0.0],
            [math.sin(3.0), math.sin(3e-4), math.cos(3.0), math.cos(3e-4), 0.0],
        ],
        rtol=0,
        atol=1e-15,
    )
    model = tiny_model(0)
    zero = NllbFloat64(model.config, {**model.weights, "model.shared.weight": np.zeros((97, 32))})
    np.testing.assert_array_equal(zero._embed([4, 5]), nllb_float64.sinusoidal_positions(2, 2, 32))


@pytest.mark.parametrize(
    ("name", "at_one"),
    [
        ("relu", 1.0),
        ("gelu", 0.8413447460685429),  # Φ(1)
        ("gelu_new", 0.8411919906082768),
        ("silu", 0.7310585786300049),  # σ(1)
    ],
)
def test_activations(name: str, at_one: float) -> None:
    activation = nllb_float64.ACTIVATIONS[name]
    y = activation(np.array([1.0, -1.0, 0.0, 800.0, -800.0]))
    # All four satisfy f(x) - f(-x) = x, and none may overflow far from zero.
    np.testing.assert_allclose(y, [at_one, at_one - 1.0, 0.0, 800.0, 0.0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("ids", [[], [1], [4, 1, 2], [97], [-1]])
def test_wrong_ids_are_refused(ids: list[int]) -> None:
    model = tiny_model(0)
    with pytest.raises(ValueError, match="ids: expected"):
        model.encode(ids)


@pytest.mark.parametrize("name", nllb_float64.TIED_NAMES)
def test_tied_matrix_under_any_name(name: str) -> None:
    model = tiny_model(1)
    weights = dict(model.weights)
    weights[name] = weights.pop("model.shared.weight")
    np.testing.assert_array_equal(
        NllbFloat64(model.config, weights).logits([5, 2], [2, 6]), model.logits([5, 2], [2, 6])
    )


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_write_tiny_dtypes(tmp_path: Path, dtype: str, stored: Any) -> None:
    """The float32 form rounded to what is stored, and loaded without another rounding."""
    folder = write_tiny(tmp_path, 7, dtype=dtype, vocab_size=83)
    on_disk, loaded = load_file(folder / "model.safetensors"), NllbFloat64.load(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == dtype
    assert json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["decoder_start_token_id"] == 2
    assert on_disk["model.shared.weight"].shape == (83, 32)
    for name, tensor in tiny_tensors(7, tiny_config(vocab_size=83)).items():
        assert on_disk[name].dtype == stored
        np.testing.assert_array_equal(loaded.weights[name], tensor.astype(stored).astype(np.float64))


@pytest.mark.parametrize("overrides", [{"activation": "gelu"}, {"encoder_attention_heads": 5}])
def test_write_tiny_refuses_wrong_overrides(tmp_path: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        write_tiny(tmp_path, 0, **overrides)


@pytest.mark.parametrize("module", [nllb_float64, tiny])
def test_the_judge_imports_nothing_it_judges(module: Any) -> None:
    allowed = {"__future__", "collections", "dataclasses", "hashlib", "json", "math", "pathlib", "typing"}
    allowed |= {"ml_dtypes", "numpy", "safetensors"}
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(str(node.module).split(".")[0])
    assert found <= allowed
