# SPDX-License-Identifier: MIT OR Apache-2.0
"""Wrong input is refused by name: nothing is enqueued, and every sequence stays what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError
from metrale.errors import InvalidInput
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Call, Case, assert_refused, begin, prefilled

VOCAB = 97
ONE = Case([5, 6, 7], 80, 81, [])

WRONG_IDS: list[Any] = [-1, VOCAB, 1 << 40, True, np.True_, 5.0, np.float32(5), "5", None, [5], np.array([5, 6])]
NO_SEQUENCES: list[Any] = ["567", b"567", 5, None, 5.0]


def shown(value: Any) -> str:
    return repr(value)


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=shown)
def test_a_wrong_source_id(tiny: NllbModel, wrong: Any) -> None:
    assert_refused(tiny, lambda model, live, fresh: model.prefill([5, wrong], fresh), "tokens[1]")


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=shown)
def test_a_wrong_target_id(tiny: NllbModel, wrong: Any) -> None:
    assert_refused(tiny, lambda model, live, fresh: model.decode(wrong, live), "token")


@pytest.mark.parametrize("wrong", [-1, VOCAB, True, 5.0, "5", None], ids=shown)
@pytest.mark.parametrize("language", ["src_lang_id", "tgt_lang_id"])
def test_a_wrong_language(tiny: NllbModel, language: str, wrong: Any) -> None:
    def call(model: NllbModel, live: SequenceState, fresh: SequenceState) -> None:
        good = getattr(fresh, language)
        setattr(fresh, language, wrong)
        try:
            model.prefill([5], fresh)
        finally:
            setattr(fresh, language, good)

    assert_refused(tiny, call, language)


@pytest.mark.parametrize("wrong", NO_SEQUENCES, ids=shown)
def test_what_is_no_sequence_of_ids(tiny: NllbModel, wrong: Any) -> None:
    assert_refused(tiny, lambda model, live, fresh: model.prefill(wrong, fresh), "tokens")


@pytest.mark.parametrize("wrong", NO_SEQUENCES, ids=shown)
def test_what_is_no_sequence_of_ids_in_a_batch(tiny: NllbModel, wrong: Any) -> None:
    assert_refused(tiny, lambda model, live, fresh: model.decode_batch(wrong, [live]), "tokens")


CALLS: list[tuple[str, str, Call]] = [
    ("a later id of a batch", "tokens[1]", lambda m, a, b: m.decode_batch([5, VOCAB], [a, a])),
    ("a later id of a chunk", "tokens[2]", lambda m, a, b: m.prefill_chunk([5, 6, -1], b, 0, 3, True)),
    (
        "a later stream",
        "streams[1][0]",
        lambda m, a, b: m.prefill_batch_chunk([PrefillSlice.whole([5], a), PrefillSlice.whole([VOCAB], b)]),
    ),
    (
        "a stream twice",
        "streams",
        lambda m, a, b: m.prefill_batch_chunk([PrefillSlice.whole([5], b), PrefillSlice.whole([6], b)]),
    ),
    ("a sequence twice", "seqs", lambda m, a, b: m.decode_batch([5, 6], [a, a])),
    ("nothing at all", "tokens, seqs", lambda m, a, b: m.decode_batch([], [])),
    ("too few tokens", "tokens, seqs", lambda m, a, b: m.decode_batch([], [a])),
    ("too many tokens", "tokens, seqs", lambda m, a, b: m.decode_batch([5, 6], [a])),
    ("too many sequences", "tokens, seqs", lambda m, a, b: m.decode_batch([5] * 5, [a] * 5)),
]


@pytest.mark.parametrize(("argument", "call"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_a_wrong_call(tiny: NllbModel, argument: str, call: Call) -> None:
    assert_refused(tiny, call, argument)


def test_an_adapter_that_is_not_there(tiny: NllbModel) -> None:
    def call(model: NllbModel, live: SequenceState, fresh: SequenceState) -> None:
        fresh.adapter_slot = 0
        try:
            model.prefill([5], fresh)
        finally:
            fresh.adapter_slot = -1

    assert_refused(tiny, call, "adapter_slot")


@host_only
def test_a_stream_that_is_not_there(tiny: NllbModel) -> None:
    """The sequence that would have been prefilled again keeps what it has."""
    assert_refused(tiny, lambda model, live, fresh: model.prefill([5], live, 0x7FFF), "stream", DeviceError)
    assert_refused(tiny, lambda model, live, fresh: model.decode(5, live, 0x7FFF), "stream", DeviceError)


def test_a_stream_that_was_destroyed(tiny: NllbModel) -> None:
    stream = tiny.create_stream()
    tiny.gpu.destroy_stream(stream)
    assert_refused(tiny, lambda model, live, fresh: model.prefill([5], live, stream), "stream", DeviceError)
    assert_refused(tiny, lambda model, live, fresh: model.decode(5, live, stream), "stream", DeviceError)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16, np.uint64])
def test_numpy_integers_are_ids(tiny: NllbModel, kind: type[np.integer[Any]]) -> None:
    plain, numpy = prefilled(tiny, ONE), begin(tiny, ONE)
    numpy.src_lang_id, numpy.tgt_lang_id = kind(80), kind(81)  # type: ignore[assignment]
    expected = tiny.copy_logits_to_host(tiny.prefill(ONE.tokens, plain)).tobytes()
    tokens = np.array(ONE.tokens, dtype=kind)
    assert tiny.copy_logits_to_host(tiny.prefill(tokens, numpy)).tobytes() == expected  # type: ignore[arg-type]
    assert tiny.copy_logits_to_host(tiny.prefill(tuple(tokens), numpy)).tobytes() == expected
    expected = tiny.copy_logits_to_host(tiny.decode(9, plain)).tobytes()
    assert tiny.copy_logits_to_host(tiny.decode(kind(9), numpy)).tobytes() == expected  # type: ignore[arg-type]
    assert all(type(token) is int for token in numpy.tokens)
    assert numpy.tokens == plain.tokens


def test_the_ends_of_the_vocabulary_are_ids(tiny: NllbModel) -> None:
    seq = prefilled(tiny, Case([0, VOCAB - 1], VOCAB - 1, VOCAB - 1, []))
    tiny.decode(0, seq)
    tiny.decode(VOCAB - 1, seq)
    assert seq.tokens == [2, VOCAB - 1, 0, VOCAB - 1]


@pytest.mark.parametrize(("language", "keyword"), [("src_lang_id", "source"), ("tgt_lang_id", "target")])
def test_language_zero_needs_a_default(make_tiny: MakeModel, language: str, keyword: str) -> None:
    """The other one has a default; a language of the sequence's own goes before it."""
    other = {"source": 80, "target": 81}
    del other[keyword]
    model = make_tiny(**other)
    seq = model.alloc_sequence()
    with model.gpu.launch_trace() as trace, pytest.raises(InvalidInput, match=f"given no default {keyword}="):
        model.prefill(ONE.tokens, seq)
    assert not trace
    setattr(seq, language, 40)
    model.prefill(ONE.tokens, seq)
    assert seq.tokens == [2, 40 if language == "tgt_lang_id" else 81]


def test_default_languages_are_those_of_sequences_without_their_own(make_tiny: MakeModel) -> None:
    model = make_tiny(source=80, target=81)
    rows = []
    for source, target in ((0, 0), (80, 81), (80, 0), (0, 81), (50, 0), (0, 51)):
        seq = model.alloc_sequence()
        seq.src_lang_id, seq.tgt_lang_id = source, target
        rows.append(model.copy_logits_to_host(model.prefill(ONE.tokens, seq)).tobytes())
        assert seq.tokens == [2, target or 81]
        assert (seq.src_lang_id, seq.tgt_lang_id) == (source, target)
        model.free_sequence(seq)
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert len(set(rows)) == 3
