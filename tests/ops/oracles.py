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

from tests.ops.beam_oracle import beam_select

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
    rows = []
    for row, position in enumerate(v["positions"]):
        cell = -1 if v["cell_index"] is None else v["cell_index"][row]
        token = v["cells"][cell] if cell >= 0 else v["ids"][row]
        shift = _f64(v["position_table"][position]) if token != v["blank"] else 0.0
        rows.append(v["scale"] * _f64(v["table"][token]) + shift)
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
        ancestry = -1 if v["ancestry_index"] is None else v["ancestry_index"][row]
        where = []
        for position in range(length):
            beam = int(v["ancestry"][ancestry, position]) if ancestry >= 0 else 0
            before = beam * int(v["beam_positions"][row]) if beam else 0
            where.append(int(start) + (before + position) * v["kv_stride"])
        keys = np.stack([pool[at + v["k_offset"] : at + v["k_offset"] + width] for at in where])
        values = np.stack([pool[at + v["v_offset"] : at + v["v_offset"] + width] for at in where])
        rows.append(_attend(_f64(v["q"][row, :width]), keys, values, v["heads"], v["scale"]))
    return {"out": np.stack(rows)}


def attention_weights(v: Values) -> dict[str, Array]:
    head_dim = v["head_dim"]
    pool, out = _f64(v["spans"].pool), np.zeros((v["rows"], v["heads"], v["longest"]))
    for row, (start, length) in enumerate(zip(v["spans"].starts, v["lengths"], strict=True)):
        for head in range(v["heads"]):
            query = _f64(v["q"][row, head * head_dim : (head + 1) * head_dim])
            first = int(start) + v["k_offset"] + head * head_dim
            keys = [pool[first + p * v["kv_stride"] :][:head_dim] for p in range(length)]
            out[row, head, :length] = _softmax(v["scale"] * np.array([query @ key for key in keys]))
    return {"out": out.reshape(v["rows"], -1)}


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
    return {"ids": np.array(ids), "flags": np.array(flags), "arrivals": v["arrivals"] + 32.0}


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


def _philox(counter: list[Any], key: list[int]) -> list[Any]:
    """Philox4x32-10 as its authors write it; words are ints, or arrays of uint64."""
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            divmod(word * multiplier, 1 << 32)
            for word, multiplier in ((counter[0], 0xD2511F53), (counter[2], 0xCD9E8D57))
        )
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(word + weyl) % (1 << 32) for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return counter


