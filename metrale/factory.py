# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a checkpoint folder to a model on a device."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.config import Config
from gpu_runtime.errors import BackendUnavailable
from gpu_runtime.opening import open_backend
from metrale.checkpoint import open_checkpoint, require_path
from metrale.checkpoint.peft import CONFIG_FILE as _ADAPTER_FILE
from metrale.checks import flag
from metrale.errors import CheckpointError, InvalidInput, told
from metrale.hub import resolve
from metrale.nllb.admission import Languages
from metrale.nllb.checks import token_id
from metrale.nllb.config import NllbConfig
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.lora import check_adapter
from metrale.nllb.model import NllbModel
from metrale.nllb.plan import MemoryPlan, plan_memory
from metrale.nllb.tokenizer import VOCABULARIES, Tokenizer, open_tokenizer
from metrale.nllb.weights import WeightMap, match_weights

log = logging.getLogger(__name__)

_DEVICE = re.compile(r"auto|host|cuda(:\d+)?", re.ASCII)

_ARGUMENTS = {"forced_eos_token_id": "forced_eos"}
"""Arguments of a translation that are not called as the checkpoint's settings are."""

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
    max_adapters: int | None = None,
    max_lora_rank: int = 64,
    adapters: Mapping[str, PathLike] | None = None,
    source: str | int | None = None,
    target: str | int | None = None,
    legacy_order: bool = False,
    step_graphs: bool | None = None,
    batch_invariant: bool = False,
) -> NllbModel:
    """Load an NLLB-200 or M2M-100 checkpoint in Hugging Face format.

    Parameters
    ----------
    path : path
        The checkpoint's folder, or its id on the Hugging Face Hub, ``"org/name"`` or ``"org/name@revision"``: see
        `metrale.hub.resolve`. Without tokenizer files the model serves ids only.
    device : str or GpuBackend
        ``"auto"`` (what ``METRALE_DEVICE`` says; else the first GPU that can be used, else the host), ``"host"``,
        ``"cuda"``, ``"cuda:N"``, or an open backend, which stays the caller's. The choice is logged.
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"``, or ``"auto"``: float32 on the host, bfloat16 on compute
        capability 8.0 and later, else float16.
    max_batch, max_source_len, max_new_tokens, max_encoder_tokens, kv_bytes, max_lora_rank
        See `ServingLimits`. Device memory is allocated here, and does not grow.
    max_adapters : int or None
        LoRA adapters that may be resident at once. None: as many as ``adapters`` has.
    adapters : mapping of str to path
        Folders of adapters in PEFT's format, by the names they get. They go to slots 0, 1 and so on, in order.
    source, target : str, int or None
        Default languages, as codes or token ids, for sequences whose language id is 0.
    legacy_order : bool
        Whether the encoder gets a text's language after the text instead of before it, for models that were trained
        so. When a checkpoint's ``legacy_behaviour`` asks for it and the caller does not, it is not done, and a warning
        says so.
    step_graphs : bool or None
        Whether decode steps that come again are captured as graphs of the device and replayed, which changes no bit of
        a result and takes the host a fraction of the time. None: on a GPU, and not on the host. docs/performance.md
        says when a step is launched op by op all the same.
    batch_invariant : bool
        Whether a sequence's logits have the same bits alone and in any batch, whatever its neighbours are and whichever
        row it has. It takes time and some memory; docs/performance.md says how much, and what it does.

    Raises
    ------
    CheckpointError
        When the folder cannot be served; every reason is listed. When an id cannot be had.
    InvalidInput, UnknownLanguage
        When an argument is wrong.
    gpu_runtime.OutOfMemory
        When the device is too small; see `memory_plan`.
    gpu_runtime.BackendUnavailable
        When the device cannot be opened; it says why. Only ``"auto"`` ever takes another device instead.
    """
    legacy_order = flag("legacy_order", legacy_order)
    if step_graphs is not None:
        step_graphs = flag("step_graphs", step_graphs)
    batch_invariant = flag("batch_invariant", batch_invariant)
    folders = _adapter_folders(adapters)
    room = len(folders) if max_adapters is None else max_adapters
    limits = ServingLimits(max_batch, max_source_len, max_new_tokens, max_encoder_tokens, kv_bytes, room, max_lora_rank)
    if len(folders) > limits.max_adapters:
        raise InvalidInput("max_adapters", f"at least {len(folders)}, as many as adapters has", room)
    path = resolve(path)
    config = _config(path)
    with open_checkpoint(path) as checkpoint:
        weights = match_weights(config, checkpoint)
        tokenizer = _tokenizer(path, weights.vocab_size, legacy_order)
        languages = Languages(
            _language("source", source, tokenizer, weights.vocab_size),
            _language("target", target, tokenizer, weights.vocab_size),
        )
        _check_dtype(dtype)
        with ExitStack() as undo:
            owns_gpu = not isinstance(device, GpuBackend)
            gpu = device if isinstance(device, GpuBackend) else undo.enter_context(open_device(device))
            shape = model_shape(gpu, config, weights, dtype, limits, batch_invariant=batch_invariant)
            log.info("device %s: %s", device if owns_gpu else "given", gpu.name())
            log.info("dtype %s: %s", dtype, dtypes.long_name(shape.dtype))
            log.info("memory: %s", plan_memory(shape))
            for folder in folders.values():
                check_adapter(folder, shape)  # before gigabytes are read
            model = NllbModel(
                gpu,
                shape,
                checkpoint,
                weights,
                languages=languages,
                tokenizer=tokenizer,
                owns_gpu=owns_gpu,
                legacy_order=legacy_order,
                step_graphs=step_graphs,
            )
            undo.pop_all()  # from here on the model closes the backend that was opened for it
            undo.push(model)
            for slot, (name, folder) in enumerate(folders.items()):
                model.swap_lora_from_disk(folder, name, slot)
            undo.pop_all()
        return model


