# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the attention kernels: signs, bounds, masks, scales, rescaling, indices, barriers."""

from __future__ import annotations

from typing import Final

ATTENTION_MUTANTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "decode_attention": (
        ("to_float(head.query[dim[c] + e]) * head.scale", "to_float(head.query[dim[c] + e]) * -head.scale"),
        ("to_float(head.query[dim[c] + e]) * head.scale", "to_float(head.query[dim[c] + e])"),
        (
            "score[i] = first + i * groups < head.length ? score[i] : -infinity();",
            "score[i] = first + i * groups <= head.length ? score[i] : -infinity();",
        ),
        ("score[i] : -infinity()", "score[i] : 0.0f"),
        ("begin < head.length", "begin + groups < head.length"),
        ("begin += KEYS * groups", "begin += KEYS * groups - 1"),
        ("        total *= keep;\n", ""),
        ("                sum[c][e] *= keep;\n", ""),
        ("largest = fmaxf(largest, score[i]);", "largest = 0.0f;"),
        ("score[KEYS], largest = most;", "score[KEYS], largest = LOWEST;"),
        ("query[c][e], k[e], score[i]", "query[c][e], k[0], score[i]"),
        ("warp_reduce<Sum>(score[i], LANES)", "warp_reduce<Sum>(score[i], LANES / 2)"),
        ("int offset = LANES; offset < WARP", "int offset = 2 * LANES; offset < WARP"),
        ("take = expf(other - largest)", "take = keep"),
        ("dim[c] = (c * LANES + lane % LANES) * VEC", "dim[c] = lane % LANES * VEC"),
        (
            "warp < warps; ++warp) {\n            const float* part",
            "warp < warps - 1; ++warp) {\n            const float* part",
        ),
        ("expf(part[head_dim] - most)", "1.0f"),
        ("    __syncthreads();\n", ""),
        ("q + row * q_stride", "q + row * heads * head_dim"),
        ("span + v_offset", "span + k_offset"),
        ("static_cast<long long>(blockIdx.x % heads) * head_dim", "0"),
        ("(first + i * groups) * head.kv_stride", "(first + i * groups) * (head.kv_stride - head.head_dim)"),
        ("from_float<T>(sum / total)", "from_float<T>(sum)"),
    ),
    "packed_attention": (
        # on the float units
        ("there ? product[r] * scale", "there ? -product[r] * scale"),
        ("there ? product[r] * scale", "there ? product[r]"),
        ("head.scale, lane < count", "head.scale, lane <= count"),
        ("fmaxf(running.most[r], warp_reduce<Max>(score))", "warp_reduce<Max>(score)"),
        ("fmaf(running.total[r], keep, weight)", "running.total[r] + weight"),
        ("            running.sum[r][c] *= keep;\n", ""),
        ("        __syncthreads();  // the tiles are there\n", ""),
        ("min(KEYS, head.length - first)", "min(KEYS, head.length - first + 1)"),
        ("queries + warp * QUERIES * pitch;", "queries;"),
        ("fmaf(query.w, key.w, product[r])", "fmaf(query.w, key.z, product[r])"),
        ("v3 = value[3 * pitch]", "v3 = value[2 * pitch]"),
        ("tile += warps * QUERIES", "tile += 2 * warps * QUERIES"),
        ("warp_reduce<Sum>(running.total[r])", "running.total[r]"),
        # on the tensor cores
        ("+ i % 2 < keys_left ?", "+ i % 2 <= keys_left ?"),
        ("? own * scale : -infinity()", "? -own * scale : -infinity()"),
        ("LOG2_E = 1.4426950408889634f", "LOG2_E = 1.0f"),
        ("        total[half] *= keep;\n", ""),
        ("            sum[i / 2][2 * half + i % 2] *= keep;\n", ""),
        ("fmaxf(most[half], warp_reduce<Max>(largest, 4))", "fmaxf(most[half], largest)"),
        ("fmaxf(most[half], warp_reduce<Max>(largest, 4))", "warp_reduce<Max>(largest, 4)"),
        ("warp_reduce<Sum>(total[half], 4)", "total[half]"),
        ("? 0x5410 : 0x7632", "? 0x7632 : 0x5410"),
        ("first + 2 * t + i % 2 + i / 2 * 8", "first + 2 * t + i % 2 + i / 2"),
        ("begin + g + i % 2 * 8, i / 2", "begin + g, i / 2"),
        ("high.z, low.w", "low.z, high.w"),
        ("first + 8 * n + g, 32", "first + g, 32"),
        ("i / 2 * 64 + 16 * t + i % 2 * 8", "i / 2 * 64 + 16 * t + (1 - i % 2) * 8"),
        # both
        ("begin * stride + within", "begin * out_stride + within"),
        ("out + begin * out_stride + within", "out + within"),
        ("blockIdx.z + 1] - begin", "blockIdx.z + 1] - begin - 1"),
        ("static_cast<long long>(blockIdx.y) * head_dim", "0"),
    ),
}
