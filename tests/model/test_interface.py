# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Model interface: which methods it has, which are abstract, and what every default does."""

from __future__ import annotations

import inspect
import io
import re
import sys
from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import metrale.model as interface
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.errors import InvalidInput, MetraleError, NotSupported
from metrale.model import (
    BeamReq,
    EpCommandFailed,
    FeedSource,
    ForwardDisclosure,
    MixedBatchResult,
    MixedForwardResult,
    Model,
    ModelAdapters,
    ModelCircuit,
    ModelDeviceFeed,
    ModelDraft,
    ModelEp,
    ModelForward,
    ModelLifecycle,
    ModelLogits,
    ModelSsmState,
    ModelStreams,
    ModelVerify,
    ModelVision,
    PrefillSlice,
    RowMask,
    SequenceState,
    VerifyBatchedOpts,
    padded_batch_n,
)
from metrale.model.lifecycle import UNLOCKED

DECODE_ROW = DevicePtr(0x1000)
PREFILL_ROW = DevicePtr(0x2000)
NULL = DevicePtr.NULL
STREAM = 7
SEQ = SequenceState(0)
OTHER = SequenceState(1)


def prefill_chunk(tokens: Sequence[int], seq: SequenceState, start: int, length: int, last: bool, stream: Any) -> int:
    return PREFILL_ROW.offset(seq.slot_idx) if last else NULL


ANSWERS: dict[str, Any] = {
    "alloc_sequence": SEQ,
    "decode_batch": DECODE_ROW,
    "prefill_chunk": prefill_chunk,
    "decode_verify": [11, 12],
}
"""What the fake's abstract methods return, or compute it from their arguments; None otherwise."""

Calls = list[tuple[Any, ...]]


def recorder(calls: Calls, name: str) -> Callable[..., Any]:
    def method(self: Model, *args: Any) -> Any:
        calls.append((name, *args))
        answer = ANSWERS.get(name)
        return answer(*args) if callable(answer) else answer

    return method


def fake(calls: Calls, overrides: dict[str, Callable[..., Any]] | None = None, but: str = "") -> Model:
    """Return a model of the abstract methods alone (without ``but``), each writing down its positional arguments."""
    abstract = {name: recorder(calls, name) for name in Model.__abstractmethods__ if name != but}
    model: Model = type("FakeModel", (Model,), abstract | (overrides or {}))()
    return model


REFUSES: Final = object()
"""In place of a value: the default raises NotSupported."""


class Row(NamedTuple):
    """One default: how it is called, what it returns, and which abstract methods it calls for that."""

    trait: type
    method: str
    args: tuple[Any, ...] = ()
    expected: object = None
    calls: tuple[tuple[Any, ...], ...] = ()


PROMPT = [4, 5, 6]
SLICE = PrefillSlice.whole(PROMPT, OTHER)
PREFILL_CALL = ("prefill_chunk", PROMPT, OTHER, 0, 3, True, STREAM)
PREFILLED = PREFILL_ROW.offset(OTHER.slot_idx)
DECODE_CALL = ("decode_batch", [9], [SEQ], STREAM)
VERIFY_ARGS = ([1, 2], SEQ, STREAM)
VERIFY_CALLS = (("decode_verify", *VERIFY_ARGS),)
IDS = np.zeros(1, np.int32)
PINNED = PinnedMemory(0x10, 4, np.zeros(4, np.uint8))