def gumbel(seed: int, length: int, ids: Array) -> Array:
    """The noise of ids: float64, of numbers in (0, 1) that are float32 by definition."""
    zero = np.zeros(len(ids), np.uint64)
    words = _philox([ids.astype(np.uint64) // 4, zero + np.uint64(length), zero, zero], [seed % (1 << 32), seed >> 32])
    word = np.choose(ids % 4, words).astype(np.float32)
    uniform = _f64(np.minimum((word + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24)))
    return np.asarray(-np.log(-np.log1p(-uniform)))


def _process(
    v: Values, x: Array, slot: int, length: int, size: int, mode: int, penalty: float, rules: int | None = None
) -> None:
    """Penalty, n-grams, bans and bad words on the scores of a row, as transformers' processors are documented.

    The bans and words are those of ``rules``, if they are not the slot's own.
    """
    rules = slot if rules is None else rules
    past = v["history"][slot, :length].tolist()
    for token in set(past) if penalty != 1 else ():
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    followers: dict[tuple[int, ...], set[int]] = {}
    for first in range(len(past) - size + 1 if size else 0):
        followers.setdefault(tuple(past[first : first + size - 1]), set()).add(past[first + size - 1])
    ending = tuple(past[len(past) - size + 1 :]) if size > 1 else ()
    x[list(followers.get(ending, ()))] = -math.inf
    for plane in range(2):
        if mode >> plane & 1:
            bits = [int(word) >> bit & 1 for word in v["bans"][rules, plane] for bit in range(32)]
            x[np.array(bits[: len(x)]) == 1] = -math.inf
    if mode & 16:
        count, *table = v["bad_words"][rules].tolist()
        for at in range(count):
            *prefix, token = table[table[at] - 1 : table[at + 1] - 1]
            if len(prefix) < len(past) and past[len(past) - len(prefix) :] == prefix:
                x[token] = -math.inf


def processed_logits(v: Values, row: int) -> Array:
    """The logits of a row after all processors and masks."""
    slot, length, _, size, mode, *masks, _, _ = (int(count) for count in v["counts"][row])
    x = _f64(v["logits"][row, : v["vocab"]]).copy()
    x[np.isnan(x)] = -math.inf
    _process(v, x, slot, length, size, mode, float(v["settings"][row, 3]))
    for mask in masks:
        if mask >= 0:
            x[mask] = -math.inf
    return x


def kept_scores(x: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """The scores of processed logits, minus infinity where they are not kept."""
    x = np.minimum(x, float(np.finfo(np.float32).max))
    scores = (x - x.max()) / temperature
    if 0 < top_k < len(scores):
        scores[scores < np.sort(scores)[-top_k]] = -math.inf
    if top_p < 1:
        weights = _softmax(scores)
        order = np.argsort(-scores)
        values, first = np.unique(-scores[order], return_index=True)  # from the largest score down
        larger = np.concatenate([[0.0], np.cumsum(weights[order])])[first]
        least = -values[(larger < top_p) | (values == 0)].max()
        scores[scores < least] = -math.inf
    if min_p > 0:
        scores[np.exp(scores) < min(min_p, 1.0)] = -math.inf
    return np.asarray(scores)


def _chosen(v: Values, row: int, x: Array) -> int:
    temperature, top_p, min_p, _ = map(float, v["settings"][row])
    if temperature == 0:
        return int(x.argmax())
    scores = kept_scores(x, temperature, int(v["counts"][row, 2]), top_p, min_p)
    ids = np.flatnonzero(scores > -math.inf)
    totals = scores[ids] + gumbel(int(v["seeds"][row]), int(v["counts"][row, 1]), ids)
    return int(ids[totals.argmax()])


def sample(v: Values) -> dict[str, Array]:
    result = {"history": v["history"].copy(), "cells": v["cells"].copy(), "arrivals": v["arrivals"] + 32.0}
    ids, logprobs, flags = [], [], []
    for row, (slot, length, _, _, mode, _, _, cell, forced) in enumerate(v["counts"].tolist()):
        given = _f64(v["logits"][row, : v["vocab"]])
        x = processed_logits(v, row)
        nothing = forced < 0 and bool(x.max() == -math.inf)
        ids.append(forced if forced >= 0 else 0 if nothing else _chosen(v, row, x))
        flags.append(int(not np.isfinite(given).all()) + 2 * nothing)
        raw = np.where(np.isnan(given), -math.inf, given).tolist()
        logprobs.append(raw[ids[-1]] - _log_sum_exp(raw) if mode & 8 else 0.0)
        if cell >= 0:
            result["cells"][cell] = ids[-1]
        if mode & 4 and length < v["capacity"]:
            result["history"][slot, length] = ids[-1]
    return {**result, "ids": np.array(ids), "logprobs": np.array(logprobs), "flags": np.array(flags)}


def join_maxima(v: Values) -> dict[str, Array]:
    result = {"history": v["history"].copy(), "cells": v["cells"].copy(), "logprobs": np.zeros(v["rows"])}
    ids, flags = [], []
    for row, (slot, length, _, _, mode, _, _, cell, forced) in enumerate(v["counts"].tolist()):
        parts = v["maxima"][row].tolist()
        _, high, low = max((high > 0, high, low) for low, high, _, _ in parts)
        ids.append(forced if forced >= 0 else 2**32 - 1 - low if high else 0)
        flags.append(int(any(part[2] for part in parts)) + 2 * (forced < 0 and not high))
        if cell >= 0:
            result["cells"][cell] = ids[-1]
        if mode & 4 and length < v["capacity"]:
            result["history"][slot, length] = ids[-1]
    return {**result, "ids": np.array(ids), "flags": np.array(flags)}


def beam_candidates(v: Values) -> dict[str, Array]:
    rows, most = v["rows"], v["most"]
    values, ids, flags = np.full((rows, most), -math.inf), np.zeros((rows, most)), []
    for row, (slot, length, k, size, mode, forced, rules) in enumerate(v["counts"].tolist()):
        given = _f64(v["logits"][row, : v["vocab"]])
        flags.append(int(not all(map(math.isfinite, given))))
        x = [-math.inf if math.isnan(value) else value for value in given.tolist()]
        total = _log_sum_exp(x)
        scores = _f64([value - total if math.isfinite(total) else -math.inf for value in x])
        penalty = float(v["penalties"][row])
        if forced >= 0:
            scores = np.array([0.0 if token == forced else -math.inf for token in range(len(x))])
            order = scores
        elif penalty == 1:  # what is forbidden is so in the order as in the result
            order = _f64(x)
            for each in (scores, order):
                _process(v, each, slot, length, size, mode, 1.0, rules)
        else:
            _process(v, scores, slot, length, size, mode, penalty, rules)
            order = scores
        best = [token for _, token in heapq.nsmallest(k, ((-value, token) for token, value in enumerate(order)))]
        values[row, : len(best)], ids[row, : len(best)] = scores[best], best
    return {"values": values, "ids": ids, "flags": np.array(flags)}


def linear(v: Values) -> dict[str, Array]:
    from metrale.ops.linear import ACTIVATION_NAMES

    product = _f64(v["x"])[:, : v["k"]] @ _f64(v["weight"]).T
    if v["bias"] is not None:
        product += _f64(v["bias"])
    product = np.vectorize(ACTIVATIONS[ACTIVATION_NAMES[v["activation"]]], otypes=[np.float64])(product)
    out = _f64(v["out"]).copy()
    out[:, : v["n"]] = product + (out[:, : v["n"]] if v["residual"] else 0)
    return {"out": out}


def _dense(v: Values) -> dict[str, Array]:
    x = v["x"][:, : v["k"]]
    if v["gamma"] is not None:
        x = layer_norm({"x": x, "weight": v["gamma"], "bias": v["beta"], "eps": v["eps"]})["out"].astype(x.dtype)
    return linear({**v, "x": x})


def thin_linear(v: Values) -> dict[str, Array]:
    if v["spans"] is None:
        return _dense(v)
    whole, out = _dense({**v, "out": np.zeros((v["rows"], v["n"]))})["out"], _f64(v["out"]).copy()
    out[:, : v["kv_from"]] = whole[:, : v["kv_from"]]
    kept = {"src": whole[:, v["kv_from"] :], "width": v["n"] - v["kv_from"], "offset": v["kv_offset"]}
    return {"out": out, **kv_scatter({**v, **kept})}


def cluster_linear(v: Values) -> dict[str, Array]:
    return thin_linear({**v, "gamma": None, "beta": None})


def head_linear(v: Values) -> dict[str, Array]:
    result = linear({**v, "activation": 0, "residual": 0})
    if v["maxima"] is None:
        return result
    given = result["out"].astype(v["out"].dtype)
    maxima = np.zeros((v["rows"], v["blocks"], 4))
    for row, block in np.ndindex(v["rows"], v["blocks"]):
        best: float | None = None
        for column in range(v["counted"]):
            if column // 16 % v["blocks"] == block:
                value = float(given[row, column])
                maxima[row, block, 2] = max(maxima[row, block, 2], not math.isfinite(value))
                if value > (-math.inf if best is None else best):
                    best = value
                    bits = int(np.float32(value + 0.0).view(np.uint32))
                    maxima[row, block, :2] = 2**32 - 1 - column, bits ^ (2**32 - 1 if bits >> 31 else 1 << 31)
    return {**result, "maxima": maxima}


def gemv(v: Values) -> dict[str, Array]:
    from metrale.ops.linear import ACTIVATION_NAMES

    x, product = _f64(v["x"]), _f64(v["x"]) @ _f64(v["weight"]).T
    if v["gamma"] is not None:
        exact = x * _f64(v["gamma"])
        scaled = _f64((exact / 16).astype(v["x"].dtype)) * 16  # rounded, but not to infinity
        product = (scaled @ _f64(v["weight"]).T - x.mean() * _f64(v["sums"][0])) / np.sqrt(x.var() + v["eps"])
        product += _f64(v["sums"][1])
    if v["bias"] is not None:
        product += _f64(v["bias"])
    product = np.vectorize(ACTIVATIONS[ACTIVATION_NAMES[v["activation"]]], otypes=[np.float64])(product)
    out = product[: v["kv_from"]] + (_f64(v["out"]) if v["residual"] else 0)
    if v["spans"] is None:
        return {"out": out}
    kept = {"src": product[None, v["kv_from"] :], "width": v["n"] - v["kv_from"], "offset": v["kv_offset"]}
    return {"out": out, **kv_scatter({**v, "rows": 1, **kept})}


def lora_down(v: Values) -> dict[str, Array]:
    a = _f64(v["a"]).reshape(v["adapter_count"], v["segments"], v["room"], v["k"])
    t = np.zeros((v["rows"], v["segments"], v["room"]))
    for row, adapter in enumerate(v["adapters"]):
        for segment in range(v["segments"]) if adapter >= 0 else ():
            for i in range(v["ranks"][adapter, segment]):
                t[row, segment, i] = _f64(v["x"][row, : v["k"]]) @ a[adapter, segment, i]
    return {"t": t.reshape(v["rows"], -1)}


def lora_up(v: Values) -> dict[str, Array]:
    from metrale.ops.linear import ACTIVATION_NAMES

    b = _f64(v["b"]).reshape(v["adapter_count"], v["segments"], v["room"], v["width"])
    t = _f64(v["t"]).reshape(v["rows"], v["segments"], v["room"])
    out = _f64(v["out"]).reshape(v["rows"], v["segments"], v["width"]).copy()
    for row, adapter in enumerate(v["adapters"]):
        for segment in range(v["segments"]) if adapter >= 0 else ():
            for i in range(v["ranks"][adapter, segment]):
                out[row, segment] += float(v["scales"][adapter, segment]) * t[row, segment, i] * b[adapter, segment, i]
    activation = ACTIVATIONS[ACTIVATION_NAMES[v["activation"]]]
    return {"out": np.vectorize(activation, otypes=[np.float64])(out.reshape(v["rows"], -1))}


ORACLES: dict[str, Callable[[Values], dict[str, Array]]] = {
    function.__name__: function
    for function in (
        layer_norm,
        embed,
        kv_scatter,
        decode_attention,
        attention_weights,
        packed_attention,
        argmax,
        row_gather,
        top_k,
        sample,
        beam_candidates,
        beam_select,
        linear,
        thin_linear,
        cluster_linear,
        head_linear,
        join_maxima,
        gemv,
        lora_down,
        lora_up,
    )
}
