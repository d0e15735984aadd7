# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each op should compute, in float64 and one element or row at a time, straight from its formula.

An oracle takes an op's inputs and returns the expected arrays by name, in the shape that the device holds (a strided
output with its padding as it was; for an address table, the pool).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Values = Mapping[str, Any]


def _f64(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "none": lambda x: x,
    "relu": lambda x: x if x > 0 else 0.0,
    "gelu": lambda x: x * _phi(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
}


def _softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def layer_norm(v: Values) -> dict[str, Array]:
    x, weight, bias = _f64(v["x"]), _f64(v["weight"]), _f64(v["bias"])
    mean = x.mean(axis=1, keepdims=True)
    deviation = np.sqrt(((x - mean) ** 2).mean(axis=1, keepdims=True) + v["eps"])
    return {"out": (x - mean) / deviation * weight + bias}


def embed(v: Values) -> dict[str, Array]:
    rows = [
        v["scale"] * _f64(v["table"][token]) + _f64(v["position_table"][position])
        for token, position in zip(v["ids"], v["positions"], strict=True)
    ]
    return {"out": np.stack(rows)}


def kv_scatter(v: Values) -> dict[str, Array]:
    pool = v["spans"].pool.copy()
    for row, (start, position) in enumerate(zip(v["spans"].starts, v["positions"], strict=True)):
        where = int(start) + int(position) * v["kv_stride"] + v["offset"]
        pool[where : where + v["width"]] = v["src"][row, : v["width"]]
    return {"spans": pool}


def _attend(query: Array, keys: Array, values: Array, heads: int, scale: float) -> Array:
    mixed = []
    for q, k, v in zip(
        np.split(query, heads), np.split(keys, heads, axis=1), np.split(values, heads, axis=1), strict=True
    ):
        mixed.append(_softmax(scale * (k @ q)) @ v)
    return np.concatenate(mixed)


def decode_attention(v: Values) -> dict[str, Array]:
    width = v["heads"] * v["head_dim"]
    pool, rows = _f64(v["spans"].pool), []
    for row, (start, length) in enumerate(zip(v["spans"].starts, v["lengths"], strict=True)):
        where = [int(start) + position * v["kv_stride"] for position in range(length)]
        keys = np.stack([pool[at + v["k_offset"] : at + v["k_offset"] + width] for at in where])
        values = np.stack([pool[at + v["v_offset"] : at + v["v_offset"] + width] for at in where])
        rows.append(_attend(_f64(v["q"][row, :width]), keys, values, v["heads"], v["scale"]))
    return {"out": np.stack(rows)}


def packed_attention(v: Values) -> dict[str, Array]:
    width = v["heads"] * v["head_dim"]
    q, k, values = (_f64(v[name])[:, :width] for name in ("q", "k", "v"))
    out = np.empty((v["tokens"], width))
    for first, after in zip(v["offsets"], v["offsets"][1:], strict=False):
        for row in range(first, after):
            out[row] = _attend(q[row], k[first:after], values[first:after], v["heads"], v["scale"])
    return {"out": out}


def argmax(v: Values) -> dict[str, Array]:
    ids, flags = [], []
    for row in _f64(v["logits"])[:, : v["vocab"]]:
        best = 0
        order = [-math.inf if math.isnan(x) else x for x in row]
        for index, value in enumerate(order):
            if value > order[best]:
                best = index
        ids.append(best)
        flags.append(int(not all(map(math.isfinite, row))))
    return {"ids": np.array(ids), "flags": np.array(flags)}


def row_gather(v: Values) -> dict[str, Array]:
    out = v["out"].copy()
    for row, source in enumerate(v["index"]):
        out[row, : v["width"]] = v["src"][source, : v["width"]]
    return {"out": out}


def _log_sum_exp(row: list[float]) -> float:
    most = max(row)
    return most if math.isinf(most) else most + math.log(math.fsum(math.exp(x - most) for x in row))


def top_k(v: Values) -> dict[str, Array]:
    result: dict[str, list[Any]] = {"values": [], "ids": [], "lse": [], "flags": []}
    for given in _f64(v["logits"])[:, : v["vocab"]]:
        row = [-math.inf if math.isnan(x) else x for x in given.tolist()]
        best = heapq.nsmallest(v["k"], ((-value, index) for index, value in enumerate(row)))
        result["ids"].append([index for _, index in best])
        result["values"].append([-value for value, _ in best])
        result["lse"].append(_log_sum_exp(row))
        result["flags"].append(int(not all(map(math.isfinite, given))))
    return {name: np.array(rows) for name, rows in result.items()}


def linear(v: Values) -> dict[str, Array]:
    from metrale.ops.linear import ACTIVATION_NAMES

    product = _f64(v["x"])[:, : v["k"]] @ _f64(v["weight"]).T
    if v["bias"] is not None:
        product += _f64(v["bias"])
    product = np.vectorize(ACTIVATIONS[ACTIVATION_NAMES[v["activation"]]], otypes=[np.float64])(product)
    out = _f64(v["out"]).copy()
    out[:, : v["n"]] = product + (out[:, : v["n"]] if v["residual"] else 0)
    return {"out": out}


ORACLES: dict[str, Callable[[Values], dict[str, Array]]] = {
    function.__name__: function
    for function in (
        layer_norm,
        embed,
        kv_scatter,
        decode_attention,
        packed_attention,
        argmax,
        row_gather,
        top_k,
        linear,
    )
}