DEFAULTS = [
    Row(ModelStreams, "default_stream", (), 0),
    Row(ModelStreams, "create_stream", (), 0),
    Row(ModelStreams, "create_event", (), 0),
    Row(ModelStreams, "record_event", (3, STREAM)),
    Row(ModelStreams, "stream_wait_event", (STREAM, 3)),
    Row(ModelStreams, "synchronize", (STREAM,)),
    Row(ModelLifecycle, "teardown"),
    Row(ModelLifecycle, "exclusive", (), UNLOCKED),
    Row(ModelLifecycle, "alloc_sequence_for", (100,), SEQ, (("alloc_sequence",),)),
    Row(ModelLifecycle, "save_sequence_state", (SEQ, io.BytesIO()), REFUSES),
    Row(ModelLifecycle, "restore_sequence_state", (SEQ, 1, io.BytesIO()), REFUSES),
    Row(ModelLifecycle, "num_free_blocks", (), 0),
    Row(ModelLifecycle, "num_total_blocks", (), 0),
    Row(ModelLifecycle, "kv_block_bytes", (), 0),
    Row(ModelLifecycle, "reclaim_prefix_blocks", (5,), 0),
    Row(ModelLifecycle, "poll_innerq"),
    Row(ModelLifecycle, "high_speed_swap_dims", (), None),
    Row(ModelForward, "supports_beam", (), False),
    Row(ModelForward, "generate_beam_batch", ([BeamReq(PROMPT)],), REFUSES),
    Row(
        ModelForward,
        "mixed_forward",
        ([9], [SEQ], PROMPT, OTHER, 0, 3, True, STREAM),
        MixedForwardResult(DECODE_ROW, PREFILLED),
        (DECODE_CALL, PREFILL_CALL),
    ),
    Row(ModelForward, "prefill_batch_chunk", ([SLICE], STREAM), [PREFILLED], (PREFILL_CALL,)),
    Row(ModelForward, "prefill_batch_chunk_rows", ([SLICE], STREAM, 4), [PREFILLED], (PREFILL_CALL,)),
    Row(
        ModelForward,
        "mixed_forward_batch",
        ([9], [SEQ], [SLICE], STREAM),
        MixedBatchResult(DECODE_ROW, [PREFILLED]),
        (DECODE_CALL, PREFILL_CALL),
    ),
    Row(ModelForward, "normalize_ssm_states", (SEQ, STREAM)),
    Row(ModelForward, "prefill_twophase", (PROMPT, OTHER, 2, STREAM), PREFILLED, (PREFILL_CALL,)),
    Row(ModelForward, "is_mla", (), False),
    Row(ModelForward, "hc_mult", (), 0),
    Row(ModelForward, "kv_block_size", (), None),
    Row(ModelForward, "prefill_tail_split", (PROMPT,), None),
    Row(ModelLogits, "logits_ptr_is_fp32", (DECODE_ROW,), False),
    Row(ModelLogits, "hidden_after_norm", (), NULL),
    Row(ModelLogits, "decode_logits_fp32", (), False),
    Row(ModelAdapters, "set_active_lora", ("a",), REFUSES),
    Row(ModelAdapters, "adapter_id_for", (2,), 0),
    Row(ModelAdapters, "acquire_adapter_slot", (2,), -1),
    Row(ModelAdapters, "release_adapter_slot", (2,)),
    Row(ModelAdapters, "swap_lora_from_disk", ("folder", "a", 2), REFUSES),
    Row(ModelAdapters, "promote_lora_from_disk", ("folder", "a"), REFUSES),
    Row(ModelAdapters, "promote_lora_from_peer", ("host:1", "id", "a", {}), REFUSES),
    Row(ModelSsmState, "has_ssm_layers", (), False),
    Row(ModelSsmState, "decode_rollback_unsupported", (), False),
    Row(ModelSsmState, "decode_rollback_ring_slots", (), 0),
    Row(ModelSsmState, "save_decode_ssm_snapshot", (SEQ, 0)),
    Row(ModelSsmState, "restore_decode_ssm_snapshot", (SEQ, 0)),
    Row(ModelSsmState, "decode_marconi_checkpoint", (SEQ,)),
    Row(ModelSsmState, "start_checkpoint_async", (SEQ,), None, (("checkpoint_ssm_states", SEQ),)),
    Row(
        ModelSsmState,
        "start_rollback_and_checkpoint_async",
        (SEQ, 2),
        None,
        (("rollback_ssm_states", SEQ, 2), ("checkpoint_ssm_states", SEQ)),
    ),
    Row(ModelSsmState, "sync_secondary"),
    Row(ModelSsmState, "commit_accepted_prefix", (SEQ, 1, 2)),
    Row(ModelSsmState, "ssm_snapshot_occupancy", (), None),
    Row(ModelVerify, "can_batch_verify", ([2, 2],), False),
    Row(ModelVerify, "decode_verify_batched", ([1, 2], [2], [SEQ], STREAM, VerifyBatchedOpts()), REFUSES),
    Row(ModelVerify, "decode_verify_graphed_kgamma", VERIFY_ARGS, [11, 12], VERIFY_CALLS),
    Row(ModelVerify, "decode_verify_dflash", VERIFY_ARGS, [11, 12], VERIFY_CALLS),
    Row(ModelVerify, "decode_and_verify_fused", VERIFY_ARGS, [11, 12], VERIFY_CALLS),
    Row(ModelVerify, "gdn_fold_accepted", ([0], [1], 2), False),
    Row(ModelDraft, "mtp_slot_draft_capacity", (0,), sys.maxsize),
    Row(ModelDraft, "dflash_gamma", (), None),
    Row(ModelDraft, "stash_verify_hidden_rows", ([0], STREAM), REFUSES),
    Row(ModelDraft, "stash_verify_catchup_rows", ([(0, 1)],)),
    Row(ModelDraft, "run_mtp_catchup_batched", ([[1]], [0], [3], [SEQ]), 0),
    Row(ModelDraft, "save_hidden_for_mtp_from_stash", (0, STREAM), REFUSES),
    Row(ModelDraft, "run_mtp_propose_batched", ([1], [3], [0], 2, [SEQ], STREAM), None),
    Row(ModelDraft, "mtp_propose_batch_max", (), 1),
    Row(ModelDraft, "save_hidden_for_catchup", (0, 3)),
    Row(ModelDraft, "save_dflash_hidden_for_propose", (0, STREAM)),
    Row(ModelDraft, "dflash_accept_append", (SEQ,)),
    Row(ModelDraft, "dflash_eagle_accept_append", (SEQ,)),
    Row(ModelDraft, "dflash_eagle_kgamma_append", (SEQ, 1, 3)),
    Row(ModelDraft, "dflash_serial_ctx_append", (SEQ,)),
    Row(ModelDraft, "commit_ctx", (SEQ, 1, 3, 0)),
    Row(ModelDraft, "dflash_capture_band", (), 0),
    Row(ModelDraft, "read_deferred_draft_token", (), 0),
    Row(ModelVision, "prepare_vision_embed", ([object()],)),
    Row(ModelVision, "ep_sync_vision_embeds", ([1],)),
    Row(ModelVision, "prepare_vision_embed_batched", ([[object()]],), []),
    Row(ModelVision, "set_vision_slice_base", (1, 2, 3)),
    Row(ModelVision, "tokens_contain_vision_pad", ([1],), False),
    Row(ModelEp, "ep_worker_step", ([None],), True),
    Row(ModelEp, "is_ep", (), False),
    Row(ModelEp, "ep_broadcast_cmd", (1,)),
    Row(ModelEp, "ep_broadcast_cmd_for_seq", (0, 1)),
    Row(ModelEp, "ep_protocol_v2", (), False),
    Row(ModelEp, "ep_broadcast_tokens", ([1, 2],), []),
    Row(ModelDeviceFeed, "supports_device_token_feed", (), False),
    Row(ModelDeviceFeed, "decode_batch_fed", ([FeedSource(token=1)], [SEQ], STREAM), REFUSES),
    Row(ModelDeviceFeed, "argmax_batch_to_feed", (DECODE_ROW, [RowMask()], IDS, 3, STREAM), REFUSES),
    Row(ModelDeviceFeed, "reserve_decode_block", (SEQ,), REFUSES),
    Row(ModelDeviceFeed, "release_decode_blocks", (SEQ, 1), REFUSES),
    Row(ModelDeviceFeed, "fed_step_settled"),
    Row(ModelDeviceFeed, "event_query", (3,), True),
    Row(ModelDeviceFeed, "event_synchronize", (3,)),
    Row(ModelDeviceFeed, "destroy_event", (3,)),
    Row(ModelDeviceFeed, "copy_d2h_async", (DECODE_ROW, IDS, STREAM), REFUSES),
    Row(ModelDeviceFeed, "alloc_host_pinned", (4,), REFUSES),
    Row(ModelDeviceFeed, "free_host_pinned", (PINNED,), REFUSES),
    Row(ModelCircuit, "set_forward", ("legacy",)),
    Row(ModelCircuit, "forward_disclosure", (), ForwardDisclosure("legacy", None, None)),
]

