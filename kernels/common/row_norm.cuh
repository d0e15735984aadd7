// SPDX-License-Identifier: MIT OR Apache-2.0
//
// LayerNorm of one row by a whole block, which has warps along both axes: each warp forms the moments of some chunks, and
// every thread merges those of all of them, in order.

#ifndef METRALE_ROW_NORM_CUH
#define METRALE_ROW_NORM_CUH

#include "common/dependent.cuh"
#include "common/moments.cuh"

constexpr int MOST_STAGED = 8192;  // columns that are normalised in shared memory

// Columns of which a warp has a pack in each lane.
template <typename T>
inline constexpr int CHUNK = WARP * PACK<T>;

template <typename T>
inline constexpr int MERGED = MOST_STAGED / CHUNK<T>;  // chunks whose moments are merged at once

// A row of k elements, and what it is normalised by.
template <typename T>
struct RowNorm {
    const T *x, *gamma, *beta;
    int k;
    float eps;
};

// The block's threads, whichever axis they lie along.
__device__ __forceinline__ int thread_of_block() {
    return threadIdx.y * blockDim.x + threadIdx.x;
}

// How many of `columns` from `first` on there are. Not as max(0, min(...)): where such a number is compared with
// `columns`, ptxas of CUDA 13.0 takes a predicate of VIMNMX.RELU for the result, which it is not.
__device__ __forceinline__ int columns_from(int first, int columns, int k) {
    return first < k ? min(columns, k - first) : 0;
}

// Leaves what a warp has seen of the chunk from column `begin` on in shared memory; its lane has `count` elements of it.
template <typename T>
__device__ __forceinline__ void store_moments(const uint4& pack, int count, int begin, int k, float2* to) {
    Moments moments = {0.0f, 0.0f, 0.0f};
    if (begin + CHUNK<T> <= k) {
        moments = merge_equal_lanes(moments_of_pack<T>(pack), WARP);
    } else {
        const uint4 packs[1] = {pack};
        const int counts[1] = {count};
        if (count > 0) {
            moments = moments_of<T, false>(packs, counts);
        }
        moments = merge_lanes(moments, static_cast<float>(k - begin), WARP);
    }
    if (threadIdx.x % WARP == 0) {
        *to = make_float2(moments.mean, moments.squares);
    }
}

// Merges what the warps have left of at most MERGED chunks, some at a time.
template <typename T>
__device__ __forceinline__ Moments merge_chunks(const float2* from, int columns) {
    constexpr int EACH = 8;
    Moments moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < columns; first += EACH * CHUNK<T>) {
        const int here = columns_from(first, EACH * CHUNK<T>, columns);
        const int last = (here - 1) / CHUNK<T>;
        const float in_last = static_cast<float>(here - last * CHUNK<T>);
        float2 parts[EACH];
        float counts[EACH], sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            parts[i] = i <= last ? from[first / CHUNK<T> + i] : make_float2(0.0f, 0.0f);
            counts[i] = i < last ? static_cast<float>(CHUNK<T>) : i == last ? in_last : 0.0f;
            sum += counts[i] * parts[i].x;
        }
        const float mean = sum * reciprocal(static_cast<float>(here));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float apart = parts[i].x - mean;
            squares += parts[i].y + counts[i] * (apart * apart);
        }
        moments = merged(moments, {static_cast<float>(here), mean, squares});
    }
    return moments;
}

__device__ __forceinline__ Norm norm_of(const Moments& moments, int k, float eps) {
    return {moments.mean, rsqrtf(moments.squares * reciprocal(static_cast<float>(k)) + eps)};
}

// Gamma and beta of the lane's pack in one of the chunks.
struct Scales {
    uint4 gamma, beta;
};

template <typename T>
__device__ __forceinline__ Scales load_scales(const RowNorm<T>& row, int column) {
    return {load_once(row.gamma + column, column < row.k), load_once(row.beta + column, column < row.k)};
}

// Normalises x, of at most MOST_STAGED columns, into shared memory, each pack once. `scales`: those of the warp's first
// chunk.
template <typename T>
__device__ __forceinline__ void stage(const RowNorm<T>& row, uint4* staged, float2* moments, Scales scales) {
    const int stride = blockDim.y * blockDim.x * PACK<T>, first = thread_of_block() * PACK<T>;
    const int lane_column = threadIdx.x % WARP * PACK<T>;
#pragma unroll 1
    for (int column = first; column - lane_column < row.k; column += stride) {
        const uint4 pack = load_fresh(row.x + column, column < row.k);
        const int begin = column - lane_column;
        staged[column / PACK<T>] = pack;
        store_moments<T>(pack, columns_from(column, PACK<T>, row.k), begin, row.k, moments + begin / CHUNK<T>);
    }
    __syncthreads();
    const Norm norm = norm_of(merge_chunks<T>(moments, row.k), row.k, row.eps);
#pragma unroll 1
    for (int column = first; column - lane_column < row.k; column += stride) {
        if (column != first) {
            scales = load_scales(row, column);
        }
        staged[column / PACK<T>] = normalised<T>(staged[column / PACK<T>], scales.gamma, scales.beta, norm);
    }
    __syncthreads();
}

// What x is shifted and scaled by, element by element.
template <typename T>
__device__ __noinline__ Norm find_norm(RowNorm<T> row, float2* room) {
    Moments moments = {0.0f, 0.0f, 0.0f};
    const int warps = blockDim.y * blockDim.x / WARP;
#pragma unroll 1
    for (int first = 0; first < row.k; first += MOST_STAGED) {
        const int columns = columns_from(first, MOST_STAGED, row.k);
#pragma unroll 1
        for (int chunk = thread_of_block() / WARP; chunk * CHUNK<T> < columns; chunk += warps) {
            const int begin = first + chunk * CHUNK<T>, column = begin + threadIdx.x % WARP * PACK<T>;
            const int count = columns_from(column, PACK<T>, row.k);
            store_moments<T>(gather_fresh(row.x + column, count), count, begin, row.k, room + chunk);
        }
        __syncthreads();
        moments = merged(moments, merge_chunks<T>(room, columns));
        __syncthreads();  // they have been read
    }
    return norm_of(moments, row.k, row.eps);
}

#endif
