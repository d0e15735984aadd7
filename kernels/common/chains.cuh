// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The order in which kernels that divide k in ways of their own sum over it, so that they give a row the same bits.
//
// Columns   k is cut into chains of `chain_columns`, at most MOST_CHAINS, of which the last may be shorter. A chain is
//           multiplied from 0 on by one mma.m16n8k16 after the other, two for each STEP of columns: with `t` of 0 to 3,
//           the first has the step's columns 8t, 8t+1 as its k of 2t, 2t+1, and 8t+2, 8t+3 as its k of 2t+8, 2t+9; the
//           second likewise the columns from 8t+4 on. So a lane's share of a step is 8 neighbouring columns of a row.
//           Columns past the last are 0.
// Sums      Some neighbouring chains are a part: a part's chains are added in order, then the parts are.
// Moments   LANES lanes have a chain of a row, a pack of each chunk. A lane forms the moments of each two of its chunks,
//           and merges them in order; then the lanes are merged, then the chains.

#ifndef METRALE_CHAINS_CUH
#define METRALE_CHAINS_CUH

#include "common/moments.cuh"

constexpr int LANES = 4;         // that have a row of a chain
constexpr int STEP = 32;         // columns that are multiplied at a time
constexpr int UNIT = 128;        // columns that chains are counted in
constexpr int MOST_CHAINS = 16;  // of k
constexpr int MERGED = 2;        // chunks that moments are formed of

// Columns of which the lanes have a pack each.
template <typename T>
inline constexpr int CHUNK = LANES * PACK<T>;

__device__ __forceinline__ int chain_columns(int k) {
    return (k + MOST_CHAINS * UNIT - 1) / (MOST_CHAINS * UNIT) * UNIT;
}

// How many of a chain's columns there are.
__device__ __forceinline__ int columns_of_chain(int k, int chain) {
    const int columns = chain_columns(k);
    return columns_from(chain * columns, columns, k);
}

// Merges the moments of a row's chains, of which the first `count` are at `from`, `apart` from each other: each of its
// lanes every fourth chain, then the lanes.
__device__ __forceinline__ Norm merge_chains(const float2* from, int apart, int count, int k, float eps) {
    constexpr int EACH = MOST_CHAINS / LANES;
    const int lane = threadIdx.x % LANES;
    float2 parts[EACH];
    float columns[EACH], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int chain = i * LANES + lane;
        parts[i] = chain < count ? from[chain * apart] : make_float2(0.0f, 0.0f);
        columns[i] = static_cast<float>(columns_of_chain(k, chain));  // 0 past the last
        sum = fmaf(columns[i], parts[i].x, sum);
    }
    const float part = reciprocal(static_cast<float>(k));
    const float mean = __fmul_rn(warp_reduce<Sum>(sum, LANES), part);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const float distance = parts[i].x - mean;
        squares += fmaf(columns[i], distance * distance, parts[i].y);
    }
    return {mean, rsqrtf(fmaf(warp_reduce<Sum>(squares, LANES), part, eps))};
}

#endif
