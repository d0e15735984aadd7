// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Row r of src goes to position positions[r] of the span at address spans[r].
//
// Layout     src: T, [rows, width], rows `src_stride` elements apart; spans: device addresses, [rows]; positions: int,
//            [rows]. The row lands `positions[r] * kv_stride + offset` elements after spans[r]. The alignment of one
//            element is enough; packs are moved whole where a row's two addresses are multiples of 16 bytes.
// Launch     grid x = rows; block = whole warps, at most 256 threads; no shared memory. May begin before the kernel ahead
//            has ended.
// Aliasing   none; two rows with the same target race.
// Numbers    A copy, bit for bit.
// Undefined  an address or position outside the memory of a span: foreign memory is written.

#include "common/dependent.cuh"

template <typename T>
__device__ __forceinline__ void kv_scatter(const T* src, const unsigned long long* spans, const int* positions, int rows,
                                           int width, long long src_stride, long long offset, long long kv_stride) {
    let_next_begin();
    wait_for_previous();
    const long long row = blockIdx.x;
    if (row >= rows) {
        return;
    }
    T* span = reinterpret_cast<T*>(spans[row]);
    copy_row(span + positions[row] * kv_stride + offset, src + row * src_stride, width);
}

#define ENTRY(T, suffix)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) kv_scatter_##suffix(                           \
        const T* src, const unsigned long long* spans, const int* positions, int rows, int width,    \
        long long src_stride, long long offset, long long kv_stride) {                               \
        kv_scatter<T>(src, spans, positions, rows, width, src_stride, offset, kv_stride);            \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