def _adapter_folders(adapters: Mapping[str, PathLike] | None) -> dict[str, PathLike]:
    if adapters is None:
        return {}
    if not isinstance(adapters, Mapping) or not all(isinstance(name, str) and name for name in adapters):
        raise InvalidInput("adapters", "a mapping of names to folders", adapters)
    return {name: require_path(f"adapters[{told(name)}]", folder) for name, folder in adapters.items()}


def memory_plan(
    path: PathLike,
    device: str | GpuBackend = "auto",
    dtype: str = "auto",
    *,
    max_batch: int = 32,
    max_source_len: int = 512,
    max_new_tokens: int = 256,
    max_encoder_tokens: int | None = None,
    kv_bytes: int | None = None,
    max_adapters: int = 0,
    max_lora_rank: int = 64,
    batch_invariant: bool = False,
) -> MemoryPlan:
    """Return the device memory that `load` would take with the same arguments, without allocating any.

    A device that is not open yet is opened for a moment, to resolve ``dtype="auto"``. Raises as `load` does; only
    a plan larger than the device is no error here.
    """
    serving = ServingLimits(
        max_batch, max_source_len, max_new_tokens, max_encoder_tokens, kv_bytes, max_adapters, max_lora_rank
    )
    batch_invariant = flag("batch_invariant", batch_invariant)
    path = resolve(path)
    config = _config(path)
    with open_checkpoint(path) as checkpoint:
        weights = match_weights(config, checkpoint)
    _check_dtype(dtype)
    with nullcontext(device) if isinstance(device, GpuBackend) else open_device(device) as gpu:
        return plan_memory(model_shape(gpu, config, weights, dtype, serving, batch_invariant=batch_invariant))


def model_shape(
    gpu: GpuBackend,
    config: NllbConfig,
    weights: WeightMap,
    dtype: str,
    limits: ServingLimits,
    *,
    batch_invariant: bool = False,
) -> ModelShape:
    """Return what a model's sizes follow from on this device."""
    device = gpu.limits()
    return ModelShape(
        config,
        weights.vocab_size,
        element_type(dtype, gpu),
        limits,
        device.gemm_workspace_bytes,
        device.pad_batches,
        weights.tables,
        batch_invariant,
        device.fixed_rows,
    )


