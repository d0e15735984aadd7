# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the CUDA kernels: each must change a result of the op's conformance cases on a GPU.

None of them touches memory that the kernel may not touch: on a GPU such a fault ends the process, whatever the tests
say. Barriers are removed where that shows every time, not where it loses a race now and then.
"""

from __future__ import annotations

from typing import Final

Changes = tuple[tuple[str, str], ...]

KERNEL_MUTANTS: Final[dict[str, Changes]] = {
    "layer_norm": (
        ("(values[i] - mean) * scale", "(values[i] + mean) * scale"),
        ("* weight[i] + bias[i]", "* weight[i] - bias[i]"),
        ("* scale * weight[i]", "* scale"),
        ("sum += i < count ? centred * centred : 0.0f", "sum += i < count - 1 ? centred * centred : 0.0f"),
        ("sum += i < count ? centred * centred : 0.0f", "sum += count > 0 ? centred * centred : 0.0f"),
        ("sqrtf(variance + eps)", "sqrtf(variance)"),
        ("1.0f / sqrtf(variance + eps)", "1.0f / (sqrtf(variance) + eps)"),
        ("out += row * width", "out += (row > 0 ? row - 1 : 0) * width"),
        ("if (row >= rows)", "if (row + 1 >= rows)"),
        ("        sum += sum_of<T>(more);\n", "        sum += more[0];\n"),
        ("        square += squares_of<T>(more, width - column, mean);\n", ""),
        ("normalise<T>(more, scales, shifts", "normalise<T>(more, shifts, scales"),
        ("block_reduce<Sum>(sum, partial[0])", "warp_reduce<Sum>(sum)"),  # takes a barrier away, too
        ("block_reduce<Sum>(square, partial[1])", "warp_reduce<Sum>(square)"),
    ),
    "embed": (
        ("scale * values[i] + shifts[i]", "scale * values[i] - shifts[i]"),
        ("scale * values[i] + shifts[i]", "values[i] + shifts[i]"),
        ("scale * values[i] + shifts[i]", "scale * (values[i] + shifts[i])"),
        ("static_cast<long long>(ids[row])", "static_cast<long long>(ids[0])"),
        ("static_cast<long long>(positions[row])", "static_cast<long long>(positions[rows - 1])"),
        ("column < width;", "column < width - 1;"),
        ("column += blockDim.x * PACK<T>", "column += 2 * blockDim.x * PACK<T>"),
        ("if (row >= rows)", "if (row + 1 >= rows)"),
    ),
    "kv_scatter": (
        ("positions[row] * kv_stride", "positions[0] * kv_stride"),
        ("positions[row] * kv_stride", "positions[row] * static_cast<long long>(width)"),
        ("* kv_stride + offset,", "* kv_stride,"),
        ("src + row * src_stride", "src + row * width"),
        ("src + row * src_stride", "src + (rows - 1 - row) * src_stride"),
        ("spans[row]", "spans[rows - 1 - row]"),
        ("src_stride, width);", "src_stride, width - 1);"),
        ("if (row >= rows)", "if (row + 1 >= rows)"),
    ),
    "row_gather": (
        ("index[row]", "index[0]"),
        ("index[row]", "(index[row] > 0 ? index[row] - 1 : 0)"),
        ("index[row] * src_stride", "static_cast<long long>(index[row]) * width"),
        ("row * out_stride", "row * width"),
        ("src_stride, width);", "src_stride, width - 1);"),
        ("if (row >= rows)", "if (row + 1 >= rows)"),
    ),
    "argmax": (
        ("logits + r * stride, vocab", "logits + r * static_cast<long long>(vocab), vocab"),
        ("logits + r * stride, vocab", "logits + r * stride, vocab - 1"),
        ("seen.best == largest", "seen.best != largest"),
        ("seen.best == largest", "threadIdx.x == 0"),
        ("ids[r] = index_of(best)", "ids[r] = index_of(best) + 1"),
        ("flags[r] = tainted", "flags[r] = !tainted"),
        ("if (r >= rows)", "if (r + 1 >= rows)"),
        ("__syncthreads_or(seen.taint != 0)", "(seen.taint != 0)"),  # takes a barrier away, too
        # in the headers
        ("~static_cast<unsigned>(index);", "static_cast<unsigned>(index);"),
        (
            "if (value > seen.best) {\n            raise(seen, value, group)",
            "if (value >= seen.best) {\n            raise(seen, value, group)",
        ),
        ("if (values[i] > value)", "if (values[i] >= value)"),
        ("seen.taint = group + g * threads < row.packs ? taint : seen.taint", "seen.taint = taint"),
        ("seen.taint |= taint_word<float>", "seen.taint &= taint_word<float>"),
        ("        const int pack = group + g * threads;", "        const int pack = group + g * threads + (g > 2);"),
        ("step > 0; step /= 2", "step > 1; step /= 2"),
        ("int warp = 1; warp <", "int warp = 2; warp <"),
        ("    __syncthreads();\n", ""),
        ("0xfc00fc00u", "0x00000000u"),
        ("0xff80ff80u", "0x00000000u"),
        ("0xff800000u", "0x00000000u"),
    ),
    "top_k": (
        ("place += keys[i] > key", "place += keys[i] < key"),
        ("place += keys[i] > key", "place += keys[i] >= key"),
        ("if (key >= shared.bound)", "if (key > shared.bound)"),
        ("best >= shared.bound", "best > shared.bound"),
        ("== k - 1", "== 0"),
        ("owner + lane * threads", "owner + (lane + 1) * threads"),
        ("lane == 0 && loose < row.vocab", "lane == 0 && loose < row.vocab - 1"),
        ("if (place < k)", "if (place < k - 1)"),
        ("key < last ? Max::of(best, key)", "key <= last ? Max::of(best, key)"),
        ("largest + logf(sum)", "largest - logf(sum)"),
        ("seen.sum * exp_of(seen.best - largest)", "seen.sum"),
        ("flags[r] = tainted", "flags[r] = !tainted"),
        ("values += r * k", "values += r"),
        ("logits + r * stride, vocab", "logits + r * static_cast<long long>(vocab), vocab"),
        ("    __syncthreads();\n\n    const int found", "\n    const int found"),
        # in the headers
        ("fmaxf(value, -infinity()) + 0.0f", "value + 0.0f"),
        ("x * 1.44269504f", "x"),
        ("seen.sum *= exp_of(seen.best - value)", "seen.sum *= exp_of(value - seen.best)"),
        ("if (values[i] > value)", "if (values[i] >= value)"),
    ),
}
"""By op: ``old`` stands exactly once in ``kernels/<op>.cu``, or else in its headers, and becomes ``new``."""
