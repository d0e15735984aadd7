# SPDX-License-Identifier: MIT OR Apache-2.0
"""40 models drawn from a seed, so that each value of each dimension is met, in ever other company.

Each dimension goes round its values in an order of its own, which is shuffled anew in every round; what has no list is
drawn. Only the raw words of a bit generator are used, which no NumPy changes (NEP 19).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.family.forms import FORMS
from tests.family.specs import EMBEDDINGS, PREFIXES, Embeddings, Family, Feed
from tests.parity.draw import Words

SEED = 512_000
MODELS = 40
WEIGHTS = 200  # seed of the first model's weights
LONGEST = 17  # ids of a source, its language and end included
STEPS = 6

ACTIVATIONS = (
    "relu",
    "gelu",
    "gelu_python",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_python_tanh",
    "gelu_fast",
    "gelu_accurate",
    "silu",
    "swish",
    "linear",
)
SHAPES = (  # d_model, heads of the encoder, heads of the decoder
    (4, 1, 4),
    (5, 1, 5),
    (7, 7, 1),
    (24, 8, 1),
    (33, 3, 11),
    (36, 12, 2),
    (48, 2, 48),
    (64, 1, 8),
    (80, 1, 2),
    (128, 1, 2),
    (160, 1, 2),
    (130, 2, 13),
    (256, 1, 2),
)
LAYERS = ((1, 1), (0, 1), (2, 1), (1, 3), (3, 2), (0, 2))  # of the encoder, of the decoder
FFNS = (1, 3, 20, 37, 64)
POSITIONS = (0, 3, 6, 64, 1024)  # max_position_embeddings
VOCABULARIES = ("right", "stated too small", "stated too large")
PADS = (1, 0, 5, "last")
STARTS = (
    "2",
    "other",
    "padding",
    "null, given by generation",
    "null, so bos",
    "2, but generation has bos alone",
)
ENDS = ("2", "several", "other", "null, given by generation")
KEYS = ("all", "aliases", "aliases over stale keys", "no defaults")
DTYPES = ("float32", "float16", "bfloat16", "float64", "mixed")
DTYPE_KEYS = ("dtype", "torch_dtype", "null", "none")
NOISE: dict[str, Any] = {
    "dropout": 0.9,
    "attention_dropout": 0.9,
    "activation_dropout": 0.9,
    "encoder_layerdrop": 0.9,
    "decoder_layerdrop": 0.9,
    "init_std": 3.0,
    "use_cache": False,
    "architectures": ["M2M100ForConditionalGeneration"],
    "normalize_before": False,
    "add_final_layer_norm": False,
    "layernorm_embedding": True,
    "static_position_embeddings": True,
}
"""Keys that change nothing in a forward pass."""

DEFAULTS: dict[str, Any] = {
    "vocab_size": 128112,
    "max_position_embeddings": 1024,
    "activation_function": "relu",
    "scale_embedding": True,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
"""What ``M2M100Config`` has for keys that ``config.json`` lacks, apart from sizes that no small model has."""

ALIASES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
}

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "activation": ACTIVATIONS,
    "shape": SHAPES,
    "layers": LAYERS,
    "encoder ffn": FFNS,
    "decoder ffn": FFNS,
    "positions": POSITIONS,
    "scaled": (True, False),
    "vocabulary": VOCABULARIES,
    "pad": PADS,
    "start": STARTS,
    "end": ENDS,
    "keys": KEYS,
    "noise": (True, False),
    "forced bos": ("none", "null", "an id"),
    "embeddings": tuple(EMBEDDINGS),
    "prefix": tuple(PREFIXES),
    "extras": (True, False),
    "dtype": DTYPES,
    "dtype key": DTYPE_KEYS,
    "form": tuple(FORMS),
}
"""Every dimension with its values."""


def choices() -> list[dict[str, Any]]:
    """Return for each model the value of each dimension."""
    found: list[dict[str, Any]] = [{} for _ in range(MODELS)]
    for at, (dimension, values) in enumerate(DIMENSIONS.items()):
        words, order = Words(SEED + at), list[Any]()
        for chosen in found:
            if not order:
                left = list(values)
                order = [left.pop(words.below(len(left))) for _ in values]
            chosen[dimension] = order.pop()
    return found


def _config(chosen: dict[str, Any], words: Words) -> dict[str, Any]:
    """Return the truth about a model."""
    (d_model, encoder_heads, decoder_heads), (encoder_layers, decoder_layers) = chosen["shape"], chosen["layers"]
    rows = words.between(40, 120)
    pad = rows - 1 if chosen["pad"] == "last" else chosen["pad"]
    return {
        "model_type": "m2m_100",
        "vocab_size": rows,
        "d_model": d_model,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "encoder_attention_heads": encoder_heads,
        "decoder_attention_heads": decoder_heads,
        "encoder_ffn_dim": chosen["encoder ffn"],
        "decoder_ffn_dim": chosen["decoder ffn"],
        "max_position_embeddings": max(chosen["positions"], pad),  # transformers needs a row for padding
        "activation_function": chosen["activation"],
        "scale_embedding": chosen["scaled"],
        "tie_word_embeddings": EMBEDDINGS[chosen["embeddings"]].tied,
        "pad_token_id": pad,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }


def _ids(
    chosen: dict[str, Any], config: dict[str, Any], words: Words
) -> tuple[dict[str, Any], dict[str, Any] | None, int, int]:
    """Return the special ids as ``config.json`` and ``generation_config.json`` have them; the end and the start."""
    other, bos = words.between(6, 20), words.between(21, 30)
    every_end: dict[str, Any] = {"2": 2, "several": [other, 2], "other": other, "null, given by generation": None}
    ends, pad = every_end[chosen["end"]], config["pad_token_id"]
    starts: dict[str, int | None] = {"2": 2, "other": bos + 1, "padding": pad, "2, but generation has bos alone": 2}
    start: Any = starts.get(chosen["start"])
    stated: dict[str, Any] = {"eos_token_id": ends, "decoder_start_token_id": start, "bos_token_id": bos}
    generation: dict[str, Any] = {}
    if ends is None:
        generation["eos_token_id"] = ends = [other + 1, 2]
    if chosen["start"] == "2, but generation has bos alone":
        generation["bos_token_id"] = start = bos + 3
    elif chosen["start"] == "null, given by generation":
        generation["decoder_start_token_id"] = start = bos + 2
    elif start is None:
        start = bos
    elif generation:
        generation["decoder_start_token_id"] = start
    if generation:
        generation = {"pad_token_id": pad, "bos_token_id": bos} | generation
    return stated, generation or None, ends[0] if isinstance(ends, list) else ends, start


def _stated(chosen: dict[str, Any], config: dict[str, Any], ids: dict[str, Any], words: Words) -> dict[str, Any]:
    """Return ``config.json``."""
    stated = config | ids
    shift = {"right": 0, "stated too small": -3, "stated too large": 7}[chosen["vocabulary"]]
    stated["vocab_size"] += shift if config["pad_token_id"] < config["vocab_size"] - 3 else max(shift, 0)
    if chosen["keys"] == "no defaults":
        stated = {key: value for key, value in stated.items() if key not in DEFAULTS or value != DEFAULTS[key]}
    elif chosen["keys"] != "all":
        for key, alias in ALIASES.items():
            stated[alias] = stated.pop(key)
            if chosen["keys"] == "aliases over stale keys":
                stated[key] = 2 * config[key] + 1
    stated |= NOISE if chosen["noise"] else {}
    kind = {"mixed": "float32"}.get(chosen["dtype"], chosen["dtype"])
    keys: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": kind},
        "torch_dtype": {"torch_dtype": kind},
        "null": {"dtype": None},
        "none": {},
    }
    stated |= keys[chosen["dtype key"]]
    if chosen["forced bos"] != "none":
        stated["forced_bos_token_id"] = None if chosen["forced bos"] == "null" else words.between(3, 30)
    return stated


def _feeds(config: dict[str, Any], words: Words) -> list[Feed]:
    """Return four sequences of unlike lengths, one of them with padding inside of its source and its target."""
    rows, pad = config["vocab_size"], config["pad_token_id"]

    def ids(count: int) -> list[int]:
        return [(pad + words.between(1, rows - 1)) % rows for _ in range(count)]

    def language() -> int:
        return next(token for token in iter(lambda: words.between(3, rows - 1), None) if token != pad)

    lengths = [LONGEST - 2, words.between(0, 1), words.between(3, 6), words.between(7, 12)]
    feeds = [Feed(ids(length), language(), language(), ids(STEPS)) for length in lengths]
    padded = feeds[3]
    padded.source[1] = padded.source[4] = padded.steps[2] = pad
    return [feeds[at] for at in (2, 0, 3, 1)]


def draw() -> list[Family]:
    """Return the models."""
    found = []
    for at, chosen in enumerate(choices()):
        words = Words(SEED + 1000 + at)
        config = _config(chosen, words)
        ids, generation, eos, start = _ids(chosen, config, words)
        stated = _stated(chosen, config, ids, words)
        found.append(
            Family(
                name=f"{at}: {chosen['embeddings']}, {chosen['activation']}, {chosen['shape']}",
                seed=WEIGHTS + at,
                config=config,
                stated=stated,
                generation=generation,
                eos=eos,
                # without generation_config.json, a start that config.json leaves out is the start of a text
                start=start if generation or "decoder_start_token_id" in stated else ids["bos_token_id"],
                embeddings=chosen["embeddings"],
                prefix=chosen["prefix"],
                extras=chosen["extras"],
                dtype=chosen["dtype"],
                form=chosen["form"],
                feeds=_feeds(config, words),
            )
        )
    return found


def _distinct(embeddings: Embeddings) -> int:
    """Return how many different matrices are stored."""
    return len(set(embeddings.stored.values()))


COVERED: dict[str, Callable[[Family], bool]] = {
    "d_model is odd": lambda one: one.config["d_model"] % 2 == 1,
    "d_model is even and no multiple of 8": lambda one: one.config["d_model"] % 8 in (2, 4, 6),
    "heads of one": lambda one: (
        one.config["d_model"] in (one.config["encoder_attention_heads"], one.config["decoder_attention_heads"])
    ),
    "one head": lambda one: 1 in (one.config["encoder_attention_heads"], one.config["decoder_attention_heads"]),
    "heads of more than 128": lambda one: one.config["d_model"] > 128 * one.config["encoder_attention_heads"],
    "sides with other layers": lambda one: one.config["encoder_layers"] != one.config["decoder_layers"],
    "no encoder layer": lambda one: one.config["encoder_layers"] == 0,
    "sides with other feed-forward": lambda one: one.config["encoder_ffn_dim"] != one.config["decoder_ffn_dim"],
    "positions past those that the model was made for": lambda one: one.config["max_position_embeddings"] < STEPS,
    "fewer rows than stated": lambda one: one.config["vocab_size"] < one.stated.get("vocab_size", 128112),
    "more rows than stated": lambda one: one.config["vocab_size"] > one.stated.get("vocab_size", 128112),
    "a start that is padding": lambda one: one.start == one.config["pad_token_id"],
    "an end that generation_config.json has": lambda one: "eos_token_id" in (one.generation or {}),
    "matrices of which none is shared": lambda one: _distinct(EMBEDDINGS[one.embeddings]) >= 3,
    "several matrices, half precision": lambda one: (
        _distinct(EMBEDDINGS[one.embeddings]) > 1 and one.dtype != "float32"
    ),
    "several matrices, not scaled": lambda one: (
        _distinct(EMBEDDINGS[one.embeddings]) > 1 and not one.config["scale_embedding"]
    ),
    "an alias over another value": lambda one: "hidden_size" in one.stated and "d_model" in one.stated,
}
"""What must be met at least twice in the draw, and how one sees it."""
