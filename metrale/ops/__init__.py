# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ops that the models are made of. Importing this package registers them all."""

from metrale.ops.argmax import argmax
from metrale.ops.attention_weights import attention_weights
from metrale.ops.beam_candidates import beam_candidates
from metrale.ops.beam_select import beam_select
from metrale.ops.cluster_linear import cluster_linear
from metrale.ops.decode_attention import decode_attention
from metrale.ops.embed import embed
from metrale.ops.gemv import gemv
from metrale.ops.head_linear import head_linear
from metrale.ops.join_maxima import join_maxima
from metrale.ops.kv_scatter import kv_scatter
from metrale.ops.layer_norm import layer_norm
from metrale.ops.linear import linear
from metrale.ops.lora_down import lora_down
from metrale.ops.lora_up import lora_up
from metrale.ops.packed_attention import packed_attention
from metrale.ops.row_gather import row_gather
from metrale.ops.sample import sample
from metrale.ops.thin_linear import thin_linear
from metrale.ops.top_k import top_k

__all__ = [
    "argmax",
    "attention_weights",
    "beam_candidates",
    "beam_select",
    "cluster_linear",
    "decode_attention",
    "embed",
    "gemv",
    "head_linear",
    "join_maxima",
    "kv_scatter",
    "layer_norm",
    "linear",
    "lora_down",
    "lora_up",
    "packed_attention",
    "row_gather",
    "sample",
    "thin_linear",
    "top_k",
]
