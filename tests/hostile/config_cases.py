# SPDX-License-Identifier: MIT OR Apache-2.0
"""config.json and generation_config.json: every field with values that it may not have, and odd ones that it may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.hostile import stage
from tests.hostile.case import Answer, Case, Refusal

NOT_INTEGERS: Final[dict[str, Any]] = {
    "string": "7",
    "bool": True,
    "float": 16.0,
    "object": {"value": 16},
    "list": [[16]],
    "huge": 10**400,
    "minus_huge": -(10**400),
    "int64": 2**63,
}
NOT_BOOLEANS: Final[dict[str, Any]] = {"string": "true", "one": 1, "zero": 0, "list": [True], "object": {}}
NOT_NUMBERS: Final[dict[str, Any]] = {"string": "1.0", "bool": True, "list": [1.0], "object": {}, "huge": 10**400}

SIZES: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("vocab_size", "d_model"), (0, -1)),
    **dict.fromkeys(("max_position_embeddings", "encoder_layers"), (-1,)),
    **dict.fromkeys(("decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"), (0, -1)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), (0, -1, 3)),
}
"""Fields that must be integers, and values of the right type that they may not have."""

IDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id")
BOOLEANS: Final = ("scale_embedding", "tie_word_embeddings")
CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "activation_function": ("tanh", "RELU", "", 3, None),
    "dtype": ("float8", "int8", "", 3, []),
}

GENERATION_SIZES: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("max_length", "max_new_tokens", "num_beams"), (0, -1)),
    **dict.fromkeys(("min_new_tokens", "no_repeat_ngram_size"), (-1,)),
}
GENERATION_NUMBERS: Final[dict[str, tuple[float, ...]]] = {"length_penalty": (), "repetition_penalty": (0, -1.5)}


def set_fields(name: str, changes: Mapping[str, Any]) -> Any:
    """Return a damage that gives fields of a JSON file other values."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def refused(file: str, field: str, label: str, value: Any, says: str = "") -> Case:
    """Return the case of one field with one value, which the message must name."""
    name = f"config/{file.removesuffix('.json')}/{field}/{label}"
    expect = Refusal("CheckpointError", (rf"{file}: {field}: expected ", says), path="/input")
    return Case(name, stage.judged, expect, stage.copied("whole", set_fields(file, {field: value})))


def _fields() -> Iterator[Case]:
    config, generation = "config.json", "generation_config.json"
    for field, values in SIZES.items():
        for label, value in {**NOT_INTEGERS, "null": None, **{str(one): one for one in values}}.items():
            yield refused(config, field, label, value, says="" if value == 3 else "an integer from")
    for file in (config, generation):
        for field in IDS:
            one_only = field != "eos_token_id"
            for label, value in {**NOT_INTEGERS, "minus": -1, "past_the_end": stage.SMALL["vocab_size"]}.items():
                yield refused(file, field, label, value, says="an integer from 0 to 8239")
            if one_only:
                yield refused(file, field, "array", [2], says="an integer from 0 to 8239")
            else:
                yield refused(file, field, "empty", [], says="an array of them")
                yield refused(file, field, "mixed", [2, "2"], says="an array of them")
        for field, values in GENERATION_SIZES.items():
            if file == generation:
                for label, value in {**NOT_INTEGERS, **{str(one): one for one in values}}.items():
                    yield refused(file, field, label, value, says="an integer from")
    for field in BOOLEANS:
        for label, value in NOT_BOOLEANS.items():
            yield refused(config, field, label, value, says="true or false")
    for label, value in {**NOT_BOOLEANS, "sometimes": "sometimes"}.items():
        yield refused(generation, "early_stopping", label, value, says='true or false or "never"')
    for field, numbers in GENERATION_NUMBERS.items():
        for label, value in {**NOT_NUMBERS, **{str(one): one for one in numbers}}.items():
            yield refused(generation, field, label, value, says="a finite number")
    for field, choices in CHOICES.items():
        for choice in choices:
            if not (field == "dtype" and choice is None):
                yield refused(config, field, json.dumps(choice), choice, says="one of ")
    for label, value in {"flat": [3], "empty": [[]], "past": [[9000]], "text": "abc", "deep": [[[3]]]}.items():
        yield refused(generation, "bad_words_ids", label, value, says="non-empty arrays of integers")


