# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tiny random NLLB checkpoints in the Hugging Face format, made from a seed with NumPy alone.

The numbers must be the same on every machine and with every NumPy, because results for them are recorded. Only the raw
words of a bit generator are promised not to change between versions (NEP 19), so the variates are built from those by
additions and multiplications, which round the same everywhere; ``log`` and ``cos`` do not.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

DTYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

TINY_CONFIG: dict[str, Any] = {
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "bos_token_id": 0,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 56,
    "decoder_layers": 3,
    "decoder_start_token_id": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "is_encoder_decoder": True,
    "max_position_embeddings": 64,
    "model_type": "m2m_100",
    "pad_token_id": 1,
    "scale_embedding": True,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 97,
}

INPUT_DEVIATION = 2.0  # of the embedding as it enters a layer, that is after the scale
LOGITS_DEVIATION = 2.5
GENERATION_KEYS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """``TINY_CONFIG`` with ``overrides``.

    Raises
    ------
    ValueError
        For a key that ``TINY_CONFIG`` lacks, and for heads that do not divide ``d_model``.
    """
    unknown = sorted(set(overrides) - set(TINY_CONFIG))
    if unknown:
        raise ValueError(f"overrides: expected keys of TINY_CONFIG, got {unknown}")
    config = TINY_CONFIG | overrides
    for side in ("encoder", "decoder"):
        if config["d_model"] % config[f"{side}_attention_heads"]:
            raise ValueError(f"{side}_attention_heads: expected a divisor of d_model, got {config}")
    return config


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a checkpoint with this config, tied matrix once."""
    d = config["d_model"]
    yield "model.shared.weight", (config["vocab_size"], d)
    for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        ffn = config[f"{side}_ffn_dim"]
        for i in range(config[f"{side}_layers"]):
            layer = f"model.{side}.layers.{i}"
            linears = [(f"{a}.{p}_proj", d, d) for a in attentions for p in "qkv"]
            linears += [(f"{a}.out_proj", d, d) for a in attentions]
            linears += [("fc1", ffn, d), ("fc2", d, ffn)]
            for name, n_out, n_in in linears:
                yield f"{layer}.{name}.weight", (n_out, n_in)
                yield f"{layer}.{name}.bias", (n_out,)
            for norm in (*(f"{a}_layer_norm" for a in attentions), "final_layer_norm"):
                yield f"{layer}.{norm}.weight", (d,)
                yield f"{layer}.{norm}.bias", (d,)
        yield f"model.{side}.layer_norm.weight", (d,)
        yield f"model.{side}.layer_norm.bias", (d,)


def variates(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Bell-shaped variates of mean 0 and deviation 1: the sum of a word's four 16-bit fields (Irwin-Hall)."""
    fields = bits.random_raw(math.prod(shape)).view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    return np.asarray((fields - 2 * 65535) * (math.sqrt(3.0) / 65536), dtype=np.float64).reshape(shape)


def tiny_tensors(seed: int, config: Mapping[str, Any], dtype: str = "float32") -> dict[str, npt.NDArray[Any]]:
    """Random tensors for ``config`` in ``dtype`` ("float32", "float16", "bfloat16").

    The half-precision forms are the float32 form rounded.

    The deviations keep every part of the model visible in the logits: attention neither uniform nor one-hot, biases
    far from zero, LayerNorm weights around one. Only the decoder's last LayerNorm has weights of both signs: with the
    tied head, weights of one sign make the input token the likeliest output, and greedy decoding repeats itself.
    """
    bits = np.random.PCG64(seed)
    d = config["d_model"]
    embedding = INPUT_DEVIATION / (math.sqrt(d) if config["scale_embedding"] else 1.0)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, shape in tensor_shapes(config):
        x = variates(bits, shape)
        if name == "model.decoder.layer_norm.weight":
            x *= LOGITS_DEVIATION / (embedding * math.sqrt(d))
        elif name.endswith("norm.weight"):
            x = 1.0 + 0.1 * x
        elif name == "model.shared.weight":
            x *= embedding
        elif name.endswith("bias"):
            x *= 0.2
        else:
            x *= 1.5 / math.sqrt(shape[1])
        tensors[name] = x.astype(np.float32).astype(DTYPES[dtype])
    return tensors


def digest(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 over names and bytes, in order of the names: tells a changed generator from a changed forward pass."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode() + tensors[name].tobytes())
    return sha.hexdigest()


def write_tiny(path: str | Path, seed: int, *, dtype: str = "float32", **overrides: Any) -> Path:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` into folder ``path``.

    Parameters
    ----------
    path : str or Path
        Made if it is missing. There is no tokenizer in it.
    seed : int
        Not negative. Equal seed, dtype and overrides give equal bytes in every tensor.
    dtype : str
        "float32", "float16" or "bfloat16".
    **overrides
        Keys of ``TINY_CONFIG``.

    Returns
    -------
    Path
        The folder.
    """
    config = tiny_config(**overrides)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    generation = {key: config[key] for key in GENERATION_KEYS} | {"max_length": 200}
    for name, content in (("config.json", config | {"dtype": dtype}), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(tiny_tensors(seed, config, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
