# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `sample` promises of each row, what it refuses, and that its two halves agree on names."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.cuda import nvrtc
from gpu_runtime.errors import InvalidPointer
from gpu_runtime.kernel_source import inlined
from gpu_runtime.limits import MINIMUM
from metrale import ops
from metrale.ops import sample as launcher
from metrale.ops.processing import BANNED, SUPPRESS, WORDS
from metrale.ops.sample import (
    COUNT_COLUMNS,
    KEEP,
    LOGPROB,
    MOST_VOCAB,
    NOT_FINITE,
    NOTHING_LEFT,
    OP,
    SETTING_COLUMNS,
    STATIC_SHARED,
)
from tests.backends import cuda_only, host_only
from tests.ops.harness import download, run, upload
from tests.ops.sampling import inputs_of, row_of

Array = np.ndarray[Any, np.dtype[Any]]


def test_the_source_names_the_same_columns_bits_and_flags() -> None:
    assert OP.source is not None
    source = inlined(OP.source, OP.include)
    names = {kind: body.split(", ") for kind, body in re.findall(r"enum (\w+) \{ (.*) \};", source)}
    assert names["Count"] == [*(name.upper() for name in COUNT_COLUMNS), "COUNTS"]
    assert names["Setting"] == [*(name.upper() for name in SETTING_COLUMNS), "SETTINGS"]
    bits = {"BANNED": BANNED, "SUPPRESS": SUPPRESS, "KEEP": KEEP, "LOGPROB": LOGPROB, "WORDS": WORDS}
    assert names["Mode"] == [f"{name} = {bit}" for name, bit in bits.items()]
    assert names["Flag"] == [f"NOT_FINITE = {NOT_FINITE}", f"NOTHING_LEFT = {NOTHING_LEFT}"]


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA makes no compiler for macOS")
def test_the_kernel_has_no_more_shared_memory_than_the_plan_allows_for() -> None:
    assert OP.source is not None
    ptx = nvrtc.compile_source(inlined(OP.source, OP.include), "sample.cu", "compute_80", cache=None).decode()
    declared = re.findall(r"^\s*\.shared .*\[(\d+)\];", ptx, re.MULTILINE)
    assert len(declared) == len(OP.spec.entries()), "one structure for each entry point"
    assert 0 < max(map(int, declared)) <= STATIC_SHARED


@pytest.mark.parametrize("vocab", [97, 8240, 256_206])
def test_shared_memory_is_asked_for_only_to_adjust(vocab: int) -> None:
    dims = {"rows": 3, "vocab": vocab, "words": -(-vocab // 32), "adjust": 0, "greedy": 0}
    assert OP.plan is not None
    assert OP.plan(dims, "f16", MINIMUM).shared_bytes == 0
    plan = OP.plan({**dims, "adjust": 1}, "f16", MINIMUM)
    assert plan.shared_bytes == 2 * 4 * dims["words"] <= MINIMUM.max_shared_bytes - STATIC_SHARED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"words": 3}, "words: expected 4, a bit for each of 97 ids, got 3"),
        (
            {"vocab": 4_000_000, "words": 125_000},
            r"vocab: expected at most \d+ ids to adjust on this device, got 4000000",
        ),
        ({"vocab": MOST_VOCAB + 1, "words": 1, "adjust": 0}, f"vocab: expected at most {MOST_VOCAB} ids"),
        ({"greedy": 1}, "adjust: expected 0 with greedy, got 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(gpu: GpuBackend, changed: Mapping[str, int], message: str) -> None:
    sizes: dict[str, Any] = {"rows": 1, "vocab": 97, "stride": 97, "slot_count": 1, "words": 4, "capacity": 1}
    sizes |= {"word_room": 2, "cell_count": 1, "adjust": 1, "greedy": 0, **changed}
    with pytest.raises(ValueError, match=f"sample: {message}"):
        launcher(gpu, *[64] * 13, dtype="f32", **sizes)


@pytest.mark.parametrize("setting", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 1}])
def test_a_vocabulary_of_one(gpu: GpuBackend, setting: Mapping[str, Any]) -> None:
    result = run(OP, gpu, "f32", inputs_of([[3.5]], mode=LOGPROB | KEEP, cell=0, **setting))
    assert [result[name].tolist() for name in ("ids", "logprobs", "flags")] == [[0], [0.0], [0]]
    assert result["history"].tolist() == [[0]]
    assert result["cells"].tolist() == [0, -77, -77, -77]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_the_id_is_one_of_the_vocabulary_even_when_nothing_may_be_chosen(
    gpu: GpuBackend, temperature: float, value: float
) -> None:
    result = run(OP, gpu, "f32", inputs_of(np.full((2, 40), value), temperature=temperature, cell=[0, 1]))
    assert result["ids"].tolist() == result["cells"].tolist()[:2] == [0, 0]
    assert result["flags"].tolist() == [NOT_FINITE | NOTHING_LEFT] * 2


