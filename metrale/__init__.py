# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200 and M2M-100 translation from raw device pointers."""

from metrale.demo import demo_model_path
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
from metrale.model import BeamReq, MixedBatchResult, MixedForwardResult, Model, PrefillSlice, SequenceState
from metrale.translator import Translation, Translator

__version__ = "0.1.0"

__all__ = [
    "BeamReq",
    "CheckpointError",
    "InvalidInput",
    "MetraleError",
    "MixedBatchResult",
    "MixedForwardResult",
    "Model",
    "NonFiniteLogits",
    "NotSupported",
    "PrefillSlice",
    "SequenceError",
    "SequenceState",
    "Translation",
    "Translator",
    "UnknownLanguage",
    "demo_model_path",
    "load",
    "memory_plan",
]
