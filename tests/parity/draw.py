# SPDX-License-Identifier: MIT OR Apache-2.0
"""300 beam searches on 25 small models, drawn from a seed.

Each model has two groups of five cases and two greedy ones. Four cases of a group differ in nothing but what ends the
search and how lengths are weighed, so that pairs of them tell whether these matter; the fifth is on its own.

Only the raw words of a bit generator are used, which no NumPy changes (NEP 19).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tests.parity.cases import PAD, START, Case, Draw, ModelSpec

T = TypeVar("T")

SEED = 20240
MODELS = 25
RECORDED_MODELS = 10
PAIRED = ("plain", "early", "never", "lengths")
"""The four cases of a group that belong together: early_stopping False, True and "never", and another penalty."""

WIDTHS = (4, 2, 8, 3, 5, 6, 4, 16, 7, 3, 2, 5, 16, 4, 6, 3, 8, 64, 7, 4, 5, 3, 8, 2, 4)
PENALTIES = (1.0, 2.0, 0.5, 1.3, 1.0, 2.5, 0.0, 1.5)
OTHER_PENALTIES = (-1.0, 0.5, 2.0, -0.5, 3.0, 1.0, 1.0, -2.0)
ACTIVATIONS = ("relu", "gelu", "silu", "gelu_new")
SHAPES = ((16, 2, 4), (24, 3, 2), (32, 4, 8), (33, 11, 3), (40, 5, 4), (48, 6, 2))  # d_model, heads of each side
BOOSTED = (2, 5, 11)  # ids that may end a sequence


class Words:
    """A stream of numbers that is the same everywhere."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def below(self, n: int) -> int:
        """Return one of 0 to ``n - 1``."""
        return int(self._bits.random_raw()) % n

    def between(self, low: int, high: int) -> int:
        """Return one of ``low`` to ``high``."""
        return low + self.below(high - low + 1)

    def one_in(self, n: int) -> bool:
        """Return True once in ``n`` times."""
        return self.below(n) == 0

    def of(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]


def draw_model(words: Words, index: int) -> ModelSpec:
    """Return a model; activations, shapes and scaled embeddings go round, the rest is drawn."""
    d_model, encoder_heads, decoder_heads = SHAPES[index % len(SHAPES)]
    overrides = {
        "d_model": d_model,
        "encoder_attention_heads": encoder_heads,
        "decoder_attention_heads": decoder_heads,
        "encoder_layers": words.between(1, 3),
        "decoder_layers": words.between(1, 3),
        "encoder_ffn_dim": words.between(20, 80),
        "decoder_ffn_dim": words.between(20, 80),
        "vocab_size": words.between(40, 150) if index != 8 else 150,  # 64 beams want as many candidates
        "activation_function": ACTIVATIONS[index % len(ACTIVATIONS)],
        "scale_embedding": index % 3 != 2,
    }
    sharpness = words.of((0.5, 0.7))
    boost = {str(token): words.of((2.5, 3.0, 3.5)) for token in BOOSTED}
    return ModelSpec(1000 + index, overrides, sharpness, boost)