def test_infinity_is_drawn_before_anything_else_and_the_lowest_id_wins_when_greedy(gpu: GpuBackend) -> None:
    logits = np.zeros((40, 40))
    logits[:, [7, 31]] = np.inf
    values = inputs_of(logits, temperature=[0.0] + [1.0] * 39, seed=np.arange(40), top_p=0.9)
    result = run(OP, gpu, "f32", values)
    assert result["ids"][0] == 7
    assert set(result["ids"].tolist()) == {7, 31}
    assert (result["flags"] == NOT_FINITE).all()


def test_neither_bit_of_adjust_nor_other_rows_change_a_row_that_asks_for_nothing(gpu: GpuBackend) -> None:
    logits = np.random.default_rng(0).standard_normal((6, 300))
    plain = run(OP, gpu, "f32", inputs_of(logits, temperature=0.8, top_k=9, adjust=0))
    adjusting = inputs_of(logits, temperature=0.8, top_k=9, penalty=[1, 1, 1, 1, 2, 1], mode=[0, 0, 0, 0, 0, 1])
    adjusting["bans"][5] = 0xFFFFFFFF
    adjusted = run(OP, gpu, "f32", adjusting)
    assert plain["ids"].tolist()[:4] == adjusted["ids"].tolist()[:4]
    assert adjusted["flags"].tolist() == [0] * 5 + [NOTHING_LEFT]


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("vocab", [4096, 4099])
def test_a_row_has_the_same_bits_alone_and_in_any_place_among_any_others(
    gpu: GpuBackend, dtype: str, vocab: int
) -> None:
    kinds = ("everything", "warm", "top-k top-p", "score", "2-gram")
    values: dict[str, Any] = dict(OP.make_inputs(np.random.default_rng(0), dtype, vocab=vocab, kinds=kinds))
    together = run(OP, gpu, dtype, values)
    shuffled = [3, 0, 4, 2, 1]
    moved = run(OP, gpu, dtype, row_of(values, shuffled))
    for row in range(len(kinds)):
        alone = run(OP, gpu, dtype, row_of(values, [row]))
        for name in ("ids", "logprobs", "flags"):
            assert alone[name].tobytes() == together[name][row : row + 1].tobytes(), (name, row)
            assert moved[name][shuffled.index(row)].tobytes() == together[name][row].tobytes(), (name, row)


def test_a_launch_repeats_itself(gpu: GpuBackend) -> None:
    kinds = ("everything", "top-p most", "hot", "top-k most") * 4
    values = OP.make_inputs(np.random.default_rng(1), "f16", vocab=8240, kinds=kinds, levels=9)
    first, second = run(OP, gpu, "f16", values), run(OP, gpu, "f16", values)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_the_chosen_id_goes_through_its_cell_into_the_next_step(gpu: GpuBackend) -> None:
    values = inputs_of(np.eye(4)[[2, 0, 3]], cell=[4, -1, 0], cell_count=6)
    pointers = [upload(gpu, values[arg.name]) for arg in OP.spec.args if arg.is_pointer]
    sizes = {arg.name: values[arg.name] for arg in OP.spec.args if not arg.is_pointer}
    launcher(gpu, *pointers, dtype="f32", **sizes)
    ids, index, positions = (upload(gpu, np.array(x, np.int32)) for x in ([1, 1, 1], [4, -1, 0], [0, 0, 0]))
    table, shift = upload(gpu, np.arange(4, dtype=np.float32)), upload(gpu, np.zeros(1, np.float32))
    out = upload(gpu, np.zeros(3, np.float32))
    ops.embed(
        gpu,
        ids,
        positions,
        table,
        shift,
        out,
        rows=3,
        width=1,
        vocab=4,
        position_count=1,
        scale=1.0,
        dtype="f32",
        cells=pointers[7],
        cell_index=index,
        cell_count=6,
    )
    assert download(gpu, out, np.zeros(3, np.float32)).tolist() == [2, 1, 3]


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("setting", [{}, {"temperature": 1.0}, {"mask0": 3, "penalty": 2.0}, {"mode": BANNED}])
def test_a_forced_id_is_chosen_whatever_the_logits_are(
    gpu: GpuBackend, value: float, setting: Mapping[str, Any]
) -> None:
    """Nothing is left to be chosen, in the last two settings because of the mask or the bans; that is no flag here."""
    logits = np.full((1, 40), value)
    logits[0, 7] = 2 * value + 1
    mode = setting.get("mode", 0) | KEEP | LOGPROB
    values = inputs_of(logits, **{**setting, "mode": mode}, forced=3, cell=1, length=1)
    values["bans"][...] = 0xFFFFFFFF
    result = run(OP, gpu, "f32", values)
    assert [result[name].tolist() for name in ("ids", "history", "cells")] == [[3], [[0, 3]], [-77, 3, -77, -77]]
    assert result["flags"].tolist() == [0 if value == 0 else NOT_FINITE]
    if value == 0:
        assert result["logprobs"].item() == pytest.approx(-np.log(39 + np.e), rel=1e-6)  # a float32 sum of 40 terms


