# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200 and M2M-100 translation from raw device pointers."""

from metrale.demo import demo_model_path
from metrale.engine import Engine, Generated, Request, RequestHandle
from metrale.errors import (
    CheckpointError,
    InvalidInput,
    MetraleError,
    NonFiniteLogits,
    NotSupported,
    SequenceError,
    UnknownLanguage,
)
from metrale.factory import load, memory_plan
from metrale.model import (
    BeamReq,
    FeedSource,
    MixedBatchResult,
    MixedForwardResult,
    Model,
    PrefillSlice,
    RowMask,
    SamplingParams,
    SequenceState,
)
from metrale.translator import Translation, TranslationStream, Translator

__version__ = "0.1.0"

__all__ = [
    "BeamReq",
    "CheckpointError",
    "Engine",
    "FeedSource",
    "Generated",
    "InvalidInput",
    "MetraleError",
    "MixedBatchResult",
    "MixedForwardResult",
    "Model",
    "NonFiniteLogits",
    "NotSupported",
    "PrefillSlice",
    "Request",
    "RequestHandle",
    "RowMask",
    "SamplingParams",
    "SequenceError",
    "SequenceState",
    "Translation",
    "TranslationStream",
    "Translator",
    "UnknownLanguage",
    "demo_model_path",
    "load",
    "memory_plan",
]
