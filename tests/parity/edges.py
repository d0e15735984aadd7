# SPDX-License-Identifier: MIT OR Apache-2.0
"""Searches at the edges, by name: what a draw meets seldom or never."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import Case, Draw, ModelSpec

SMALL = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 2}

MODELS: dict[str, ModelSpec] = {
    "wide": ModelSpec(2001, {"vocab_size": 150}, 0.7, {"2": 2.0}),
    "long": ModelSpec(2002, {"vocab_size": 120}, 0.8, {"2": -1.0}),
    "few ids": ModelSpec(2003, SMALL | {"vocab_size": 40}, 0.7, {"2": 2.0}),
    "ends at once": ModelSpec(2004, SMALL | {"vocab_size": 60}, 0.7, {"2": 9.0}),
    "two ends": ModelSpec(2005, SMALL | {"vocab_size": 60}, 0.7, {"2": 1.5, "5": 2.5}, [2, 5]),
}

# name, model, options
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("64 beams", "wide", {"num_beams": 64, "max_new": 14, "num_return_sequences": 8}),
    ("64 beams, early", "wide", {"num_beams": 64, "max_new": 14, "num_return_sequences": 8, "early_stopping": True}),
    (
        "200 new ids",
        "long",
        {"num_beams": 4, "max_new": 200, "num_return_sequences": 2, "no_repeat_ngram_size": 3, "min_new": 200},
    ),
    ("forced EOS", "long", {"num_beams": 4, "max_new": 10, "num_return_sequences": 4, "forced_eos_id": 2}),
    (
        "forced end by another id",
        "long",
        {"num_beams": 4, "max_new": 10, "num_return_sequences": 4, "forced_eos_id": 9},
    ),
    ("fewer ids than twice the beams", "few ids", {"num_beams": 32, "max_new": 12, "num_return_sequences": 6}),
    ("fewer ids than beams", "few ids", {"num_beams": 64, "max_new": 12, "num_return_sequences": 6}),
    ("EOS first", "ends at once", {"num_beams": 4, "max_new": 12, "num_return_sequences": 4}),
    (
        "EOS first, early",
        "ends at once",
        {"num_beams": 4, "max_new": 12, "num_return_sequences": 4, "early_stopping": True},
    ),
    (
        "EOS first, never",
        "ends at once",
        {"num_beams": 4, "max_new": 12, "num_return_sequences": 4, "early_stopping": "never"},
    ),
    (
        "all beams end together",
        "ends at once",
        {"num_beams": 4, "max_new": 12, "num_return_sequences": 4, "min_new": 6},
    ),
    (
        "all beams end together, early",
        "ends at once",
        {"num_beams": 4, "max_new": 12, "num_return_sequences": 4, "min_new": 6, "early_stopping": True},
    ),
    ("the language alone", "two ends", {"num_beams": 4, "max_new": 1}),
    ("the language and one id", "two ends", {"num_beams": 4, "max_new": 2, "num_return_sequences": 4}),
    ("ends of generation_config.json", "two ends", {"num_beams": 4, "max_new": 16, "num_return_sequences": 4}),
    ("one of them asked for", "two ends", {"num_beams": 4, "max_new": 16, "num_return_sequences": 4, "eos_ids": [2]}),
    ("greedy, ends of generation_config.json", "two ends", {"num_beams": 1, "max_new": 16}),
]

PROMPT, LANGUAGES = [13, 30, 7, 22, 38], (31, 24)


def edges(first: int = 0) -> Draw:
    """Return the edge cases, their models numbered from ``first`` on."""
    places = {name: first + i for i, name in enumerate(MODELS)}
    cases = [Case(name, places[model], PROMPT, *LANGUAGES, options) for name, model, options in CASES]
    return Draw(list(MODELS.values()), cases)