def test_a_forced_id_of_an_impossible_logit_has_no_probability(gpu: GpuBackend) -> None:
    logits = np.zeros((1, 40))
    logits[0, 3] = -np.inf
    result = run(OP, gpu, "f32", inputs_of(logits, forced=3, mode=LOGPROB))
    assert (result["ids"].item(), result["logprobs"].item()) == (3, -np.inf)


@pytest.mark.parametrize(
    ("length", "chosen"),
    [(0, 9), (1, 9), (2, 8), (3, 7), (4, 7)],  # of ids 9, 8 and 7, in this order, what the words leave
)
def test_a_bad_word_is_not_completed_once_the_history_has_as_many_ids(
    gpu: GpuBackend, length: int, chosen: int
) -> None:
    values = inputs_of(np.arange(10)[None], mode=WORDS, length=length, capacity=4, word_room=9)
    values["bad_words"][0] = [2, 4, 6, 9, 5, 9, 5, 5, 8]
    values["history"][...] = 5
    assert run(OP, gpu, "f32", values)["ids"].tolist() == [chosen]
    values["history"][...] = [5, 6, 5, 5]  # only words that end in what came last
    assert run(OP, gpu, "f32", values)["ids"].tolist() == [{2: 9, 3: 8}.get(length, chosen)]


@cuda_only
def test_a_table_of_bad_words_that_is_malformed_is_passed_over(gpu: GpuBackend) -> None:
    """Nothing outside of it is read, which a memory checker sees, and the words that are sound count."""
    tables = [
        [1 << 30, 0, 0, 0, 0, 0, 0, 0],
        [-5, 4, 6, 8, 5, 9, 5, 8],
        [2, 4, 6, 1 << 30, 5, 9, 5, 8],
        [2, -4, 1 << 30, 6, 5, 9, 5, 8],
        [2, 7, 6, 8, 5, 9, 5, 8],
        [1, 4, 6, 0, 5, 12, 0, 0],
        [1, 4, 5, 0, 9, 0, 0, 0],
    ]
    logits = np.tile(np.arange(10), (len(tables), 1))
    values = inputs_of(logits, mode=WORDS, length=3, capacity=3)
    values["bad_words"][...] = tables
    values["history"][...] = 5
    assert run(OP, gpu, "f32", values)["ids"].tolist() == [9, 9, 8, 9, 9, 9, 9]


@pytest.mark.parametrize(("length", "kept"), [(0, [2, -5, -5]), (2, [-5, -5, 2]), (3, [-5, -5, -5]), (9, [-5, -5, -5])])
def test_an_id_is_kept_where_there_is_room(gpu: GpuBackend, length: int, kept: list[int]) -> None:
    values = inputs_of(np.eye(4)[[2]], mode=KEEP, length=length, capacity=3)
    values["history"][...] = -5
    assert run(OP, gpu, "f32", values)["history"].tolist() == [kept]


