# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Model interface: which methods it has, which are abstract, and what every default does."""

from __future__ import annotations

import inspect
import math
import re
import sys
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

import metrale.model as interface
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.errors import InvalidInput, MetraleError, NotSupported
from metrale.model import (
    MAX_BEAMS,
    BeamParams,
    BeamReq,
    EpCommandFailed,
    FeedSource,
    MixedBatchResult,
    MixedForwardResult,
    Model,
    ModelForward,
    PrefillSlice,
    RowMask,
    SamplingParams,
    SequenceState,
    VerifyBatchedOpts,
    padded_batch_n,
)
from tests.model.tables import (
    ABSTRACT,
    DECODE_CALL,
    DECODE_ROW,
    DEFAULTS,
    NULL,
    OTHER,
    PREFILL_CALL,
    PREFILL_ROW,
    PREFILLED,
    PROMPT,
    REFUSES,
    SEQ,
    SLICE,
    STREAM,
    Calls,
    Row,
    fake,
    recorder,
)


def trait_name(trait: type) -> str:
    return trait.__name__


def own_methods(trait: type) -> dict[str, Callable[..., Any]]:
    """Return what the supertrait itself defines, without what it inherits."""
    return {name: f for name, f in vars(trait).items() if inspect.isfunction(f) and not name.startswith("_")}


@pytest.mark.parametrize("row", DEFAULTS, ids=lambda row: f"{row.trait.__name__}.{row.method}")
def test_default(row: Row) -> None:
    calls: Calls = []
    call = getattr(fake(calls), row.method)
    if row.expected is REFUSES:
        with pytest.raises(NotSupported, match=f"^FakeModel does not support {row.method}$") as refused:
            call(*row.args)
        assert (refused.value.model, refused.value.method) == ("FakeModel", row.method)
    else:
        got = call(*row.args)
        assert got == row.expected
        assert type(got) is type(row.expected)
    assert calls == list(row.calls)


@pytest.mark.parametrize("trait", ABSTRACT, ids=trait_name)
def test_every_method_is_in_a_table(trait: type) -> None:
    methods = own_methods(trait)
    abstract = {name for name, method in methods.items() if getattr(method, "__isabstractmethod__", False)}
    assert abstract == set(ABSTRACT[trait].split())
    rows = [row.method for row in DEFAULTS if row.trait is trait]
    assert sorted(rows) == sorted(set(methods) - abstract), "each default has one row"


def test_model_is_all_supertraits_and_nothing_else() -> None:
    supertraits = {v for name, v in vars(interface).items() if name.startswith("Model") and name != "Model"}
    assert supertraits == set(ABSTRACT) == set(Model.__bases__) - {ABC}
    assert not own_methods(Model)
    assert set(interface.__all__) <= set(vars(interface))


@pytest.mark.parametrize("trait", ABSTRACT, ids=trait_name)
def test_each_supertrait_has_its_file(trait: type) -> None:
    stem = re.sub(r"(?<!^)(?=[A-Z])", "_", trait.__name__.removeprefix("Model")).lower()
    assert trait.__module__ == f"metrale.model.{stem}"


@pytest.mark.parametrize("method", sorted(" ".join(ABSTRACT.values()).split()))
def test_a_model_without_an_abstract_method_cannot_be_made(method: str) -> None:
    with pytest.raises(TypeError, match=rf"abstract.*\b{method}\b"):
        fake([], but=method)


@pytest.mark.parametrize("trait", ABSTRACT, ids=trait_name)
def test_signatures(trait: type) -> None:
    for name, method in own_methods(trait).items():
        assert inspect.getdoc(method), name
        signature = inspect.signature(method, eval_str=True)
        parameters = list(signature.parameters.values())[1:]
        assert all(p.annotation is not p.empty for p in parameters), name
        assert signature.return_annotation is not signature.empty, name
        for p in parameters:
            if p.name == "stream" and name not in ("stream_wait_event", "destroy_stream"):  # there it must be given
                assert (p.default, p.annotation) == (0, StreamLike), name


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_mixed_forward_decodes_then_prefills(make: Callable[[list[int]], Sequence[int]]) -> None:
    calls: Calls = []
    result = fake(calls).mixed_forward(make([9]), [SEQ], PROMPT, OTHER, 1, 2, False, STREAM)
    assert [call[0] for call in calls] == ["decode_batch", "prefill_chunk"]
    assert calls[1] == ("prefill_chunk", PROMPT, OTHER, 1, 2, False, STREAM)
    assert result == MixedForwardResult(DECODE_ROW, NULL)


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_mixed_forward_without_decode_tokens_only_prefills(make: Callable[[list[int]], Sequence[int]]) -> None:
    calls: Calls = []
    result = fake(calls).mixed_forward(make([]), [], PROMPT, OTHER, 0, 3, True, STREAM)
    assert calls == [PREFILL_CALL]
    assert result == MixedForwardResult(NULL, PREFILLED)
    assert isinstance(result.decode_logits, DevicePtr)


