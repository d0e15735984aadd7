# SPDX-License-Identifier: MIT OR Apache-2.0
"""NLLB-200 / M2M-100 in float64, one sequence at a time: the judge of every other implementation here.

It imports nothing of the system it judges and shares no code with it: no batching, no padding, no cache, no fused
weights. Symbols: S source tokens, T decoder tokens, d = ``d_model``, H heads of size d/H, V vocabulary rows.

Sources of the formulas: Vaswani et al. 2017, "Attention Is All You Need" (attention, sec. 3.2; feed-forward, 3.3;
tied and scaled embeddings, 3.4); Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture" (pre-norm
layers with a final norm, sec. 3.2); Ba et al. 2016, "Layer Normalization", eq. 3; Fan et al. 2020, "Beyond
English-Centric Multilingual Machine Translation" (the model family). The sinusoid is tensor2tensor's variant, whose
sines and cosines are two halves instead of alternating.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]

EPS = 1e-5
TIED_NAMES = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0.0)


def gelu(x: Array) -> Array:
    """x·Φ(x) with the normal distribution's Φ(x) = (1 + erf(x/√2))/2 (Hendrycks and Gimpel 2016, sec. 2)."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return np.asarray(x * 0.5 * (1.0 + erf(x / math.sqrt(2.0))), dtype=np.float64)


def gelu_tanh(x: Array) -> Array:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))): the approximation in the same paper and section."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Array) -> Array:
    """x·σ(x), with σ(x) = (1 + tanh(x/2))/2, which cannot overflow."""
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
    "swish": silu,
}


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    """(x - μ)/√(σ² + ε)·w + b over the last axis; σ² is the biased variance, ε = 1e-5."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + EPS) * weight + bias, dtype=np.float64)


def softmax(x: Array) -> Array:
    """exp(x)/Σexp(x) over the last axis, shifted by the maximum so that exp cannot overflow."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True), dtype=np.float64)


def sinusoidal_positions(first: int, count: int, d: int) -> Array:
    """Rows ``first`` to ``first + count - 1`` of the position table, float64 ``[count, d]``.

    Row p is ``[sin(p·w_i) | cos(p·w_i)]`` with ``w_i = exp(-i·ln(10000)/(⌊d/2⌋ - 1))`` for i < ⌊d/2⌋, and a zero at
    the end when d is odd. The table has no last row.
    """
    half = d // 2
    w = np.exp(-np.arange(half) * (math.log(10000.0) / (half - 1)))
    angle = np.arange(first, first + count)[:, None] * w
    return np.concatenate([np.sin(angle), np.cos(angle), np.zeros((count, d - 2 * half))], axis=1)


def multi_head_attention(q: Array, k: Array, v: Array, heads: int, causal: bool) -> Array:
    """softmax(q·kᵀ/√(d/H))·v for each head; queries ``[T, d]``, keys and values ``[S, d]``, result ``[T, d]``.

    Head h owns columns h·d/H to (h+1)·d/H - 1. ``causal`` lets query t see the keys up to t alone.
    """
    size = q.shape[1] // heads
    out = np.empty_like(q)
    for h in range(heads):
        columns = slice(h * size, (h + 1) * size)
        scores = q[:, columns] @ k[:, columns].T / math.sqrt(size)
        if causal:
            scores = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)
        out[:, columns] = softmax(scores) @ v[:, columns]
    return out