def refuse_adapter(path: Path) -> None:
    """Refuse a folder that only looks like a checkpoint of a whole model.

    Raises
    ------
    CheckpointError
        When it holds a LoRA adapter.
    """
    if os.path.lexists(os.path.join(path, _ADAPTER_FILE)):
        raise CheckpointError(
            path,
            f"holds a LoRA adapter ({_ADAPTER_FILE}), not a model: load the model that it was trained on, and the "
            "adapter with it, as adapters={'name': folder}",
        )


def _config(path: Path) -> NllbConfig:
    """Return the checkpoint's configuration, with a warning of what it asks for and does not get by itself."""
    refuse_adapter(path)
    config = NllbConfig.from_dir(path)
    asked = config.generation.not_greedy()
    if asked:
        settings = ", ".join(f"{name}={value}" for name, value in asked.items())
        arguments = ", ".join(f"{_ARGUMENTS.get(name, name)}=" for name in asked)
        warnings.warn(
            f"{path}: the checkpoint asks for {settings}. This is not applied by itself: a translation has it when its "
            f"call asks for it ({arguments})",
            stacklevel=3,
        )
    return config


def open_device(device: str) -> GpuBackend:
    """Open a device by its name, ``"auto"`` standing for what ``METRALE_DEVICE`` says.

    Raises
    ------
    InvalidInput
        As `device_name`.
    gpu_runtime.BackendUnavailable
        When it cannot be opened. The message names the variable when that named the device, and where to look further.
    """
    name = device_name(device)
    try:
        return open_backend(name)
    except BackendUnavailable as error:
        origin = f"METRALE_DEVICE={name}: " if device != name else ""
        raise BackendUnavailable(f"{origin}{error} (metrale doctor shows what there is and what is missing)") from error


def device_name(device: object) -> str:
    """Return the name of the device that ``device`` stands for, ``"auto"`` having given way to ``METRALE_DEVICE``.

    Raises
    ------
    InvalidInput
        When it, or the environment's setting, is not the name of a device.
    """
    origin = "device"
    if isinstance(device, str) and device == "auto":
        origin, device = "METRALE_DEVICE", Config.from_env().device
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        open_too = " or an open backend" if origin == "device" else ""
        raise InvalidInput(origin, f"'auto', 'host', 'cuda', 'cuda:N'{open_too}", told(device))
    return device


def _check_dtype(dtype: str) -> None:
    known = ("auto", *map(dtypes.long_name, dtypes.FLOAT_TYPES))
    if not isinstance(dtype, str) or dtype not in known:
        raise InvalidInput("dtype", f"one of {', '.join(known)}", told(dtype))


def element_type(dtype: str, gpu: GpuBackend) -> str:
    """Return the short name of the type that ``dtype`` stands for on a device."""
    if dtype != "auto":
        return dtypes.short_name(dtype)
    if gpu.kind() == "host":
        return "f32"
    return "bf16" if gpu.limits().compute_capability >= (8, 0) else "f16"


def _tokenizer(path: PathLike, vocab: int, legacy_order: bool) -> Tokenizer | None:
    """Return the folder's tokenizer, or None when the folder has none at all."""
    tokenizer = open_tokenizer(path, vocab_size=vocab, legacy_order=legacy_order)
    if tokenizer is None:
        log.info("%s: no tokenizer (%s); the model serves token ids only", path, VOCABULARIES)
    elif tokenizer.asks_legacy_order and not legacy_order:
        warnings.warn(
            f"{path}: tokenizer_config.json sets legacy_behaviour, which puts the language after a text. This is not "
            "applied by itself: legacy_order=True applies it",
            stacklevel=3,
        )
    return tokenizer


def _language(argument: str, given: str | int | None, tokenizer: Tokenizer | None, vocab: int) -> int | None:
    if given is None:
        return None
    if not isinstance(given, str):
        return token_id(argument, given, vocab)
    if tokenizer is None:
        raise InvalidInput(argument, "a token id (without a tokenizer the checkpoint knows no codes)", told(given))
    return tokenizer.language_id(given, argument)
