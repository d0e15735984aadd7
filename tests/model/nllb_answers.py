# SPDX-License-Identifier: MIT OR Apache-2.0
"""The methods of the Model interface that NLLB has no work for: what it answers, and what it refuses."""

from __future__ import annotations

import sys
from typing import Final

from metrale.model import ForwardDisclosure
from tests.model.lab import PROMPT, REFUSES, Lab, Row

LIFECYCLE: Final = [
    Row("num_total_blocks", lambda lab: lab.model.num_total_blocks(), 0),
    Row("kv_block_bytes", lambda lab: lab.model.kv_block_bytes(), 0),
    Row("reclaim_prefix_blocks", lambda lab: lab.model.reclaim_prefix_blocks(3), 0),
    Row("poll_innerq", lambda lab: lab.model.poll_innerq()),
    Row("high_speed_swap_dims", lambda lab: lab.model.high_speed_swap_dims()),
]

FORWARD: Final = [
    Row("normalize_ssm_states", lambda lab: lab.model.normalize_ssm_states(lab.live())),
    Row("is_mla", lambda lab: lab.model.is_mla(), False),
    Row("hc_mult", lambda lab: lab.model.hc_mult(), 0),
    Row("kv_block_size", lambda lab: lab.model.kv_block_size()),
    Row("prefill_tail_split", lambda lab: lab.model.prefill_tail_split(PROMPT)),
]

ADAPTERS: Final = [
    Row("promote_lora_from_peer", lambda lab: lab.model.promote_lora_from_peer("host:1", "a", "b", {}), REFUSES),
]

SSM_STATE: Final = [
    Row("checkpoint_ssm_states", lambda lab: lab.model.checkpoint_ssm_states(lab.live())),
    Row("rollback_ssm_states", lambda lab: lab.model.rollback_ssm_states(lab.live(), 1)),
    Row("has_ssm_layers", lambda lab: lab.model.has_ssm_layers(), False),
    Row("decode_rollback_unsupported", lambda lab: lab.model.decode_rollback_unsupported(), False),
    Row("decode_rollback_ring_slots", lambda lab: lab.model.decode_rollback_ring_slots(), 0),
    Row("save_decode_ssm_snapshot", lambda lab: lab.model.save_decode_ssm_snapshot(lab.live(), 0)),
    Row("restore_decode_ssm_snapshot", lambda lab: lab.model.restore_decode_ssm_snapshot(lab.live(), 0)),
    Row("decode_marconi_checkpoint", lambda lab: lab.model.decode_marconi_checkpoint(lab.live())),
    Row("start_checkpoint_async", lambda lab: lab.model.start_checkpoint_async(lab.live())),
    Row(
        "start_rollback_and_checkpoint_async",
        lambda lab: lab.model.start_rollback_and_checkpoint_async(lab.live(), 1),
    ),
    Row("sync_secondary", lambda lab: lab.model.sync_secondary()),
    Row("commit_accepted_prefix", lambda lab: lab.model.commit_accepted_prefix(lab.live(), 1, 2)),
    Row("ssm_snapshot_occupancy", lambda lab: lab.model.ssm_snapshot_occupancy()),
]


def verify(method: str, count: int, names: str = "") -> Row:
    """Return the row of a verify of one sequence, which is refused."""
    return Row(method, lambda lab: getattr(lab.model, method)([9] * count, lab.live()), REFUSES, names)


VERIFY: Final = [
    verify("decode_verify", 3),
    verify("decode_verify_graphed", 2),
    verify("decode_verify_graphed_k3", 3),
    verify("decode_verify_graphed_k4", 4),
    verify("decode_verify_graphed_kgamma", 5, "decode_verify"),
    verify("decode_verify_dflash", 5, "decode_verify"),
    verify("decode_and_verify_fused", 5, "decode_verify"),
    Row("can_batch_verify", lambda lab: lab.model.can_batch_verify([2, 2]), False),
    Row("decode_verify_batched", lambda lab: lab.model.decode_verify_batched([9, 10], [2], [lab.live()]), REFUSES),
    Row("gdn_fold_accepted", lambda lab: lab.model.gdn_fold_accepted([0], [1], 2), False),
]


def batched_catchup(lab: Lab) -> object:
    return lab.model.run_mtp_catchup_batched([[9]], [0], [2], [lab.live()])


def batched_proposal(lab: Lab) -> object:
    return lab.model.run_mtp_propose_batched([9], [2], [0], 2, [lab.live()])


