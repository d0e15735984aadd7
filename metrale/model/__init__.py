# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Model interface: what a scheduler, or anyone who drives a model by pointer and stream, may ask of it.

It is made of fourteen supertraits, one file each. A model implements the abstract methods, overrides the defaults that
it can better, and refuses the rest with :class:`~metrale.errors.NotSupported`.
"""

from __future__ import annotations

from abc import ABC

from metrale.model.adapters import ModelAdapters
from metrale.model.beam_types import (
    BEAM_DONE_FLAG,
    BEAM_NO_CHOICE_FLAG,
    BEAM_NOT_FINITE_FLAG,
    MAX_BEAMS,
    BeamParams,
    BeamReq,
    EarlyStopping,
    Hypothesis,
)
from metrale.model.beams import ModelBeams
from metrale.model.circuit import ModelCircuit
from metrale.model.device_feed import NO_CHOICE_FLAG, NOT_FINITE_FLAG, ModelDeviceFeed
from metrale.model.draft import ModelDraft
from metrale.model.ep import ModelEp
from metrale.model.forward import ModelForward
from metrale.model.lifecycle import ModelLifecycle
from metrale.model.logits import ModelLogits
from metrale.model.refusal import refusal
from metrale.model.sampling import GREEDY, SamplingParams
from metrale.model.scoring import ModelScoring, ScoredTarget, ScoreReq
from metrale.model.ssm_state import ModelSsmState
from metrale.model.streams import ModelStreams
from metrale.model.types import (
    BATCH_LADDER,
    Capacity,
    EpCommandFailed,
    FeedSource,
    ForwardDisclosure,
    ForwardSelect,
    LogitsDtype,
    MixedBatchResult,
    MixedForwardResult,
    PrefillSlice,
    RowMask,
    SequenceState,
    VerifyBatchedOpts,
    padded_batch_n,
)
from metrale.model.verify import ModelVerify
from metrale.model.vision import ModelVision


class Model(
    ModelLifecycle,
    ModelForward,
    ModelLogits,
    ModelAdapters,
    ModelSsmState,
    ModelVerify,
    ModelDraft,
    ModelVision,
    ModelEp,
    ModelStreams,
    ModelDeviceFeed,
    ModelBeams,
    ModelScoring,
    ModelCircuit,
    ABC,
):
    """All supertraits together."""


__all__ = [
    "BATCH_LADDER",
    "BEAM_DONE_FLAG",
    "BEAM_NOT_FINITE_FLAG",
    "BEAM_NO_CHOICE_FLAG",
    "GREEDY",
    "MAX_BEAMS",
    "NOT_FINITE_FLAG",
    "NO_CHOICE_FLAG",
    "BeamParams",
    "BeamReq",
    "Capacity",
    "EarlyStopping",
    "EpCommandFailed",
    "FeedSource",
    "ForwardDisclosure",
    "ForwardSelect",
    "Hypothesis",
    "LogitsDtype",
    "MixedBatchResult",
    "MixedForwardResult",
    "Model",
    "ModelAdapters",
    "ModelBeams",
    "ModelCircuit",
    "ModelDeviceFeed",
    "ModelDraft",
    "ModelEp",
    "ModelForward",
    "ModelLifecycle",
    "ModelLogits",
    "ModelScoring",
    "ModelSsmState",
    "ModelStreams",
    "ModelVerify",
    "ModelVision",
    "PrefillSlice",
    "RowMask",
    "SamplingParams",
    "ScoreReq",
    "ScoredTarget",
    "SequenceState",
    "VerifyBatchedOpts",
    "padded_batch_n",
    "refusal",
]
