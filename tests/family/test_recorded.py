# SPDX-License-Identifier: MIT OR Apache-2.0
"""40 drawn models of the family in every stored form, and the published ones: against recorded values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from metrale.cli import main
from metrale.nllb.config import NllbConfig
from metrale.nllb.device_weights import regions, weight_layout
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.plan import plan_memory
from metrale.nllb.weights import canonical_shapes
from tests.family.draw import COVERED, DIMENSIONS, MODELS, STEPS, choices, draw
from tests.family.official import OFFICIAL, grouped, weight_bytes
from tests.family.ours import logits
from tests.family.recorded import FILE, OFFICIAL_FILE, TOLERANCE, digest, recorded, worst
from tests.family.specs import EMBEDDINGS

DRAWN = draw()
RECORDED_OFFICIAL = json.loads(OFFICIAL_FILE.read_text(encoding="utf-8"))["models"]


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_draw_has_every_value_of_every_dimension(dimension: str) -> None:
    counts = [sum(chosen[dimension] == value for chosen in choices()) for value in DIMENSIONS[dimension]]
    assert min(counts) >= MODELS // len(DIMENSIONS[dimension]) >= 2


@pytest.mark.parametrize("what", COVERED)
def test_the_draw_has(what: str) -> None:
    assert sum(COVERED[what](one) for one in DRAWN) >= 2


def test_every_model_is_fed_unlike_lengths_and_languages_and_padding_inside_of_one() -> None:
    for one in DRAWN:
        pad = one.config["pad_token_id"]
        assert len({len(feed.source) for feed in one.feeds}) == len(one.feeds) == 4
        assert len({feed.tgt for feed in one.feeds}) > 1
        assert [pad in feed.source and pad in feed.steps for feed in one.feeds].count(True) == 1
        assert {len(feed.steps) for feed in one.feeds} == {STEPS}


def test_the_record_is_small_and_of_this_draw() -> None:
    assert set(recorded()) == {one.name for one in DRAWN}
    assert FILE.stat().st_size + OFFICIAL_FILE.stat().st_size < 300_000


@pytest.mark.parametrize("one", DRAWN, ids=lambda one: one.name)
def test_the_logits_are_transformers(one: Any, gpu: GpuBackend, tmp_path: Path) -> None:
    found = digest(logits(one, one.write(tmp_path), gpu))
    assert worst(found, recorded()[one.name]) <= TOLERANCE


@pytest.mark.parametrize("embeddings", EMBEDDINGS)
def test_what_metrale_convert_writes_is_the_same_model(embeddings: str, tmp_path: Path) -> None:
    one = next(one for one in DRAWN if one.embeddings == embeddings)
    assert main(["convert", str(one.write(tmp_path / "first")), str(tmp_path / "second"), "--quiet"]) == 0
    assert worst(digest(logits(one, tmp_path / "second", "host")), recorded()[one.name]) <= TOLERANCE


def test_a_difference_would_be_seen() -> None:
    """In one logit alone, wherever it is: from twice what a sum shows of it on."""
    rows = np.random.default_rng(3).standard_normal((4, 7, 90)).astype(np.float32)
    expected, scale = digest(rows), np.abs(rows).max()
    assert worst(expected, digest(rows)) == 0.0
    for at in range(40):
        other = rows.copy()
        other[at % 4, at % 7, 2 * at + 3] += 2 * TOLERANCE * scale * math.sqrt(90)
        assert worst(digest(other), expected) > TOLERANCE


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_what_is_not_a_number_is_never_close(spoilt: float) -> None:
    rows = np.ones((1, 1, 4), np.float32)
    assert worst(rows * np.float32(spoilt), rows) == math.inf
    assert worst(rows[:, :, :3], rows) == math.inf


@pytest.mark.parametrize("name", OFFICIAL)
def test_a_published_model_has_the_weights_that_transformers_has(name: str) -> None:
    shapes = canonical_shapes(NllbConfig.from_dict(OFFICIAL[name]))
    expected = RECORDED_OFFICIAL[name]
    assert grouped(shapes) == expected["shapes"]
    assert sum(math.prod(shape) for shape in shapes.values()) == expected["parameters"]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("name", OFFICIAL)
def test_a_published_model_takes_the_memory_that_its_sizes_say(name: str, dtype: str) -> None:
    config = NllbConfig.from_dict(OFFICIAL[name])
    shape = ModelShape(
        config, config.vocab_size, dtype, ServingLimits(max_batch=8, max_source_len=512, max_new_tokens=256)
    )
    plan, item = plan_memory(shape), dtypes.itemsize(dtype)
    exact = weight_bytes(config, item, 512)
    summed = config.decoder_layers if dtype != "f32" else 0  # layers whose LayerNorms of one row have sums of weights
    exact += summed * 2 * 4 * (4 * config.d_model + config.decoder_ffn_dim)
    assert plan.weights == weight_layout(shape).nbytes
    gaps = sum(1 for _ in regions(config)) + 2 + 3 * summed  # after each region
    assert exact <= plan.weights < exact + 512 * gaps
    assert plan.kv == 8 * (512 + 257) * config.decoder_layers * 2 * config.d_model * item
    assert plan.logits == 2 * 8 * -(-config.vocab_size // 64) * 64 * item
    assert plan.adapters == 0