def recording_fake(calls: Calls) -> Model:
    """Return a fake that also writes down waiting and the row that a prefill is sent to."""

    def prefill_batch_chunk_rows(self: Model, *args: Any) -> list[DevicePtr]:
        calls.append(("prefill_batch_chunk_rows", *args))
        return ModelForward.prefill_batch_chunk_rows(self, *args)

    return fake(
        calls,
        {
            "default_stream": lambda self: 77,
            "synchronize": recorder(calls, "synchronize"),
            "prefill_batch_chunk_rows": prefill_batch_chunk_rows,
        },
    )


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_mixed_forward_batch_waits_for_the_decode_and_shifts_the_prefill_rows(lanes: int) -> None:
    calls: Calls = []
    tokens, seqs = list(range(lanes)), [SequenceState(slot) for slot in range(lanes)]
    unfinished = PrefillSlice(PROMPT, SEQ, 0, 2, False)
    result = recording_fake(calls).mixed_forward_batch(tokens, seqs, [unfinished, SLICE], STREAM)
    assert calls == [
        ("decode_batch", tokens, seqs, STREAM),
        ("synchronize", 77),
        ("prefill_batch_chunk_rows", [unfinished, SLICE], STREAM, lanes),
        ("prefill_chunk", PROMPT, SEQ, 0, 2, False, STREAM),
        PREFILL_CALL,
    ]
    assert result == MixedBatchResult(DECODE_ROW, [NULL, PREFILLED])


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_mixed_forward_batch_without_decode_tokens_does_not_wait(make: Callable[[list[int]], Sequence[int]]) -> None:
    calls: Calls = []
    result = recording_fake(calls).mixed_forward_batch(make([]), [], [SLICE], STREAM)
    assert calls == [("prefill_batch_chunk_rows", [SLICE], STREAM, 0), PREFILL_CALL]
    assert result == MixedBatchResult(NULL, [PREFILLED])


@pytest.mark.parametrize(("failing", "before"), [("decode_batch", 0), ("synchronize", 1)])
def test_mixed_forward_batch_stops_at_what_fails(failing: str, before: int) -> None:
    def fail(self: Model, *args: object) -> None:
        raise RuntimeError("device lost")

    calls: Calls = []
    model = fake(calls, {failing: fail})
    with pytest.raises(RuntimeError, match="device lost"):
        model.mixed_forward_batch([9], [SEQ], [SLICE], STREAM)
    assert calls == [DECODE_CALL][:before]


def test_prefill_batch_chunk_runs_one_slice_after_another() -> None:
    calls: Calls = []
    slices = [PrefillSlice(PROMPT, SEQ, 1, 1, False), SLICE, PrefillSlice([8], SEQ, 0, 1, True)]
    assert fake(calls).prefill_batch_chunk(slices, STREAM) == [NULL, PREFILLED, PREFILL_ROW]
    assert calls == [
        ("prefill_chunk", PROMPT, SEQ, 1, 1, False, STREAM),
        PREFILL_CALL,
        ("prefill_chunk", [8], SEQ, 0, 1, True, STREAM),
    ]


def test_a_stream_object_is_passed_on_as_it_is() -> None:
    class ForeignStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 42)

    stream = ForeignStream()
    calls: Calls = []
    model = fake(calls)
    model.mixed_forward_batch([9], [SEQ], [SLICE], stream)
    model.prefill_twophase(PROMPT, OTHER, 2, stream)
    model.decode_verify_dflash([1, 2], SEQ, stream)
    assert [call[-1] for call in calls] == [stream] * 4


@pytest.mark.parametrize("method", ["decode_verify_dflash", "decode_and_verify_fused"])
def test_verifies_of_a_block_go_through_kgamma(method: str) -> None:
    model = fake([], {"decode_verify_graphed_kgamma": lambda self, tokens, seq, stream: [99]})
    assert getattr(model, method)([1, 2], SEQ) == [99]


def test_a_circuit_is_refused_by_default_and_another_name_is_wrong() -> None:
    model = fake([])
    with pytest.raises(NotSupported, match="FakeModel does not support set_forward"):
        model.set_forward("circuit")
    with pytest.raises(InvalidInput, match=r"^select: expected 'legacy' or 'circuit', got Legacy$"):
        model.set_forward("Legacy")  # type: ignore[arg-type]


@pytest.mark.parametrize("n", range(1, 140))
def test_padded_batch_n_is_the_smallest_rung_that_holds_n(n: int) -> None:
    rungs = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    assert padded_batch_n(n) == min((rung for rung in rungs if rung >= n), default=n)


@pytest.mark.parametrize("n", [0, -1])
def test_padded_batch_n_refuses_an_empty_batch(n: int) -> None:
    with pytest.raises(InvalidInput, match="n: expected at least 1"):
        padded_batch_n(n)


