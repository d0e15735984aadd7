# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Model interface: what a scheduler, or anyone who drives a model by pointer and stream, may ask of it.

It is made of twelve supertraits, one file each. A model implements the abstract methods, overrides the defaults that
it can better, and refuses the rest with :class:`~metrale.errors.NotSupported`.
"""

from __future__ import annotations

from abc import ABC

from metrale.model.adapters import ModelAdapters
from metrale.model.circuit import ModelCircuit
from metrale.model.device_feed import NO_CHOICE_FLAG, NOT_FINITE_FLAG, ModelDeviceFeed
from metrale.model.draft import ModelDraft
from metrale.model.ep import ModelEp
from metrale.model.forward import ModelForward
from metrale.model.lifecycle import ModelLifecycle
from metrale.model.logits import ModelLogits
from metrale.model.refusal import refusal
from metrale.model.ssm_state import ModelSsmState
from metrale.model.streams import ModelStreams
from metrale.model.types import (
    BATCH_LADDER,
    GREEDY,
    BeamReq,
    Capacity,
    EarlyStopping,
    EpCommandFailed,
    FeedSource,
    ForwardDisclosure,
    ForwardSelect,
    LogitsDtype,
    MixedBatchResult,
    MixedForwardResult,
    PrefillSlice,
    RowMask,
    SamplingParams,
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
    ModelCircuit,
    ABC,
):
    """All supertraits together."""


__all__ = [
    "BATCH_LADDER",
    "GREEDY",
    "NOT_FINITE_FLAG",
    "NO_CHOICE_FLAG",
    "BeamReq",
    "Capacity",
    "EarlyStopping",
    "EpCommandFailed",
    "FeedSource",
    "ForwardDisclosure",
    "ForwardSelect",
    "LogitsDtype",
    "MixedBatchResult",
    "MixedForwardResult",
    "Model",
    "ModelAdapters",
    "ModelCircuit",
    "ModelDeviceFeed",
    "ModelDraft",
    "ModelEp",
    "ModelForward",
    "ModelLifecycle",
    "ModelLogits",
    "ModelSsmState",
    "ModelStreams",
    "ModelVerify",
    "ModelVision",
    "PrefillSlice",
    "RowMask",
    "SamplingParams",
    "SequenceState",
    "VerifyBatchedOpts",
    "padded_batch_n",
    "refusal",
]
