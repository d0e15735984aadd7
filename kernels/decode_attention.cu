// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Attention of one query row each over the first lengths[r] positions of its own span of the KV cache:
// out[r, h] = sum_p softmax_p(scale * q[r, h] . k[p, h]) v[p, h].
//
// Layout     q is [rows, heads * head_dim], rows q_stride elements apart; out is the same, contiguous. Position p of
//            row r has its keys k_offset + p * kv_stride elements after spans[r], and its values v_offset +
//            p * kv_stride after it, heads * head_dim of each. head_dim is 1 to 256.
// Ancestry   ancestry, ancestry_index and beam_positions are all addresses or all NULL. A row whose ancestry_index is at
//            least 0 has an ancestry, that row a of ancestry, ancestry_capacity wide: its position p is position
//            a[p] * beam_positions[r] + p of the span, which is the storage of one beam after the other. Any other row
//            has its positions one after the other, and its beam_positions is not looked at.
// Alignment  One element. Keys and values come in loads of 16 bytes when head_dim, kv_stride and the addresses of
//            the row's first key and value are multiples of 16 bytes, else element by element; the bits are the same.
// Launch     Grid (rows * heads, 1, 1), the heads of a row next to each other, as they are in memory. Block: a
//            multiple of 32 threads, at most 256. Shared memory: head_dim + 2 floats a warp, whatever the lengths.
// Aliasing   out overlaps nothing that is read. Rows may share a span.
// Order      A row's bits depend on its own query, keys, values and length and on the size of the block, not on the
//            other rows, not on where it lies, and not on whether an ancestry leads to its keys.
// Undefined  A length below 1, or past what the span, an ancestry or a beam's storage holds; head_dim above 256; an
//            ancestry_index or an ancestor past the last.
//
// A group of lanes takes one key, each lane a pack of it; the groups of a block take every n-th key, KEYS of them in
// flight, and keep a running maximum, sum of weights and weighted value (online softmax). These are merged within the
// warp, then across the warps, in a fixed order. Each key and value is read once, so memory is the limit when
// rows * heads fill the device. Few rows with long spans do not (one row of 16 heads: 16 blocks). There, keys split
// over several blocks in pieces of a fixed length, and a second pass that merges the pieces in order, would help; a
// launch knows no lengths, so that needs their bound as a parameter, and memory for partial results.

#include "common/attention.cuh"

// What a block attends to: one head of one row.
template <typename T>
struct Head {
    const T* query;
    const T* keys;
    const T* values;
    const int* ancestors;  // the beam of each position; not read where there is no ancestry
    long long kv_stride;
    unsigned beam_positions;
    unsigned length;
    int head_dim;
    float scale;

    // Which position of the span holds the row's position p.
    template <bool BEAMS>
    __device__ __forceinline__ unsigned place(unsigned p) const {
        if constexpr (BEAMS) {
            return p < length ? __ldg(ancestors + p) * beam_positions + p : 0;
        } else {
            return p;
        }
    }
};

// Merges the groups of a warp: after each round a group stands for twice as many.
template <int LANES, int CHUNKS, int VEC>
__device__ __forceinline__ void merge_groups(float& most, float& total, float (&sum)[CHUNKS][VEC]) {
#pragma unroll
    for (int offset = LANES; offset < WARP; offset *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, most, offset);
        const float largest = fmaxf(most, other);
        const float keep = expf(most - largest), take = expf(other - largest);
        most = largest;
        total = fmaf(__shfl_xor_sync(ALL_LANES, total, offset), take, total * keep);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                sum[c][e] = fmaf(__shfl_xor_sync(ALL_LANES, sum[c][e], offset), take, sum[c][e] * keep);
            }
        }
    }
}

// Writes each warp's part of the result to `partial`: head_dim weighted sums, the maximum, the sum of weights. LANES
// lanes hold a key, CHUNKS packs each. BEAMS: the row has an ancestry.
template <typename T, int LANES, int CHUNKS, int KEYS, bool WHOLE, bool BEAMS>
__device__ __forceinline__ void attend(const Head<T>& head, float* partial) {
    constexpr int VEC = PACK<T>;
    const int lane = threadIdx.x % WARP;
    const unsigned group = threadIdx.x / LANES, groups = blockDim.x / LANES;

    float query[CHUNKS][VEC], sum[CHUNKS][VEC] = {};
    int dim[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        dim[c] = (c * LANES + lane % LANES) * VEC;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            query[c][e] = dim[c] + e < head.head_dim ? to_float(head.query[dim[c] + e]) * head.scale : 0.0f;
        }
    }

    float most = LOWEST, total = 0.0f;
    for (unsigned begin = 0; begin < head.length; begin += KEYS * groups) {
        const unsigned first = begin + group;
        uint4 key[KEYS][CHUNKS] = {}, value[KEYS][CHUNKS] = {};
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const long long at = head.template place<BEAMS>(first + i * groups) * head.kv_stride;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (first + i * groups < head.length && dim[c] < head.head_dim) {
                    const T *k = head.keys + at + dim[c], *v = head.values + at + dim[c];
                    const int count = head.head_dim - dim[c];
                    key[i][c] = WHOLE ? load_words(k) : gather_words(k, count);
                    value[i][c] = WHOLE ? load_words(v) : gather_words(v, count);
                }
            }
        }
        float score[KEYS], largest = most;
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            score[i] = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float k[VEC];
                unpack(key[i][c], k, T{});
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    score[i] = fmaf(query[c][e], k[e], score[i]);
                }
            }
            score[i] = warp_reduce<Sum>(score[i], LANES);
            score[i] = first + i * groups < head.length ? score[i] : -infinity();
            largest = fmaxf(largest, score[i]);
        }
        const float keep = expf(most - largest);
        most = largest;
        total *= keep;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                sum[c][e] *= keep;
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const float weight = expf(score[i] - most);
            total += weight;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float v[VEC];
                unpack(value[i][c], v, T{});
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    sum[c][e] = fmaf(weight, v[e], sum[c][e]);
                }
            }
        }
    }
    merge_groups<LANES>(most, total, sum);

    float* own = partial + threadIdx.x / WARP * (head.head_dim + 2);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            if (lane < LANES && dim[c] + e < head.head_dim) {
                own[dim[c] + e] = sum[c][e];
            }
        }
    }
    if (lane == 0) {
        own[head.head_dim] = most;
        own[head.head_dim + 1] = total;
    }
}

