# SPDX-License-Identifier: MIT OR Apache-2.0
"""A decode step and a prefill in one call: the same results as one by one, in rows of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpu_runtime.pointer import DevicePtr
from metrale.errors import NotSupported, SequenceError
from metrale.model import FeedSource, MixedBatchResult, PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import (
    Call,
    Case,
    arena,
    assert_refused,
    begin,
    changed_rows,
    prefilled,
    row_index,
    state,
)

CASES = [
    Case([5, 6, 7], 80, 81, []),
    Case([30, 31], 82, 83, []),
    Case([], 84, 85, []),
    Case([40, 41, 42, 43, 44], 86, 87, []),
]
TOKENS = [9, 10, 11, 12]
PARTS = [(n, m) for n in range(5) for m in range(5 - n) if n + m]
"""Lanes that decode, and sources that are prefilled: all that 4 slots allow."""


def whole(cases: Sequence[Case], seqs: Sequence[SequenceState]) -> list[PrefillSlice]:
    return [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases, seqs, strict=True)]


def lanes(model: NllbModel, n: int, m: int) -> tuple[list[SequenceState], list[SequenceState]]:
    """Return ``n`` sequences that can decode and ``m`` new ones, as always in the same slots and spans."""
    return [prefilled(model, case) for case in CASES[:n]], [begin(model, case) for case in CASES[4 - m :]]


@pytest.mark.parametrize(("n", "m"), PARTS)
@pytest.mark.parametrize("fed", [False, True])
def test_the_same_bits_as_one_by_one(tiny: NllbModel, n: int, m: int, fed: bool) -> None:
    """Lane ``i`` in row ``i``, source ``i`` in row ``n + i``, and no other row is written.

    The same products of the same shapes: nothing is rounded otherwise.
    """
    decoding, fresh = lanes(tiny, n, m)
    if n:
        tiny.decode_batch(TOKENS[:n], decoding)
    tiny.prefill_batch_chunk_rows(whole(CASES[4 - m :], fresh), 0, n)
    expected, noted = arena(tiny), [state(seq) for seq in (*decoding, *fresh)]
    for seq in (*decoding, *fresh):
        tiny.free_sequence(seq)
    tiny.gpu.copy_h2d(np.full(tiny.logits_row_bytes(), 3, np.float32), tiny.logits_buffer_ptr())  # four rows

    decoding, fresh = lanes(tiny, n, m)
    before, slices, stream = arena(tiny), whole(CASES[4 - m :], fresh), tiny.create_stream()
    if fed:
        sources = [FeedSource(token) for token in TOKENS[:n]]
        result = tiny.mixed_forward_batch_fed(sources, decoding, slices, stream)
        for seq, token in zip(decoding, TOKENS, strict=False):
            assert (len(seq.tokens), seq.seq_len) == (2, 2)  # the caller's to update
            seq.tokens, seq.seq_len = [*seq.tokens, token], 3
    else:
        result = tiny.mixed_forward_batch(TOKENS[:n], decoding, slices, stream)
    tiny.synchronize(stream)
    assert isinstance(result, MixedBatchResult)
    assert result.decode_logits == (tiny.logits_buffer_ptr() if n else DevicePtr.NULL)
    assert [row_index(tiny, ptr) for ptr in result.prefill_logits] == list(range(n, n + m))
    assert changed_rows(before, arena(tiny)) == list(range(n + m))
    assert arena(tiny)[: n + m, :97].tobytes() == expected[: n + m, :97].tobytes()
    assert [state(seq) for seq in (*decoding, *fresh)] == noted
    tiny.gpu.destroy_stream(stream)


@pytest.mark.parametrize("n", range(4))
def test_a_single_prefill_goes_to_its_slots_row(tiny: NllbModel, n: int) -> None:
    """As a bare one does; the step beside it is what it is alone."""
    decoding, (fresh,) = lanes(tiny, n, 1)
    row = tiny.copy_logits_to_host(tiny.prefill(CASES[3].tokens, fresh)).tobytes()
    steps = arena(tiny)[:n]
    if n:
        tiny.decode_batch(TOKENS[:n], decoding)
        steps = arena(tiny)[:n]
        for case, seq in zip(CASES, decoding, strict=False):
            tiny.prefill(case.tokens, seq)
    before = arena(tiny)
    result = tiny.mixed_forward(TOKENS[:n], decoding, CASES[3].tokens, fresh, 0, len(CASES[3].tokens), True)
    assert result.decode_logits == (tiny.logits_buffer_ptr() if n else DevicePtr.NULL)
    assert row_index(tiny, result.prefill_logits) == 4 + fresh.slot_idx
    assert set(changed_rows(before, arena(tiny))) <= {*range(n), 4 + fresh.slot_idx}
    assert arena(tiny)[:n].tobytes() == steps.tobytes()
    assert tiny.copy_logits_to_host(result.prefill_logits).tobytes() == row
    assert [seq.tokens[1:] for seq in decoding] == [[81, 9], [83, 10], [85, 11]][:n]
    assert (fresh.tokens, fresh.seq_len, fresh.prompt_len) == ([2, 87], 2, 2)


@pytest.mark.parametrize("fed", [False, True])
def test_nothing_at_all_is_nothing(tiny: NllbModel, fed: bool) -> None:
    with tiny.gpu.launch_trace() as trace:
        result = (tiny.mixed_forward_batch_fed if fed else tiny.mixed_forward_batch)([], [], [])
    assert (result.decode_logits, result.prefill_logits) == (DevicePtr.NULL, [])
    assert not trace


def one(tokens: list[Any], seq: SequenceState) -> list[PrefillSlice]:
    return [PrefillSlice.whole(tokens, seq)]


WRONG: list[tuple[str, str, Call]] = [
    ("a sequence in both parts", "seqs, streams", lambda m, a, b: m.mixed_forward_batch([5], [a], one([5], a))),
    ("a prefill twice", "seqs, streams", lambda m, a, b: m.mixed_forward_batch([5], [a], one([5], b) * 2)),
    ("a lane twice", "seqs", lambda m, a, b: m.mixed_forward_batch([5, 6], [a, a], one([5], b))),
    ("a wrong id to decode", "decode_tokens[0]", lambda m, a, b: m.mixed_forward_batch([97], [a], one([5], b))),
    ("a wrong source id", "streams[0][1]", lambda m, a, b: m.mixed_forward_batch([5], [a], one([5, 97], b))),
    ("no ids to decode", "decode_tokens, seqs", lambda m, a, b: m.mixed_forward_batch([], [a], one([5], b))),
    ("ids for nobody", "decode_tokens, seqs", lambda m, a, b: m.mixed_forward_batch([5], [], one([5], b))),
    ("what is no ids", "decode_tokens", lambda m, a, b: m.mixed_forward_batch(None, [a], one([5], b))),  # type: ignore[arg-type]
    ("too long a source", "streams[0]", lambda m, a, b: m.mixed_forward_batch([5], [a], one([5] * 11, b))),
    (
        "part of a source",
        "streams[0]: chunk",
        lambda m, a, b: m.mixed_forward_batch([5], [a], [PrefillSlice([5, 6], b, 0, 1, True)]),
    ),
    ("more rows than there are", "row_base", lambda m, a, b: m.mixed_forward_batch([5], [a], one([5], b) * 8)),
    ("too many lanes", "decode_tokens, seqs", lambda m, a, b: m.mixed_forward_batch([5] * 5, [a] * 5, one([5], b))),
    ("single: in both parts", "seqs, streams", lambda m, a, b: m.mixed_forward([5], [a], [5], a, 0, 1, True)),
    (
        "single: a wrong id to decode",
        "decode_tokens[0]",
        lambda m, a, b: m.mixed_forward([-1], [a], [5], b, 0, 1, True),
    ),
    ("single: a wrong source id", "prefill_tokens[0]", lambda m, a, b: m.mixed_forward([5], [a], [-1], b, 0, 1, True)),
    ("single: part of it", "prefill_tokens: chunk", lambda m, a, b: m.mixed_forward([5], [a], [5], b, 0, 1, False)),
    (
        "fed: in both parts",
        "seqs, streams",
        lambda m, a, b: m.mixed_forward_batch_fed([FeedSource(5)], [a], one([5], a)),
    ),
    (
        "fed: a wrong id",
        "sources[0].token",
        lambda m, a, b: m.mixed_forward_batch_fed([FeedSource(97)], [a], one([5], b)),
    ),
    ("fed: too few sources", "sources, seqs", lambda m, a, b: m.mixed_forward_batch_fed([], [a], one([5], b))),
    (
        "fed: a wrong source id",
        "streams[0][0]",
        lambda m, a, b: m.mixed_forward_batch_fed([FeedSource(5)], [a], one([97], b)),
    ),
]


@pytest.mark.parametrize(("argument", "call"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_what_is_wrong_in_either_part_refuses_both(tiny: NllbModel, argument: str, call: Call) -> None:
    assert_refused(tiny, call, argument)


UNSERVED: list[tuple[str, Call]] = [
    ("slot 1 has not been prefilled", lambda m, a, b: m.mixed_forward_batch([5], [b], one([5], a))),
    ("it does not hold slot 3", lambda m, a, b: m.mixed_forward_batch([5], [a], one([5], SequenceState(3)))),
    ("it does not hold slot 1", lambda m, a, b: m.mixed_forward([5], [a], [5], SequenceState(1), 0, 1, True)),
    ("it does not hold slot 0", lambda m, a, b: m.mixed_forward_batch([5], [SequenceState(0)], one([5], b))),
    ("slot 1 has not", lambda m, a, b: m.mixed_forward_batch_fed([FeedSource(5)], [b], one([5], a))),
]


@pytest.mark.parametrize(("error", "call"), UNSERVED)
def test_a_sequence_that_cannot_be_served_refuses_both_parts(tiny: NllbModel, error: str, call: Call) -> None:
    assert_refused(tiny, call, error, SequenceError)


@pytest.mark.parametrize("which", ["default", "given"])
def test_a_capture_of_either_stream_is_refused(tiny: NllbModel, which: str) -> None:
    stream = tiny.create_stream()
    captured = stream if which == "given" else tiny.default_stream()

    def call(model: NllbModel, live: SequenceState, fresh: SequenceState) -> None:
        model.gpu.begin_capture(captured)
        try:
            model.mixed_forward_batch([5], [live], one([5], fresh), stream)
        finally:
            model.gpu.abort_capture_if_active(captured)

    assert_refused(tiny, call, "capture", NotSupported)
    tiny.gpu.destroy_stream(stream)
