// SPDX-License-Identifier: MIT OR Apache-2.0
//
// t[r, s * room + i] = sum over c of x[r, c] * a[adapters[r], s, i, c] for i < ranks[adapters[r], s], 0 for other i and
// for rows with adapters[r] < 0.
//
// Layout     x: T, [rows, k], rows `x_stride` elements apart; adapters: int, [rows]; ranks: int, [adapters, segments];
//            a: T, [adapters, segments, room, k]; t: float, [rows, segments * room]. The alignment of one element is
//            enough; packs are loaded whole where all rows begin at multiples of 16 bytes and k is a multiple of a pack.
// Launch     grid x = rows * segments; block = whole warps, at most 256 threads; no shared memory.
// Aliasing   none.
// Numbers    Products and sums in float: a lane adds up every 32nd pack, then the lanes' sums are added, in an order that
//            depends on k alone. What is past a rank, and the x of a row without adapter, is not read.
// Undefined  adapters[r] beyond a's adapters, or a rank above room: memory outside a is read, or outside the row written.
//
// A warp takes RANKS ranks at a time, so that a pack of x serves as many products. The block of a row without adapter
// only writes zeros.

#include "common/element.cuh"
#include "common/reduce.cuh"

constexpr int RANKS = 2;

// The sums over k of x times RANKS rows of a, in every lane of the warp. Past `last`, a row is the last one again, which
// leaves no branch between the loads.
template <typename T, bool WHOLE>
__device__ __forceinline__ void dot(const T* x, const T* a, int k, int last, float (&sums)[RANKS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 4
    for (int column = lane * PACK<T>; column < k; column += WARP * PACK<T>) {
        float values[PACK<T>];
        load_pack(x + column, k - column, WHOLE, values);
#pragma unroll
        for (int j = 0; j < RANKS; ++j) {
            float weights[PACK<T>];
            load_pack(a + static_cast<long long>(min(j, last)) * k + column, k - column, WHOLE, weights);
#pragma unroll
            for (int e = 0; e < PACK<T>; ++e) {
                sums[j] = fmaf(values[e], weights[e], sums[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < RANKS; ++j) {
        sums[j] = warp_reduce<Sum>(sums[j]);
    }
}

// The first `rank` elements of a row and segment.
template <typename T, bool WHOLE>
__device__ __forceinline__ void fill(const T* x, const T* a, float* t, int k, int rank) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (int first = warp * RANKS; first < rank; first += warps * RANKS) {
        float sums[RANKS] = {};
        dot<T, WHOLE>(x, a + static_cast<long long>(first) * k, k, rank - 1 - first, sums);
#pragma unroll
        for (int j = 0; j < RANKS; ++j) {
            if (lane == j && first + j < rank) {
                t[first + j] = sums[j];
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void lora_down(const T* x, const int* adapters, const int* ranks, const T* a, float* t,
                                          int rows, int k, int segments, int room, long long x_stride) {
    const long long row = blockIdx.x / segments;
    const int segment = static_cast<int>(blockIdx.x % segments);
    if (row >= rows) {
        return;
    }
    const int adapter = adapters[row];
    const long long place = static_cast<long long>(adapter) * segments + segment;
    const int rank = adapter < 0 ? 0 : ranks[place];
    const bool whole = k % PACK<T> == 0 && x_stride % PACK<T> == 0 && aligned16(x) && aligned16(a);
    x += row * x_stride;
    a += place * room * k;
    t += (row * segments + segment) * room;
    if (whole) {
        fill<T, true>(x, a, t, k, rank);
    } else {
        fill<T, false>(x, a, t, k, rank);
    }
    for (int i = rank + static_cast<int>(threadIdx.x); i < room; i += blockDim.x) {
        t[i] = 0.0f;
    }
}

#define ENTRY(T, suffix)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) lora_down_##suffix(                                          \
        const T* x, const int* adapters, const int* ranks, const T* a, float* t, int rows, int k, int segments,    \
        int room, int adapter_count, long long x_stride) {                                                         \
        lora_down<T>(x, adapters, ranks, a, t, rows, k, segments, room, x_stride);                                 \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
