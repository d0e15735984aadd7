# SPDX-License-Identifier: MIT OR Apache-2.0
"""Floors: hand-counted bytes and operations, and the whole of a recorded pass against the model's own sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.host import HostBackend
from gpu_runtime.op import REGISTRY, Op
from metrale.bench.breakdown import kinds, passes, recording
from metrale.bench.decode import Batch
from metrale.bench.floors import (
    BY_RULE,
    FLOP_PER_S,
    READ_BYTES_PER_S,
    RULES,
    TABLES,
    Call,
    Cost,
    cost,
    floor_us,
    total,
)
from metrale.bench.protocol import SOURCE_TOKENS
from metrale.bench.shapes import SHAPES, tensors, write_checkpoint
from metrale.errors import InvalidInput
from metrale.nllb.model import NllbModel

OPS = {op.spec.name: op for op in REGISTRY}
TINY = SHAPES["tiny"]


def call(name: str, tables: dict[str, Any] | None = None, /, **values: Any) -> Call:
    """A launch with the values given, every other pointer at some address and every other number 0."""
    op = OPS[name]
    assert set(values) | set(tables or {}) <= {arg.name for arg in op.spec.args}
    given = tuple(values.get(arg.name, int(arg.is_pointer)) for arg in op.spec.args)
    return Call(op, "f16", given, {key: np.array(table) for key, table in (tables or {}).items()})


LINEAR: dict[str, Any] = {"rows": 3, "n": 8, "k": 16, "workspace": 0}
NO_BEAMS = dict.fromkeys(("ancestry", "ancestry_index", "beam_positions"), 0)
ATTENTION: dict[str, Any] = {"rows": 2, "heads": 4, "head_dim": 8, **NO_BEAMS}
BEAMS: dict[str, Any] = {**ATTENTION, **dict.fromkeys(NO_BEAMS, 64), "ancestry_rows": 3, "ancestry_capacity": 9}
APART: dict[str, Any] = {"spans": [100, 300], "lengths": [5, 7]}
SHARED: dict[str, Any] = {
    # two beams of a search, the third and the first row of the ancestries: they have three positions in common
    "spans": [100, 100],
    "lengths": [5, 5],
    "ancestry_index": [2, 0],
    "ancestry": [[0, 0, 0, 1, 1, 9, 9, 9, 9], [7] * 9, [0, 0, 0, 0, 0, 9, 9, 9, 9]],
    "beam_positions": [8, 8],
}
SEARCHES: dict[str, Any] = {
    # row, member, beams, k, fresh, length, mode, eos
    "counts": [[0, 0, 4, 8, 0, 10, 0, 0], [4, 4, 2, 6, 1, 1, 0, 4]]
}
SELECT: dict[str, Any] = {"groups": 2, "candidate_rows": 5, "most": 256, "member_count": 6, "slot_count": 64}
ADAPTED: dict[str, Any] = {"adapters": [1, -1, 1, 0], "ranks": [[4, 0], [2, 3], [9, 9]]}
LORA: dict[str, Any] = {"rows": 4, "segments": 2, "room": 16, "adapter_count": 3}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (call("linear", **LINEAR), Cost(2 * (8 * 16 + 8), 2 * (3 * 16 + 3 * 8), 0, 2 * 3 * 8 * 16)),
        (
            call("thin_linear", rows=3, n=8, k=16, kv_from=8, spans=0, positions=0),  # with the LayerNorm's vectors
            Cost(2 * (8 * 16 + 8 + 2 * 16), 2 * (3 * 16 + 3 * 8), 0, 2 * 3 * 8 * 16),
        ),
        (
            call("cluster_linear", rows=3, n=8, k=16, kv_from=3, residual=0),  # five columns go into the KV cache
            Cost(2 * (8 * 16 + 8), 2 * (3 * 16 + 3 * 3) + 3 * (8 + 4), 2 * 3 * 5, 2 * 3 * 8 * 16),
        ),
        (
            call("gemv", n=8, k=16, kv_from=8, spans=0, positions=0),
            Cost(2 * (8 * 16 + 8 + 16) + 4 * 2 * 8, 2 * (16 + 8), 0, 2 * 8 * 16),
        ),
        (
            call("gemv", n=8, k=16, kv_from=3, gamma=0, sums=0),  # five columns go into the KV cache
            Cost(2 * (8 * 16 + 8), 2 * (16 + 3) + 8 + 4, 2 * 5, 2 * 8 * 16),
        ),
        (
            call("head_linear", rows=3, n=8, k=16, blocks=2),  # with four words for each row and block
            Cost(2 * (8 * 16 + 8), 2 * (3 * 16 + 3 * 8) + 4 * 4 * 3 * 2, 0, 2 * 3 * 8 * 16),
        ),
        (
            call("join_maxima", rows=3, blocks=2, slot_count=5, capacity=7, cell_count=9),
            Cost(0, 4 * (4 * 3 * 2 + 9 * 3 + 3 * 3 + 3)),  # an id goes to its cell
        ),
        (call("linear", **LINEAR, bias=0), Cost(2 * 8 * 16, 2 * (3 * 16 + 3 * 8), 0, 2 * 3 * 8 * 16)),
        (
            call("linear", **LINEAR, residual=1),  # what is added to is read as well
            Cost(2 * (8 * 16 + 8), 2 * (3 * 16 + 2 * 3 * 8), 0, 2 * 3 * 8 * 16),
        ),
        (
            call("linear", **{**LINEAR, "workspace": 64, "workspace_bytes": 1 << 20}),  # scratch is no traffic
            Cost(2 * (8 * 16 + 8), 2 * (3 * 16 + 3 * 8), 0, 2 * 3 * 8 * 16),
        ),
        (call("layer_norm", rows=3, width=16), Cost(2 * 2 * 16, 2 * 2 * 3 * 16)),
        (
            # three rows of either table, and no more
            call("embed", rows=3, width=16, vocab=1000, position_count=50, cells=0, cell_index=0),
            Cost(3 * 16 * 2 + 3 * 16 * 4, 3 * 16 * 2 + 2 * 3 * 4),
        ),
        (
            call("embed", rows=3, width=16, vocab=1000, position_count=50, cell_count=5),  # and the cells
            Cost(3 * 16 * 2 + 3 * 16 * 4, 3 * 16 * 2 + 3 * 3 * 4 + 5 * 4),
        ),
        (
            # spans and lengths, q and out; keys and values; two products
            call("decode_attention", APART, **ATTENTION),
            Cost(0, 2 * 8 + 2 * 4 + 2 * 2 * 2 * 32, 2 * 2 * 12 * 32, 4 * 12 * 32),
        ),
        (
            # one source for both: its keys and values come once
            call("decode_attention", {"spans": [100, 100], "lengths": [6, 6]}, **ATTENTION),
            Cost(0, 2 * 8 + 2 * 4 + 2 * 2 * 2 * 32, 2 * 2 * 6 * 32, 4 * 12 * 32),
        ),
        (
            # seven positions, three of them shared; two indices and storages, and ten ancestors
            call("decode_attention", SHARED, **BEAMS),
            Cost(0, 2 * 8 + 2 * 4 + 2 * 2 * 2 * 32 + 2 * 2 * 4 + 10 * 4, 2 * 2 * 7 * 32, 4 * 10 * 32),
        ),
        (
            # keys alone, and float32 out
            call("attention_weights", APART, rows=2, heads=4, head_dim=8, longest=9),
            Cost(0, 2 * 8 + 2 * 4 + 2 * 2 * 32 + 4 * 2 * 4 * 9, 2 * 12 * 32, 2 * 12 * 32),
        ),
        (
            # logits; seven counts and a penalty; values and ids of all places, and flags
            call("beam_candidates", rows=3, vocab=100, most=9, slot_count=64, words=4, word_room=99, capacity=50),
            Cost(0, 3 * 100 * 2 + 3 * (7 + 1) * 4 + 2 * 3 * 9 * 4 + 3 * 4),
        ),
        (
            # flags, counts, settings, members and results; candidates of four rows and of one; the beams' tables, read
            # and written, with one word more; scores twice and cells; states twice
            call("beam_select", SEARCHES, **SELECT),
            Cost(
                0,
                4 * (5 + 2 * 8 + 2 * 2 + 6 + 2)
                + 4 * (2 * (4 * 8 + 1 * 6) + 3 * (4 * (10 + 11) + 2 * (1 + 2)) + 3 * (4 + 2) + 2 * 2),
            ),
        ),
        (
            # x, adapters and t; A of the two adapters that are asked for, once each; three rows have one
            call("lora_down", ADAPTED, **LORA, k=10),
            Cost(2 * (4 + 5) * 10, 2 * 4 * 10 + 4 * 4 + 4 * 4 * 32, 0, 2 * (5 + 5 + 4) * 10),
        ),
        (
            # adapters; t where there are ranks; out of three rows, read and written
            call("lora_up", ADAPTED, **LORA, width=10),
            Cost(2 * (4 + 5) * 10, 4 * 4 + 4 * (5 + 5 + 4) + 2 * 2 * 3 * 20, 0, 2 * (5 + 5 + 4) * 10),
        ),
        (
            call("lora_up", ADAPTED, **LORA, width=10, activation=1),  # out of all rows
            Cost(2 * (4 + 5) * 10, 4 * 4 + 4 * (5 + 5 + 4) + 2 * 2 * 4 * 20, 0, 2 * (5 + 5 + 4) * 10),
        ),
        (
            call("packed_attention", {"offsets": [0, 2, 5]}, tokens=5, offset_count=3, heads=4, head_dim=8),
            Cost(0, 3 * 4 + 4 * 2 * 5 * 32, 0, 4 * (4 + 9) * 32),
        ),
        (call("kv_scatter", rows=3, width=16), Cost(0, 3 * 8 + 3 * 4 + 3 * 16 * 2, 3 * 16 * 2)),
        (call("argmax", rows=3, vocab=100), Cost(0, 3 * 100 * 2 + 2 * 3 * 4 + 2 * 3 * 4)),  # arrivals are counted up
        (
            # logits; counts, settings and seeds; ids, log-probabilities, flags and cells; arrivals; no bans, no words
            call("sample", rows=3, vocab=100, slot_count=64, words=4, word_room=99, capacity=50, cell_count=99),
            Cost(0, 3 * 100 * 2 + 3 * (9 + 4 + 2) * 4 + 4 * 3 * 4 + 2 * 3 * 4),
        ),
    ],
    ids=lambda value: value.label if isinstance(value, Call) else "",
)
def test_cost_of_a_launch(one: Call, expected: Cost) -> None:
    assert replace(cost(one), written=0) == expected


@pytest.mark.parametrize(
    ("one", "written"),
    [
        (call("linear", **LINEAR, residual=1), 2 * 3 * 8),
        (call("linear", **{**LINEAR, "workspace": 64, "workspace_bytes": 1 << 20}), 2 * 3 * 8),
        (call("layer_norm", rows=3, width=16), 2 * 3 * 16),
        (call("decode_attention", APART, **ATTENTION), 2 * 2 * 32),
        (call("kv_scatter", rows=3, width=16), 3 * 16 * 2),
        (call("argmax", rows=3, vocab=100), 3 * 3 * 4),
        (call("sample", rows=3, vocab=100, slot_count=64, words=4, capacity=50, cell_count=99), (4 + 1) * 3 * 4),
        # results; three tables of each beam, its score and cell; a state of each search
        (call("beam_select", SEARCHES, **SELECT), 4 * (2 + 3 * (4 * 11 + 2 * 2) + 2 * 6 + 2)),
        (call("lora_down", ADAPTED, **LORA, k=10), 4 * 4 * 32),
        (call("lora_up", ADAPTED, **LORA, width=10), 2 * 3 * 20),
    ],
    ids=lambda value: value.label if isinstance(value, Call) else "",
)
def test_what_a_launch_writes(one: Call, written: int) -> None:
    """All else that it moves it reads."""
    found = cost(one)
    assert found.written == written
    assert found.read == found.nbytes - written > 0


def test_what_a_rule_counts_and_what_a_table_says_are_parameters() -> None:
    assert all(arg in {one.name for one in OPS[op].spec.args} for op, arg in BY_RULE)
    for op, names in TABLES.items():
        assert set(names) <= {one.name for one in OPS[op].spec.args if one.is_pointer}
    assert set(RULES) <= set(OPS)


def test_the_floor_is_the_longer_of_moving_and_computing() -> None:
    assert Cost(weights=1000, activations=200, kv=300).floor_us() == pytest.approx(1500 / READ_BYTES_PER_S * 1e6)
    assert Cost(weights=1000, flop=10**12).floor_us() == pytest.approx(1e12 / FLOP_PER_S * 1e6)
    assert Cost(1, 2, 3, 4, 5) + Cost(10, 20, 30, 40, 50) == Cost(11, 22, 33, 44, 55)


@pytest.mark.parametrize(
    ("one", "label"),
    [
        (call("linear", **LINEAR), "linear 8x16"),
        (call("linear", **LINEAR, activation=1), "linear 8x16 relu"),
        (call("linear", **LINEAR, residual=1), "linear 8x16 +="),
        (call("thin_linear", rows=3, n=8, k=16, spans=0), "thin_linear 8x16 normed"),
        (call("cluster_linear", rows=3, n=8, k=16, spans=0, residual=1), "cluster_linear 8x16 +="),
        (call("gemv", n=8, k=16, gamma=0, spans=0, activation=1), "gemv 8x16 relu"),
        (call("gemv", n=8, k=16), "gemv 8x16 normed to kv"),
        (call("head_linear", rows=3, n=8, k=16), "head_linear 8x16"),
        (call("decode_attention", **ATTENTION, q_stride=96), "decode_attention self"),
        (call("decode_attention", **ATTENTION, q_stride=32), "decode_attention cross"),
        (call("decode_attention", **BEAMS, q_stride=96), "decode_attention self, beams"),
        (call("lora_down", **LORA, k=10), "lora_down 2x10"),
        (call("lora_up", **LORA, width=10), "lora_up 2x10"),
        (call("kv_scatter", rows=3, width=16), "kv_scatter 16"),
        (call("layer_norm", rows=3, width=16), "layer_norm"),
    ],
)
def test_labels(one: Call, label: str) -> None:
    assert one.label == label


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NllbModel]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, TINY, "float16")
    with (
        HostBackend() as gpu,
        metrale.load(folder, gpu, "float16", max_batch=3, max_source_len=64, max_new_tokens=66) as found,
    ):
        yield found


def weights(*parts: str) -> int:
    """Bytes in float16 of the tensors with one of these in their names."""
    return sum(2 * math.prod(shape) for name, shape in tensors(TINY).items() if any(part in name for part in parts))


def test_a_step_reads_each_weight_of_the_decoder_once(model: NllbModel) -> None:
    """All of the decoder but the source's keys and values, the output head, and a row of the embedding."""
    size, d = 3, TINY.d_model
    with Batch(model, size) as batch:
        tokens = batch.choose(batch.prefill())
        with recording(model.gpu) as step:
            batch.choose(batch.decode(tokens))
    assert step.unseen() == 0
    whole = total(step.calls)
    names = [call.spec.name for call in step.calls]
    normed = [call for call in step.calls if call.spec.name == "thin_linear" and call.value("gamma")]
    assert len(normed) == 3 * TINY.layers  # of few rows, norms are part of the products behind them
    assert names.count("layer_norm") == 1
    rows = size * d * (2 + 4)  # of the embedding, and of the positions, which are float32
    others = weights("encoder_attn.k_proj", "encoder_attn.v_proj")
    head = model.logits_row_bytes() * (d + 1)  # a row of weights, and a bias, for each element of a logits row
    assert whole.weights == weights("model.decoder") - others + head + rows
    heads = TINY.layers * 2 * d * 2  # keys and values of a position, all layers, in bytes
    assert whole.kv == size * (SOURCE_TOKENS + 3 + 1) * heads  # two prefix tokens and this one are read, one is written
    assert floor_us(step.calls) >= whole.floor_us()


