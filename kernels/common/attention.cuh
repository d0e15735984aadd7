// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What the attention kernels share: packs as they lie in memory, and products on the tensor cores.

#ifndef METRALE_ATTENTION_CUH
#define METRALE_ATTENTION_CUH

#include "common/element.cuh"
#include "common/reduce.cuh"

// The running maximum before any score: finite, so that the difference of two of them is 0 and not NaN. A key that is
// not there has the score -infinity, whose weight is 0 whatever the maximum.
constexpr float LOWEST = -3.402823466e+38f;

// Whether rows `stride` elements apart begin at multiples of 16 bytes.
template <typename T>
__device__ __forceinline__ bool rows_aligned16(const T* rows, long long stride) {
    return aligned16(rows) && stride % PACK<T> == 0;
}

// A pack as it lies in memory. The address must be a multiple of 16 bytes. A read-only load also says what the compiler
// cannot see: that an address from a table is of global memory.
template <typename T>
__device__ __forceinline__ uint4 load_words(const T* from) {
    return __ldg(reinterpret_cast<const uint4*>(from));
}

// The same from any address, element by element; past `count` elements it is 0.
__device__ __forceinline__ uint4 gather_words(const float* from, int count) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = i < count ? __float_as_uint(__ldg(from + i)) : 0;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ uint4 gather_words(const T* from, int count) {
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        if (i < count) {
            words[i / 2] |= static_cast<unsigned>(__ldg(&from[i].bits)) << (i % 2 * 16);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// sum += a b on the tensor cores: a is 16 x 16, b is 16 x 8, sum is 16 x 8 in float. With g = lane / 4, t = lane % 4,
// a lane holds a[g][2t, 2t+1], a[g+8][2t, 2t+1], a[g][2t+8, 2t+9], a[g+8][2t+8, 2t+9] in a0 to a3, and
// b[2t, 2t+1][g], b[2t+8, 2t+9][g] in b0 and b1, the first in the low half; and sum[g][2t, 2t+1], sum[g+8][2t, 2t+1].
// All lanes of the warp take part. The last parameter only names the element type.
__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1, f16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1, bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif
