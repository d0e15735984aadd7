# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is refused, and what the sentence has to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[Any]]

OTHER_ACTIVATIONS = (
    "gelu_10",
    "hardswish",
    "laplace",
    "leaky_relu",
    "mish",
    "prelu",
    "quick_gelu",
    "relu2",
    "relu6",
    "sigmoid",
    "sqrtsoftplus",
    "tanh",
    "xielu",
)
"""The activations that transformers has and we have not."""


def _as_is(tensors: Tensors) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Refusal:
    """A change to a good checkpoint, and what its one problem must contain."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], object] = _as_is
    says: tuple[str, ...] = ()


def _replace(name: str, array: npt.NDArray[Any]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: array})


def _fewer_rows(tensors: Tensors) -> None:
    tensors[_SHARED] = tensors[_SHARED][:90].copy()


def _rest_of_a_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if "encoder.layers.1." in name and not name.endswith("fc1.bias")]:
        del tensors[name]


def _sides_alone(tensors: Tensors) -> None:
    tensors |= {f"model.{side}.embed_tokens.weight": tensors[_SHARED] for side in ("encoder", "decoder")}


_SHARED = "model.shared.weight"
_NORM = "model.encoder.layer_norm.bias"
_MODEL_TYPES = {
    "nllb-moe": "a mixture of experts",
    "mbart": "mBART",
    "marian": "Marian",
    "t5": "T5",
    "umt5": "UMT5",
    "seamless_m4t": "SeamlessM4T",
    "seamless_m4t_v2": "SeamlessM4T",
    "bart": "",
    "fsmt": "",
    "M2M_100": "",
}

REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal(f"model_type {kind}", {"model_type": kind}, says=(f'"{kind}"', what, "only 'm2m_100' is"))
        for kind, what in _MODEL_TYPES.items()
    ),
    *(
        Refusal(f"activation {name}", {"activation_function": name}, says=("activation_function", "relu, gelu", name))
        for name in OTHER_ACTIVATIONS
    ),
    Refusal("no padding", {"pad_token_id": None}, says=("pad_token_id", "null")),
    Refusal("no end", {"eos_token_id": None}, says=("eos_token_id", "null")),
    Refusal(
        "no start", {"decoder_start_token_id": None, "bos_token_id": None}, says=("decoder_start_token_id", "null")
    ),
    Refusal("no decoder layer", {"decoder_layers": 0}, says=("decoder_layers", "from 1")),
    Refusal("heads that do not fit", {"decoder_attention_heads": 3}, says=("decoder_attention_heads", "divisor", "3")),
    Refusal("wrong alias", {"num_attention_heads": 3}, says=("encoder_attention_heads", "divisor", "3")),
    Refusal("quantized", {"quantization_config": {"quant_method": "bitsandbytes"}}, says=("quantization_config",)),
    Refusal("layers of their own", {"per_layer_config": {"0": {}}}, says=("per_layer_config",)),
    Refusal("an id without a row", {"eos_token_id": 96}, _fewer_rows, ("90 rows", "96")),
    Refusal(
        "learned positions",
        tensors=_replace("model.encoder.embed_positions.weight", np.zeros((9, 32), np.float32)),
        says=("unknown tensor", "embed_positions.weight"),
    ),
    Refusal(
        "more layers than said", {"num_hidden_layers": 1}, _rest_of_a_layer, ("unknown tensor", "layers.1.fc1.bias")
    ),
    Refusal("a missing tensor", tensors=lambda tensors: tensors.pop(_NORM), says=("missing tensor", _NORM)),
    Refusal("a shape", tensors=_replace(_NORM, np.zeros((1, 32), np.float32)), says=(_NORM, "[1, 32]", "[32]")),
    Refusal("integers", tensors=_replace(_NORM, np.zeros(32, np.int8)), says=(_NORM, "i8")),
    Refusal(
        "stored twice",
        tensors=_replace(_NORM.removeprefix("model."), np.zeros(32, np.float32)),
        says=("stored twice", _NORM),
    ),
    Refusal(
        "a head of other rows",
        tensors=_replace("lm_head.weight", np.zeros((96, 32), np.float32)),
        says=("lm_head.weight", "96 rows", "97"),
    ),
    Refusal(
        "a narrow head",
        tensors=_replace("lm_head.weight", np.zeros((97, 31), np.float32)),
        says=("lm_head.weight", "[97, 31]"),
    ),
    Refusal(
        "not tied, no head",
        {"tie_word_embeddings": False},
        _sides_alone,
        ("missing tensor 'lm_head.weight'", "tie_word_embeddings is false"),
    ),
)
"""Each leaves one fault."""
