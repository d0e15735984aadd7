# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200 and M2M-100 translation from raw device pointers."""

import gpu_runtime  # noqa: F401  # first: it refuses a subinterpreter, before NumPy is imported
from metrale.demo import demo_model_path
from metrale.engine import (
    Engine,
    EngineClosed,
    EngineError,
    EngineStats,
    Generated,
    QueueFull,
    Request,
    RequestFailed,
    RequestHandle,
)
from metrale.errors import (
    CheckpointError,
    InvalidInput,
    MetraleError,
    NoFreeSlot,
    NonFiniteLogits,
    NotSupported,
    SequenceError,
    UnknownLanguage,
)
from metrale.factory import load, memory_plan
from metrale.model import (
    BeamParams,
    BeamReq,
    FeedSource,
    Hypothesis,
    MixedBatchResult,
    MixedForwardResult,
    Model,
    PrefillSlice,
    RowMask,
    SamplingParams,
    ScoredTarget,
    ScoreReq,
    SequenceState,
)
from metrale.translator import (
    Scored,
    Translation,
    TranslationHypothesis,
    TranslationOptions,
    TranslationStream,
    Translator,
    UnknownSpan,
)

__version__ = "0.1.0"

__all__ = [
    "BeamParams",
    "BeamReq",
    "CheckpointError",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineStats",
    "FeedSource",
    "Generated",
    "Hypothesis",
    "InvalidInput",
    "MetraleError",
    "MixedBatchResult",
    "MixedForwardResult",
    "Model",
    "NoFreeSlot",
    "NonFiniteLogits",
    "NotSupported",
    "PrefillSlice",
    "QueueFull",
    "Request",
    "RequestFailed",
    "RequestHandle",
    "RowMask",
    "SamplingParams",
    "ScoreReq",
    "Scored",
    "ScoredTarget",
    "SequenceError",
    "SequenceState",
    "Translation",
    "TranslationHypothesis",
    "TranslationOptions",
    "TranslationStream",
    "Translator",
    "UnknownLanguage",
    "UnknownSpan",
    "demo_model_path",
    "load",
    "memory_plan",
]
