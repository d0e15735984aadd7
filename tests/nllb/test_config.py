# SPDX-License-Identifier: MIT OR Apache-2.0
"""The NLLB configuration: what is read, what is derived, and that every fault is listed at once."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

import metrale.nllb
from metrale.errors import CheckpointError
from metrale.nllb.config import ACTIVATIONS, GenerationDefaults, NllbConfig

DEMO = Path(metrale.nllb.__file__).parents[1] / "demo_model"

# The form that transformers 4 wrote: torch_dtype, num_hidden_layers, and max_length without a generation_config.json.
REAL: dict[str, Any] = {
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "bos_token_id": 0,
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 8192,
    "decoder_layers": 24,
    "decoder_start_token_id": 2,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 8192,
    "encoder_layers": 24,
    "eos_token_id": 2,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 1024,
    "model_type": "m2m_100",
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "scale_embedding": True,
    "torch_dtype": "float32",
    "vocab_size": 256206,
}


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def problems(config: dict[str, Any], generation: dict[str, Any] | None = None) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        NllbConfig.from_dict(config, generation, path="somewhere")
    assert caught.value.path == "somewhere"
    return caught.value.problems


def test_the_demo_model() -> None:
    config = NllbConfig.from_dir(DEMO)
    assert (config.vocab_size, config.d_model, config.max_position_embeddings) == (8240, 256, 512)
    assert (config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim) == (6, 4, 1280)
    assert (config.decoder_layers, config.decoder_attention_heads, config.decoder_ffn_dim) == (3, 4, 1024)
    assert (config.activation_function, config.scale_embedding, config.dtype) == ("relu", True, "bf16")
    assert (config.encoder_head_dim, config.decoder_head_dim, config.embed_scale) == (64, 64, 16.0)
    assert config.special_ids == {0, 1, 2}
    assert config.generation == GenerationDefaults(max_length=200)


def test_absent_keys_take_the_defaults_of_m2m100config() -> None:
    config = NllbConfig.from_dict({"model_type": "m2m_100"})
    assert config == NllbConfig()
    # transformers 5.24.0, M2M100Config().
    assert dataclasses.asdict(config) | {"generation": None} == {
        "vocab_size": 128112,
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "activation_function": "relu",
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": (2,),
        "decoder_start_token_id": 2,
        "forced_bos_token_id": None,
        "dtype": None,
        "generation": None,
    }


def test_a_real_config_and_its_legacy_generation_keys(tmp_path: Path) -> None:
    config = NllbConfig.from_dir(write(tmp_path, REAL))
    assert (config.encoder_layers, config.decoder_ffn_dim, config.vocab_size, config.dtype) == (24, 8192, 256206, "f32")
    assert config.generation.max_length == 200


def test_sides_may_differ() -> None:
    config = NllbConfig.from_dict(REAL | {"decoder_attention_heads": 8, "d_model": 1040, "scale_embedding": False})
    assert (config.encoder_head_dim, config.decoder_head_dim) == (65, 130)
    assert config.embed_scale == 1.0
    assert NllbConfig.from_dict(REAL | {"d_model": 1040}).embed_scale == math.sqrt(1040)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("relu", "relu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_python_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_accurate", "gelu_tanh"),
        ("gelu_python", "gelu"),
        ("silu", "silu"),
        ("swish", "silu"),
        ("linear", "none"),
    ],
)
def test_activations(name: str, meaning: str) -> None:
    assert NllbConfig.from_dict(REAL | {"activation_function": name}).activation_function == meaning


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "f16"),
        ({"torch_dtype": "float64"}, "f64"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "f16"),
        ({"dtype": None}, None),
        ({}, None),
    ],
)
def test_the_dtype_under_its_old_and_new_name(keys: dict[str, Any], dtype: str | None) -> None:
    assert NllbConfig.from_dict({"model_type": "m2m_100"} | keys).dtype == dtype


def test_transformers_aliases_stand_in_for_absent_keys() -> None:
    aliases: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = NllbConfig.from_dict(aliases | {"model_type": "m2m_100"})
    assert (config.d_model, config.encoder_layers, config.encoder_attention_heads) == (512, 3, 8)
    assert (config.decoder_layers, config.decoder_attention_heads) == (12, 16)


def test_transformers_aliases_win_over_the_keys_themselves() -> None:
    aliases: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = NllbConfig.from_dict(REAL | aliases)
    assert (config.d_model, config.encoder_layers, config.encoder_attention_heads) == (512, 3, 8)
    assert (config.decoder_layers, config.decoder_attention_heads) == (24, 16)
    assert problems(REAL | {"num_attention_heads": None}) == [
        f"config.json: num_attention_heads: expected an integer from 1 to {1 << 16}, got null"
    ]


@pytest.mark.parametrize(
    ("config", "generation", "eos", "start"),
    [
        ({"eos_token_id": None}, {"eos_token_id": [5, 6]}, (5, 6), 2),
        ({"decoder_start_token_id": None}, {"decoder_start_token_id": 7, "bos_token_id": 9}, (2,), 7),
        ({"decoder_start_token_id": None}, {"decoder_start_token_id": None, "bos_token_id": 9}, (2,), 9),
        ({"decoder_start_token_id": None, "bos_token_id": 8}, {"bos_token_id": None}, (2,), 8),
        ({"decoder_start_token_id": None, "bos_token_id": 8}, None, (2,), 8),
    ],
)
def test_ids_that_config_json_leaves_null(
    config: dict[str, Any], generation: dict[str, Any] | None, eos: tuple[int, ...], start: int
) -> None:
    found = NllbConfig.from_dict(REAL | config, generation)
    assert (found.eos_token_id, found.decoder_start_token_id) == (eos, start)
    assert (found.generation.eos_token_id, found.generation.decoder_start_token_id) == (eos, start)


@pytest.mark.parametrize(
    ("config", "generation", "start"),
    [
        ({}, {"bos_token_id": 9}, 9),
        ({}, {"bos_token_id": 9, "decoder_start_token_id": None}, 9),
        ({}, {"bos_token_id": None}, 2),
        ({}, {}, 2),
        ({}, {"bos_token_id": 9, "decoder_start_token_id": 7}, 7),
        ({"decoder_start_token_id": 5}, {}, 5),
        ({"bos_token_id": 8}, {}, 2),
        ({"bos_token_id": 8}, None, 8),
        ({"bos_token_id": 8, "decoder_start_token_id": 5}, None, 5),
        ({}, None, 2),
    ],
    ids=str,
)
def test_a_target_starts_as_a_text_where_only_that_is_said(
    config: dict[str, Any], generation: dict[str, Any] | None, start: int
) -> None:
    found = NllbConfig.from_dict({"model_type": "m2m_100"} | config, generation)
    assert found.generation.decoder_start_token_id == start


def test_a_start_that_nothing_names() -> None:
    assert problems(REAL | {"decoder_start_token_id": None, "bos_token_id": None}) == [
        "config.json: decoder_start_token_id: expected an integer from 0 to 256205, got null"
    ]


def test_generation_config_wins_and_falls_back_to_the_models_ids() -> None:
    generation = {
        "max_length": None,
        "max_new_tokens": 64,
        "num_beams": 5,
        "length_penalty": 2,
        "early_stopping": "never",
        "eos_token_id": [2, 5],
        "forced_bos_token_id": 9,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [8, 9]],
        "min_new_tokens": 1,
        "bos_token_id": None,
        "transformers_version": "4.33.0",
    }
    config = NllbConfig.from_dict(REAL | {"pad_token_id": 3, "num_beams": 2}, generation)
    assert config.eos_token_id == (2,)
    assert config.special_ids == {0, 2, 3, 5, 9}
    assert config.generation == GenerationDefaults(
        max_new_tokens=64,
        min_new_tokens=1,
        num_beams=5,
        length_penalty=2.0,
        early_stopping="never",
        no_repeat_ngram_size=3,
        repetition_penalty=1.5,
        bad_words_ids=((7,), (8, 9)),
        pad_token_id=3,
        eos_token_id=(2, 5),
        forced_bos_token_id=9,
    )


@pytest.mark.parametrize(
    ("asked", "left_out"),
    [
        ({"max_length": 200, "max_new_tokens": 64}, {}),
        ({"length_penalty": 0.0, "early_stopping": True}, {}),
        ({"num_beams": 5}, {"num_beams": 5}),
        (
            {"num_beams": 2, "length_penalty": 0.0, "early_stopping": "never"},
            {"num_beams": 2, "length_penalty": 0.0, "early_stopping": "never"},
        ),
        ({"min_new_tokens": 0, "repetition_penalty": 1.0, "bad_words_ids": [], "no_repeat_ngram_size": 0}, {}),
        (
            {"forced_eos_token_id": 0, "bad_words_ids": [[7]], "no_repeat_ngram_size": 3},
            {"no_repeat_ngram_size": 3, "bad_words_ids": ((7,),), "forced_eos_token_id": 0},
        ),
        (
            {"min_new_tokens": 1, "repetition_penalty": 0.5},
            {"min_new_tokens": 1, "repetition_penalty": 0.5},
        ),
    ],
    ids=str,
)
def test_what_greedy_decoding_leaves_out(asked: dict[str, object], left_out: dict[str, object]) -> None:
    assert list(NllbConfig.from_dict(REAL, asked).generation.not_greedy().items()) == list(left_out.items())


def test_several_end_ids_and_no_bos() -> None:
    config = NllbConfig.from_dict(REAL | {"eos_token_id": [2, 3], "bos_token_id": None})
    assert config.eos_token_id == config.generation.eos_token_id == (2, 3)
    assert config.bos_token_id is None
    assert config.generation.bos_token_id is None


@pytest.mark.parametrize("model_type", ["nllb-moe", "marian", "mbart", "M2M_100", "", None, 3, ["m2m_100"]], ids=repr)
def test_other_model_types_are_refused_by_name(model_type: object) -> None:
    (problem,) = problems({"model_type": model_type, "d_model": -1})
    assert problem.startswith(f"config.json: model_type {json.dumps(model_type)} ")
    assert "is not supported" in problem


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("nllb-moe", "a mixture of experts"),
        ("mbart", "mBART, whose positions are learned"),
        ("marian", "Marian"),
        ("t5", "T5 or MADLAD"),
        ("seamless_m4t_v2", "SeamlessM4T"),
    ],
)
def test_other_families_are_refused_by_what_they_are(model_type: str, what: str) -> None:
    (problem,) = problems({"model_type": model_type})
    assert f"\"{model_type}\" ({what}) is not supported, only 'm2m_100' is" in problem


def test_a_missing_model_type() -> None:
    assert problems({}) == ["config.json: model_type is missing, expected 'm2m_100'"]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("d_model", True, "an integer from 4 to 65536"),
        ("d_model", 1024.0, "an integer from 4 to 65536"),
        ("d_model", "1024", "an integer from 4 to 65536"),
        ("d_model", None, "an integer from 4 to 65536"),
        ("d_model", 1 << 17, "an integer from 4 to 65536"),
        ("encoder_layers", -1, "an integer from 0 to 1024"),
        ("decoder_layers", 0, "an integer from 1 to 1024"),
        ("decoder_layers", 1025, "an integer from 1 to 1024"),
        ("encoder_ffn_dim", -1, "an integer from 1 to"),
        ("decoder_ffn_dim", [], "an integer from 1 to"),
        ("encoder_attention_heads", 3, "a divisor of d_model (1024)"),
        ("decoder_attention_heads", 0, "an integer from 1 to"),
        ("decoder_attention_heads", 2048, "a divisor of d_model (1024)"),
        ("vocab_size", (1 << 24) + 1, "an integer from 1 to 16777216"),
        ("max_position_embeddings", -1, "an integer from 0 to"),
        ("activation_function", "quick_gelu", f"one of {', '.join(ACTIVATIONS)}"),
        ("activation_function", ["relu"], "one of relu"),
        ("scale_embedding", 1, "true or false"),
        ("tie_word_embeddings", 0, "true or false"),
        ("quantization_config", {"bits": 8}, "weights that are not quantized"),
        ("per_layer_config", {}, "layers of one shape"),
        ("pad_token_id", 256206, "an integer from 0 to 256205"),
        ("pad_token_id", None, "an integer from 0 to 256205"),
        ("bos_token_id", -1, "an integer from 0 to 256205, or null"),
        ("eos_token_id", [], "or an array of them"),
        ("eos_token_id", [2, 256206], "or an array of them"),
        ("eos_token_id", [2, True], "or an array of them"),
        ("eos_token_id", None, "or an array of them"),
        ("decoder_start_token_id", 2.5, "an integer from 0 to 256205"),
        ("forced_bos_token_id", 300000, "an integer from 0 to 256205, or null"),
        ("torch_dtype", "int8", "one of float32, float16, bfloat16, float64"),
        ("num_beams", 0, "an integer from 1 to"),
        ("length_penalty", "1", "a finite number"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object, expected: str) -> None:
    config = {name: old for name, old in REAL.items() if name != "num_hidden_layers"}
    (problem,) = problems(config | {key: value})
    assert problem.startswith(f"config.json: {key}: expected ")
    assert expected in problem
    assert problem.endswith(f", got {json.dumps(value)}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_length", 0),
        ("max_new_tokens", "64"),
        ("min_new_tokens", -1),
        ("num_beams", True),
        ("length_penalty", True),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("no_repeat_ngram_size", -1),
        ("repetition_penalty", 0),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [3]),
        ("eos_token_id", 256206),
        ("forced_eos_token_id", 256206),
    ],
)
def test_a_wrong_generation_default_is_named(key: str, value: object) -> None:
    (problem,) = problems(REAL, {key: value})
    assert problem.startswith(f"generation_config.json: {key}: expected ")
    assert problem.endswith(f", got {json.dumps(value)}")


def test_all_faults_of_both_files_are_in_one_error(tmp_path: Path) -> None:
    faults = {"d_model": 0, "decoder_layers": "3", "scale_embedding": None, "eos_token_id": "</s>"}
    write(tmp_path, {"model_type": "m2m_100"} | faults, {"num_beams": -1, "early_stopping": 2})
    with pytest.raises(CheckpointError) as caught:
        NllbConfig.from_dir(tmp_path)
    keys = [problem.split(": ")[1] for problem in caught.value.problems]
    assert sorted(keys) == sorted([*faults, "num_beams", "early_stopping"])
    assert all(key in str(caught.value) for key in keys)


def test_a_vocabulary_too_small_for_the_default_ids() -> None:
    assert problems({"model_type": "m2m_100", "vocab_size": 2}) == [
        "config.json: vocab_size: expected more than 2, the largest special id, got 2"
    ]


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        NllbConfig.from_dir(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="is an empty folder"):
        NllbConfig.from_dir(tmp_path)
    (tmp_path / "other").write_text("")
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        NllbConfig.from_dir(tmp_path)
    write(tmp_path, [REAL])
    with pytest.raises(CheckpointError, match="expected an object"):
        NllbConfig.from_dir(tmp_path)
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "gone")
    write(tmp_path, REAL)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: there is no such file"):
        NllbConfig.from_dir(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    write(tmp_path, REAL, [])
    with pytest.raises(CheckpointError, match=r"generation_config\.json: holds a JSON array"):
        NllbConfig.from_dir(tmp_path)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NllbConfig().d_model = 3  # type: ignore[misc]
