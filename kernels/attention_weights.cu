// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The attention weights of one query row each over the first lengths[r] positions of its own span of the KV cache:
// out[r, h, p] = softmax_p(scale * q[r, h] . k[p, h]), and 0 for lengths[r] <= p < longest.
//
// Layout     q is [rows, heads * head_dim] of T, rows q_stride elements apart; out is [rows, heads, longest] of float,
//            contiguous. Position p of row r has its keys k_offset + p * kv_stride elements after spans[r],
//            heads * head_dim of them. head_dim is 1 to 256. The alignment of one element is enough.
// Launch     Grid (rows * heads, 1, 1). Block: a multiple of 32 threads, at most 256. No dynamic shared memory: the
//            scores lie in out until they are weights.
// Aliasing   out overlaps nothing that is read. Rows may share a span.
// Numbers    Scores, softmax and sum in float; the result is float, so nothing is rounded to T.
// Order      A row's bits depend on its own query, keys and length and on the size of the block.
// Undefined  A length below 1, above longest, or past what the span holds; head_dim above 256.
//
// A warp takes one key, its lanes neighbouring elements of it; then a thread takes every n-th score.

#include "common/attention.cuh"

// Elements of the widest head that a lane holds.
constexpr int ELEMENTS = 256 / WARP;

// The score of a key, in every lane.
template <typename T>
__device__ __forceinline__ float score_of(const float (&query)[ELEMENTS], const T* key, int head_dim) {
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int dim = i * WARP + threadIdx.x % WARP;
        score = fmaf(query[i], dim < head_dim ? to_float(key[dim]) : 0.0f, score);
    }
    return warp_reduce<Sum>(score);
}

template <typename T>
__device__ __forceinline__ void attention_weights(const T* q, const unsigned long long* spans, const int* lengths,
                                                  float* out, int heads, int head_dim, int longest, long long q_stride,
                                                  long long k_offset, long long kv_stride, float scale) {
    __shared__ float partial[2][256 / WARP];
    const long long row = blockIdx.x / heads;
    const long long within = static_cast<long long>(blockIdx.x % heads) * head_dim;
    const int length = lengths[row], warps = blockDim.x / WARP;
    const T* keys = reinterpret_cast<const T*>(spans[row]) + k_offset + within;
    q += row * q_stride + within;
    out += static_cast<long long>(blockIdx.x) * longest;

    float query[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int dim = i * WARP + threadIdx.x % WARP;
        query[i] = dim < head_dim ? to_float(q[dim]) * scale : 0.0f;
    }
    float most = LOWEST;
    for (int p = threadIdx.x / WARP; p < length; p += warps) {
        const float score = score_of(query, keys + p * kv_stride, head_dim);
        most = fmaxf(most, score);
        if (threadIdx.x % WARP == 0) {
            out[p] = score;
        }
    }
    most = block_reduce<Max>(most, partial[0]);  // its barrier also shows every thread all scores

    float total = 0.0f;
    for (int p = threadIdx.x; p < length; p += blockDim.x) {
        const float weight = expf(out[p] - most);
        total += weight;
        out[p] = weight;
    }
    total = block_reduce<Sum>(total, partial[1]);
    for (int p = threadIdx.x; p < longest; p += blockDim.x) {
        out[p] = p < length ? out[p] / total : 0.0f;
    }
}

#define ENTRY(T, suffix)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) attention_weights_##suffix(                                      \
        const T* q, const unsigned long long* spans, const int* lengths, float* out, int rows, int heads,              \
        int head_dim, int longest, long long q_stride, long long k_offset, long long kv_stride, float scale) {         \
        attention_weights<T>(q, spans, lengths, out, heads, head_dim, longest, q_stride, k_offset, kv_stride, scale);  \
    }

ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
