# SPDX-License-Identifier: MIT OR Apache-2.0
"""Greedy ids by the maxima that a step leaves: when they are joined, and that they are those of the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest

from gpu_runtime import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.pointer import DevicePtr
from metrale import Engine, Request
from metrale.model import FeedSource, PrefillSlice, SamplingParams, SequenceState
from metrale.nllb.decoder import Decoder
from metrale.nllb.logits import LogitsRows
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.nllb.backends import Clustered
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, poke, prefilled, results

LIMITS: Final[dict[str, Any]] = {"dtype": "float16", "max_batch": 6, "max_new_tokens": 12}
CASES: Final = [Case([5 + i, 6, 7 + i], 80 + i, 81, []) for i in range(6)]


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    if not device.is_host:
        if shared_gpu.limits().max_cluster == 1:
            pytest.skip("row maxima come from head_linear, whose products need a GPU with clusters (9.0)")
        yield shared_gpu
        shared_gpu.sweep_unreleased()
        return
    with Clustered(check=True) as backend:
        yield backend


def chosen(
    model: NllbModel, seqs: Sequence[SequenceState], first: int = 0, *, untouched: bool = True, logprobs: bool = False
) -> tuple[str, list[int], list[int]]:
    """Choose from the rows from ``first`` on; return which op did it, the ids and the flags."""
    row = model.logits_buffer_ptr().offset(first * model.logits_row_bytes())
    with results(model, 3, len(seqs)) as (dst, event), model.gpu.launch_trace() as trace:
        model.sample_batch_to_feed(row, seqs, dst, event, logprobs=logprobs, untouched=untouched)
        model.event_synchronize(event)
        ids, _, flags = dst.tolist()
    [kernel] = [one.name for one in trace if one.kind == "kernel" and not one.name.startswith("copy")]
    return kernel.split("_f")[0], ids, flags


def both(model: NllbModel, seqs: Sequence[SequenceState], first: int = 0, **options: bool) -> str:
    """Choose with the promise and without it, compare, and return which op it was with it."""
    how, *found = chosen(model, seqs, first, **options)
    plain, *expected = chosen(model, seqs, first, untouched=False, **options)
    assert (plain, found) == ("sample", expected)
    return how


def started(model: NllbModel, count: int) -> list[SequenceState]:
    return [prefilled(model, case) for case in CASES[:count]]


def test_a_steps_rows_are_joined(make_tiny: MakeModel) -> None:
    """Of two rows or more, all of which the step has written; and the ids are fed as ever."""
    model = make_tiny(**LIMITS)
    seqs = started(model, 5)
    model.decode_batch([9, 33, 11, 40, 41], seqs)
    seen = set()
    for _ in range(5):
        assert both(model, seqs) == both(model, seqs[2:4], 2) == both(model, seqs[4:], 4) == "join_maxima"
        _, ids, _ = chosen(model, seqs)
        seen.update(ids)
        model.decode_batch_fed([FeedSource(sampled=True)] * 5, seqs)
        for seq, token in zip(seqs, ids, strict=True):
            seq.tokens.append(token)
            seq.seq_len += 1
    assert len(seen) > 3


def test_without_the_promise_rows_are_read(make_tiny: MakeModel) -> None:
    """A caller may have written to them."""
    model = make_tiny(**LIMITS)
    seqs = started(model, 3)
    model.decode_batch([9, 33, 11], seqs)
    poke(model, 1, {50: 1000.0})
    how, ids, _ = chosen(model, seqs, untouched=False)
    assert (how, ids[1]) == ("sample", 50)


def test_one_row_has_no_maxima(make_tiny: MakeModel) -> None:
    """And those behind it keep theirs."""
    model = make_tiny(**LIMITS)
    seqs = started(model, 4)
    model.decode_batch([9, 33, 11, 40], seqs)
    model.decode(5, seqs[0])
    assert both(model, seqs[:1]) == both(model, seqs[:2]) == "sample"
    assert both(model, seqs[1:], 1) == "join_maxima"


def test_rows_of_a_prefill_are_read(make_tiny: MakeModel) -> None:
    """Beside a step, and where a step's rows have been."""
    model = make_tiny(**LIMITS)
    seqs = started(model, 3)
    model.decode_batch([9, 33, 11], seqs)
    fresh = [begin(model, case) for case in CASES[3:5]]
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES[3:5], fresh, strict=True)]
    model.mixed_forward_batch([5, 6], seqs[:2], slices)
    assert both(model, seqs[:2]) == "join_maxima"
    assert both(model, [*seqs[:2], *fresh]) == both(model, fresh, 2) == "sample"
    model.decode_batch([5, 6, 7], seqs)
    model.prefill_batch_chunk_rows([PrefillSlice.whole(CASES[5].tokens, begin(model, CASES[5]))], 0, 1)
    assert both(model, seqs) == both(model, seqs[1:2], 1) == "sample"
    assert both(model, seqs[:1]) == both(model, seqs[2:], 2) == "join_maxima"


