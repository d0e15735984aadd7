# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `beam_candidates` promises of each row, what it refuses, and that its two halves agree on names."""

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
from metrale.ops import beam_candidates as launcher
from metrale.ops.beam_candidates import MAX_CANDIDATES, OP, ROW_COLUMNS, STATIC_SHARED
from metrale.ops.processing import BANNED, SUPPRESS, WORDS
from tests.backends import cuda_only, host_only
from tests.ops.harness import run

Array = np.ndarray[Any, np.dtype[Any]]


def inputs_of(logits: Any, *, most: int = 3, capacity: int = 4, word_room: int = 8, **columns: Any) -> dict[str, Any]:
    """Return the op's parameters for contiguous float32 rows with a slot each, and ``most`` candidates.

    ``columns`` are those of ``counts``, "penalty" and "adjust": one value, or one for each row. Tables are 0.
    """
    logits = np.asarray(logits, np.float32)
    rows, vocab = logits.shape
    words, adjust, penalty = -(-vocab // 32), columns.pop("adjust", 1), columns.pop("penalty", 1)
    given = {"slot": np.arange(rows), "rules": np.arange(rows), "k": most, "forced": -1, **columns}
    counts = np.stack([np.broadcast_to(given.pop(name, 0), rows) for name in ROW_COLUMNS], axis=1)
    assert not given, f"no such column: {given}"
    return {
        "logits": logits,
        "counts": counts.astype(np.int32),
        "penalties": np.broadcast_to(np.asarray(penalty, np.float32), rows).copy(),
        "bans": np.zeros((rows, 2, words), np.uint32),
        "bad_words": np.zeros((rows, word_room), np.int32),
        "history": np.zeros((rows, capacity), np.int32),
        "values": np.full((rows, most), -77, np.float32),
        "ids": np.full((rows, most), -77, np.int32),
        "flags": np.full(rows, -77, np.int32),
        "rows": rows,
        "vocab": vocab,
        "stride": vocab,
        "slot_count": rows,
        "words": words,
        "word_room": word_room,
        "capacity": capacity,
        "most": most,
        "adjust": adjust,
    }


def test_the_source_names_the_same_columns() -> None:
    assert OP.source is not None
    names = dict(re.findall(r"enum (\w+) \{ (.*) \};", inlined(OP.source, OP.include)))
    assert names["Count"].split(", ") == [*(name.upper() for name in ROW_COLUMNS), "COUNTS"]


@pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA makes no compiler for macOS")
def test_the_kernel_has_no_more_shared_memory_than_the_plan_allows_for() -> None:
    assert OP.source is not None
    ptx = nvrtc.compile_source(inlined(OP.source, OP.include), "beam_candidates.cu", "compute_80", cache=None).decode()
    declared = re.findall(r"^\s*\.shared .*\[(\d+)\];", ptx, re.MULTILINE)
    assert len(declared) == len(OP.spec.dtypes), "one structure for each entry point"
    assert 0 < max(map(int, declared)) <= STATIC_SHARED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"most": 0}, "most: expected 1 to 256, got 0"),
        ({"most": MAX_CANDIDATES + 1}, "most: expected 1 to 256, got 257"),
        ({"words": 3}, "words: expected 4, a bit for each of 97 ids, got 3"),
        ({"vocab": 4_000_000, "words": 125_000}, r"vocab: expected at most \d+ ids to adjust on this device"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(gpu: GpuBackend, changed: Mapping[str, int], message: str) -> None:
    sizes: dict[str, Any] = {"rows": 1, "vocab": 97, "stride": 97, "slot_count": 1, "words": 4, "word_room": 2}
    sizes |= {"capacity": 1, "most": 1, "adjust": 1, **changed}
    with pytest.raises(ValueError, match=f"beam_candidates: {message}"):
        launcher(gpu, *[64] * 9, dtype="f32", **sizes)


@pytest.mark.parametrize("most", [1, 255, MAX_CANDIDATES])
@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_a_whole_row_of_one_value_gives_the_lowest_ids(gpu: GpuBackend, most: int, penalty: float) -> None:
    values = inputs_of(np.full((1, 70_000), -2), most=most, penalty=penalty)
    result = run(OP, gpu, "f32", values)
    assert result["ids"].tolist() == [list(range(most))]
    assert result["values"][0] == pytest.approx(-np.log(70_000), rel=1e-6)  # a float32 sum of equal terms


def test_logits_that_only_their_rounded_log_probabilities_make_equal_keep_their_order(gpu: GpuBackend) -> None:
    """Beside a logit of 1,000, the others round to the same number, which is what counts once there is a penalty."""
    logits = np.array([[0.0, 1000.0, 1e-6, 2e-6, 3e-6]])
    assert run(OP, gpu, "f32", inputs_of(logits, most=4))["ids"].tolist() == [[1, 4, 3, 2]]
    values = inputs_of(logits, most=4, penalty=2.0, length=1)
    values["history"][...] = 1
    assert run(OP, gpu, "f32", values)["ids"].tolist() == [[1, 0, 2, 3]]


@pytest.mark.parametrize(
    ("k", "forced", "ids"), [(1, 3, [3, 0, 0]), (3, 1, [1, 0, 2]), (3, 0, [0, 1, 2]), (2, 3, [3, 0, 0])]
)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_forced_id_comes_first_and_has_a_probability_of_one(
    gpu: GpuBackend, value: float, k: int, forced: int, ids: list[int]
) -> None:
    values = inputs_of(np.full((1, 4), value), k=k, forced=forced, mode=BANNED, penalty=2.0)
    values["bans"][...] = 0xFFFFFFFF
    result = run(OP, gpu, "f32", values)
    assert result["ids"].tolist() == [ids]
    assert result["values"].tolist() == [[0.0, -np.inf, -np.inf]]
    assert result["flags"].tolist() == [0 if value == 0 else 1]


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_of_an_infinite_logit_nothing_has_a_probability(gpu: GpuBackend, penalty: float) -> None:
    """Without a penalty the order is still the logits'."""
    result = run(OP, gpu, "f32", inputs_of([[1.0, 2.0, np.inf, np.nan]], penalty=penalty))
    assert result["ids"].tolist() == [[2, 1, 0] if penalty == 1 else [0, 1, 2]]
    assert result["values"].tolist() == [[-np.inf] * 3]
    assert result["flags"].tolist() == [1]


def test_all_processors_at_once(gpu: GpuBackend) -> None:
    """Ids from the largest logit down: banned, withheld, an n-gram, a bad word, with a penalty, and what is left."""
    values = inputs_of(
        [[4.0, 9.0, 8.0, 7.0, 6.0, 5.0, 0.0]],
        most=7,
        length=4,
        ngram=2,
        mode=BANNED | SUPPRESS | WORDS,
        penalty=2.0,
    )
    values["bans"][0, :, 0] = 1 << 1, 1 << 2
    values["history"][0] = [5, 3, 6, 5]
    values["bad_words"][0, :6] = [1, 3, 6, 6, 5, 4]
    result = run(OP, gpu, "f32", values)
    assert result["ids"].tolist() == [[0, 5, 6, 1, 2, 3, 4]]
    x = values["logits"][0].astype(np.float64)
    logp = x - np.log(np.exp(x).sum())
    expected = [logp[0], 2 * logp[5], 2 * logp[6]]
    assert result["values"][0, :3] == pytest.approx(expected, rel=1e-6)  # of float32
    assert result["values"][0, 3:].tolist() == [-np.inf] * 4


def test_what_a_row_does_not_ask_for_may_be_anything(gpu: GpuBackend) -> None:
    values = inputs_of(np.eye(4)[[2, 1]], most=1, slot=-7, length=99)
    values["history"][...] = 1 << 30
    values["bad_words"][...] = 1 << 30
    values["bans"][...] = 0xFFFFFFFF
    assert run(OP, gpu, "f32", values)["ids"].tolist() == [[2], [1]]


@pytest.mark.parametrize("dtype", OP.spec.dtypes)
@pytest.mark.parametrize("vocab", [4096, 4099])
def test_a_row_has_the_same_bits_alone_and_among_others(gpu: GpuBackend, dtype: str, vocab: int) -> None:
    kinds = ("everything", "plain", "penalty", "words", "forced")
    values: dict[str, Any] = dict(
        OP.make_inputs(np.random.default_rng(0), dtype, vocab=vocab, kinds=kinds, most=40, special=("nan",))
    )
    together = run(OP, gpu, dtype, values)
    for row in range(len(kinds)):
        part = {name: values[name][[row]] for name in ("logits", "counts", "penalties", "values", "ids", "flags")}
        alone = run(OP, gpu, dtype, {**values, **part, "rows": 1})
        for name in ("values", "ids", "flags"):
            assert alone[name].tobytes() == together[name][row : row + 1].tobytes(), (name, row)


@host_only
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"k": 0}, r"k: expected values in \[1, 4\), got 0"),
        ({"k": 4}, r"k: expected values in \[1, 4\), got 4"),
        ({"forced": 40}, r"forced: expected values in \[-1, 40\), got 40"),
        ({"forced": -2}, r"forced: expected values in \[-1, 40\), got -2"),
        ({"slot": 2, "penalty": 1.5}, r"slot: expected values in \[0, 2\), got 2"),
        ({"slot": -1, "mode": BANNED}, r"slot: expected values in \[0, 2\), got -1"),
        ({"slot": 2, "mode": WORDS}, r"slot: expected"),
        ({"length": 5, "ngram": 2}, r"length: expected values in \[0, 5\), got 5"),
        ({"length": -1}, r"length: expected values in \[0, 2147483648\), got -1"),
    ],
)
def test_an_index_that_is_out_of_range_is_refused(gpu: GpuBackend, asked: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidPointer, match=f"beam_candidates: {message}"):
        run(OP, gpu, "f32", inputs_of(np.zeros((2, 40)), **asked))


@host_only
@pytest.mark.parametrize("asked", [{"penalty": 1.5}, {"ngram": 2}, {"mode": SUPPRESS}, {"mode": WORDS}])
def test_a_launch_that_does_not_adjust_refuses_a_row_that_must_be(gpu: GpuBackend, asked: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match="beam_candidates: adjust: expected 1, as row 0 has"):
        run(OP, gpu, "f32", inputs_of(np.zeros((1, 40)), adjust=0, **asked))


@cuda_only
def test_more_candidates_than_there_is_room_for_are_not_written(gpu: GpuBackend) -> None:
    assert run(OP, gpu, "f32", inputs_of(np.eye(4)[[2]], k=1000, most=2))["ids"].tolist() == [[2, 0]]
