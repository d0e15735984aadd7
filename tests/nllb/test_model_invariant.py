# SPDX-License-Identifier: MIT OR Apache-2.0
"""``batch_invariant``: what is computed for a sequence has the same bits alone and in any company.

On the host the products are those of a device that rounds them by their number of rows, so that one of another shape
shows in every type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.host import HostBackend
from metrale import BeamReq, Engine, Request, ScoreReq
from metrale.errors import InvalidInput
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import Device, host_only
from tests.draws import draws
from tests.nllb.adapters import NAMES, Shelf
from tests.nllb.backends import ByShape
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, arena, begin, changed_rows, head_product, prefilled
from tests.nllb.searching import same
from tests.nllb.stepping import LANES, PROGRAMS
from tests.nllb.test_model_products import own_products

DTYPES = draws(("float32", "float16", "bfloat16"), 2)
LIMITS: dict[str, Any] = {"max_batch": 70, "max_new_tokens": 12, "batch_invariant": True}

SUBJECT = Case([5, 6, 7, 8, 40], 80, 81, [])
FED = (9, 33, 11)
SIZES = (1, 2, 3, 8, 17, 33, 64, 70)
"""Of steps; those above 64 are multiplied in two launches."""


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    if not device.is_host:
        yield shared_gpu
        shared_gpu.sweep_unreleased()
        return
    with ByShape(check=True) as backend:
        yield backend


def logits(model: NllbModel, base: Any, row: int = 0) -> bytes:
    return model.copy_logits_to_host(base.offset(row * model.logits_row_bytes())).tobytes()


def alone(model: NllbModel, case: Case = SUBJECT, fed: Sequence[int] = FED) -> list[bytes]:
    """Return a sequence's logits after its prefill and after each of ``fed``."""
    seq = begin(model, case)
    found = [logits(model, model.prefill(case.tokens, seq))]
    found += [logits(model, model.decode(token, seq)) for token in fed]
    model.free_sequence(seq)
    return found


def neighbours(rng: np.random.Generator, count: int) -> list[Case]:
    return [
        Case(rng.integers(3, 97, rng.integers(0, 11)).tolist(), int(rng.integers(60, 97)), 60 + lane % 30, [])
        for lane in range(count)
    ]


def sliced(cases: Sequence[Case], seqs: Sequence[SequenceState]) -> list[PrefillSlice]:
    return [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases, seqs, strict=True)]


