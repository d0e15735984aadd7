# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Model interface as tables: what every default answers, which methods are abstract, and a model that records."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gpu_runtime.handles import PinnedMemory
from gpu_runtime.pointer import DevicePtr
from metrale.model import (
    BeamParams,
    BeamReq,
    FeedSource,
    ForwardDisclosure,
    MixedBatchResult,
    MixedForwardResult,
    Model,
    ModelAdapters,
    ModelBeams,
    ModelCircuit,
    ModelDeviceFeed,
    ModelDraft,
    ModelEp,
    ModelForward,
    ModelLifecycle,
    ModelLogits,
    ModelScoring,
    ModelSsmState,
    ModelStreams,
    ModelVerify,
    ModelVision,
    PrefillSlice,
    RowMask,
    SamplingParams,
    ScoreReq,
    SequenceState,
    VerifyBatchedOpts,
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
CHOSEN = np.zeros((3, 1), np.int32)
PINNED = PinnedMemory(0x10, 4, np.zeros(4, np.uint8))

DEFAULTS = [
    Row(ModelStreams, "default_stream", (), 0),
    Row(ModelStreams, "runs_ahead", (), False),
    Row(ModelStreams, "create_stream", (), 0),
    Row(ModelStreams, "destroy_stream", (STREAM,)),
    Row(ModelStreams, "create_event", (), 0),
    Row(ModelStreams, "record_event", (3, STREAM)),
    Row(ModelStreams, "stream_wait_event", (STREAM, 3)),
    Row(ModelStreams, "synchronize", (STREAM,)),
    Row(ModelLifecycle, "teardown"),
    Row(ModelLifecycle, "exclusive", (), UNLOCKED),
    Row(ModelLifecycle, "alloc_sequence_for", (100,), SEQ, (("alloc_sequence",),)),
    Row(ModelLifecycle, "save_sequence_state", (SEQ, io.BytesIO()), REFUSES),
    Row(ModelLifecycle, "restore_sequence_state", (SEQ, 1, io.BytesIO()), REFUSES),
    Row(ModelLifecycle, "capacity", (), REFUSES),
    Row(ModelLifecycle, "device_bytes", (), None),
    Row(ModelLifecycle, "kv_usage", (), None),
    Row(ModelLifecycle, "num_free_blocks", (), 0),
    Row(ModelLifecycle, "num_total_blocks", (), 0),
    Row(ModelLifecycle, "kv_block_bytes", (), 0),
    Row(ModelLifecycle, "reclaim_prefix_blocks", (5,), 0),
    Row(ModelLifecycle, "poll_innerq"),
    Row(ModelLifecycle, "high_speed_swap_dims", (), None),
    Row(ModelForward, "supports_beam", (), False),
    Row(ModelForward, "generate_beam_batch", ([BeamReq(PROMPT)],), REFUSES),
    Row(ModelForward, "generate_beams", ([BeamReq(PROMPT)],), REFUSES),
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
    Row(ModelForward, "step_rows", (3,), 3),
    Row(ModelForward, "normalize_ssm_states", (SEQ, STREAM)),
    Row(ModelForward, "prefill_twophase", (PROMPT, OTHER, 2, STREAM), PREFILLED, (PREFILL_CALL,)),
    Row(ModelForward, "is_mla", (), False),
    Row(ModelForward, "hc_mult", (), 0),
    Row(ModelForward, "kv_block_size", (), None),
    Row(ModelForward, "prefill_tail_split", (PROMPT,), None),
    Row(ModelLogits, "logits_view", (DECODE_ROW, 2, STREAM), REFUSES),
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
    Row(ModelDeviceFeed, "begin_sampling", (SEQ, SamplingParams(), STREAM), REFUSES),
    Row(ModelDeviceFeed, "sample_batch_to_feed", (DECODE_ROW, [SEQ], CHOSEN, 3, STREAM), REFUSES),
    Row(ModelDeviceFeed, "mixed_forward_batch_fed", ([FeedSource(token=1)], [SEQ], [SLICE], STREAM), REFUSES),
    Row(ModelDeviceFeed, "reserve_decode_block", (SEQ,), REFUSES),
    Row(ModelDeviceFeed, "release_decode_blocks", (SEQ, 1), REFUSES),
    Row(ModelDeviceFeed, "fed_step_settled"),
    Row(ModelDeviceFeed, "event_query", (3,), True),
    Row(ModelDeviceFeed, "event_synchronize", (3,)),
    Row(ModelDeviceFeed, "destroy_event", (3,)),
    Row(ModelDeviceFeed, "copy_d2h_async", (DECODE_ROW, IDS, STREAM), REFUSES),
    Row(ModelDeviceFeed, "alloc_host_pinned", (4,), REFUSES),
    Row(ModelDeviceFeed, "free_host_pinned", (PINNED,), REFUSES),
    Row(ModelBeams, "alloc_beams", (2, 8, 9), REFUSES),
    Row(ModelBeams, "begin_beams", (SEQ, BeamParams(2), SamplingParams(max_new_tokens=8), STREAM), REFUSES),
    Row(ModelBeams, "select_beams_to_feed", ([DECODE_ROW], [SEQ], IDS, 3, STREAM), REFUSES),
    Row(ModelBeams, "take_beams", (SEQ,), REFUSES),
    Row(ModelScoring, "score_targets", ([ScoreReq(PROMPT, [7, 8])],), REFUSES),
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
    ModelBeams: "",
    ModelScoring: "",
    ModelCircuit: "",
}
"""The abstract methods of each supertrait."""
