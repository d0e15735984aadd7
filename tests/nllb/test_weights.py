# SPDX-License-Identifier: MIT OR Apache-2.0
"""Matching a checkpoint's tensors with a configuration: names, ties, and one error that lists every fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import metrale.nllb
from metrale.checkpoint import FLOAT_DTYPES, open_checkpoint
from metrale.errors import CheckpointError
from metrale.nllb import weights
from metrale.nllb.config import NllbConfig
from metrale.nllb.weights import EMBEDDING, TIED_NAMES, WeightMap, canonical_shapes, match_weights

DEMO = Path(metrale.nllb.__file__).parents[1] / "demo_model"
CONFIG = NllbConfig(
    vocab_size=12,
    d_model=4,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=6,
    decoder_ffn_dim=5,
)
Arrays = dict[str, NDArray[Any]]


def make(dtype: str = "f32") -> Arrays:
    random = np.random.default_rng(5)
    target = FLOAT_DTYPES[dtype]
    return {name: random.standard_normal(shape).astype(target) for name, shape in canonical_shapes(CONFIG).items()}


def match(folder: Path, arrays: Arrays, config: NllbConfig = CONFIG) -> WeightMap:
    save_file(arrays, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        return match_weights(config, checkpoint)


def problems(folder: Path, arrays: Arrays, config: NllbConfig = CONFIG) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        match(folder, arrays, config)
    assert caught.value.path == str(folder)
    return sorted(caught.value.problems)


def with_ties(arrays: Arrays, names: tuple[str, ...]) -> Arrays:
    table = arrays[EMBEDDING]
    rest = {name: array for name, array in arrays.items() if name != EMBEDDING}
    return rest | {name: table.copy() for name in names}


def test_the_names_and_shapes_of_a_small_model() -> None:
    shapes = canonical_shapes(CONFIG)
    assert len(shapes) == 1 + 2 * 16 + 2 + 3 * 26 + 2
    assert next(iter(shapes.items())) == ("model.shared.weight", (12, 4))
    layer = {
        name.removeprefix("model.decoder.layers.2."): shape
        for name, shape in shapes.items()
        if "decoder.layers.2" in name
    }
    block = {f"{part}_proj.weight": (4, 4) for part in "qkv"} | {f"{part}_proj.bias": (4,) for part in "qkv"}
    block |= {"out_proj.weight": (4, 4), "out_proj.bias": (4,)}
    norms = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    assert layer == {
        **{f"self_attn.{name}": shape for name, shape in block.items()},
        **{f"encoder_attn.{name}": shape for name, shape in block.items()},
        **{f"{norm}.{part}": (4,) for norm in norms for part in ("weight", "bias")},
        "fc1.weight": (5, 4),
        "fc1.bias": (5,),
        "fc2.weight": (4, 5),
        "fc2.bias": (4,),
    }
    assert shapes["model.encoder.layers.1.fc1.weight"] == (6, 4)
    assert not [name for name in shapes if "encoder.layers" in name and "encoder_attn" in name]
    assert shapes["model.encoder.layer_norm.weight"] == shapes["model.decoder.layer_norm.bias"] == (4,)
    assert canonical_shapes(CONFIG, 20)[EMBEDDING] == (20, 4)


def test_the_demo_model_matches() -> None:
    config = NllbConfig.from_dir(DEMO)
    with open_checkpoint(DEMO) as checkpoint:
        found = match_weights(config, checkpoint)
        assert set(found.sources.values()) == set(checkpoint.tensors)
        assert {name: checkpoint.tensors[name].shape for name in checkpoint.tensors} == dict(found.shapes)
    assert found.vocab_size == 8240
    assert found.dtypes == {"bf16"}


@pytest.mark.parametrize("dtype", list(FLOAT_DTYPES))
def test_a_complete_checkpoint_matches(tmp_path: Path, dtype: str) -> None:
    found = match(tmp_path, make(dtype))
    assert found.sources == {name: name for name in canonical_shapes(CONFIG)}
    assert found.shapes == canonical_shapes(CONFIG)
    assert found.dtypes == {dtype}


def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    norms = {name: array for name, array in make("f32").items() if "norm" in name}
    assert match(tmp_path, make("f16") | norms).dtypes == {"f16", "f32"}


def test_a_sharded_checkpoint_matches(tmp_path: Path) -> None:
    arrays = make()
    weight_map = {name: f"part-{at % 3}.safetensors" for at, name in enumerate(arrays)}
    for file in set(weight_map.values()):
        save_file({name: arrays[name] for name in arrays if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(match_weights(CONFIG, checkpoint).sources) == set(arrays)


@pytest.mark.parametrize(
    "names",
    [(name,) for name in TIED_NAMES] + [TIED_NAMES[:2], TIED_NAMES[1:], TIED_NAMES],
    ids=lambda names: "+".join(names),
)
def test_the_tied_matrix_is_found_under_any_of_its_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = match(tmp_path, with_ties(make("bf16"), names))
    assert found.sources[EMBEDDING] == names[0]
    assert set(found.sources) == set(found.shapes) == set(canonical_shapes(CONFIG))


@pytest.mark.parametrize("dtype", list(FLOAT_DTYPES))
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_tied_matrices_must_be_equal_to_the_bit(
    tmp_path: Path, dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_COMPARE_BYTES", chunk)
    arrays = make(dtype)
    arrays[EMBEDDING][3] = np.nan
    arrays[EMBEDDING][7, 2] = 0.0
    arrays = with_ties(arrays, TIED_NAMES)
    assert match(tmp_path, arrays).sources[EMBEDDING] == EMBEDDING  # NaNs of one pattern are equal
    arrays["lm_head.weight"][7, 2] = -0.0
    (problem,) = problems(tmp_path, arrays)
    assert problem.startswith("tensors 'model.shared.weight' and 'lm_head.weight' must be equal")
    assert problem.endswith("they differ in values, first in row 7")


def test_tied_matrices_of_unlike_shape_or_dtype(tmp_path: Path) -> None:
    arrays = with_ties(make(), TIED_NAMES[:3])
    arrays[TIED_NAMES[1]] = arrays[TIED_NAMES[1]][:11].copy()
    arrays[TIED_NAMES[2]] = arrays[TIED_NAMES[2]].astype(np.float16)
    shape, dtype = sorted(problems(tmp_path, arrays), key=lambda problem: "dtype" in problem)
    assert shape.endswith("differ in shape ([12, 4], [11, 4])")
    assert dtype.endswith("differ in dtype (f32, f16)")


def test_a_bare_model_without_the_prefix(tmp_path: Path) -> None:
    arrays = {name.removeprefix("model."): array for name, array in make().items()}
    arrays["encoder.embed_tokens.weight"] = arrays["shared.weight"].copy()
    arrays["encoder.embed_positions.weights"] = np.zeros((8, 4), np.float32)
    found = match(tmp_path, arrays)
    assert found.sources == {name: name.removeprefix("model.") for name in canonical_shapes(CONFIG)}


def test_a_tensor_with_and_without_the_prefix_is_ambiguous(tmp_path: Path) -> None:
    arrays = make()
    arrays["encoder.layers.0.fc1.bias"] = arrays["model.encoder.layers.0.fc1.bias"].copy()
    (problem,) = problems(tmp_path, arrays)
    assert "is stored twice" in problem
    assert "'encoder.layers.0.fc1.bias'" in problem
    assert "'model.encoder.layers.0.fc1.bias'" in problem


def test_known_extras_are_left_aside_whatever_they_are(tmp_path: Path) -> None:
    extras = {name: np.zeros((2, 3), np.int64) for name in weights.IGNORED_NAMES}
    found = match(tmp_path, make() | extras)
    assert not weights.IGNORED_NAMES & set(found.sources.values())
    assert found.dtypes == {"f32"}


def test_every_fault_is_listed_in_one_error(tmp_path: Path) -> None:
    arrays = make()
    del arrays["model.encoder.layers.0.self_attn.q_proj.bias"]
    del arrays["model.decoder.layer_norm.weight"]
    arrays["model.encoder.layers.1.fc1.weight"] = np.zeros((5, 4), np.float32)
    arrays["model.decoder.layers.0.fc2.bias"] = np.zeros((4, 1), np.float32)
    arrays["model.decoder.layers.1.fc2.bias"] = np.zeros(4, np.int32)
    arrays["model.decoder.layers.3.fc2.bias"] = np.zeros(4, np.float32)
    arrays["model.lm_head.bias\n"] = np.zeros(4, np.float32)
    assert problems(tmp_path, arrays) == [
        "missing tensor 'model.decoder.layer_norm.weight'",
        "missing tensor 'model.encoder.layers.0.self_attn.q_proj.bias'",
        "tensor 'model.decoder.layers.0.fc2.bias': shape [4, 1], expected [4] by the configuration",
        "tensor 'model.decoder.layers.1.fc2.bias': dtype i32, expected one of f32, f16, bf16, f64",
        "tensor 'model.encoder.layers.1.fc1.weight': shape [5, 4], expected [6, 4] by the configuration",
        "unknown tensor 'model.decoder.layers.3.fc2.bias'",
        "unknown tensor 'model.lm_head.bias\\n'",
    ]


def test_an_absent_embedding_names_where_it_may_be(tmp_path: Path) -> None:
    arrays = make()
    del arrays[EMBEDDING]
    (problem,) = problems(tmp_path, arrays)
    assert problem.startswith("missing tensor 'model.shared.weight'")
    assert all(name in problem for name in TIED_NAMES)


@pytest.mark.parametrize("shape", [(12, 5), (12,), (), (4, 12, 4)], ids=repr)
def test_an_embedding_of_another_width(tmp_path: Path, shape: tuple[int, ...]) -> None:
    arrays = make() | {EMBEDDING: np.zeros(shape, np.float32)}
    assert problems(tmp_path, arrays) == [
        f"tensor 'model.shared.weight': shape {list(shape)}, expected [vocabulary, 4] by the configuration"
    ]


@pytest.mark.parametrize("rows", [3, 11, 15])
def test_the_rows_of_the_embedding_are_the_vocabulary(tmp_path: Path, rows: int) -> None:
    found = match(tmp_path, make() | {EMBEDDING: np.zeros((rows, 4), np.float32)})
    assert found.vocab_size == rows
    assert found.shapes[EMBEDDING] == (rows, 4)


@pytest.mark.parametrize("rows", [0, 2])
def test_every_special_id_needs_a_row(tmp_path: Path, rows: int) -> None:
    (problem,) = problems(tmp_path, make() | {EMBEDDING: np.zeros((rows, 4), np.float32)})
    assert f"{rows} rows, none for the special id 2" in problem


def test_groups_cover_every_canonical_tensor_once_and_in_fusing_order() -> None:
    layers: list[weights.EncoderLayerNames | weights.DecoderLayerNames] = []
    layers += [weights.encoder_layer(index) for index in range(CONFIG.encoder_layers)]
    layers += [weights.decoder_layer(index) for index in range(CONFIG.decoder_layers)]
    named = [EMBEDDING, *weights.ENCODER_NORM, *weights.DECODER_NORM]
    for layer in layers:
        blocks = [layer.self_attn]
        norms = [layer.self_attn_norm, layer.ffn_norm]
        if isinstance(layer, weights.DecoderLayerNames):
            blocks.append(layer.cross_attn)
            norms.append(layer.cross_attn_norm)
        parts = [part for block in blocks for part in (*block.qkv, block.out)]
        named += [name for part in (*parts, *norms, layer.fc1, layer.fc2) for name in part]
    assert len(named) == len(set(named))
    assert set(named) == set(canonical_shapes(CONFIG))
    assert [part.weight.rsplit(".", 2)[1] for part in layers[0].self_attn.qkv] == ["q_proj", "k_proj", "v_proj"]
    assert [part.bias for part in weights.cross_kv(CONFIG)] == [
        f"model.decoder.layers.{index}.encoder_attn.{part}_proj.bias" for index in range(3) for part in "kv"
    ]
