// SPDX-License-Identifier: MIT OR Apache-2.0
// What no library epilogue does to a product: bias of another type than the result, the exact GELU, SiLU.
//
//   value = product[b, r, c] + bias[c];  c[b, r, c] = round(activation(value) + (accumulate ? c[b, r, c] : 0))
//
// product  float32, row r of matrix b at product + b * product_step + r * product_stride
// bias     n elements of the type that bias_type names (0 none, 1 float32, 2 float16, 3 bfloat16)
// c        row r of matrix b at c + b * c_step + r * c_stride; for float32 it may be the product itself
// Everything in float32, one rounding. Only element alignment is needed.
// Grid: x over rows of all matrices, looping; y over tiles of blockDim.x columns, looping. No shared memory.
#include "common/activation.cuh"
#include "common/element.cuh"

__device__ __forceinline__ float bias_at(const unsigned char* bias, int bias_type, int column) {
    switch (bias_type) {
        case 1:
            return reinterpret_cast<const float*>(bias)[column];
        case 2:
            return to_float(reinterpret_cast<const f16*>(bias)[column]);
        case 3:
            return to_float(reinterpret_cast<const bf16*>(bias)[column]);
        default:
            return 0.0f;
    }
}

template <typename T>
__device__ void gemm_epilogue(const float* product, const unsigned char* bias, T* c, int rows, int n, int batch,
                              long long product_stride, long long product_step, long long c_stride, long long c_step,
                              int bias_type, int activation, int accumulate) {
    const long long all = static_cast<long long>(rows) * batch;
    for (long long row = blockIdx.x; row < all; row += gridDim.x) {
        const long long matrix = row / rows, within = row % rows;
        const float* from = product + matrix * product_step + within * product_stride;
        T* to = c + matrix * c_step + within * c_stride;
        for (int column = blockIdx.y * blockDim.x + threadIdx.x; column < n; column += gridDim.y * blockDim.x) {
            float value = activate(from[column] + bias_at(bias, bias_type, column), activation);
            if (accumulate) value += to_float(to[column]);
            to[column] = from_float<T>(value);
        }
    }
}

#define ENTRY(T, suffix)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) gemm_epilogue_##suffix(                                         \
        const float* product, const unsigned char* bias, T* c, int rows, int n, int batch, long long product_stride,  \
        long long product_step, long long c_stride, long long c_step, int bias_type, int activation, int accumulate) { \
        gemm_epilogue<T>(product, bias, c, rows, n, batch, product_stride, product_step, c_stride, c_step, bias_type, \
                         activation, accumulate);                                                                     \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