// Writes the head's result from the parts that the warps have left in `partial`.
template <typename T>
__device__ __forceinline__ void merge_warps(const float* partial, int head_dim, T* out) {
    const int warps = blockDim.x / WARP, pitch = head_dim + 2;
    float most = LOWEST;
    for (int warp = 0; warp < warps; ++warp) {
        most = fmaxf(most, partial[warp * pitch + head_dim]);
    }
    for (int dim = threadIdx.x; dim < head_dim; dim += blockDim.x) {
        float sum = 0.0f, total = 0.0f;
        for (int warp = 0; warp < warps; ++warp) {
            const float* part = partial + warp * pitch;
            const float keep = expf(part[head_dim] - most);
            sum = fmaf(part[dim], keep, sum);
            total = fmaf(part[head_dim + 1], keep, total);
        }
        out[dim] = from_float<T>(sum / total);
    }
}

template <typename T, bool WHOLE, bool BEAMS>
__device__ __forceinline__ void attend_by_width(const Head<T>& head, float* partial) {
    constexpr int VEC = PACK<T>;
    if (head.head_dim <= 64) {
        attend<T, 64 / VEC, 1, 4, WHOLE, BEAMS>(head, partial);
    } else if (head.head_dim <= 128) {
        attend<T, 128 / VEC, 1, 4, WHOLE, BEAMS>(head, partial);
    } else {
        attend<T, 32, 8 / VEC, VEC / 2, WHOLE, BEAMS>(head, partial);  // float takes two packs a lane, so fewer keys
    }
}

template <typename T, bool BEAMS>
__device__ __forceinline__ void attend_by_address(const Head<T>& head, float* partial) {
    if (head.head_dim % PACK<T> == 0 && rows_aligned16(head.keys, head.kv_stride) &&
        rows_aligned16(head.values, head.kv_stride)) {
        attend_by_width<T, true, BEAMS>(head, partial);
    } else {
        attend_by_width<T, false, BEAMS>(head, partial);
    }
}

template <typename T>
__device__ __forceinline__ void decode_attention(const T* q, const unsigned long long* spans, const int* lengths,
                                                 const int* ancestry, const int* ancestry_index,
                                                 const int* beam_positions, T* out, int heads, int head_dim,
                                                 long long q_stride, long long k_offset, long long v_offset,
                                                 long long kv_stride, float scale, long long ancestry_capacity) {
    extern __shared__ float partial[];
    const long long row = blockIdx.x / heads;
    const long long within = static_cast<long long>(blockIdx.x % heads) * head_dim;
    const T* span = reinterpret_cast<const T*>(spans[row]) + within;
    const int index = ancestry == nullptr ? -1 : ancestry_index[row];
    Head<T> head = {q + row * q_stride + within, span + k_offset, span + v_offset, nullptr, kv_stride, 0,
                    static_cast<unsigned>(lengths[row]), head_dim, scale};
    if (index < 0) {
        attend_by_address<T, false>(head, partial);
    } else {
        head.ancestors = ancestry + index * ancestry_capacity;
        head.beam_positions = beam_positions[row];
        attend_by_address<T, true>(head, partial);
    }
    __syncthreads();
    merge_warps(partial, head_dim, out + row * heads * head_dim + within);
}

// Three blocks of 256 threads on a multiprocessor: told nothing, the compiler saves registers for more of them, and
// waits for one load before it issues the next.
#define ENTRY(T, suffix)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 3) decode_attention_##suffix(                                    \
        const T* q, const unsigned long long* spans, const int* lengths, const int* ancestry,                          \
        const int* ancestry_index, const int* beam_positions, T* out, int rows, int heads, int head_dim,               \
        long long q_stride, long long k_offset, long long v_offset, long long kv_stride, float scale,                  \
        int ancestry_rows, int ancestry_capacity) {                                                                    \
        decode_attention<T>(q, spans, lengths, ancestry, ancestry_index, beam_positions, out, heads, head_dim,         \
                            q_stride, k_offset, v_offset, kv_stride, scale, ancestry_capacity);                        \
    }

ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
