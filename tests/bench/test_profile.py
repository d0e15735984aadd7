# SPDX-License-Identifier: MIT OR Apache-2.0
"""A step launch by launch: which part of which layer each belongs to, what the lines of a trace say, and their sums."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metrale
from metrale.bench import profile as profiles
from metrale.bench.breakdown import Timed, joined, kind_us, recording, summary
from metrale.bench.cases import Case
from metrale.bench.decode import Batch, Busy
from metrale.bench.floors import H200, Rates, cost
from metrale.bench.measuring import Bench, instruments
from metrale.bench.parts import OF_OPS, Place, places
from metrale.bench.protocol import Lengths
from metrale.bench.shapes import SHAPES, write_checkpoint
from metrale.bench.timing import open_device
from metrale.nllb.model import NllbModel
from tests.bench.test_floors import call

TINY = SHAPES["tiny"]
LENGTHS = Lengths(5, 8)
RATES = Rates(1e9, 1e12)
LAYER = [
    *("norm", "qkv", "KV write", "self-attention", "out", "cross norm", "cross q", "cross-attention", "cross out"),
    *("ffn norm", "fc1", "fc2"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NllbModel, Bench]]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, TINY, "float32")
    with (
        open_device("host") as gpu,
        instruments(gpu) as (clock, reader),
        metrale.load(folder, gpu, "float32", max_batch=6, max_source_len=16, max_new_tokens=18) as model,
    ):
        yield model, Bench(clock, reader, Busy(clock, reader), RATES, 2)


def pieces(opened: tuple[NllbModel, Bench], case: Case) -> list[profiles.Piece]:
    model, bench = opened
    return profiles.profile(model, case, bench.clock, bench.reader, bench.runs)


@pytest.fixture(scope="module")
def greedy(opened: tuple[NllbModel, Bench]) -> list[profiles.Piece]:
    return pieces(opened, Case(3, 1, LENGTHS))


@pytest.fixture(scope="module")
def searched(opened: tuple[NllbModel, Bench]) -> list[profiles.Piece]:
    return pieces(opened, Case(2, 3, LENGTHS))


def test_every_launch_of_a_step_has_its_place(greedy: list[profiles.Piece], searched: list[profiles.Piece]) -> None:
    layers = [Place(index, part) for index in range(TINY.layers) for part in LAYER]
    rest = [Place(None, "final norm"), Place(None, "head")]
    begin, choice = Place(None, "feed, embedding"), Place(None, "choice")
    (step,) = greedy
    assert list(step.places) == [begin, *layers, *rest, choice]
    decode, select = searched
    assert list(decode.places) == [begin, *layers, *rest]
    assert list(select.places) == [choice, choice]
    assert profiles.unseen(greedy) == profiles.unseen(searched) == 0


def test_ops_without_weights_are_placed_by_what_comes_before(opened: tuple[NllbModel, Bench]) -> None:
    model, _ = opened
    weights = model.device_weights
    lora: dict[str, Any] = {"rows": 1, "segments": 1, "room": 8, "adapter_count": 1}
    found = places(
        weights,
        [
            call("layer_norm", weight=int(weights.decoder[1].norm.weight), rows=1, width=64),
            call("thin_linear", weight=int(weights.decoder[1].qkv.weight), rows=1, n=192, k=64),
            call("lora_down", **lora, k=64),
            call("lora_up", **lora, width=64),
            call("decode_attention", heads=2, head_dim=32, q_stride=192),
            call("row_gather", rows=1),
            call("decode_attention", heads=2, head_dim=32, q_stride=64),
            call("linear", weight=12345, rows=1, n=8, k=8),
        ],
    )
    names = ["norm", "qkv", *2 * ["qkv adapters"], "self-attention", "row_gather", "cross-attention", "linear"]
    assert found == [Place(1, name) for name in names]


def test_parts_of_ops_are_ops() -> None:
    assert all(call(name).spec.name == name for name in OF_OPS)


def test_layers_add_up(greedy: list[profiles.Piece]) -> None:
    found = profiles.layers(greedy, RATES)
    assert found is not None
    calls = {row["part"]: row["calls"] for row in found["parts"]}
    assert calls == {
        **dict.fromkeys(LAYER, TINY.layers),
        **dict.fromkeys(("feed, embedding", "final norm", "head", "choice"), 1),
    }
    for kind in ("ops", "parts"):
        rows = found[kind]
        assert sum(row["calls"] for row in rows) == found["launches"] == 12 * TINY.layers + 4
        assert sum(row["calls"] * row["weight_bytes"] for row in rows) == found["weight_bytes"]
        # Microseconds are rounded to 3 places for each launch, floors to 4.
        total = sum(row["calls"] * row["us"] for row in rows)
        assert total == pytest.approx(1e3 * found["sum_of_ops_ms"], abs=0.1)
        assert sum(row["calls"] * row["floor_us"] for row in rows) == pytest.approx(1e3 * found["floor_ms"], abs=0.1)
        assert all(row["us"] > 0 for row in rows), "without a reader nothing is taken off"
    assert found["graph_ms"] > 0


def test_a_search_is_the_sum_of_its_pieces(searched: list[profiles.Piece]) -> None:
    whole = profiles.layers(searched, RATES)
    decode, select = (summary(piece.timed, piece.places, RATES) for piece in searched)
    assert whole == joined(decode, select)
    assert whole["launches"] == decode["launches"] + select["launches"] == decode["launches"] + 2
    assert whole["parts"] == [*decode["parts"], *select["parts"]]
    assert profiles.layers([], RATES) is None


def test_a_step_needs_tokens_half_way(opened: tuple[NllbModel, Bench]) -> None:
    for beams in (1, 2):
        assert pieces(opened, Case(1, beams, Lengths(5, 2))) == []
    assert list(profiles.lines([], Case(1, 1, Lengths(5, 2)), RATES)) == []


def test_lines_tell_of_everything_in_order(greedy: list[profiles.Piece]) -> None:
    (step,) = greedy
    lines = list(profiles.lines(greedy, Case(3, 1, LENGTHS), RATES))
    assert [line["index"] for line in lines] == list(range(len(lines)))
    about = {tuple(line[key] for key in ("batch", "beams", "source_tokens", "new_tokens")) for line in lines}
    assert about == {(3, 1, 5, 8)}
    assert len({tuple(line) for line in lines}) == 1, "the same keys, in the same order"
    launches = [line for line in lines if line["op"] is not None]
    assert Counter(line["kind"] for line in lines) - Counter(line["kind"] for line in launches) == {"copy": 3}
    assert [line["op"] for line in launches] == [one.spec.name for one in step.timed.calls]
    assert [line["name"] for line in lines] == [one.name for one in step.recorded.trace if one.kind != "wait"]
    assert [(line["name"], line["op"]) for line in lines if line["kind"] == "copy"] == [
        *2 * [("h2d", None)],
        ("d2h", None),
    ]
    for line, one, us, place in zip(launches, step.timed.calls, step.timed.us, step.places, strict=True):
        moved = cost(one)
        assert (line["read_bytes"], line["written_bytes"]) == (moved.read, moved.written)
        assert line["flop"] == moved.flop
        assert line["us"] == pytest.approx(us, abs=1e-3)
        assert (line["layer"], line["part"]) == place
        assert line["library"] == (line["kind"] == "gemm") == one.spec.library
    assert sum(line["floor_us"] for line in launches) == pytest.approx(
        1e3 * summary(step.timed, rates=RATES)["floor_ms"], rel=1e-2
    )


def test_kernels_have_a_geometry(greedy: list[profiles.Piece]) -> None:
    lines = list(profiles.lines(greedy, Case(3, 1, LENGTHS), RATES))
    for line in lines:
        shapes = (line["grid"], line["block"])
        assert all(shape is None or len(shape) == 3 for shape in shapes)
        assert (None in shapes) == (line["shared_bytes"] is None) == (line["kind"] != "kernel")
    (attention, *_) = (one for one in greedy[0].timed.calls if one.spec.name == "decode_attention")
    assert attention.op.plan is not None
    with open_device("host") as gpu:
        plan = attention.op.plan(attention.dims, attention.dtype, gpu.limits())
    found = next(line for line in lines if line["op"] == "decode_attention")
    assert found["name"] == plan.entry
    assert (found["grid"], found["block"], found["shared_bytes"]) == ([*plan.grid], [*plan.block], plan.shared_bytes)
    assert plan.shared_bytes > 0


def test_the_searches_lines_go_on_with_the_selection(searched: list[profiles.Piece]) -> None:
    lines = list(profiles.lines(searched, Case(2, 3, LENGTHS), RATES))
    assert [line["index"] for line in lines] == list(range(len(lines)))
    ops = [line["op"] for line in lines if line["op"]]
    assert ops[0] == "embed"
    assert ops[-2:] == ["beam_candidates", "beam_select"]


def test_a_launch_past_the_ops_has_no_figures(opened: tuple[NllbModel, Bench]) -> None:
    model, _ = opened
    with Batch(model, 2, LENGTHS) as batch:
        tokens = batch.choose(batch.prefill())
        with recording(model.gpu) as step:
            batch.choose(batch.decode(tokens))
    seen = step.calls.pop()
    at = step.first.pop()
    timed = Timed(step.calls, [1.0] * len(step.calls), 1.0)
    piece = profiles.Piece(step, timed, places(model.device_weights, step.calls))
    assert profiles.unseen([piece]) == 1
    line = list(profiles.lines([piece], Case(2, 1, LENGTHS), RATES))[-2]  # the copy of the ids comes last
    assert line["name"] == step.trace[at].name == seen.spec.entry(seen.dtype)
    assert line["op"] is line["us"] is line["read_bytes"] is line["floor_us"] is None
    assert line["grid"] is not None


def test_without_a_reader_nothing_is_flushed(opened: tuple[NllbModel, Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    _, bench = opened
    flushed: list[int] = []
    monkeypatch.setattr(bench.reader, "flush", flushed.append)
    calls = pieces(opened, Case(1, 1, LENGTHS))[0].timed.calls[:1]
    assert flushed == []
    kind_us(bench.clock, bench.reader, calls, 2)
    assert flushed


def test_rates_are_those_of_the_device(greedy: list[profiles.Piece]) -> None:
    slow, fast = (profiles.layers(greedy, rates) for rates in (RATES, H200))
    assert slow is not None
    assert fast is not None
    assert slow["floor_ms"] > 100 * fast["floor_ms"]


def test_a_layer_has_a_place_for_each_of_its_weights(opened: tuple[NllbModel, Bench]) -> None:
    model, _ = opened
    layer = model.device_weights.decoder[0]
    names = [field.name.replace("_", " ") for field in dataclasses.fields(layer)]
    assert set(names) <= set(LAYER)
