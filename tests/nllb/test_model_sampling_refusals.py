# SPDX-License-Identifier: MIT OR Apache-2.0
"""Wrong ways to choose ids on the device: refused by name, and everything stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metrale.errors import InvalidInput, NotSupported, SequenceError
from metrale.model import GREEDY, FeedSource, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import Call, Case, assert_refused, prefilled, results, sampled

CASES = [Case([5, 6, 7], 80, 81, []), Case([30, 31], 82, 83, [])]


WRONG_BEGINNINGS: list[tuple[str, str, Call]] = [
    ("no params", "params", lambda m, a, b: m.begin_sampling(a, None)),  # type: ignore[arg-type]
    (
        "a ban of no id",
        "suppress_tokens[1]",
        lambda m, a, b: m.begin_sampling(a, SamplingParams(suppress_tokens=(5, 97))),
    ),
    (
        "a bad word with no id",
        "bad_words[1][2]",
        lambda m, a, b: m.begin_sampling(a, SamplingParams(bad_words=((1, 2), (3, 4, 97)))),
    ),
    (
        "bad words without room",
        "bad_words",
        lambda m, a, b: m.begin_sampling(a, SamplingParams(bad_words=((1, 2),) * 340 + ((1, 2, 3),))),
    ),
    ("an EOS that is no id", "eos_ids[0]", lambda m, a, b: m.begin_sampling(a, SamplingParams(eos_ids=(1 << 30,)))),
    (
        "a forced end that is no id",
        "forced_eos_id",
        lambda m, a, b: m.begin_sampling(a, SamplingParams(forced_eos_id=97, max_new_tokens=5)),
    ),
    (
        "a forced end without a limit",
        "params.max_new_tokens",
        lambda m, a, b: m.begin_sampling(a, SamplingParams(forced_eos_id=2)),
    ),
    (
        "a least length without an end",
        "params.eos_ids",
        lambda m, a, b: m.begin_sampling(a, SamplingParams(min_new_tokens=3)),
    ),
]


@pytest.mark.parametrize(("argument", "call"), [c[1:] for c in WRONG_BEGINNINGS], ids=[c[0] for c in WRONG_BEGINNINGS])
def test_a_wrong_beginning_changes_nothing(tiny: NllbModel, argument: str, call: Call) -> None:
    """The sequence goes on choosing as it was told before."""

    def asked(model: NllbModel, live: SequenceState, fresh: SequenceState) -> None:
        assert fresh.slot_idx == 1
        call(model, live, fresh)

    assert_refused(tiny, asked, argument)
    seq = prefilled(tiny, CASES[0])
    tiny.begin_sampling(seq, SamplingParams(suppress_tokens=tuple(range(90))))
    ptr = tiny.decode(9, seq)
    before = sampled(tiny, ptr, [seq]).ids
    with pytest.raises(InvalidInput):
        call(tiny, seq, seq)
    assert sampled(tiny, ptr, [seq]).ids == before
    assert before[0] >= 90


def sample_into(model: NllbModel, seqs: list[SequenceState], shape: tuple[int, ...] | None = None, at: int = 0) -> None:
    with results(model, *(shape or (3, len(seqs)))) as (dst, event):
        model.sample_batch_to_feed(model.logits_buffer_ptr().offset(at), seqs, dst, event)


UNSERVED: list[tuple[str, str, Call]] = [
    ("begin: not prefilled", "slot 1 has not been prefilled", lambda m, a, b: m.begin_sampling(b, GREEDY)),
    ("begin: not live", "it does not hold slot 3", lambda m, a, b: m.begin_sampling(SequenceState(3), GREEDY)),
    ("sample: not prefilled", "slot 1 has not been prefilled", lambda m, a, b: sample_into(m, [a, b])),
    ("sample: not live", "it does not hold slot 3", lambda m, a, b: sample_into(m, [a, SequenceState(3)])),
]


@pytest.mark.parametrize(("error", "call"), [c[1:] for c in UNSERVED], ids=[c[0] for c in UNSERVED])
def test_a_sequence_that_cannot_choose_is_refused(tiny: NllbModel, error: str, call: Call) -> None:
    assert_refused(tiny, call, error, SequenceError)


WRONG: list[tuple[str, str, Call]] = [
    ("nobody", "seqs: length", lambda m, a, b: sample_into(m, [], (3, 1))),
    ("a sequence twice", "seqs", lambda m, a, b: sample_into(m, [a, a])),
    ("room for less", "dst", lambda m, a, b: sample_into(m, [a], (2, 1))),
    ("room for another number", "dst", lambda m, a, b: sample_into(m, [a], (3, 2))),
    ("room in one axis", "dst", lambda m, a, b: sample_into(m, [a], (3,))),
    ("no row's address", "ptr", lambda m, a, b: sample_into(m, [a], None, 4)),
]


@pytest.mark.parametrize(("argument", "call"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_what_is_wrong_is_refused(tiny: NllbModel, argument: str, call: Call) -> None:
    assert_refused(tiny, call, argument)


def test_more_rows_than_there_are_from_here_is_refused(tiny: NllbModel) -> None:
    """Two sequences from the arena's last row."""
    seqs = [prefilled(tiny, case) for case in CASES[:2]]
    with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput, match="1 to 1 rows from row 7"):
        sample_into(tiny, seqs, None, 7 * tiny.logits_row_bytes())
    assert not trace


def test_tokens_must_be_known_to_begin_and_positions_must_be_there_to_choose(tiny: NllbModel) -> None:
    seq = prefilled(tiny, CASES[0])
    tiny.decode_batch_fed([FeedSource(9)], [seq])
    seq.seq_len += 1
    with tiny.gpu.launch_trace() as trace:
        with pytest.raises(SequenceError, match="begin_sampling: the tokens of the sequence in slot 0 are not known"):
            tiny.begin_sampling(seq, GREEDY)
        seq.seq_len = 10
        with pytest.raises(SequenceError, match=r"^sample_batch_to_feed: .* and a seq_len of 10$"):
            sample_into(tiny, [seq])
    assert not trace
    seq.seq_len = 3
    assert sampled(tiny, tiny.logits_buffer_ptr(), [seq]).ids == [tiny.argmax_on_device(tiny.logits_buffer_ptr())]
    seq.tokens.append(9)
    tiny.begin_sampling(seq, SamplingParams(no_repeat_ngram_size=1))


@pytest.mark.parametrize("call", ["begin_sampling", "sample_batch_to_feed"])
def test_choosing_in_a_capture_is_refused(tiny: NllbModel, call: str) -> None:
    stream, event = tiny.create_stream(), tiny.create_event()

    def captured(model: NllbModel, live: SequenceState, fresh: SequenceState) -> None:
        room: Any = np.zeros((3, 1), np.int32)
        model.gpu.begin_capture(stream)
        try:
            if call == "begin_sampling":
                model.begin_sampling(live, SamplingParams(suppress_tokens=(5,)), stream)
            else:
                model.sample_batch_to_feed(model.logits_buffer_ptr(), [live], room, event, stream)
        finally:
            model.gpu.abort_capture_if_active(stream)

    assert_refused(tiny, captured, "capture", NotSupported)
    tiny.gpu.destroy_stream(stream)
    tiny.destroy_event(event)