def test_what_a_row_does_not_ask_for_may_be_anything(gpu: GpuBackend) -> None:
    values = inputs_of(np.eye(4)[[2, 1]], temperature=[0.0, 0.01], slot=-7, length=99, capacity=3)
    values["history"][...] = 1 << 30
    values["bans"][...] = 0xFFFFFFFF
    assert run(OP, gpu, "f32", values)["ids"].tolist() == [2, 1]


@host_only
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"slot": 2, "penalty": 1.5}, r"slot: expected values in \[0, 2\), got 2"),
        ({"slot": -1, "ngram": 2}, r"slot: expected values in \[0, 2\), got -1"),
        ({"slot": 2, "mode": KEEP}, r"slot: expected"),
        ({"slot": 2, "mode": SUPPRESS}, r"slot: expected"),
        ({"length": 4, "capacity": 3, "penalty": 1.5}, r"length: expected values in \[0, 4\), got 4"),
        ({"length": 4, "capacity": 3, "ngram": 1}, r"length: expected values in \[0, 4\), got 4"),
        ({"length": -1}, r"length: expected values in \[0, 2147483648\), got -1"),
        ({"slot": 2, "mode": WORDS}, r"slot: expected"),
        ({"length": 4, "capacity": 3, "mode": WORDS}, r"length: expected values in \[0, 4\), got 4"),
        ({"forced": 40}, r"forced: expected values in \[-1, 40\), got 40"),
        ({"forced": -2}, r"forced: expected values in \[-1, 40\), got -2"),
        ({"cell": 4}, r"cell: expected values in \[-1, 4\), got 4"),
        ({"mask0": 40}, r"mask0: expected values in \[-1, 40\), got 40"),
        ({"mask1": -2}, r"mask1: expected values in \[-1, 40\), got -2"),
    ],
)
def test_an_index_that_is_out_of_range_is_refused(gpu: GpuBackend, asked: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidPointer, match=f"sample: {message}"):
        run(OP, gpu, "f32", inputs_of(np.zeros((2, 40)), **asked))


@host_only
@pytest.mark.parametrize("wrong", [-1, 40])
def test_an_id_of_the_history_that_is_out_of_range_is_refused(gpu: GpuBackend, wrong: int) -> None:
    values = inputs_of(np.zeros((1, 40)), length=2, ngram=2)
    values["history"][0, 1] = wrong
    with pytest.raises(InvalidPointer, match=r"sample: history: expected values in \[0, 40\)"):
        run(OP, gpu, "f32", values)


@host_only
@pytest.mark.parametrize(
    "asked", [{"penalty": 1.5}, {"ngram": 2}, {"mode": BANNED}, {"mode": SUPPRESS}, {"mode": WORDS}]
)
def test_a_launch_that_does_not_adjust_refuses_a_row_that_must_be(gpu: GpuBackend, asked: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="sample: adjust: expected 1, as row 0 has"):
        run(OP, gpu, "f32", inputs_of(np.zeros((1, 40)), adjust=0, **asked))


@host_only
@pytest.mark.parametrize("asked", [{"temperature": [0, 0.5]}, {"mask0": [-1, 0]}, {"mask1": [-1, 3]}])
def test_a_greedy_launch_refuses_a_row_that_asks_for_more(gpu: GpuBackend, asked: Mapping[str, Any]) -> None:
    logits = np.eye(4)[[2, 1]]
    with pytest.raises(ValueError, match="sample: greedy: expected 0, as row 1 asks for more than its largest logit"):
        run(OP, gpu, "f32", inputs_of(logits, greedy=1, **asked))
    forced = run(OP, gpu, "f32", inputs_of(logits, greedy=1, forced=[-1, 3], **asked))
    assert forced["ids"].tolist() == [2, 3]


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize(("vocab", "pad"), [(8240, 0), (50003, 2)])
def test_a_greedy_launch_finds_the_same_bits(gpu: GpuBackend, dtype: str, vocab: int, pad: int) -> None:
    kinds = ("score", "greedy", "forced", "score", "forced", "score")
    special = ("nan", "-inf", "last inf")
    options: dict[str, Any] = {"vocab": vocab, "pad": pad, "kinds": kinds, "special": special, "adjust": 0}
    values: dict[str, Any] = dict(OP.make_inputs(np.random.default_rng(0), dtype, **options))
    one_block, several = run(OP, gpu, dtype, values), run(OP, gpu, dtype, values | {"greedy": 1})
    assert all(one_block[name].tobytes() == several[name].tobytes() for name in one_block if name != "parts")