def test_sequence_state_is_itself_only_and_can_be_detached() -> None:
    seq, twin = SequenceState(3), SequenceState(3)
    assert seq != twin
    assert len({seq, twin}) == 2
    assert seq.tokens == []
    assert seq.tokens is not twin.tokens
    assert (seq.seq_len, seq.prompt_len, seq.src_lang_id, seq.tgt_lang_id, seq.adapter_slot) == (0, 0, 0, 0, -1)
    assert seq.prefix_tokens == ()
    assert not seq.is_detached
    seq.slot_idx = SequenceState.DETACHED
    assert seq.is_detached
    assert sys.maxsize == SequenceState.DETACHED
    with pytest.raises(AttributeError):
        seq.slot = 1


def test_prefill_slice_whole_is_one_last_chunk() -> None:
    assert PrefillSlice.whole(PROMPT, SEQ) == PrefillSlice(PROMPT, SEQ, 0, 3, True)


def test_beam_request_defaults_and_is_frozen() -> None:
    req = BeamReq([4, 5])
    assert req == BeamReq([4, 5], 0, 0, -1, 4, 256, 1.0, False, 1, 0, 0, 1.0, (), (), None, (), None)
    assert req.beam_params() == BeamParams() == BeamParams(4, 1.0, False, 1)
    with pytest.raises(FrozenInstanceError):
        req.num_beams = 2  # type: ignore[misc]


def test_a_beam_request_says_how_to_search_and_what_to_do_to_scores() -> None:
    req = BeamReq([4], 0, 0, -1, 3, 9, 2.0, "never", 2, 5, 3, 1.5, [[7], [8, 9]], [6], 1, [10], None)
    assert req.beam_params() == BeamParams(3, 2.0, "never", 2)
    asked: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3, "min_new_tokens": 5}
    asked |= {"suppress_tokens": (6,), "bad_words": ((7,), (8, 9)), "max_new_tokens": 9, "forced_eos_id": 1}
    assert req.sampling_params([2]) == SamplingParams(**asked, eos_ids=(2,))
    assert replace(req, eos_ids=[3, 4]).sampling_params([2]) == SamplingParams(**asked, eos_ids=(3, 4))
    assert replace(req, eos_ids=()).sampling_params([2]).eos_ids == ()


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("num_beams", (0, MAX_BEAMS + 1, 2.0, True)),
        ("length_penalty", (math.nan, math.inf, 1e5, "1")),
        ("early_stopping", ("always", 1, None, np.array([1, 2]), ["never"])),
        ("num_return_sequences", (0, 4)),
    ],
)
def test_how_to_search_is_checked(argument: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidInput) as refused:
            BeamParams(**{"num_beams": 3, argument: value})  # type: ignore[arg-type]
        assert refused.value.argument == argument


@pytest.mark.parametrize("argument", ["suppress_tokens", "eos_ids", "bad_words"])
@pytest.mark.parametrize("value", [5, None, "12", b"12", object()])
def test_what_is_no_sequence_of_ids_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match="a sequence of") as refused:
        SamplingParams(**{argument: value})
    assert refused.value.argument == argument


@pytest.mark.parametrize(
    ("token", "from_row", "sampled"),
    [(None, None, False), (1, 2, False), (1, None, True), (None, 2, True)],
)
def test_feed_source_is_one_of_three(token: int | None, from_row: int | None, sampled: bool) -> None:
    with pytest.raises(InvalidInput, match="one of token, from_row and sampled"):
        FeedSource(token, from_row, sampled)


@pytest.mark.parametrize("argument", ["token", "from_row"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "1"])
def test_what_a_feed_source_names_is_an_integer(argument: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match="expected an int of at least 0") as refused:
        FeedSource(**{argument: value})
    assert refused.value.argument == argument


def test_feed_source_and_row_mask_accept_zero() -> None:
    assert FeedSource(token=0).from_row is None
    assert FeedSource(from_row=0).token is None
    assert FeedSource(sampled=True).from_row is None
    assert RowMask((0, 2)).banned == (0, 2)


@pytest.mark.parametrize(
    ("banned", "argument"), [((1, 2, 3), "banned"), ((-1,), "banned[0]"), ((1, 2.0), "banned[1]"), (5, "banned")]
)
def test_row_mask_holds_two_ids_at_most(banned: Any, argument: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"expected (at most 2 ids|an int of at least 0|a sequence of ids)"
    ) as refused:
        RowMask(banned)
    assert refused.value.argument == argument


def test_verify_options_default_to_no_write_on_accept() -> None:
    assert VerifyBatchedOpts().write_on_accept is False


def test_a_failed_command_is_an_error_of_the_project() -> None:
    assert issubclass(EpCommandFailed, MetraleError)
