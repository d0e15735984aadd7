# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the published checkpoints have in ``config.json``."""

from __future__ import annotations

from typing import Any

from metrale.nllb.config import NllbConfig
from tests.reference.tiny import tensor_shapes

COMMON: dict[str, Any] = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["M2M100ForConditionalGeneration"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "decoder_attention_heads": 16,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "encoder_attention_heads": 16,
    "eos_token_id": 2,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 200,
    "max_position_embeddings": 1024,
    "model_type": "m2m_100",
    "pad_token_id": 1,
    "scale_embedding": True,
    "torch_dtype": "float32",
    "use_cache": True,
}
NLLB: dict[str, Any] = {
    "decoder_layerdrop": 0,
    "encoder_layerdrop": 0,
    "tokenizer_class": "NllbTokenizer",
    "vocab_size": 256206,
}
M2M100: dict[str, Any] = {
    "decoder_layerdrop": 0.05,
    "early_stopping": True,
    "encoder_layerdrop": 0.05,
    "gradient_checkpointing": False,
    "num_beams": 5,
    "vocab_size": 128112,
}


def _sizes(layers: int, d_model: int, ffn: int) -> dict[str, int]:
    both = {f"{side}_layers": layers for side in ("encoder", "decoder")}
    both |= {f"{side}_ffn_dim": ffn for side in ("encoder", "decoder")}
    return both | {"d_model": d_model, "num_hidden_layers": layers}


OFFICIAL: dict[str, dict[str, Any]] = {
    "nllb-200-distilled-600M": COMMON | NLLB | _sizes(12, 1024, 4096),
    "nllb-200-1.3B": COMMON | NLLB | _sizes(24, 1024, 8192),
    "nllb-200-3.3B": COMMON | NLLB | _sizes(24, 2048, 8192),
    "m2m100_418M": COMMON | M2M100 | _sizes(12, 1024, 4096),
    "m2m100_1.2B": COMMON | M2M100 | _sizes(24, 1024, 8192),
}


def grouped(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Return for each name, its layer's number left out, how many tensors there are, and their shape.

    Raises
    ------
    ValueError
        When layers differ.
    """
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        count, *known = found.get(kind, [0, *shape])
        if known != list(shape):
            raise ValueError(f"{name}: shape {shape}, others have {known}")
        found[kind] = [count + 1, *shape]
    return dict(sorted(found.items()))


def weight_bytes(config: NllbConfig, itemsize: int, positions: int) -> int:
    """Return the bytes of the weights and of ``positions`` rows of the float32 table of positions, without gaps.

    The output head has rows, and a bias, for the elements of a logits row, which are a multiple of 64.
    """
    shapes = dict(tensor_shapes({name: getattr(config, name) for name in config.__slots__}))
    elements = 0
    for shape in shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        elements += size
    rows = -(-config.vocab_size // 64) * 64
    elements += (rows - config.vocab_size) * config.d_model + rows
    return elements * itemsize + positions * config.d_model * 4