def test_rows_that_nobody_has_written_are_read(make_tiny: MakeModel) -> None:
    model = make_tiny(**LIMITS)
    assert both(model, started(model, 2)) == "sample"


@pytest.mark.parametrize(
    ("params", "how"),
    [
        (SamplingParams(), "join_maxima"),
        (SamplingParams(forced_eos_id=2, max_new_tokens=1), "join_maxima"),
        (SamplingParams(temperature=1.0, seed=3), "sample"),
        (SamplingParams(repetition_penalty=1.5), "sample"),
        (SamplingParams(min_new_tokens=4, eos_ids=(2,)), "sample"),
    ],
)
def test_what_asks_for_more_than_the_largest_is_read(make_tiny: MakeModel, params: SamplingParams, how: str) -> None:
    model = make_tiny(**LIMITS)
    seqs = started(model, 3)
    model.begin_sampling(seqs[1], params)
    model.decode_batch([9, 33, 11], seqs)
    assert both(model, seqs) == how
    assert both(model, [seqs[0], seqs[2]]) == "join_maxima"
    assert both(model, seqs, logprobs=True) == "sample"


def test_of_a_step_that_failed_nothing_is_known(make_tiny: MakeModel) -> None:
    """Its rows may have been written, or not."""
    model = make_tiny(**LIMITS)
    seqs = started(model, 4)
    model.decode_batch([9, 33, 11, 40], seqs)
    with (
        mock.patch.object(Decoder, "run", side_effect=DeviceError("broken")),
        pytest.raises(DeviceError, match="broken"),
    ):
        model.decode_batch([9, 33], seqs[:2])
    assert both(model, seqs[:2]) == "sample"
    assert both(model, seqs[2:], 2) == "join_maxima"


@pytest.mark.parametrize("lanes", [1, 64, 70])
def test_where_bits_must_not_depend_on_the_rows(make_tiny: MakeModel, lanes: int) -> None:
    """Any number of rows has maxima, in as many launches as it takes."""
    model = make_tiny(**LIMITS | {"max_batch": 70}, batch_invariant=True)
    seqs = [prefilled(model, Case([5 + lane % 60, 6], 80, 60 + lane % 30, [])) for lane in range(lanes)]
    model.decode_batch([9 + lane for lane in range(lanes)], seqs)
    assert both(model, seqs) == both(model, seqs[-1:], lanes - 1) == "join_maxima"


def test_other_types_and_many_rows_have_none(make_tiny: MakeModel) -> None:
    model = make_tiny(**LIMITS | {"dtype": "float32"})
    seqs = started(model, 2)
    model.decode_batch([9, 33], seqs)
    assert both(model, seqs) == "sample"
    model = make_tiny(**LIMITS | {"max_batch": 65})
    seqs = [prefilled(model, CASES[lane % 6]) for lane in range(65)]
    model.decode_batch([9] * 65, seqs)
    assert both(model, seqs) == "sample"


def test_a_row_that_is_not_finite_is_told_of(make_tiny: MakeModel) -> None:
    """As it would be if it were read."""
    model = make_tiny(**LIMITS)
    seqs = started(model, 2)
    [base] = [entry.ptr for entry in model.gpu.alloc_report() if entry.tag == "weights"]
    at = DevicePtr(base).offset(int(model.device_weights.decoder_norm.bias) - int(base))
    model.gpu.copy_h2d(np.full(32, np.inf, np.float16), at)
    model.decode_batch([9, 33], seqs)
    assert both(model, seqs) == "join_maxima"
    _, ids, flags = chosen(model, seqs)
    assert all(flag & 1 for flag in flags)
    assert all(0 <= token < model.vocab_size() for token in ids)


def test_an_engine_joins_them(make_tiny: MakeModel) -> None:
    """And its ids are the same as without."""
    requests = [Request([5 + i, *range(40, 40 + i % 6)], 80, 60 + i, max_new_tokens=4 + i % 7) for i in range(14)]

    def run(model: NllbModel) -> list[Any]:
        with Engine(model) as engine:
            handles = [engine.submit(request) for request in requests]
            return [handle.result(60).ids for handle in handles]

    model = make_tiny(**LIMITS)
    with model.gpu.launch_trace() as trace:
        found = run(model)
    assert any(one.name.startswith("join_maxima") for one in trace)
    with mock.patch.object(LogitsRows, "maxima", return_value=DevicePtr.NULL), model.gpu.launch_trace() as trace:
        assert run(model) == found
    assert not any(one.name.startswith("join_maxima") for one in trace)
