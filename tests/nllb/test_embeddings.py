# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which stored matrices embed the source, embed the target and give the logits, and that equal ones are kept once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from metrale.checkpoint import FLOAT_DTYPES, open_checkpoint
from metrale.errors import CheckpointError
from metrale.nllb import embeddings
from metrale.nllb.config import NllbConfig
from metrale.nllb.device_weights import weight_layout
from metrale.nllb.embeddings import (
    DECODER_EMBEDDING,
    EMBEDDING,
    ENCODER_EMBEDDING,
    HEAD,
    STORED_NAMES,
    TIED,
    Tables,
)
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.weights import WeightMap, canonical_shapes, match_weights

Arrays = dict[str, NDArray[Any]]
CONFIG = NllbConfig(
    vocab_size=12,
    d_model=4,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=6,
    decoder_ffn_dim=5,
)
UNTIED = replace(CONFIG, tie_word_embeddings=False)
WAYS_TO_BE_EQUAL = [
    values
    for values in itertools.product(range(4), repeat=4)
    if all(value <= max(values[:at], default=-1) + 1 for at, value in enumerate(values))
]
"""Four matrices, equal numbers for equal ones: all 15 ways, each once."""
OWN = {"encoder": ENCODER_EMBEDDING, "decoder": DECODER_EMBEDDING, "head": HEAD}


