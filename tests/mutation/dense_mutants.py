# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the fused dense layers: their reference, checks and plans."""

from __future__ import annotations

from tests.mutation.mutant import Mutant
from tests.mutation.rules import op_reference, rules

DENSE_MUTANTS: list[Mutant] = [
    *rules(
        "gemv",
        "metrale.ops.dense",
        ("tests/ops/test_conformance.py", "-k", "test_result and gemv-"),
        ("normalise(x=plain", "normalise(x=plain * 2"),
        ("weight=gamma, bias=beta", "weight=beta, bias=gamma"),
        ('width=k, eps=v["eps"]', "width=k, eps=0.0"),
        ('product, v["bias"]', "product, None"),
        ('gemm_reference(x, v["weight"]', 'gemm_reference(x, -v["weight"]'),
        ("activation=activation, accumulate", 'activation="none", accumulate'),
        ("accumulate=residual)", "accumulate=not residual)"),
        ("out[...] = product[:, :kv_from]", "out[...] = product[:, n - kv_from :]"),
        ("product[:, kv_from:], **where", "product[:, : n - kv_from], **where"),
        ('{"offset": v["kv_offset"]', '{"offset": 0'),
        ('"stride": v["kv_stride"]', '"stride": 0'),
    ),
    *rules(
        "gemv",
        "metrale.ops.dense",
        ("tests/ops/test_gemv.py",),
        ("np.empty((rows, k), dtype=x.dtype)", "np.empty((rows, k), dtype=np.float32)"),
        ("if pair[missing] is None and pair[given] is not None:", "if missing == 'beta' and pair[given] is not None:"),
        ("if dims[name] > limit:", "if dims[name] > limit + 1:"),
        ("if residual and activation", "if not residual and activation"),
        ("if in_place and (residual or", "if in_place and ("),
        ("0 if in_place else n, n)", "0, n)"),
        ("0 if in_place else n, n)", "0 if in_place else n, n + 1)"),
        ("if kv_from < n:", "if kv_from + 1 < n:"),
    ),
    *rules(
        "gemv",
        "metrale.ops.gemv",
        ("tests/ops/test_gemv.py",),
        ("along * variant.slices * _SLICE >= k", "along * variant.slices * _SLICE >= k // 2"),
        ("(-(-n // (groups * variant.rows)), 1, 1)", "(n // (groups * variant.rows) or 1, 1, 1)"),
        ("if k <= _MOST_STAGED else 0", "if k <= 2 * _MOST_STAGED else 0"),
        ("programmatic=True", "programmatic=False"),
        ("along, _WARPS // along", "along, 1"),
        ("n * k > _LONG", "n * k > 2 * _LONG"),
        ("if k > 2 * _WARPS * _SLICE", "if k >= 2 * _WARPS * _SLICE"),
        ("elif k > _WARPS * _SLICE", "elif k >= _WARPS * _SLICE"),
        ("kv_from = n if kv_from is None else kv_from", "kv_from = n"),
        ('"kv_from", reads_when', '"n", reads_when'),
    ),
    *op_reference(
        "thin_linear",
        ("values, x, out)", "values, x[:-1], out[:-1])"),
        ("values, x, out)", "values, 2 * x, out)"),
        ("values, x, out)", "values | {'gamma': None, 'beta': None}, x, out)"),
        ("values, x, out)", "values | {'bias': None}, x, out)"),
        ("values, x, out)", "values | {'activation': 0}, x, out)"),
    ),
    *rules(
        "thin_linear",
        "metrale.ops.thin_linear",
        ("tests/ops/test_thin_linear.py",),
        ("kv_from if out_stride is None else out_stride", "n if out_stride is None else kv_from"),
        ("chunks_of(k, warps) <= variant.chunks", "chunks_of(k, warps) <= 2 * variant.chunks"),
        ("if k <= 1024:", "if k < 1024:"),
        ("elif k <= 2048:", "elif k <= 2080:"),
        ("elif k <= 4096:", "elif k < 4096:"),
        ("(-(-n // (_GROUP * variant.groups)), 1, 1)", "(n // (_GROUP * variant.groups) or 1, 1, 1)"),
        ("k <= _MOST_STAGED else 0", "k <= 2 * _MOST_STAGED else 0"),
        ("programmatic=True", "programmatic=False"),
    ),
    *rules(
        "thin_linear",
        "metrale.ops.dense",
        ("tests/ops/test_thin_linear.py",),
        ("if dims[name] > limit:", "if dims[name] >= limit:"),
        ("product[:, kv_from:], **where", "product[::-1, kv_from:], **where"),
        ("out[...] = product[:, :kv_from]", "out[:-1] = product[:-1, :kv_from]"),
    ),
]