def together(model: NllbModel, size: int, place: int, rng: np.random.Generator) -> list[bytes]:
    """Return what `alone` does, of row ``place`` among ``size``.

    The rows before it are of older sequences, and the subject is prefilled beside a step of theirs, together with the
    rows behind it.
    """
    older, younger = neighbours(rng, place), neighbours(rng, size - place - 1)
    seqs = [begin(model, case) for case in older]
    if older:
        model.prefill_batch_chunk(sliced(older, seqs))
        for turn in range(3):
            some = seqs[: max(place // (turn + 1), 1)]
            model.decode_batch(rng.integers(3, 97, len(some)).tolist(), some)
    cases = [SUBJECT, *younger]
    fresh = [begin(model, case) for case in cases]
    mixed = model.mixed_forward_batch(rng.integers(3, 97, place).tolist(), seqs, sliced(cases, fresh))
    found = [logits(model, mixed.prefill_logits[0])]
    seqs += fresh
    for token in FED:
        fed = rng.integers(3, 97, size).tolist()
        base = model.decode_batch([*fed[:place], token, *fed[place + 1 :]], seqs)
        found.append(logits(model, base, place))
    for seq in seqs:
        model.free_sequence(seq)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_are_the_same_alone_and_in_any_batch(make_tiny: MakeModel, dtype: str) -> None:
    """Of any size, at any row, beside older and younger sequences of other lengths, and other prefills."""
    model, rng = make_tiny(dtype=dtype, **LIMITS), np.random.default_rng(1)
    expected = alone(model)
    assert len(set(expected)) == len(expected)
    for size in SIZES:
        place = int(rng.integers(size))
        assert together(model, size, place, rng) == expected, (size, place)
    assert alone(model) == expected


@host_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_host_as_it_is(make_tiny: MakeModel, dtype: str) -> None:
    """Where products go row by row, and no row is padded."""
    model, rng = make_tiny(HostBackend(check=True), dtype, **LIMITS), np.random.default_rng(2)
    expected = alone(model)
    for size, place in ((2, 1), (8, 3), (70, 66)):
        assert together(model, size, place, rng) == expected, (size, place)
    seqs = [prefilled(model, case) for case in neighbours(rng, 5)]
    with model.gpu.launch_trace() as trace:
        model.decode_batch([9] * 5, seqs)
    rows = {record.name.split("x")[0] for record in trace if record.kind == "gemm"}
    assert rows == ({"5"} if dtype == "float32" else set())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_many_lanes_there_are(make_tiny: MakeModel, dtype: str) -> None:
    assert alone(make_tiny(dtype=dtype, **LIMITS | {"max_batch": 1})) == alone(make_tiny(dtype=dtype, **LIMITS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_is_computed_as_by_steps(make_tiny: MakeModel, dtype: str) -> None:
    """In passes of several ids of each sequence, and of a prefix that is longer than one has rows."""
    model = make_tiny(dtype=dtype, **LIMITS | {"max_batch": 3})
    fed = [9, 33, 11, 40, 41, 42, 43]
    expected = alone(model, fed=fed)
    for given in (1, 3, 7):
        seqs = [begin(model, case) for case in (SUBJECT, *neighbours(np.random.default_rng(given), 2))]
        for seq, ids in zip(seqs, (fed[:given], [50] * given, [51] * 2), strict=True):
            seq.prefix_tokens = tuple(ids)
        slices = [PrefillSlice.whole(SUBJECT.tokens, seq) for seq in seqs]
        assert logits(model, model.prefill_batch_chunk(slices)[0]) == expected[given]
        for seq in seqs:
            model.free_sequence(seq)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_the_same_alone_and_together(make_tiny: MakeModel, dtype: str) -> None:
    model = make_tiny(dtype=dtype, **LIMITS)
    reqs = [ScoreReq([5 + i, 6, 7][: 1 + i % 3], [9, 10 + i, 2][i % 2 :], 80, 81 + i) for i in range(9)]
    scored = model.score_targets(reqs)
    for req, one in zip(reqs, scored, strict=True):
        assert model.score_targets([req])[0].logprobs == one.logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_searches_find_the_same_alone_and_together(make_tiny: MakeModel, dtype: str) -> None:
    """Hypotheses, their scores and the log-probabilities of their tokens."""
    model = make_tiny(dtype=dtype, **LIMITS)
    reqs = [
        BeamReq([5 + i, 6, 7, 8][: 1 + i % 4], 80, 60 + i, num_beams=(4, 1, 3, 2)[i % 4], max_new=5 + i % 6)
        for i in range(12)
    ]
    found = model.generate_beams(reqs)
    for req, one in zip(reqs, found, strict=True):
        [expected] = model.generate_beams([req])
        assert same(one, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_gives_a_request_the_same_alone_and_in_a_crowd(make_tiny: MakeModel, dtype: str) -> None:
    """Steps that the device feeds, with others that join and leave."""
    model = make_tiny(dtype=dtype, **LIMITS | {"max_batch": 8})
    requests = [
        Request([5 + i, *range(40, 40 + i % 6)], 80, 60 + i, max_new_tokens=4 + i % 8, logprobs=True) for i in range(24)
    ]
    with Engine(model) as engine:
        handles = [engine.submit(request) for request in requests]
        crowd = [(result.ids, result.logprobs) for result in (handle.result(60) for handle in handles)]
    for request, found in list(zip(requests, crowd, strict=True))[::3]:
        with Engine(model) as engine:
            result = engine.submit(replace(request)).result(60)
            assert (result.ids, result.logprobs) == found


@pytest.mark.parametrize(("dtype", "activation"), [("bfloat16", "gelu"), ("float32", "relu")])
def test_adapters_of_neighbours_do_not_matter(tmp_path: Path, gpu: GpuBackend, dtype: str, activation: str) -> None:
    """Those with one and those without are rounded in the same places, whoever is beside them."""
    shelf = Shelf(tmp_path, encoder_layers=1, decoder_layers=1, activation_function=activation)

    def start(slot: int) -> SequenceState:
        seq = begin(model, SUBJECT)
        seq.adapter_slot = slot
        return seq

    with shelf.load(gpu, NAMES, dtype, max_batch=16, batch_invariant=True) as model:
        slots = [index % 6 - 1 for index in range(16)]
        seqs = [start(slot) for slot in slots]
        rows = [[logits(model, ptr)] for ptr in model.prefill_batch_chunk(sliced([SUBJECT] * 16, seqs))]
        with gpu.launch_trace() as trace:
            base = model.decode_batch([9] * 16, seqs)
        library = [record.name for record in trace if record.kind == "gemm"]
        assert not library or dtype == "float32"
        for lane, seq in enumerate(seqs):
            rows[lane].append(logits(model, base, lane))
            model.free_sequence(seq)
        assert len({row for pair in rows for row in pair}) == 2 * len({*slots})
        for slot in {*slots}:
            one = start(slot)
            expected = [logits(model, model.prefill(SUBJECT.tokens, one)), logits(model, model.decode(9, one))]
            model.free_sequence(one)
            assert all(pair == expected for pair, own in zip(rows, slots, strict=True) if own == slot)


@pytest.mark.parametrize(("name", "dtype"), [*zip(PROGRAMS, cycle(["float16", "float32"]))])
def test_graphs_of_steps_change_no_bit(make_tiny: MakeModel, name: str, dtype: str) -> None:
    limits = LIMITS | {"max_batch": LANES, "max_new_tokens": 8}
    plain, graphs = (make_tiny(dtype=dtype, step_graphs=wanted, **limits) for wanted in (False, True))
    expected = PROGRAMS[name](plain)
    assert [PROGRAMS[name](graphs), PROGRAMS[name](graphs)] == [expected, expected]


@host_only
def test_the_same_bits_in_any_order(make_tiny: MakeModel) -> None:
    limits = LIMITS | {"max_batch": LANES, "max_new_tokens": 8}
    expected = PROGRAMS["mixed"](make_tiny(**limits))
    assert PROGRAMS["mixed"](make_tiny(ByShape(check=True, order="adversarial"), **limits)) == expected


@host_only
def test_both_sides_of_a_mixed_step_have_memory_for_rows_that_nobody_wants(
    make_tiny: MakeModel, gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may run at the same time."""
    model, places, multiply = make_tiny(**LIMITS), [], gpu.gemm
    lanes = [prefilled(model, SUBJECT), prefilled(model, SUBJECT)]
    slices = sliced([SUBJECT], [begin(model, SUBJECT)])

    def watched(a: int, w: int, c: int, m: int, n: int, *args: Any, **options: Any) -> None:
        places.extend([int(c)] if n == model.shape.head_rows else [])
        multiply(a, w, c, m, n, *args, **options)

    monkeypatch.setattr(gpu, "gemm", watched)
    model.mixed_forward_batch([9, 10], lanes, slices)
    first, second = sorted(places)
    assert second - first >= 64 * model.logits_row_bytes()
    rows = model.logits_buffer_ptr(), model.logits_buffer_ptr().offset(2 * 70 * model.logits_row_bytes())
    assert not any(rows[0] <= place < rows[1] for place in places)


@pytest.mark.parametrize("dtype", DTYPES)
def test_launches_of_a_step(make_tiny: MakeModel, dtype: str) -> None:
    """Layers in products of one order. The library's head has 64 rows: those wanted are copied, unless all are."""
    model = make_tiny(dtype=dtype, step_graphs=False, **LIMITS)
    head, layers = head_product(model), 3 * 6
    larger = "cluster_linear chained" if model.gpu.limits().max_cluster > 1 else "thin_linear"
    seqs = [prefilled(model, case) for case in neighbours(np.random.default_rng(3), 70)]
    copied = []
    for lanes, groups in ((64, 1), (1, 1), (33, 1), (70, 2)):
        with model.gpu.launch_trace() as trace:
            model.decode_batch([9] * lanes, seqs[:lanes])
        products = [record.name.split("x", 1) for record in trace if record.kind == "gemm"]
        heads = [record for record in trace if record.name.startswith("head_linear_")]
        copied.append(sum(record.kind == "copy" for record in trace))
        if dtype != "float32":
            own = larger if lanes > 8 else "thin_linear"
            assert (len(products), len(heads), own_products(trace)) == (0, groups, {own: groups * layers})
            continue
        assert {rows for rows, _ in products} == {"64"}
        assert sum(shape == head for _, shape in products) == groups
        assert (len(products), len(heads), own_products(trace)) == (groups * (1 + layers), 0, {})
    assert copied == [copied[0], *[copied[0] + (dtype == "float32")] * 3]


def test_an_encoder_pass_has_one_source(make_tiny: MakeModel) -> None:
    """And a decoder pass of a prefill has as many as there is room for."""
    model = make_tiny(**LIMITS)
    cases = neighbours(np.random.default_rng(4), 5)
    slices = sliced(cases, [begin(model, case) for case in cases])
    with model.gpu.launch_trace() as trace:
        model.prefill_batch_chunk(slices)
    cross = [record.name.split("x")[0] for record in trace if record.kind == "gemm" and record.name.endswith("x192x32")]
    assert cross == [str(len(case.src)) for case in cases]
    assert [record.name for record in trace if record.name.endswith(head_product(model))] == [
        f"64x{head_product(model)}"
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_not_asked_for_stay_as_they_are(make_tiny: MakeModel, dtype: str) -> None:
    """Also those behind a step's, which a product of 64 rows would reach."""
    model = make_tiny(dtype=dtype, **LIMITS | {"max_batch": 5})
    cases = neighbours(np.random.default_rng(5), 5)
    seqs = [prefilled(model, case) for case in cases]
    for lanes in (1, 3, 5):
        before = arena(model)
        model.decode_batch([9 + lanes] * lanes, seqs[:lanes])
        assert changed_rows(before, arena(model)) == list(range(lanes))
    before = arena(model)
    model.prefill(SUBJECT.tokens, seqs[3])
    assert changed_rows(before, arena(model)) == [5 + seqs[3].slot_idx]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_is_allocated(tiny_folder: Path, gpu: GpuBackend, dtype: str) -> None:
    """Two sides of logits, and activations, for 64 rows each, where they are needed; the option has no other sums."""
    limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
    plain = metrale.memory_plan(tiny_folder, gpu, dtype, **limits)
    plan = metrale.memory_plan(tiny_folder, gpu, dtype, **limits, batch_invariant=True)
    width = 3 * 32 + max(3 * 32, 64)
    rows = 2 * 64 * 128 + (64 - 4 + 64 - 8) * width if dtype == "float32" else 0
    assert plan.workspace - plain.workspace == rows * dtypes.itemsize(dtypes.short_name(dtype))
    sums = 0 if dtype == "float32" else 3 * 2 * (3 * 32 + 32 + 64) * 4  # for one row's LayerNorms, in three layers
    assert plain.weights - plan.weights == sums
    assert replace(plan, workspace=0, weights=0) == replace(plain, workspace=0, weights=0)
    with metrale.load(tiny_folder, gpu, dtype, **limits, batch_invariant=True) as model:
        assert model.memory_plan() == plan
        assert gpu.live_bytes() == plan.total


@pytest.mark.parametrize("wrong", [None, 1, "yes", 0.0])
def test_it_is_true_or_false(tiny_folder: Path, wrong: Any) -> None:
    calls: list[Any] = [metrale.load, metrale.memory_plan]
    for call in calls:
        with pytest.raises(InvalidInput) as refused:
            call(tiny_folder, "host", batch_invariant=wrong)
        assert refused.value.argument == "batch_invariant"