def test_a_prefill_is_an_encoder_pass_and_a_decoder_pass(model: NllbModel) -> None:
    with Batch(model, 2) as batch, recording(model.gpu) as prefill:
        batch.choose(batch.prefill())
    encoder, decoder = passes(prefill.calls)
    tokens = 2 * SOURCE_TOKENS
    assert {one.dims.get("rows", one.dims.get("tokens")) for one in encoder} == {tokens}
    attention = [one for one in encoder if one.spec.name == "packed_attention"]
    offsets = [0, SOURCE_TOKENS, 2 * SOURCE_TOKENS]
    assert [one.tables["offsets"].tolist() for one in attention] == [offsets] * TINY.layers
    matrices = weights("model.encoder", "encoder_attn.k_proj", "encoder_attn.v_proj")
    assert total(encoder).weights == matrices + tokens * TINY.d_model * (2 + 4)
    assert {one.dims["rows"] for one in decoder if one.spec.name in ("embed", "layer_norm")} == {4}


def test_launches_are_grouped_by_kind(model: NllbModel) -> None:
    with Batch(model, 2) as batch:
        tokens = batch.choose(batch.prefill())
        with recording(model.gpu) as step:
            batch.choose(batch.decode(tokens))
    found = kinds(step.calls)
    assert sum(map(len, found.values())) == len(step.calls)
    assert len(found["decode_attention self", 2]) == len(found["decode_attention cross", 2]) == TINY.layers
    assert len({one.value("weight") for one in found["thin_linear 64x64 +=", 2]}) == 2 * TINY.layers
    assert len(found[f"linear {model.logits_row_bytes() // 2}x{TINY.d_model}", 2]) == 1


def test_recording_leaves_the_ops_as_they_were(model: NllbModel) -> None:
    before = Op.launch
    with pytest.raises(InvalidInput), recording(model.gpu):
        model.decode_batch([-1], [])
    assert Op.launch is before
    with recording(model.gpu):
        assert Op.launch is not before
    assert Op.launch is before
