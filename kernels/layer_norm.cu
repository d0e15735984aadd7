// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out[r, c] = (x[r, c] - mean_r) / sqrt(var_r + eps) * weight[c] + bias[c]
//
// Layout     x, out: [rows, width]; weight, bias: [width]; T, contiguous. The alignment of one element is enough; packs
//            are moved whole where all addresses are multiples of 16 bytes and width is a multiple of a pack.
// Launch     grid x = rows; block = whole warps, at most 1,024 threads; static shared memory. May begin before the kernel
//            ahead has ended, if nothing that is still under way writes weight or bias.
// Aliasing   out may be x: a thread reads a pack before it writes it, and no thread reads another's.
// Numbers    The mean first, then the variance of the centred row; both sums in float, in an order that depends on width
//            and block alone.
//
// With a thread for each pack a row is read once and stays in registers. What a wider row has beyond the block's first
// packs is read again for the variance and for the result.

#include "common/dependent.cuh"
#include "common/reduce.cuh"

template <typename T>
__device__ __forceinline__ float sum_of(const float (&values)[PACK<T>]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        sum += values[i];
    }
    return sum;
}

// `count`: how many of the values are elements of the row; the others stand for nothing.
template <typename T>
__device__ __forceinline__ float squares_of(const float (&values)[PACK<T>], int count, float mean) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        const float centred = values[i] - mean;
        sum += i < count ? centred * centred : 0.0f;
    }
    return sum;
}

template <typename T>
__device__ __forceinline__ void normalise(float (&values)[PACK<T>], const float (&weight)[PACK<T>],
                                          const float (&bias)[PACK<T>], float mean, float scale) {
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        values[i] = (values[i] - mean) * scale * weight[i] + bias[i];
    }
}

template <typename T>
__device__ __forceinline__ void layer_norm(const T* x, const T* weight, const T* bias, T* out, int rows, int width,
                                           float eps) {
    __shared__ float partial[2][WARP];
    let_next_begin();
    const long long row = blockIdx.x;
    if (row >= rows) {
        wait_for_previous();
        return;
    }
    const bool whole = width % PACK<T> == 0 && aligned16(x) && aligned16(weight) && aligned16(bias) && aligned16(out);
    x += row * width;
    out += row * width;
    const int first = static_cast<int>(threadIdx.x) * PACK<T>;
    const int step = static_cast<int>(blockDim.x) * PACK<T>;

    float values[PACK<T>] = {};
    float scales[PACK<T>] = {};
    float shifts[PACK<T>] = {};
    if (first < width) {
        load_pack(weight + first, width - first, whole, scales);
        load_pack(bias + first, width - first, whole, shifts);
    }
    wait_for_previous();
    if (first < width) {
        load_fresh_pack(x + first, width - first, whole, values);
    }
    float more[PACK<T>];
    float sum = sum_of<T>(values);
#pragma unroll 1
    for (int column = first + step; column < width; column += step) {
        load_fresh_pack(x + column, width - column, whole, more);
        sum += sum_of<T>(more);
    }
    const float mean = block_reduce<Sum>(sum, partial[0]) / static_cast<float>(width);

    float square = squares_of<T>(values, width - first, mean);
#pragma unroll 1
    for (int column = first + step; column < width; column += step) {
        load_fresh_pack(x + column, width - column, whole, more);
        square += squares_of<T>(more, width - column, mean);
    }
    const float variance = block_reduce<Sum>(square, partial[1]) / static_cast<float>(width);
    const float scale = 1.0f / sqrtf(variance + eps);

    if (first < width) {
        normalise<T>(values, scales, shifts, mean, scale);
        store_pack(out + first, width - first, whole, values);
    }
#pragma unroll 1
    for (int column = first + step; column < width; column += step) {
        load_fresh_pack(x + column, width - column, whole, more);
        load_pack(weight + column, width - column, whole, scales);
        load_pack(bias + column, width - column, whole, shifts);
        normalise<T>(more, scales, shifts, mean, scale);
        store_pack(out + column, width - column, whole, more);
    }
}

#define ENTRY(T, suffix)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) layer_norm_##suffix(                           \
        const T* x, const T* weight, const T* bias, T* out, int rows, int width, float eps) {         \
        layer_norm<T>(x, weight, bias, out, rows, width, eps);                                        \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