ODD: Final[dict[str, dict[str, Any]]] = {
    "nothing_but_sizes": {"use_cache": None, "architectures": [], "unknown": {"deep": [1, {"a": None}]}},
    "positions_of_one": {"max_position_embeddings": 1},
    "no_positions": {"max_position_embeddings": 0},
    "dtype_of_none_here": {"dtype": "float64"},
    "most_positions": {"max_position_embeddings": 1 << 24},
    "other_vocabulary": {"vocab_size": 8231},
    "dtype_of_others": {"dtype": "float16"},
    "alias_that_agrees": {"hidden_size": 16, "num_hidden_layers": 1},
    "eos_twice": {"eos_token_id": [2, 2]},
    "dropout_of_a_string": {"dropout": "none"},
}
ODD_GENERATION: Final[dict[str, dict[str, Any]]] = {
    "nulls": dict.fromkeys((*IDS, *GENERATION_SIZES, *GENERATION_NUMBERS, "early_stopping")),
    "most": {"max_length": 1 << 24, "max_new_tokens": 1 << 24},
    "unknown": {"transformers_version": [], "cache_implementation": 3},
}


def _values() -> Iterator[Case]:
    """Values that are right by themselves, and wrong beside others; and odd ones that are right."""
    copied = stage.copied
    kinds: dict[str, Any] = {
        "absent": None,
        "other": "llama",
        "list": ["m2m_100"],
        "moe": "nllb-moe",
        "upper": "M2M_100",
        "long": "x" * 100_000,
    }
    for label, value in kinds.items():
        damage = set_fields("config.json", {"model_type": value})
        expect = Refusal(
            "CheckpointError", "model_type .*is not supported, only 'm2m_100' is", path="/input", problems=1
        )
        yield Case(f"config/model_type/{label}", stage.judged, expect, copied("whole", damage))
    for field, number, says in (
        ("d_model", 32, r"shape \[8240, 16\], expected \[vocabulary, 32\] by the configuration"),
        ("d_model", 65536, r"expected \[vocabulary, 65536\] by the configuration"),
        ("encoder_layers", 0, r"unknown tensor 'model\.encoder\.layers\.0\.fc1\.weight'"),
        ("tie_word_embeddings", False, r"missing tensor 'lm_head\.weight' \(tie_word_embeddings is false"),
        ("encoder_layers", 2, r"missing tensor 'model\.encoder\.layers\.1\.self_attn\.q_proj\.weight'"),
        (
            "decoder_layers",
            1024,
            r"missing tensor 'model\.decoder\.layers\.1\..* and 26498 more, which the error's problems list",
        ),
        ("encoder_ffn_dim", 1 << 20, r"shape \[24, 16\], expected \[1048576, 16\] by the configuration"),
        ("decoder_ffn_dim", 23, r"shape \[24, 16\], expected \[23, 16\] by the configuration"),
        ("hidden_size", 17, r"encoder_attention_heads: expected a divisor of d_model \(17\), got 2"),
    ):
        damage = set_fields("config.json", {field: number})
        expect = Refusal("CheckpointError", says, path="/input")
        yield Case(f"config/beside/{field}={number}", stage.judged, expect, copied("whole", damage))
    for file, odd in (("config.json", ODD), ("generation_config.json", ODD_GENERATION)):
        for label, changes in odd.items():
            name = f"config/odd/{file.removesuffix('.json')}_{label}"
            yield Case(name, stage.judged, Answer(stage.SAME), copied("whole", set_fields(file, changes)))


def cases() -> Iterator[Case]:
    """Every case of the two configuration files."""
    yield Case("config/pristine", stage.judged, Answer(stage.SAME), stage.copied("whole"))
    yield from _fields()
    yield from _values()
