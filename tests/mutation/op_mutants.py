# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the ops' references: signs, bounds, masks, biases, scales, indices."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _of(group: str, module: str, tests: tuple[str, ...], *changes: tuple[str, str]) -> list[Mutant]:
    return [Mutant(group, module, old, new, tests) for old, new in changes]


def _op(name: str, *changes: tuple[str, str]) -> list[Mutant]:
    return _of(
        name, f"metrale.ops.{name}", ("tests/ops/test_conformance.py", "-k", f"test_result and {name}-"), *changes
    )


OP_MUTANTS: list[Mutant] = [
    *_op(
        "layer_norm",
        ("np.subtract(x, x.mean(", "np.add(x, x.mean("),
        ("/ np.float32(width)", "/ np.float32(width - 1)"),
        ("np.sqrt(variance + np.float32(eps))", "np.sqrt(variance)"),
        ("np.sqrt(variance + np.float32(eps))", "np.sqrt(variance + np.float32(1.1 * eps))"),
        ("np.sqrt(variance + np.float32(eps))", "(np.sqrt(variance) + np.float32(eps))"),
        ("centred *= weight", "centred *= weight * weight"),
        ("np.add(centred, bias", "np.subtract(centred, bias"),
        ("np.add(centred, bias", "np.add(centred, 0 * bias"),
        ("mean(axis=1, keepdims=True", "mean(keepdims=True"),
        ("np.add(centred, bias, out=out,", "np.add(centred[:-1], bias, out=out[:-1],"),
    ),
    *_op(
        "embed",
        ("embedded *= np.float32(scale)", "embedded /= np.float32(scale)"),
        ("    embedded *= np.float32(scale)\n", ""),
        ("embedded += position_table[positions]", "embedded -= position_table[positions]"),
        ("position_table[positions]", "position_table[positions - 1]"),
        ("table[ids].astype", "table[ids - 1].astype"),
        ("position_table[positions]", "position_table[np.arange(rows) % position_count]"),
        ("index.max() >= count", "index.max() >= count - 1"),
        ("out[...] = embedded", "out[1:] = embedded[1:]"),
    ),
    *_op(
        "kv_scatter",
        ("spans, positions, src", "spans, positions * 0, src"),
        ("offset=offset", "offset=0"),
        ("offset=offset", "offset=offset + 1"),
        ("stride=kv_stride", "stride=width"),
        ("spans, positions, src", "spans[::-1].copy(), positions, src"),
        ("positions, src, offset", "positions, src[::-1], offset"),
        ("positions, src, offset", "positions, -src, offset"),
    ),
    *_op(
        "decode_attention",
        ("query *= np.float32(scale)", "query *= np.float32(-scale)"),
        ("    query *= np.float32(scale)\n", ""),
        (">= lengths[:, None]", "> lengths[:, None]"),
        (">= lengths[:, None]", ">= lengths[:, None] - (lengths[:, None] > 1)"),
        ("np.where(past, np.float32(-np.inf)", "np.where(past, np.float32(0)"),
        ("np.where(past, np.float32(-np.inf)", "np.where(past, np.float32(-1)"),
        ("    scores -= scores.max(axis=-1, keepdims=True)\n", ""),
        ("per_head(k_offset)", "per_head(v_offset)"),
        ("mixed = np.matmul(scores, per_head(v_offset)", "mixed = np.matmul(scores, per_head(k_offset)"),
        ("mixed /= scores.sum(axis=-1, keepdims=True)", "mixed *= scores.sum(axis=-1, keepdims=True)"),
        ("mixed /= scores.sum(axis=-1, keepdims=True)", "mixed /= scores.shape[-1]"),
        ("stride=kv_stride", "stride=width"),
        ("out[...] = mixed", "out[:, :-1] = mixed.reshape(rows, width)[:, :-1]; mixed"),
    ),
    *_op(
        "packed_attention",
        ("scores *= np.float32(scale)", "scores /= np.float32(scale)"),
        ("scores *= np.float32(scale)", "pass"),
        ("scores -= scores.max(axis=-1, keepdims=True)", "pass"),
        (
            "np.matmul(query.transpose(0, 2, 1, 3), key.transpose(0, 2, 3, 1))",
            "np.matmul(query.transpose(0, 2, 1, 3), value.transpose(0, 2, 3, 1))",
        ),
        ("np.matmul(scores, value.transpose", "np.matmul(scores, key.transpose"),
        ("for x in (q, k, v))", "for x in (k, q, v))"),
        ("mixed /= scores.sum(axis=-1, keepdims=True)", "mixed /= scores.sum(axis=-1, keepdims=True) + 1"),
        (
            "rows = slice(int(offsets[first]), int(offsets[after]))",
            "rows = slice(int(offsets[0]), int(offsets[after - first]))",
        ),
        (
            "np.diff(lengths, prepend=-1)",
            "np.diff(lengths, prepend=lengths[0] - 1) * 0 + (np.arange(len(lengths)) == 0)",
        ),
        (
            "np.matmul(query",
            "np.tril(np.ones((1, 1, int(lengths[first]), int(lengths[first])), np.float32)) * np.matmul(query",
        ),
    ),
    *_op(
        "argmax",
        ("ids[...] = values.argmax(axis=1)", "ids[...] = values.argmin(axis=1)"),
        ("ids[...] = values.argmax(axis=1)", "ids[...] = vocab - 1 - values[:, ::-1].argmax(axis=1)"),
        ("~(np.isfinite(largest) & np.isfinite(values.min(axis=1)))", "~np.isfinite(largest)"),
        ("~(np.isfinite(largest) & np.isfinite(values.min(axis=1)))", "~np.isfinite(values.min(axis=1))"),
        (
            "np.where(np.isnan(values[row]), -np.inf, values[row])",
            "np.where(np.isnan(values[row]), np.inf, values[row])",
        ),
        ("np.where(np.isnan(values[row]), -np.inf, values[row])", "values[row]"),
        ("flags[...] = ~(", "flags[...] = ("),
        (
            "values = logits.astype(np.float32, copy=False)",
            "values = logits.astype(np.float32)[:, :-1] if vocab > 1 else logits.astype(np.float32)",
        ),
    ),
    *_op(
        "row_gather",
        ("out[...] = src[index]", "out[...] = src[index - 1]"),
        ("out[...] = src[index]", "out[...] = src[index[::-1]]"),
        ("out[...] = src[index]", "out[...] = src[np.arange(rows) % src_rows]"),
        ("out[...] = src[index]", "out[...] = -src[index]"),
        ("out[...] = src[index]", "out[:-1] = src[index[:-1]]"),
        ("out[...] = src[index]", "out[:, 1:] = src[index][:, 1:]"),
        ("index.max() >= src_rows", "index.max() >= src_rows - 1"),
    ),
    *_op(
        "top_k",
        ("np.argsort(-given", "np.argsort(given"),
        ("given[row] >= bound", "given[row] > bound"),
        ("vocab - k, axis=1)[:, vocab - k]", "vocab - k, axis=1)[:, vocab - k].clip(0)"),
        ("candidates = np.flatnonzero(given[row] >= bound)", "candidates = np.flatnonzero(given[row] >= bound)[::-1]"),
        ("order = candidates[np", "order = np.arange(vocab)[np"),
        ("given[np.isnan(given)] = -np.inf", "given[np.isnan(given)] = np.inf"),
        ("    given[np.isnan(given)] = -np.inf\n", ""),
        ("~np.isfinite(given).all(axis=1)", "np.isnan(given).any(axis=1)"),
        ("~np.isfinite(given).all(axis=1)", "np.isinf(given).any(axis=1)"),
        ("sum(axis=1)) + shift", "sum(axis=1))"),
        ("sum(axis=1)) + shift", "max(axis=1)) + shift"),
        ("k(k, vocab)\n    given", "k(k, vocab)\n    vocab -= 1\n    logits = logits[:, :-1]\n    given"),
    ),
    *_of(
        "linear",
        "gpu_runtime.gemm",
        ("tests/ops/test_conformance.py", "tests/gpu_runtime/test_activations.py", "-k", "linear- or activation"),
        ("np.matmul(a32[:, :CHAIN], w32", "np.matmul(a32[:, :CHAIN], -w32"),
        ("range(CHAIN, a32.shape[1], CHAIN)", "range(CHAIN, a32.shape[1] - 1, CHAIN)"),
        ("range(CHAIN, a32.shape[1], CHAIN)", "range(CHAIN + 1, a32.shape[1], CHAIN)"),
        ("        product += bias\n", "        product -= bias\n"),
        ("        product += bias\n", "        pass\n"),
        ("np.add(product, c, out=c", "np.subtract(product, c, out=c"),
        ("np.add(product, c, out=c", "np.add(product, 0 * c, out=c"),
        ("np.zeros(x.shape[-1:], dtype=x.dtype)", "np.zeros(x.shape[-1:], dtype=x.dtype) - 1"),
        ("x *= 0.5 * (1.0 + erf(x * math.sqrt(0.5)))", "x *= 0.5 * (1.0 - erf(x * math.sqrt(0.5)))"),
        ("x *= 0.5 * (1.0 + erf(x * math.sqrt(0.5)))", "gelu_tanh(x)"),
        ("0.044715", "0.0447"),
        ("math.sqrt(2.0 / math.pi) *", "math.sqrt(1.0 / math.pi) *"),
        ("np.where(x >= 0, 1.0, decay)", "np.where(x >= 0, decay, 1.0)"),
        ("decay = np.exp(-np.abs(x))", "decay = np.exp(-np.abs(x)) * 0.999"),
    ),
    *_of(
        "linear",
        "metrale.ops.linear",
        ("tests/ops/test_conformance.py", "-k", "test_result and linear-"),
        ("lda=x_stride", "lda=k"),
        ("ldc=out_stride", "ldc=n"),
        ("accumulate=bool(residual),\n        lda", "accumulate=False,\n        lda"),
    ),
]