def match(folder: Path, tables: Arrays, config: NllbConfig = CONFIG) -> WeightMap:
    rest = {name: np.ones(shape, np.float32) for name, shape in canonical_shapes(CONFIG).items() if name != EMBEDDING}
    save_file(rest | tables, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint:
        return match_weights(config, checkpoint)


def problems(folder: Path, tables: Arrays, config: NllbConfig = CONFIG) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        match(folder, tables, config)
    return caught.value.problems


def different(names: tuple[str, ...]) -> Arrays:
    return {name: np.full((12, 4), index, np.float32) for index, name in enumerate(names)}


def stored(found: WeightMap) -> dict[str, str]:
    """Return the stored name of each of the three."""
    return {role: found.sources[name] for role, name in found.tables._asdict().items()}


def subsets(least: int) -> list[tuple[str, ...]]:
    return [names for size in range(least, 5) for names in itertools.combinations(STORED_NAMES, size)]


@pytest.mark.parametrize("names", subsets(1), ids=lambda names: "+".join(names))
def test_equal_matrices_are_one_under_whatever_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    table = np.arange(48, dtype=np.float32).reshape(12, 4)
    found = match(tmp_path, {name: table.copy() for name in names})
    assert found.tables == TIED
    assert found.sources[EMBEDDING] == names[0]
    assert found.needed & set(STORED_NAMES) == {names[0]}
    assert set(found.sources) == set(found.shapes) == set(canonical_shapes(CONFIG))


@pytest.mark.parametrize("names", subsets(2), ids=lambda names: "+".join(names))
def test_of_different_matrices_each_takes_its_own_and_the_others_the_first(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    found = match(tmp_path, different(names))
    assert stored(found) == {role: own if own in names else names[0] for role, own in OWN.items()}
    assert found.tables.encoder == EMBEDDING
    assert set(found.sources) == set(found.shapes) == set(canonical_shapes(CONFIG, 12, found.tables))
    assert all(found.shapes[name] == (12, 4) for name in found.tables)


@pytest.mark.parametrize("names", [STORED_NAMES, STORED_NAMES[1:]], ids=["with shared", "without"])
def test_without_ties_each_has_its_own(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = match(tmp_path, different(names), UNTIED)
    assert stored(found) == OWN
    assert found.tables == Tables(EMBEDDING, DECODER_EMBEDDING, HEAD)


@pytest.mark.parametrize("names", [(EMBEDDING,), (EMBEDDING, HEAD), (HEAD, ENCODER_EMBEDDING), ()], ids=str)
def test_without_ties_nothing_stands_for_what_is_missing(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert problems(tmp_path, different(names), UNTIED) == [
        f"missing tensor {name!r} (tie_word_embeddings is false, so no other matrix stands for it)"
        for name in OWN.values()
        if name not in names
    ]


def test_without_ties_equal_matrices_are_still_one(tmp_path: Path) -> None:
    tables = different(STORED_NAMES[1:])
    tables[DECODER_EMBEDDING] = tables[ENCODER_EMBEDDING].copy()
    assert match(tmp_path, tables, UNTIED).tables == Tables(EMBEDDING, EMBEDDING, HEAD)
    tables[HEAD] = tables[ENCODER_EMBEDDING].copy()
    assert match(tmp_path, tables, UNTIED).tables == TIED


@pytest.mark.parametrize("dtype", list(FLOAT_DTYPES))
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_equal_means_to_the_bit(tmp_path: Path, dtype: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_COMPARE_BYTES", chunk)
    table = np.arange(48).reshape(12, 4).astype(FLOAT_DTYPES[dtype])
    table[3], table[7, 2] = np.nan, 0.0
    tables = {name: table.copy() for name in STORED_NAMES}
    assert match(tmp_path, tables).tables == TIED  # NaNs of one pattern are equal
    tables[HEAD][7, 2] = -0.0
    assert match(tmp_path, tables).tables == Tables(head=HEAD)
    tables[HEAD][7, 2] = 0.0
    tables[DECODER_EMBEDDING][11, 3] += 1
    assert match(tmp_path, tables).tables == Tables(decoder=DECODER_EMBEDDING)


def test_a_matrix_of_another_dtype_is_another(tmp_path: Path) -> None:
    tables: Arrays = {EMBEDDING: np.zeros((12, 4), np.float32), HEAD: np.zeros((12, 4), np.float16)}
    found = match(tmp_path, tables)
    assert found.tables == Tables(head=HEAD)
    assert found.dtypes == {"f32", "f16"}


def test_all_have_the_rows_of_the_first(tmp_path: Path) -> None:
    tables = different(STORED_NAMES)
    tables[DECODER_EMBEDDING] = np.zeros((11, 4), np.float32)
    tables[HEAD] = np.zeros((12, 5), np.float32)
    assert problems(tmp_path, tables) == [
        "tensor 'lm_head.weight': shape [12, 5], expected [vocabulary, 4] by the configuration"
    ]
    tables[HEAD] = np.zeros((13, 4), np.float32)
    assert problems(tmp_path, tables) == [
        f"tensor 'lm_head.weight': 13 rows, expected 12 as {EMBEDDING!r} has",
        f"tensor {DECODER_EMBEDDING!r}: 11 rows, expected 12 as {EMBEDDING!r} has",
    ]


def test_nothing_reads_a_shared_matrix_without_ties(tmp_path: Path) -> None:
    tables = different(STORED_NAMES) | {EMBEDDING: np.zeros((3, 2), np.int8)}
    assert stored(match(tmp_path, tables, UNTIED)) == OWN


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("values", WAYS_TO_BE_EQUAL, ids=str)
def test_what_is_needed_makes_the_same_model_again(tmp_path: Path, config: NllbConfig, values: tuple[int, ...]) -> None:
    tables = {name: np.full((12, 4), value, np.float32) for name, value in zip(STORED_NAMES, values, strict=True)}
    for left_out in ((), (EMBEDDING,), *(((name,) for name in OWN.values()) if config is CONFIG else ())):
        given = {name: table for name, table in tables.items() if name not in left_out}
        found = match(tmp_path, given, config)
        needed = {name: table for name, table in given.items() if name in found.needed}
        again = match(tmp_path, needed, config)
        assert again.tables == found.tables
        assert again.needed <= found.needed
        first, second = ([given[one.sources[name]][0, 0] for name in one.tables] for one in (found, again))
        assert first == second


def test_a_matrix_of_a_dtype_that_cannot_be_read(tmp_path: Path) -> None:
    tables = different(STORED_NAMES) | {HEAD: np.zeros((12, 4), np.int32)}
    assert problems(tmp_path, tables) == ["tensor 'lm_head.weight': dtype i32, expected one of f32, f16, bf16, f64"]


@pytest.mark.parametrize("vocab", [1024, 1008])
def test_memory_is_planned_for_each_matrix_once(vocab: int) -> None:
    """The head has rows past the vocabulary, whichever matrix it is; the others that there may be have none."""

    def nbytes(tables: Tables) -> int:
        return weight_layout(ModelShape(CONFIG, vocab, "f32", ServingLimits(), tables=tables)).nbytes

    one = vocab * 4 * 4
    assert nbytes(Tables(head=HEAD)) - nbytes(TIED) == one
    assert nbytes(Tables(EMBEDDING, DECODER_EMBEDDING, HEAD)) - nbytes(TIED) == 2 * one
    assert nbytes(Tables(EMBEDDING, HEAD, HEAD)) - nbytes(TIED) == one
