// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out[r] = src[index[r]]
//
// Layout     src: T, [src_rows, width], rows `src_stride` elements apart; index: int, [rows]; out: T, [rows, width], rows
//            `out_stride` elements apart. The alignment of one element is enough; packs are moved whole where a row's two
//            addresses are multiples of 16 bytes.
// Launch     grid x = rows; block = whole warps, at most 256 threads; no shared memory.
// Aliasing   none.
// Numbers    A copy, bit for bit.
// Undefined  an index outside [0, src_rows): memory outside src is read.

#include "common/dependent.cuh"

template <typename T>
__device__ __forceinline__ void row_gather(const T* src, const int* index, T* out, int rows, int width,
                                           long long src_stride, long long out_stride) {
    const long long row = blockIdx.x;
    if (row >= rows) {
        return;
    }
    copy_row(out + row * out_stride, src + index[row] * src_stride, width);
}

#define ENTRY(T, suffix)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) row_gather_##suffix(                               \
        const T* src, const int* index, T* out, int rows, int width, int src_rows, long long src_stride, \
        long long out_stride) {                                                                          \
        row_gather<T>(src, index, out, rows, width, src_stride, out_stride);                             \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
