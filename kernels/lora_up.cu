// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out[r, s, n] = activation(out[r, s, n] + scales[a, s] * sum over i < ranks[a, s] of t[r, s, i] * b[a, s, i, n]) with
// a = adapters[r]. The product is left out where a < 0 or the rank is 0.
//
// Layout     t: float, [rows, segments, room]; adapters: int, [rows]; ranks: int, scales: float, [adapters, segments];
//            b: T, [adapters, segments, room, width]; out: T, [rows, segments, width]; all contiguous. The alignment of
//            one element is enough; packs are moved whole where b and out are multiples of 16 bytes and width is a
//            multiple of a pack.
// Launch     grid x = rows * segments * ceil(width / (threads of a block * PACK)); block: any number of threads up to 256;
//            no shared memory.
// Aliasing   none.
// Numbers    Everything in float, the ranks in order, one rounding. What is past a rank, and the t of a row without
//            adapter, is not read.
// Undefined  adapters[r] beyond the tables' adapters, or a rank above room: memory outside t and b is read.

#include "common/activation.cuh"
#include "common/element.cuh"

// values += scale * t . b, over `rank` rows of b, of which `count` elements are there, at most a pack.
template <typename T, bool WHOLE>
__device__ __forceinline__ void add_product(const float* t, const T* b, float scale, int rank, int width, int count,
                                            float (&values)[PACK<T>]) {
    float sums[PACK<T>] = {};
#pragma unroll 8
    for (int i = 0; i < rank; ++i) {
        float weights[PACK<T>];
        load_pack(b + static_cast<long long>(i) * width, count, WHOLE, weights);
#pragma unroll
        for (int e = 0; e < PACK<T>; ++e) {
            sums[e] = fmaf(t[i], weights[e], sums[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < PACK<T>; ++e) {
        values[e] += scale * sums[e];
    }
}

template <typename T>
__device__ __forceinline__ void lora_up(const float* t, const int* adapters, const int* ranks, const float* scales,
                                        const T* b, T* out, int rows, int segments, int width, int room,
                                        int activation) {
    const unsigned columns = blockDim.x * PACK<T>;
    const unsigned chunks = (width + columns - 1) / columns;
    const long long row = blockIdx.x / chunks / segments;
    const int segment = static_cast<int>(blockIdx.x / chunks % segments);
    const int column = static_cast<int>(blockIdx.x % chunks * columns + threadIdx.x * PACK<T>);
    if (row >= rows || column >= width) {
        return;
    }
    const int adapter = adapters[row];
    const long long place = static_cast<long long>(adapter) * segments + segment;
    const int rank = adapter < 0 ? 0 : ranks[place];
    if (rank == 0 && activation == 0) {
        return;
    }
    const bool whole = width % PACK<T> == 0 && aligned16(b) && aligned16(out);
    const int count = width - column;
    t += (row * segments + segment) * room;
    b += place * room * width + column;
    out += (row * segments + segment) * width + column;
    float values[PACK<T>];
    load_pack(out, count, whole, values);
    if (rank > 0 && whole) {
        add_product<T, true>(t, b, scales[place], rank, width, count, values);
    } else if (rank > 0) {
        add_product<T, false>(t, b, scales[place], rank, width, count, values);
    }
#pragma unroll
    for (int e = 0; e < PACK<T>; ++e) {
        values[e] = activate(values[e], activation);
    }
    store_pack(out, count, whole, values);
}

#define ENTRY(T, suffix)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) lora_up_##suffix(                                              \
        const float* t, const int* adapters, const int* ranks, const float* scales, const T* b, T* out, int rows,    \
        int segments, int width, int room, int adapter_count, int activation) {                                      \
        lora_up<T>(t, adapters, ranks, scales, b, out, rows, segments, width, room, activation);                     \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
