# SPDX-License-Identifier: MIT OR Apache-2.0
"""The steps of `sample` against float64 formulae, its random numbers, and that ids come as often as they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from metrale.ops.drawing import kept, noise, philox, scaled, weights
from metrale.ops.processing import BANNED, SUPPRESS, WORDS, Processors, encoded_words
from metrale.ops.sample import OP, _processed
from tests.ops.harness import run
from tests.ops.oracles import gumbel, kept_scores, processed_logits
from tests.ops.sampling import inputs_of

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    """The known-answer vectors of Random123, the authors' library."""
    found = philox([np.array([word], np.uint64) for word in counter], (key[0], key[1]))
    assert [int(word[0]) for word in found] == words


def test_noise_is_that_of_the_formula_and_depends_on_the_id_alone() -> None:
    ids = np.array([0, 1, 2, 3, 4, 9, 10, 255, 1000, 256_205])
    seed = 0xFEDCBA9876543210
    every = noise(seed, 17, ids)
    # `log` of float32 is wrong by about one unit in the last place, and so are its argument and the argument's own
    np.testing.assert_allclose(every, gumbel(seed, 17, ids), rtol=1e-5, atol=1e-6)
    for place in range(len(ids)):
        assert noise(seed, 17, ids[place : place + 1]) == every[place]
    for other in (noise(seed + 1, 17, ids), noise(seed ^ 1 << 63, 17, ids), noise(seed, 18, ids)):
        assert not np.isin(other, every).any()


def asked(rng: np.random.Generator) -> dict[str, Any]:
    """Return what a row asks for, at random; often for nothing of a kind."""
    return {
        "temperature": rng.choice([0.3, 0.9, 1.0, 2.0]),
        "top_k": rng.choice([0, 1, 3, 10, 49, 50, 60]),
        "top_p": rng.choice([1.0, 0.0, 0.05, 0.5, 0.9, 0.999]),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.2, 1.0, 3.0]),
        "penalty": rng.choice([1.0, 1.3, 0.7]),
        "ngram": rng.choice([0, 0, 1, 2, 3, 4]),
        "mode": rng.choice([0, BANNED, SUPPRESS, BANNED | SUPPRESS, WORDS]),
        "length": rng.integers(0, 30),
        "mask0": rng.integers(-1, 50),
        "mask1": rng.integers(-1, 50),
    }


@pytest.mark.parametrize("tens", range(30))
def test_steps_agree_with_float64(tens: int) -> None:
    """Half of the rows have logits that are whole numbers, with ties at every bound."""
    for seed in range(10 * tens, 10 * tens + 10):
        check_steps(seed)


def check_steps(seed: int) -> None:
    """Hold the steps of one row that asks for something at random against the oracle's."""
    rng = np.random.default_rng(seed)
    row = asked(rng)
    logits = 2 * rng.standard_normal((1, 50)) if seed % 2 else rng.integers(-4, 5, (1, 50))
    values = inputs_of(logits, word_room=30, **row)
    values["bans"][...] = rng.integers(0, 1 << 32, values["bans"].shape, np.uint32)
    values["history"][...] = rng.integers(0, 4 if seed % 3 else 50, values["history"].shape)
    words = encoded_words([rng.integers(0, 4, size).tolist() for size in (2, 3, 2, 4, 2)])
    values["bad_words"][0, : len(words)] = words
    settings = values["settings"][0]
    x = processed_logits(values, 0)
    processors = Processors("sample", values["bans"], values["bad_words"], values["history"])
    processed = _processed(values["logits"][0], values["counts"][0], settings[3], processors)
    np.testing.assert_allclose(processed, x, rtol=2e-7)  # one rounding
    if x.max() == -np.inf:
        return
    scores = scaled(processed, settings[0])
    ids = kept(scores, int(row["top_k"]), settings[1], settings[2])
    exact = kept_scores(x, float(settings[0]), int(row["top_k"]), float(settings[1]), float(settings[2]))
    assert ids.tolist() == np.flatnonzero(exact > -np.inf).tolist()
    # of two roundings, and of a difference of numbers up to 15
    np.testing.assert_allclose(scores[ids], exact[ids], rtol=5e-7, atol=1e-5)


def test_weights_are_exact_in_any_order() -> None:
    scores = -np.random.default_rng(0).exponential(5, 10_000).astype(np.float32)
    assert weights(np.array([0, -27.5, -28, -np.inf], np.float32)).tolist() == [1 << 40, 1, 0, 0]
    assert weights(scores).sum() == weights(scores[::-1]).sum()
    np.testing.assert_allclose(weights(scores) / 2.0**40, np.exp(scores.astype(np.float64)), rtol=3e-7, atol=2.0**-40)


@pytest.mark.parametrize(
    ("draws", "setting", "possible_ids"),
    [
        (6_000, {"temperature": 1.0}, 10),
        (3_000, {"temperature": 0.5, "top_k": 7, "top_p": 0.95, "min_p": 0.01}, 4),
    ],
)
def test_ids_come_as_often_as_they_should(
    gpu: GpuBackend, draws: int, setting: dict[str, Any], possible_ids: int
) -> None:
    """Draws of many seeds at 100 lengths each, as so many sequences of 100 ids would make them.

    The bound on chi squared is its mean and five standard deviations, ``d + 5 sqrt(2 d)`` for ``d`` degrees of freedom,
    which chance alone exceeds with a probability of 0.0004 for 9 of them and 0.0016 for 3.
    """
    logits = np.array([0.0, 1.3, -0.7, 2.2, 0.1, -2.0, 1.9, 0.6, -0.2, 2.4], np.float32)
    sequence, length = np.divmod(np.arange(draws), 100)
    values = inputs_of(np.tile(logits, (draws, 1)), seed=sequence, length=length, **setting)
    drawn = np.bincount(run(OP, gpu, "f32", values)["ids"], minlength=len(logits))
    exact = kept_scores(
        logits.astype(np.float64),
        setting["temperature"],
        setting.get("top_k", 0),
        setting.get("top_p", 1.0),
        setting.get("min_p", 0.0),
    )
    expected = draws * np.exp(exact) / np.exp(exact).sum()
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    assert possible.sum() == possible_ids
    chi_squared = ((drawn - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_squared < freedom + 5 * np.sqrt(2 * freedom)


def test_draws_differ_from_seed_to_seed_and_from_length_to_length(gpu: GpuBackend) -> None:
    flat = np.zeros((64, 5000))
    for varied in ({"seed": np.arange(64)}, {"length": np.arange(64)}, {"seed": np.arange(64, dtype=np.uint64) << 32}):
        ids = run(OP, gpu, "f32", inputs_of(flat, temperature=1.0, **varied))["ids"]
        assert len(set(ids.tolist())) >= 60  # of 64 draws of 5,000, one pair is alike two times in five
    ids = run(OP, gpu, "f32", inputs_of(flat, temperature=1.0, seed=5, length=5))["ids"]
    assert len(set(ids.tolist())) == 1