ABSTRACT: dict[type, str] = {
    ModelLifecycle: "bind_gpu_to_thread alloc_sequence cache_sequence free_sequence compact_sequence"
    " detach_slot_for_reuse",
    ModelForward: "prefill prefill_chunk decode decode_batch",
    ModelLogits: "vocab_size logits_row_bytes logits_dtype logits_event copy_logits_to_host logits_buffer_ptr"
    " argmax_on_device argmax_batch argmax_rows decode_logits_ptr",
    ModelAdapters: "",
    ModelSsmState: "checkpoint_ssm_states rollback_ssm_states",
    ModelVerify: "decode_verify decode_verify_graphed decode_verify_graphed_k3 decode_verify_graphed_k4",
    ModelDraft: "generate_speculative has_proposer has_self_speculative decode_draft save_hidden_for_mtp"
    " run_mtp_propose run_mtp_propose_multi trim_proposer_state",
    ModelVision: "",
    ModelEp: "",
    ModelStreams: "",
    ModelDeviceFeed: "",
    ModelCircuit: "",
}
"""The abstract methods of each supertrait."""


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
            if p.name == "stream" and name != "stream_wait_event":  # there it comes first and cannot have a default
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
    assert req == BeamReq([4, 5], 0, 0, -1, 4, 256, 1.0, False)
    with pytest.raises(FrozenInstanceError):
        req.num_beams = 2  # type: ignore[misc]


@pytest.mark.parametrize(("token", "from_row"), [(None, None), (1, 2), (-1, None), (None, -1)])
def test_feed_source_is_one_of_a_token_and_a_row(token: int | None, from_row: int | None) -> None:
    with pytest.raises(InvalidInput, match="one of token and from_row"):
        FeedSource(token, from_row)


def test_feed_source_and_row_mask_accept_zero() -> None:
    assert FeedSource(token=0).from_row is None
    assert FeedSource(from_row=0).token is None
    assert RowMask((0, 2)).banned == (0, 2)


@pytest.mark.parametrize("banned", [(1, 2, 3), (-1,)])
def test_row_mask_holds_two_ids_at_most(banned: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="at most 2 ids"):
        RowMask(banned)


def test_verify_options_default_to_no_write_on_accept() -> None:
    assert VerifyBatchedOpts().write_on_accept is False


def test_a_failed_command_is_an_error_of_the_project() -> None:
    assert issubclass(EpCommandFailed, MetraleError)
