# SPDX-License-Identifier: MIT OR Apache-2.0
"""A checkpoint in Hugging Face format as a CTranslate2 model, without torch or transformers.

The weights are views of the mapped files, so only what is stored fused (q, k and v) is copied on the way.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from metrale.nllb.config import NllbConfig
from metrale.nllb.embeddings import EMBEDDING
from metrale.nllb.positions import sinusoidal
from metrale.nllb.weights import (
    DECODER_NORM,
    ENCODER_NORM,
    Affine,
    AttentionNames,
    DecoderLayerNames,
    EncoderLayerNames,
    decoder_layer,
    encoder_layer,
)

POSITIONS = 1024
"""Enough for the longest sources and outputs that are measured."""
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": bfloat16}
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def token(index: int) -> str:
    """Return the name of an id; a model without a tokenizer has no better ones."""
    return SPECIAL[index] if index < len(SPECIAL) else f"tok{index}"


def mapped(folder: Path) -> dict[str, NDArray[Any]]:
    """Return every tensor of a folder of safetensors files, as views of the mapped files."""
    tensors: dict[str, NDArray[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:start].tobytes()).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                values = data[start + first : start + last].view(DTYPES[entry["dtype"]])
                tensors[name] = np.asarray(values).reshape(entry["shape"])
    return tensors


class Filler:
    """Puts a checkpoint's tensors into a specification of CTranslate2."""

    def __init__(self, tensors: dict[str, NDArray[Any]]) -> None:
        self._tensors = tensors

    def linear(self, spec: Any, *parts: Affine) -> None:
        """Set a linear layer; several parts become one, row block after row block."""
        weights, biases = ([self._tensors[name] for name in names] for names in zip(*parts, strict=True))
        spec.weight = weights[0] if len(parts) == 1 else np.concatenate(weights)
        spec.bias = biases[0] if len(parts) == 1 else np.concatenate(biases)

    def norm(self, spec: Any, names: Affine) -> None:
        """Set a LayerNorm."""
        spec.gamma, spec.beta = self._tensors[names.weight], self._tensors[names.bias]

    def self_attention(self, spec: Any, names: AttentionNames, norm: Affine) -> None:
        """Set self-attention: q, k and v fused, and the output."""
        self.norm(spec.layer_norm, norm)
        self.linear(spec.linear[0], *names.qkv)
        self.linear(spec.linear[1], names.out)

    def cross_attention(self, spec: Any, names: AttentionNames, norm: Affine) -> None:
        """Set attention over the source: q, k and v fused, and the output."""
        self.norm(spec.layer_norm, norm)
        self.linear(spec.linear[0], names.q)
        self.linear(spec.linear[1], *names.kv)
        self.linear(spec.linear[2], names.out)

    def feed_forward(self, spec: Any, names: EncoderLayerNames | DecoderLayerNames) -> None:
        """Set the feed-forward block of either side."""
        self.norm(spec.layer_norm, names.ffn_norm)
        self.linear(spec.linear_0, names.fc1)
        self.linear(spec.linear_1, names.fc2)


def specification(folder: Path) -> Any:
    """Return the filled ``TransformerSpec`` of a checkpoint with ReLU and the same number of heads on both sides."""
    from ctranslate2.specs import common_spec, transformer_spec  # type: ignore[import-not-found,unused-ignore]

    config = NllbConfig.from_dir(folder)
    if config.activation_function != "relu" or config.encoder_attention_heads != config.decoder_attention_heads:
        raise ValueError(f"{folder}: expected ReLU and as many heads in the encoder as in the decoder")
    tensors = mapped(folder)
    fill = Filler(tensors)
    spec: Any = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.encoder_attention_heads,
        pre_norm=True,
        activation=common_spec.Activation.RELU,
    )
    embedding = tensors[EMBEDDING]
    encodings = sinusoidal(config.pad_token_id + 1, POSITIONS, config.d_model)
    for side, place in ((spec.encoder, spec.encoder.embeddings[0]), (spec.decoder, spec.decoder.embeddings)):
        place.weight = embedding
        side.scale_embeddings = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        side.position_encodings.encodings = encodings
    spec.decoder.projection.weight = embedding
    fill.norm(spec.encoder.layer_norm, ENCODER_NORM)
    fill.norm(spec.decoder.layer_norm, DECODER_NORM)
    for index, layer in enumerate(spec.encoder.layer):
        encoder = encoder_layer(index)
        fill.self_attention(layer.self_attention, encoder.self_attn, encoder.self_attn_norm)
        fill.feed_forward(layer.ffn, encoder)
    for index, layer in enumerate(spec.decoder.layer):
        decoder = decoder_layer(index)
        fill.self_attention(layer.self_attention, decoder.self_attn, decoder.self_attn_norm)
        fill.cross_attention(layer.attention, decoder.cross_attn, decoder.cross_attn_norm)
        fill.feed_forward(layer.ffn, decoder)
    _name(spec, len(embedding))
    return spec


def _name(spec: Any, vocab: int) -> None:
    names = [token(index) for index in range(vocab)]
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<unk>"
    spec.config.decoder_start_token = "</s>"


def convert(folder: Path, output: Path, dtype: str) -> None:
    """Write the model of a checkpoint, its weights in ``dtype``."""
    spec = specification(folder)
    spec.validate()
    spec.optimize(quantization=dtype)
    output.mkdir(parents=True, exist_ok=True)
    spec.save(str(output))