def likely_path(spec: ModelSpec, source: list[int], target: list[int], ends: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` likeliest ids after ``target``, one after the other, ends of a sequence left out."""
    judge, path = spec.judge(), list(target)
    memory = judge.encode(source)
    for _ in range(count):
        row = judge.decode(memory, path)[-1] @ judge.embedding.T
        row[[*ends, PAD]] = -np.inf
        path.append(int(row.argmax()))
    return path[len(target) :]


def draw_bans(words: Words, path: Sequence[int], tgt: int) -> dict[str, Any]:
    """Return words and ids that must not come, of those that would; transformers won't suppress the language id."""
    options: dict[str, Any] = {}
    if words.one_in(3):
        at = words.below(len(path) - 2)
        single, several = [[path[words.below(3)]]], [list(path[at : at + words.between(2, 3)])]
        options["bad_words_ids"] = words.of((single, several, single + several))
    if words.one_in(3):
        banned = {path[0], words.of(path)} if words.one_in(2) else {words.of(path)}
        options["suppress_tokens"] = sorted(banned - {tgt})
    return {name: value for name, value in options.items() if value}


def draw_case(words: Words, spec: ModelSpec, model: int, name: str, num_beams: int) -> Case:
    """Return a case with everything drawn but the width, the penalty and what ends the search."""
    size = spec.vocab_size

    def ids(count: int) -> list[int]:
        return [words.between(3, size - 1) for _ in range(count)]

    prompt = ids(words.between(3, 10))
    src, tgt = (words.between(max(BOOSTED) + 1, size - 1) for _ in range(2))
    max_new = words.between(10, 28)
    options: dict[str, Any] = {"num_beams": num_beams, "max_new": max_new}
    if num_beams > 1:
        options["num_return_sequences"] = words.between(1, min(num_beams, 8))
    ends = words.of(([2], [2], [2, 5], [5], [5, 2, 11], [11, 2]))
    if ends != [2]:
        options["eos_ids"] = ends
    if words.one_in(4):
        options["prefix_tokens"] = [token for token in ids(words.between(1, 4)) if token not in ends]
    if words.one_in(2):
        options["min_new"] = words.between(3, 8)
    if words.one_in(4):
        options["no_repeat_ngram_size"] = words.between(2, 3)
    if words.one_in(4):
        options["repetition_penalty"] = words.of((1.1, 1.3, 1.7, 0.9))
    if words.one_in(5):
        options["forced_eos_id"] = words.of((ends[0], ends[-1], words.between(12, size - 1)))
    target = [START, tgt, *options.get("prefix_tokens", [])]
    options |= draw_bans(words, likely_path(spec, [src, *prompt, 2], target, ends, 6), tgt)
    if options.get("forced_eos_id") in options.get("suppress_tokens", []):
        del options["forced_eos_id"]  # nothing at all would be allowed then
    return Case(name, model, prompt, src, tgt, options)


def draw_group(words: Words, spec: ModelSpec, model: int, group: int) -> list[Case]:
    """Return the four cases that belong together, and one more."""
    at = 2 * model + group
    name = f"model {model}, group {group}"
    width, penalty = WIDTHS[at % len(WIDTHS)] if at < 34 else words.between(2, 8), PENALTIES[at % len(PENALTIES)]
    plain = draw_case(words, spec, model, f"{name}, plain", width).replace(f"{name}, plain", length_penalty=penalty)
    alone = draw_case(words, spec, model, f"{name}, alone", words.between(2, 8))
    return [
        plain,
        plain.replace(f"{name}, early", early_stopping=True),
        plain.replace(f"{name}, never", early_stopping="never"),
        plain.replace(f"{name}, lengths", length_penalty=OTHER_PENALTIES[at % len(PENALTIES)]),
        alone.replace(
            alone.name,
            length_penalty=words.of((1.0, 0.0, 0.5, 2.0, -1.0, -0.3)),
            early_stopping=words.of((False, True, "never")),
        ),
    ]


def draw(models: int = MODELS) -> Draw:
    """Return the first ``models`` models and 12 cases on each."""
    specs: list[ModelSpec] = []
    cases: list[Case] = []
    for index in range(models):
        words = Words(SEED + index)
        spec = draw_model(words, index)
        specs.append(spec)
        for group in range(2):
            cases += draw_group(words, spec, index, group)
        cases += [draw_case(words, spec, index, f"model {index}, greedy {i}", 1) for i in range(2)]
    return Draw(specs, cases)


def part(drawn: Draw) -> Draw:
    """Return the first models of the draw, each with one whole group and one greedy case, by turns."""
    kept = [
        case
        for case in drawn.cases
        if case.model < RECORDED_MODELS
        and any(f", {kind} {case.model % 2}" in case.name for kind in ("group", "greedy"))
    ]
    return Draw(drawn.models[:RECORDED_MODELS], kept)