@dataclass(frozen=True)
class NllbFloat64:
    """A checkpoint in float64.

    Attributes
    ----------
    config : mapping
        ``config.json`` as it was read. Every key that the forward pass needs must be there: nothing is guessed.
    weights : mapping of str to float64 array
        The tensors under their stored names. A test may change one and build another model from the result.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, Array]

    @classmethod
    def load(cls, folder: str | Path) -> NllbFloat64:
        """Read ``config.json`` and every ``*.safetensors`` of ``folder``; bf16, fp16 and fp32 are upcast exactly."""
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights: dict[str, Array] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= {name: tensor.astype(np.float64) for name, tensor in load_file(file).items()}
        if not weights:
            raise FileNotFoundError(f"no *.safetensors in {folder}")
        return cls(config, weights)

    @property
    def embedding(self) -> Array:
        """The one matrix ``[V, d]`` of source embedding, target embedding and output head."""
        return next(self.weights[name] for name in TIED_NAMES if name in self.weights)

    def encode(self, src_ids: Sequence[int]) -> Array:
        """Encoder output after its final LayerNorm, float64 ``[S, d]``.

        ``src_ids`` is the whole encoder input: language code, tokens, ``</s>``.
        """
        x = self._embed(src_ids)
        for i in range(self.config["encoder_layers"]):
            layer = f"model.encoder.layers.{i}"
            y = self._norm(x, f"{layer}.self_attn_layer_norm")
            x = x + self._attention(y, y, f"{layer}.self_attn", self.config["encoder_attention_heads"])
            x = x + self._feed_forward(self._norm(x, f"{layer}.final_layer_norm"), layer)
        return self._norm(x, "model.encoder.layer_norm")

    def decode(self, memory: Array, decoder_ids: Sequence[int]) -> Array:
        """Decoder output after its final LayerNorm, float64 ``[T, d]``, for encoder output ``memory`` ``[S, d]``."""
        heads = self.config["decoder_attention_heads"]
        x = self._embed(decoder_ids)
        for i in range(self.config["decoder_layers"]):
            layer = f"model.decoder.layers.{i}"
            y = self._norm(x, f"{layer}.self_attn_layer_norm")
            x = x + self._attention(y, y, f"{layer}.self_attn", heads, causal=True)
            y = self._norm(x, f"{layer}.encoder_attn_layer_norm")
            x = x + self._attention(y, memory, f"{layer}.encoder_attn", heads)
            x = x + self._feed_forward(self._norm(x, f"{layer}.final_layer_norm"), layer)
        return self._norm(x, "model.decoder.layer_norm")

    def logits(self, src_ids: Sequence[int], decoder_ids: Sequence[int]) -> Array:
        """Logits float64 ``[T, V]``; row t is for the token after ``decoder_ids[t]``. The output head has no bias.

        ``decoder_ids`` starts with the decoder start id and the target language code.
        """
        return self.decode(self.encode(src_ids), decoder_ids) @ self.embedding.T

    def _embed(self, ids: Sequence[int]) -> Array:
        """√d·E[id] + P[p], or E[id] + P[p] without ``scale_embedding``; the first token has p = pad_id + 1."""
        d, pad = self.config["d_model"], self.config["pad_token_id"]
        rows = np.asarray(ids, dtype=np.int64)
        if rows.ndim != 1 or rows.size == 0 or rows.min() < 0 or rows.max() >= len(self.embedding) or pad in rows:
            raise ValueError(f"ids: expected a sequence below {len(self.embedding)} without padding ({pad}), got {ids}")
        scale = math.sqrt(d) if self.config["scale_embedding"] else 1.0
        return scale * self.embedding[rows] + sinusoidal_positions(pad + 1, len(rows), d)

    def _norm(self, x: Array, name: str) -> Array:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _linear(self, x: Array, name: str) -> Array:
        """x·Wᵀ + b; W is stored ``[out, in]``."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _attention(self, x: Array, source: Array, name: str, heads: int, causal: bool = False) -> Array:
        """Queries from ``x``, keys and values from ``source``."""
        q, k, v = (self._linear(y, f"{name}.{p}_proj") for y, p in ((x, "q"), (source, "k"), (source, "v")))
        return self._linear(multi_head_attention(q, k, v, heads, causal), f"{name}.out_proj")

    def _feed_forward(self, x: Array, layer: str) -> Array:
        activation = ACTIVATIONS[self.config["activation_function"]]
        return self._linear(activation(self._linear(x, f"{layer}.fc1")), f"{layer}.fc2")
