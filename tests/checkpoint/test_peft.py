# SPDX-License-Identifier: MIT OR Apache-2.0
"""Folders in PEFT's format: ranks, scales and matrices as they are there, and everything else refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from metrale.checkpoint import open_adapter
from metrale.errors import CheckpointError
from tests.reference.adapters import CONFIG, PREFIX, write_raw

Q, FC = "model.encoder.layers.0.self_attn.q_proj", "model.decoder.layers.1.fc1"


def pair(module: str, rank: int = 4, k: int = 6, n: int = 10, dtype: Any = np.float32) -> dict[str, NDArray[Any]]:
    """Return both matrices of a module, of whole numbers that every type has."""
    a = np.arange(rank * k).reshape(rank, k) % 13
    b = np.arange(n * rank).reshape(n, rank) % 11
    return {f"{PREFIX}{module}.lora_{half}.weight": value.astype(dtype) for half, value in (("A", a), ("B", b))}


def problems_of(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as refused:
        open_adapter(folder)
    return refused.value.problems


# what is read


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_plain_adapter(tmp_path: Path, dtype: Any) -> None:
    tensors = pair(Q, dtype=dtype) | pair(FC, dtype=dtype)
    with open_adapter(write_raw(tmp_path / "a", CONFIG | {"lora_alpha": 10}, tensors)) as adapter:
        assert adapter.path == tmp_path / "a"
        assert list(adapter.modules) == [FC, Q]
        for name, module in adapter.modules.items():
            assert (module.name, module.rank, module.scale) == (name, 4, 2.5)
            for info, half in ((module.a, "A"), (module.b, "B")):
                got, expected = adapter.read(info), tensors[f"{PREFIX}{name}.lora_{half}.weight"]
                assert got.dtype == expected.dtype
                assert np.array_equal(got, expected)
    with pytest.raises(CheckpointError, match="closed"):
        adapter.read(module.a)


@pytest.mark.parametrize(
    ("settings", "rank", "scale"),
    [
        ({}, 4, 8 / 4),
        ({"lora_alpha": 0.5}, 4, 0.5 / 4),
        ({"lora_alpha": -3}, 4, -3 / 4),
        ({"lora_alpha": 0}, 4, 0.0),
        ({"use_rslora": True}, 4, 8 / math.sqrt(4)),
        ({"r": 9}, 9, 8 / 9),
        ({"r": 9, "use_rslora": True}, 9, 8 / 3),
        ({"rank_pattern": {"q_proj": 2}}, 2, 8 / 2),
        ({"rank_pattern": {"k_proj": 2}}, 4, 8 / 4),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3}}, 2, 8 / 2),
        ({"alpha_pattern": {"q_proj": 3}}, 4, 3 / 4),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*encoder.*_proj": 3}}, 2, 3 / 2),
        ({"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"^model.*": 3}, "use_rslora": True}, 9, 1.0),
        ({"rank_pattern": None, "alpha_pattern": None}, 4, 2.0),
    ],
)
def test_ranks_and_scales(tmp_path: Path, settings: dict[str, Any], rank: int, scale: float) -> None:
    with open_adapter(write_raw(tmp_path / "a", CONFIG | settings, pair(Q, rank))) as adapter:
        assert adapter.modules[Q].rank == rank
        assert adapter.modules[Q].scale == scale


def test_what_peft_means_where_the_configuration_says_nothing(tmp_path: Path) -> None:
    with open_adapter(write_raw(tmp_path / "a", {"peft_type": "LORA"}, pair(Q, 8))) as adapter:
        assert (adapter.modules[Q].rank, adapter.modules[Q].scale) == (8, 1.0)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_starts_that_leave_the_base_model_alone(tmp_path: Path, start: Any) -> None:
    config = CONFIG | {"init_lora_weights": start, "eva_config": {"rho": 2.0}, "lora_dropout": 0.1}
    open_adapter(write_raw(tmp_path / "a", config, pair(Q))).close()


def test_settings_that_are_off_are_no_matter(tmp_path: Path) -> None:
    off: dict[str, Any] = {
        "use_dora": False,
        "modules_to_save": None,
        "target_parameters": [],
        "some_new_one": {},
        "megatron_config": None,
    }
    open_adapter(write_raw(tmp_path / "a", CONFIG | off, pair(Q))).close()


# what is refused by the configuration


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"peft_type": "IA3"}, 'peft_type: expected "LORA", got "IA3"'),
        ({"peft_type": None}, 'peft_type: expected "LORA", got null'),
        ({"peft_type": "lora"}, 'peft_type: expected "LORA", got "lora"'),
        ({"bias": "all"}, 'bias: expected "none", got "all"'),
        ({"bias": "lora_only"}, 'bias: expected "none", got "lora_only"'),
        ({"bias": None}, 'bias: expected "none", got null'),
        ({"use_dora": True}, "use_dora: expected nothing (only plain LoRA"),
        ({"lora_bias": True}, "lora_bias: expected nothing"),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save: expected nothing (only plain LoRA of linear modules is'),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: expected nothing"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: expected nothing"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices: expected nothing"),
        ({"trainable_token_indices": {"shared": [5]}}, "trainable_token_indices: expected nothing"),
        ({"megatron_config": {"a": 1}}, "megatron_config: expected nothing"),
        ({"use_qalora": True}, "use_qalora: expected nothing"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: expected nothing"),
        ({"target_parameters": ["x.weight"]}, "target_parameters: expected nothing"),
        ({"kasa_config": {"beta": 1}}, "kasa_config: expected nothing"),
        ({"something_of_tomorrow": "on"}, 'something_of_tomorrow: expected nothing (only plain LoRA'),
        ({"init_lora_weights": "olora"}, 'init_lora_weights: expected true, false or one of gaussian, eva, orthogonal'),
        ({"init_lora_weights": "pissa_niter_4"}, "(others change the base model as well"),
        ({"init_lora_weights": "corda"}, "init_lora_weights: "),
        ({"init_lora_weights": "loftq"}, "init_lora_weights: "),
        ({"init_lora_weights": None}, "init_lora_weights: "),
        ({"init_lora_weights": ["eva"]}, "init_lora_weights: "),
        ({"r": 0}, "r: expected an integer from 1 to"),
        ({"r": -1}, "r: expected an integer"),
        ({"r": True}, "r: expected an integer"),
        ({"r": "4"}, "r: expected an integer"),
        ({"r": 1 << 40}, "r: expected an integer"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a finite number"),
        ({"lora_alpha": None}, "lora_alpha: expected a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a finite number"),
        ({"use_rslora": 1}, "use_rslora: expected true or false"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: expected an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj: expected an integer from 1"),
        ({"rank_pattern": {"(a+)+": 1}}, "rank_pattern: the pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: q_proj: expected a finite number"),
        ({"alpha_pattern": {"[": 1}}, "alpha_pattern: the pattern"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    """By their names, one problem each; ranks that are not known are held against nothing."""
    problems = problems_of(write_raw(tmp_path / "a", CONFIG | settings, pair(Q)))
    assert len(problems) == 1
    assert problems[0].startswith("adapter_config.json: ")
    assert problem in problems[0]


def test_a_scale_that_float32_does_not_have(tmp_path: Path) -> None:
    settings = CONFIG | {"alpha_pattern": {"q_proj": 1e300}}
    [problem] = problems_of(write_raw(tmp_path / "a", settings, pair(Q) | pair(FC)))
    assert problem == f"module {Q!r}: its scale of 2.5e+299 is not finite in float32"


def test_everything_that_is_wrong_is_listed(tmp_path: Path) -> None:
    tensors = pair(Q) | {"x": np.zeros(1, np.float32), f"{PREFIX}{FC}.lora_A.weight": np.zeros((4, 6), np.float32)}
    problems = problems_of(write_raw(tmp_path / "a", CONFIG | {"use_dora": True, "bias": "all"}, tensors))
    assert len(problems) == 4


# what is refused by the tensors


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("base_model.model.model.shared.lora_embedding_A", "an adapter of an embedding"),
        (f"{PREFIX}{Q}.lora_magnitude_vector", "a magnitude of DoRA"),
        (f"{PREFIX}{Q}.lora_B.bias", "a bias"),
        (f"{PREFIX}lm_head.modules_to_save.weight", "a whole module"),
        (f"{PREFIX}{Q}.base_layer.weight", "no A or B"),
        (f"{PREFIX}{Q}.lora_C.weight", "no A or B"),
        (f"{PREFIX}{Q}.lora_A.default.weight", "no A or B"),
        (f"{Q}.lora_A.weight", "no A or B"),
        (f"{PREFIX}.lora_A.weight", "no A or B"),
        ("", "no A or B"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, name: str, what: str) -> None:
    tensors = pair(Q) | {name: np.zeros((4, 4), np.float32)}
    [problem] = problems_of(write_raw(tmp_path / "a", CONFIG, tensors))
    assert problem.startswith(f"tensor {name!r}: {what}")


@pytest.mark.parametrize("half", ["A", "B"])
def test_half_a_module(tmp_path: Path, half: str) -> None:
    tensors = pair(Q) | pair(FC)
    del tensors[f"{PREFIX}{Q}.lora_{'B' if half == 'A' else 'A'}.weight"]
    [problem] = problems_of(write_raw(tmp_path / "a", CONFIG, tensors))
    assert problem == f"module {Q!r}: has lora_{half} alone, expected lora_A and lora_B"


@pytest.mark.parametrize(
    ("half", "shape", "expected"),
    [
        ("A", (5, 6), "[4, inputs]"),
        ("A", (4,), "[4, inputs]"),
        ("A", (4, 6, 1), "[4, inputs]"),
        ("A", (4, 0), "[4, inputs]"),
        ("A", (0, 6), "[4, inputs]"),
        ("A", (), "[4, inputs]"),
        ("B", (10, 5), "[outputs, 4]"),
        ("B", (4, 10), "[outputs, 4]"),
        ("B", (0, 4), "[outputs, 4]"),
        ("B", (10, 0), "[outputs, 4]"),
    ],
)
def test_shapes_that_do_not_go_with_the_rank(tmp_path: Path, half: str, shape: tuple[int, ...], expected: str) -> None:
    tensors = pair(Q) | {f"{PREFIX}{Q}.lora_{half}.weight": np.zeros(shape, np.float32)}
    [problem] = problems_of(write_raw(tmp_path / "a", CONFIG, tensors))
    assert problem == f"module {Q!r}: lora_{half} has shape {list(shape)}, expected {expected} for its rank"


def test_a_rank_that_is_not_that_of_the_pattern(tmp_path: Path) -> None:
    problems = problems_of(write_raw(tmp_path / "a", CONFIG | {"rank_pattern": {"fc1": 3}}, pair(Q) | pair(FC)))
    assert [problem.split(":")[0] for problem in problems] == [f"module {FC!r}"] * 2


@pytest.mark.parametrize("dtype", [np.int8, np.uint16])
def test_types_that_are_not_read(tmp_path: Path, dtype: Any) -> None:
    problems = problems_of(write_raw(tmp_path / "a", CONFIG, pair(Q, dtype=dtype)))
    assert len(problems) == 2
    assert all("expected one of f32, f16, bf16" in problem for problem in problems)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert problems_of(write_raw(tmp_path / "a", CONFIG, {})) == ["adapter_model.safetensors holds no tensors"]


# folders


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_adapter(tmp_path / "absent")


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file(tmp_path: Path, missing: str) -> None:
    folder = write_raw(tmp_path / "a", CONFIG, pair(Q))
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match="there is no such file") as refused:
        open_adapter(folder)
    assert refused.value.path.endswith(missing)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    folder = write_raw(tmp_path / "a", CONFIG | {"use_dora": True}, pair(Q))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    problems = problems_of(folder)
    assert len(problems) == 2
    assert problems[1].startswith("holds only adapter_model.bin, a pickle, which is not read. Convert it")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"r": NaN}', b'{"r": 1e999}', b"[" * 100_000])
def test_a_configuration_that_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    folder = write_raw(tmp_path / "a", CONFIG, pair(Q))
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        open_adapter(folder)
    assert refused.value.path.endswith("adapter_config.json")


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_weights_that_are_cut(tmp_path: Path, keep: int) -> None:
    folder = write_raw(tmp_path / "a", CONFIG, pair(Q))
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(CheckpointError) as refused:
        open_adapter(folder)
    assert refused.value.path.endswith("adapter_model.safetensors")


def test_a_weights_file_that_is_a_folder_or_a_dangling_link(tmp_path: Path) -> None:
    folder = write_raw(tmp_path / "a", CONFIG, pair(Q))
    (folder / "adapter_model.bin").write_bytes(b"x")
    weights = folder / "adapter_model.safetensors"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: is not a regular file"):
        open_adapter(folder)
    weights.rmdir()
    weights.symlink_to(folder / "nowhere")
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: there is no such file"):
        open_adapter(folder)


def test_a_header_that_is_nested_or_huge_in_numbers(tmp_path: Path) -> None:
    """Claims of sizes that are not there are refused by the header, before any memory is taken for them."""
    folder = write_raw(tmp_path / "a", CONFIG, pair(Q))
    entry = {"dtype": "F32", "shape": [4, 1 << 40], "data_offsets": [0, 1 << 44]}
    header = json.dumps({f"{PREFIX}{Q}.lora_A.weight": entry}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        open_adapter(folder)
