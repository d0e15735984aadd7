# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a checkpoint folder to a model on a device."""

from __future__ import annotations

import logging
import os
from typing import Any

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend, open_backend
from metrale.checkpoint import Checkpoint, open_checkpoint
from metrale.errors import InvalidInput
from metrale.nllb.admission import Languages
from metrale.nllb.checks import token_id
from metrale.nllb.config import NllbConfig
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.model import NllbModel
from metrale.nllb.plan import MemoryPlan, plan_memory
from metrale.nllb.tokenizer import MODEL_FILE, NllbTokenizer
from metrale.nllb.weights import WeightMap, match_weights

log = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


def load(
    path: PathLike,
    device: str | GpuBackend = "auto",
    dtype: str = "auto",
    *,
    max_batch: int = 32,
    max_source_len: int = 512,
    max_new_tokens: int = 256,
    max_encoder_tokens: int | None = None,
    kv_bytes: int | None = None,
    source: str | int | None = None,
    target: str | int | None = None,
) -> NllbModel:
    """Load an NLLB-200 or M2M-100 checkpoint in Hugging Face format.

    Parameters
    ----------
    path : path
        The checkpoint's folder. Without tokenizer files the model serves ids only.
    device : str or GpuBackend
        ``"auto"``, ``"host"``, ``"cuda"``, ``"cuda:N"``, or an open backend, which stays the caller's.
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"``, or ``"auto"``: float32 on the host, bfloat16 on compute
        capability 8.0 and later, else float16.
    max_batch, max_source_len, max_new_tokens, max_encoder_tokens, kv_bytes
        See `ServingLimits`. Device memory is allocated here, and does not grow.
    source, target : str, int or None
        Default languages, as codes or token ids, for sequences whose language id is 0.

    Raises
    ------
    CheckpointError
        When the folder cannot be served; every reason is listed.
    InvalidInput, UnknownLanguage
        When an argument is wrong.
    gpu_runtime.OutOfMemory
        When the device is too small; see `memory_plan`.
    gpu_runtime.BackendUnavailable
        When the device cannot be opened.
    """
    limits = ServingLimits(max_batch, max_source_len, max_new_tokens, max_encoder_tokens, kv_bytes)
    config = NllbConfig.from_dir(path)
    with open_checkpoint(path) as checkpoint:
        weights = match_weights(config, checkpoint)
        tokenizer = _tokenizer(path, weights.vocab_size)
        languages = Languages(
            _language("source", source, tokenizer, weights.vocab_size),
            _language("target", target, tokenizer, weights.vocab_size),
        )
        _check_dtype(dtype)
        if isinstance(device, GpuBackend):
            return _build(device, config, weights, checkpoint, dtype, limits, languages, tokenizer, owns_gpu=False)
        gpu = open_backend(device)
        log.info("device %r: %s", device, gpu.name())
        return _build(gpu, config, weights, checkpoint, dtype, limits, languages, tokenizer, owns_gpu=True)


def memory_plan(path: PathLike, device: str | GpuBackend = "auto", dtype: str = "auto", **limits: Any) -> MemoryPlan:
    """Return the device memory that `load` would take with the same arguments, without allocating any.

    Parameters
    ----------
    path, device, dtype
        As for `load`. A device that is not open yet is opened for a moment, to resolve ``dtype="auto"``.
    **limits
        The keyword arguments of `ServingLimits`.
    """
    serving = ServingLimits(**limits)
    config = NllbConfig.from_dir(path)
    with open_checkpoint(path) as checkpoint:
        vocab = match_weights(config, checkpoint).vocab_size
    _check_dtype(dtype)
    if isinstance(device, GpuBackend):
        element = _element_type(dtype, device)
    else:
        with open_backend(device) as gpu:
            element = _element_type(dtype, gpu)
    return plan_memory(ModelShape(config, vocab, element, serving))


def _build(
    gpu: GpuBackend,
    config: NllbConfig,
    weights: WeightMap,
    checkpoint: Checkpoint,
    dtype: str,
    limits: ServingLimits,
    languages: Languages,
    tokenizer: NllbTokenizer | None,
    *,
    owns_gpu: bool,
) -> NllbModel:
    shape = ModelShape(config, weights.vocab_size, _element_type(dtype, gpu), limits)
    log.info("memory: %s", plan_memory(shape))
    return NllbModel(gpu, shape, checkpoint, weights, languages=languages, tokenizer=tokenizer, owns_gpu=owns_gpu)


def _check_dtype(dtype: str) -> None:
    known = ("auto", *map(dtypes.long_name, dtypes.FLOAT_TYPES))
    if dtype not in known:
        raise InvalidInput("dtype", f"one of {', '.join(known)}", dtype)


def _element_type(dtype: str, gpu: GpuBackend) -> str:
    if dtype != "auto":
        return dtypes.short_name(dtype)
    if gpu.kind() == "host":
        return "f32"
    return "bf16" if gpu.limits().compute_capability >= (8, 0) else "f16"


def _tokenizer(path: PathLike, vocab: int) -> NllbTokenizer | None:
    """Return the folder's tokenizer, or None when the folder has none at all."""
    if os.path.lexists(os.path.join(path, MODEL_FILE)):
        return NllbTokenizer.from_dir(path, vocab_size=vocab)
    log.info("%s: no %s; the model serves token ids only", path, MODEL_FILE)
    return None


def _language(argument: str, given: str | int | None, tokenizer: NllbTokenizer | None, vocab: int) -> int | None:
    if given is None:
        return None
    if not isinstance(given, str):
        return token_id(argument, given, vocab)
    if tokenizer is None:
        raise InvalidInput(argument, "a token id (the checkpoint has no tokenizer that knows codes)", given)
    return tokenizer.language_id(given, argument)