DRAFT: Final = [
    Row("generate_speculative", lambda lab: lab.model.generate_speculative(PROMPT, None, 2), REFUSES),
    Row("has_proposer", lambda lab: lab.model.has_proposer(), False),
    Row("has_self_speculative", lambda lab: lab.model.has_self_speculative(), False),
    Row("decode_draft", lambda lab: lab.model.decode_draft(9, lab.live()), REFUSES),
    Row("save_hidden_for_mtp", lambda lab: lab.model.save_hidden_for_mtp(0)),
    Row("run_mtp_propose", lambda lab: lab.model.run_mtp_propose(9, 2, lab.live())),
    Row("run_mtp_propose_multi", lambda lab: lab.model.run_mtp_propose_multi(9, 2, 3, lab.live()), []),
    Row("trim_proposer_state", lambda lab: lab.model.trim_proposer_state(lab.live(), 1)),
    Row("mtp_slot_draft_capacity", lambda lab: lab.model.mtp_slot_draft_capacity(0), sys.maxsize),
    Row("dflash_gamma", lambda lab: lab.model.dflash_gamma()),
    Row("stash_verify_hidden_rows", lambda lab: lab.model.stash_verify_hidden_rows([0]), REFUSES),
    Row("stash_verify_catchup_rows", lambda lab: lab.model.stash_verify_catchup_rows([(0, 1)])),
    Row("run_mtp_catchup_batched", batched_catchup, 0),
    Row("save_hidden_for_mtp_from_stash", lambda lab: lab.model.save_hidden_for_mtp_from_stash(0), REFUSES),
    Row("run_mtp_propose_batched", batched_proposal),
    Row("mtp_propose_batch_max", lambda lab: lab.model.mtp_propose_batch_max(), 1),
    Row("save_hidden_for_catchup", lambda lab: lab.model.save_hidden_for_catchup(0, 2)),
    Row("save_dflash_hidden_for_propose", lambda lab: lab.model.save_dflash_hidden_for_propose(0)),
    Row("dflash_accept_append", lambda lab: lab.model.dflash_accept_append(lab.live())),
    Row("dflash_eagle_accept_append", lambda lab: lab.model.dflash_eagle_accept_append(lab.live())),
    Row("dflash_eagle_kgamma_append", lambda lab: lab.model.dflash_eagle_kgamma_append(lab.live(), 1, 2)),
    Row("dflash_serial_ctx_append", lambda lab: lab.model.dflash_serial_ctx_append(lab.live())),
    Row("commit_ctx", lambda lab: lab.model.commit_ctx(lab.live(), 1, 2, 0)),
    Row("dflash_capture_band", lambda lab: lab.model.dflash_capture_band(), 0),
    Row("read_deferred_draft_token", lambda lab: lab.model.read_deferred_draft_token(), 0),
]

VISION: Final = [
    Row("prepare_vision_embed", lambda lab: lab.model.prepare_vision_embed([object()]), REFUSES),
    Row("ep_sync_vision_embeds", lambda lab: lab.model.ep_sync_vision_embeds(PROMPT)),
    Row("prepare_vision_embed_batched", lambda lab: lab.model.prepare_vision_embed_batched([[], [object()]]), REFUSES),
    Row("set_vision_slice_base", lambda lab: lab.model.set_vision_slice_base(0, 0, 0)),
    Row("tokens_contain_vision_pad", lambda lab: lab.model.tokens_contain_vision_pad(PROMPT), False),
]

EP: Final = [
    Row("ep_worker_step", lambda lab: lab.model.ep_worker_step([None]), True),
    Row("is_ep", lambda lab: lab.model.is_ep(), False),
    Row("ep_broadcast_cmd", lambda lab: lab.model.ep_broadcast_cmd(1)),
    Row("ep_broadcast_cmd_for_seq", lambda lab: lab.model.ep_broadcast_cmd_for_seq(0, 1)),
    Row("ep_protocol_v2", lambda lab: lab.model.ep_protocol_v2(), False),
    Row("ep_broadcast_tokens", lambda lab: lab.model.ep_broadcast_tokens(PROMPT), []),
]

FEED: Final = [Row("fed_step_settled", lambda lab: lab.model.fed_step_settled())]

CIRCUIT: Final = [
    Row("set_forward", lambda lab: lab.model.set_forward("legacy")),
    Row("forward_disclosure", lambda lab: lab.model.forward_disclosure(), ForwardDisclosure("legacy", None, None)),
]
