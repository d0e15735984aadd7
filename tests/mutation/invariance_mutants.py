# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of what makes a sequence's bits its own, in any batch."""

from __future__ import annotations

from tests.mutation.mutant import Mutant
from tests.mutation.rules import files, rules

_GROUP = "batch invariance"
_MODEL = files("invariant")
_MAXIMA = files("maxima", "products")
_OPS = ("tests/ops/test_batch_invariance.py",)
_PRODUCTS = ("tests/gpu_runtime/test_gemm.py", "-k", "given_algorithm")

INVARIANCE_MUTANTS: list[Mutant] = [
    *rules(
        _GROUP,
        "metrale.nllb.layers",
        _MODEL,
        ("if self.invariant and short:", "if self.invariant and short and self.count > 1:"),
        ("if self.invariant and short:", "if False:"),
        ("if self.invariant and short:", "if self.invariant:"),
        ("self.shape.product_rows(count) if self.invariant else count", "count"),
        ("algorithm=PINNED if self.invariant else None", "algorithm=None"),
        ("launches(self.count) if self.invariant else [(0, self.count)]", "[(0, self.count)]"),
        ("p.kv.spans.offset(8 * first)", "p.kv.spans"),
        ("p.kv.positions.offset(4 * first)", "p.kv.positions"),
        ("p.out.offset(first * p.n * size),\n                rows=", "p.out,\n                rows="),
        ('"out": p.out.offset(first * p.n * size)', '"out": p.out'),
        ('shape.batch_invariant and side != "encoder"', "shape.batch_invariant"),
    ),
    *rules(
        _GROUP,
        "metrale.nllb.layers",
        ("tests/nllb/test_model_products.py",),
        ("clustered if clusters and self.count > THIN_ROWS else thin", "thin"),
        ("clustered if clusters and self.count > THIN_ROWS else thin", "clustered"),
        ("clusters and self.count > THIN_ROWS else", "clusters and self.count >= THIN_ROWS else"),
        ("elif clusters and n * k", "elif n * k"),
        ("chained=self.invariant", "chained=True"),
        ("chained=self.invariant", "chained=False"),
        ("self.count <= _most_clustered(min(n, k))", "self.count < _most_clustered(min(n, k))"),
        ("self.count <= THIN_ROWS and", "self.count < THIN_ROWS and"),
    ),
    *rules(
        _GROUP,
        "metrale.nllb.decoder",
        _MODEL,
        ("if rows.invariant:", "if False:"),
        ("if apart != width and not shape.own_head:", "if False:"),
        ("            return shape.own_head\n", "            return False\n"),
        ("hidden.offset(first * apart)", "hidden"),
        ("made = shape.product_rows(count)", "made = count"),
        ("count * row_bytes, rows.stream", "row_bytes, rows.stream"),
        ('self._workspace[f"{self._side}.logits"]', 'self._workspace["decoder.logits"]'),
        ("PINNED if rows.invariant else None", "None"),
        ("self._shape.always_adapts or adapter", "adapter"),
    ),
    *rules(
        _GROUP,
        "metrale.nllb.passes",
        _MODEL,
        ("if self._shape.batch_invariant:", "if False:"),
    ),
    *rules(
        _GROUP,
        "metrale.nllb.workspace",
        _MODEL,
        ("shape.product_rows(rows) * width", "rows * width"),
        ("gpu.memset(self.arena[name], 0, layout.sizes[name])", "pass"),
    ),
    *rules(
        _GROUP,
        "metrale.nllb.limits",
        _MODEL,
        ("if self.batch_invariant and not self.own_head else 1", "if self.batch_invariant else 1"),
        ("if self.batch_invariant and not self.own_head else 1", "if not self.own_head else 1"),
        ("if self.product_rows(1) > 1 else 0", ""),
        ("return self.batch_invariant and self.limits.max_adapters > 0", "return False"),
    ),
    *rules(
        _GROUP,
        "metrale.factory",
        _MODEL,
        ('    batch_invariant = flag("batch_invariant", batch_invariant)\n    folders', "    folders"),
        ('    batch_invariant = flag("batch_invariant", batch_invariant)\n    path', "    path"),
        ("        device.fixed_rows,\n", "        1,\n"),
    ),
    *rules(
        _GROUP,
        "metrale.ops.decode_attention",
        _OPS,
        ("rounded = -(-lengths // _KEYS) * _KEYS", "rounded = np.full_like(lengths, lengths.max())"),
    ),
    *rules(
        "maxima",
        "metrale.nllb.passes",
        _MAXIMA,
        ("        rows.writing(0, lanes)\n", ""),
        ("maxima=self._decoder.leaves_maxima(lanes)", "maxima=True"),
        ("maxima=self._decoder.leaves_maxima(lanes)", "maxima=False"),
    ),
    *rules(
        "maxima",
        "metrale.nllb.logits",
        _MAXIMA,
        ("self._has_maximum[row : row + count] = [maxima] * count", "self._has_maximum[row] = maxima"),
        ("if not all(self._has", "if not any(self._has"),
        ("offset(row * block_count", "offset(0 * block_count"),
    ),
    *rules(
        "maxima",
        "metrale.nllb.feed",
        _MAXIMA,
        ("greedy and untouched and not logprobs}", "greedy and not logprobs}"),
        ("greedy and untouched and not logprobs}", "greedy and untouched}"),
        ("greedy and untouched and not logprobs}", "untouched and not logprobs}"),
        ("self._logits.maxima(first, rows) if join", "self._logits.maxima(0, rows) if join"),
    ),
    *rules(
        "maxima",
        "metrale.nllb.decoder",
        _MAXIMA,
        ('"counted": shape.vocab', '"counted": shape.head_rows'),
        ("self._maxima_of(first)", "self._maxima_of(0)"),
        ("1 < heads <= MOST_ROWS", "1 < heads < MOST_ROWS"),
    ),
    *rules("maxima", "metrale.engine.steps", _MAXIMA, (", untouched=True)", ")")),
    *rules(_GROUP, "metrale.ops.attention_weights", _OPS, ("room=longest)", "room=None)")),
    *rules(_GROUP, "metrale.ops.dense", _OPS, ("by_row=True", "by_row=False")),
    *rules(_GROUP, "metrale.ops.lora_down", _OPS, ("by_row=True", "by_row=False")),
    *rules(_GROUP, "metrale.ops.lora_up", _OPS, ('"by_row": True', '"by_row": False')),
    *rules(_GROUP, "metrale.ops.linear", _MODEL, ("None if algorithm == ANY else algorithm", "None")),
    *rules(
        _GROUP,
        "gpu_runtime.gemm",
        _PRODUCTS,
        ("_multiply_rows if by_row else _multiply", "_multiply"),
        ("multiply(a32[:, start : start + CHAIN]", "_multiply(a32[:, start : start + CHAIN]"),
    ),
    *rules(
        _GROUP,
        "gpu_runtime.host.product_calls",
        _PRODUCTS,
        ("by_row = algorithm is not None", "by_row = False"),
        ("by_row=call.by_row", "by_row=False"),
    ),
]
