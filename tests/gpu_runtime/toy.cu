// SPDX-License-Identifier: MIT OR Apache-2.0
// out[r, c] = x[r, c] * factor (+ bias[c]), for `rows` rows of `width` elements that lie x_stride and out_stride
// elements apart. Any grid in x and any block in x will do; no shared memory. out may be x.
//
// Two factors are special: 666 traps, and 0.75 first waits for 30 ms.

#include "common/element.cuh"

__device__ void wait_30_ms() {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < 30000000ULL);
}

template <typename T>
__device__ void toy(const T* x, const T* bias, T* out, int rows, int width, long long x_stride, long long out_stride,
                    float factor) {
    if (factor == 666.0f) {
        __trap();
    }
    if (factor == 0.75f) {
        wait_30_ms();
    }
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        for (int column = threadIdx.x; column < width; column += blockDim.x) {
            // rounded after each step, as the reference is
            float value = __fmul_rn(to_float(x[row * x_stride + column]), factor);
            if (bias) {
                value = __fadd_rn(value, to_float(bias[column]));
            }
            out[row * out_stride + column] = from_float<T>(value);
        }
    }
}

#define ENTRY(T, suffix)                                                                                    \
    extern "C" __global__ void __launch_bounds__(1024) toy_##suffix(                                        \
        const T* x, const T* bias, T* out, int rows, int width, long long x_stride, long long out_stride,   \
        float factor) {                                                                                     \
        toy<T>(x, bias, out, rows, width, x_stride, out_stride, factor);                                    \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
