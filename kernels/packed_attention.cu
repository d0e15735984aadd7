// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Full attention inside each of several sequences packed one after another: sequence s owns rows offsets[s] to
// offsets[s + 1], and out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, h]) v[j, h] over its rows j.
//
// Layout     q, k and v are [tokens, heads * head_dim], rows `stride` elements apart; out is the same, contiguous.
//            offsets rise from 0 to tokens. head_dim is 1 to 256.
// Alignment  One element. The tensor cores serve 16-bit types when head_dim is a multiple of 8, at most 128, and q, k,
//            v, out and the distance between their rows are multiples of 16 bytes: one path for a whole launch.
// Launch     Grid (ceil(longest / queries of a block), heads, sequences). Block: a number of warps, at most 4; a warp
//            takes 8 queries of float, 16 of the 16-bit types. Shared memory: with a pitch of head_dim, rounded up to a
//            multiple of 8, plus 4 floats: pitch * (64 + 8 * warps) + 256 * warps floats, whatever the lengths.
// Aliasing   out overlaps nothing that is read.
// Order      A sequence's bits depend on its own rows and on the path, not on its neighbours or its place.
// Undefined  Offsets that do not rise, or pass tokens; head_dim above 256. Rows past `longest` are not written.
//
// Both paths go through the keys in tiles, with a running maximum, sum of weights and weighted value for each query
// (online softmax), so that shared memory does not bound the length. Sums are in float.

#include "common/attention.cuh"

constexpr int KEYS = WARP;  // of a tile, on the float units: one a lane
constexpr int QUERIES = 8;  // of a warp at a time, on the float units
constexpr int ROWS = 16;    // queries of a warp on the tensor cores
constexpr float LOG2_E = 1.4426950408889634f;

// What a block attends to: one head of one sequence.
template <typename T>
struct Head {
    const T* q;
    const T* k;
    const T* v;
    T* out;
    long long stride;  // of q, k and v
    long long out_stride;
    int length;
    int head_dim;
    float scale;
};

// ---- On the float units ----

// Copies `count` rows, at most `rows`, to a tile of `rows` as floats; what lies past them and past head_dim becomes 0.
template <typename T>
__device__ __forceinline__ void load_tile(const T* from, long long stride, int count, int rows, int head_dim,
                                          int pitch, float* tile) {
    const bool whole = head_dim % PACK<T> == 0 && rows_aligned16(from, stride);
    const int packs = (head_dim + 7) / 8 * (8 / PACK<T>);
    for (int i = threadIdx.x; i < rows * packs; i += blockDim.x) {
        const int row = i / packs, dim = i % packs * PACK<T>;
        float values[PACK<T>] = {};
        if (row < count && dim < head_dim) {
            load_pack(from + row * stride + dim, head_dim - dim, whole, values);
        }
#pragma unroll
        for (int e = 0; e < PACK<T>; ++e) {
            tile[row * pitch + dim + e] = values[e];
        }
    }
}

__device__ __forceinline__ float4 four(const float* from) {
    return *reinterpret_cast<const float4*>(from);
}

// The softmax of a warp's queries so far. A lane has the sum of weights of its own keys, and its own dims.
template <int CHUNKS>
struct Running {
    float most[QUERIES];
    float total[QUERIES];
    float sum[QUERIES][CHUNKS];
};

// Takes the products of each query with the lane's key; on return `weights` holds the weight of each query and key.
template <int CHUNKS>
__device__ __forceinline__ void take_scores(const float (&product)[QUERIES], float scale, bool there,
                                            Running<CHUNKS>& running, float* weights) {
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
        const float score = there ? product[r] * scale : -infinity();
        const float largest = fmaxf(running.most[r], warp_reduce<Max>(score));
        const float weight = expf(score - largest), keep = expf(running.most[r] - largest);
        running.most[r] = largest;
        running.total[r] = fmaf(running.total[r], keep, weight);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            running.sum[r][c] *= keep;
        }
        weights[r * KEYS + threadIdx.x % WARP] = weight;
    }
}

// Adds the weighted values of `count` keys, four at a time: past `count`, weights and values are 0.
template <int CHUNKS>
__device__ __forceinline__ void add_weighted(const float* weights, const float* values, int count, int pitch,
                                             const int (&dims)[CHUNKS], Running<CHUNKS>& running) {
#pragma unroll 1
    for (int key = 0; key < count; key += 4) {
        float4 weight[QUERIES];
#pragma unroll
        for (int r = 0; r < QUERIES; ++r) {
            weight[r] = four(weights + r * KEYS + key);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const float* value = values + key * pitch + dims[c];
            const float v0 = value[0], v1 = value[pitch], v2 = value[2 * pitch], v3 = value[3 * pitch];
#pragma unroll
            for (int r = 0; r < QUERIES; ++r) {
                float& sum = running.sum[r][c];
                sum = fmaf(weight[r].x, v0, fmaf(weight[r].y, v1, fmaf(weight[r].z, v2, fmaf(weight[r].w, v3, sum))));
            }
        }
    }
}

// Queries `begin` to `begin` + QUERIES * warps. CHUNKS * 32 is at least head_dim.
template <typename T, int CHUNKS>
__device__ __forceinline__ void attend_tile(const Head<T>& head, int begin, float* shared) {
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int depth = (head.head_dim + 7) / 8 * 8;
    const int pitch = depth + 4;  // an odd number of quads: the lanes' keys lie in different banks
    float* keys = shared;
    float* values = keys + KEYS * pitch;
    float* queries = values + KEYS * pitch;
    float* weights = queries + warps * QUERIES * pitch + warp * QUERIES * KEYS;
    const float* own = queries + warp * QUERIES * pitch;

    Running<CHUNKS> running = {};
    int dims[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        dims[c] = min(c * WARP + lane, head.head_dim - 1);
    }
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
        running.most[r] = LOWEST;
    }
    load_tile(head.q + begin * head.stride, head.stride, head.length - begin, warps * QUERIES, head.head_dim, pitch,
              queries);
    for (int first = 0; first < head.length; first += KEYS) {
        const int count = min(KEYS, head.length - first);
        load_tile(head.k + first * head.stride, head.stride, count, KEYS, head.head_dim, pitch, keys);
        load_tile(head.v + first * head.stride, head.stride, count, KEYS, head.head_dim, pitch, values);
        __syncthreads();  // the tiles are there
        float product[QUERIES] = {};
#pragma unroll 2
        for (int dim = 0; dim < depth; dim += 4) {
            const float4 key = four(keys + lane * pitch + dim);
#pragma unroll
            for (int r = 0; r < QUERIES; ++r) {
                const float4 query = four(own + r * pitch + dim);
                product[r] = fmaf(query.x, key.x, product[r]);
                product[r] = fmaf(query.y, key.y, product[r]);
                product[r] = fmaf(query.z, key.z, product[r]);
                product[r] = fmaf(query.w, key.w, product[r]);
            }
        }
        take_scores(product, head.scale, lane < count, running, weights);
        __syncwarp();
        add_weighted(weights, values, count, pitch, dims, running);
        __syncthreads();  // the next tiles take their place
    }
#pragma unroll
    for (int r = 0; r < QUERIES; ++r) {
        const float share = 1.0f / warp_reduce<Sum>(running.total[r]);
        const int row = begin + warp * QUERIES + r;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (row < head.length && c * WARP + lane < head.head_dim) {
                head.out[row * head.out_stride + dims[c]] = from_float<T>(running.sum[r][c] * share);
            }
        }
    }
}

// ---- On the tensor cores ----
//
// Operands go from global memory to registers in loads of 16 bytes, without shared memory. That is possible because the
// order of the terms of a product is free: where the hardware has lane t hold columns 2t, 2t+1, 2t+8, 2t+9 of a, and
// those rows of b, in each of two products, here it holds 8t to 8t+7 of both; and where lane g holds column g of b in
// each of eight products, here these are columns 8g to 8g+7.

// A pack of row `row`, or zeros where the sequence or the head ends before it.
template <typename T>
__device__ __forceinline__ uint4 load_row(const Head<T>& head, const T* from, int row, int dim) {
    const bool there = row < head.length && dim < head.head_dim;
    return there ? load_words(from + row * head.stride + dim) : make_uint4(0, 0, 0, 0);
}

// sum += weights (16 queries, 16 keys) times values of the keys from `first` on. `left` has the weights of the first
// 8 keys as a product leaves them, `right` those of the others. A weight is taken as the sum of two numbers of type T:
// rounded to one, the weights alone could use up the error that rounding the result is allowed.
template <typename T, int DEPTH>
__device__ __forceinline__ void add_values(const Head<T>& head, int first, const float (&left)[4],
                                           const float (&right)[4], float (&sum)[DEPTH / 8][4]) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const float weights[4][2] = {{left[0], left[1]}, {left[2], left[3]}, {right[0], right[1]}, {right[2], right[3]}};
    unsigned coarse[4], fine[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        coarse[i] = word_of<T>(weights[i][0], weights[i][1]);
        fine[i] = word_of<T>(weights[i][0] - to_float(T{static_cast<unsigned short>(coarse[i] & 0xffff)}),
                             weights[i][1] - to_float(T{static_cast<unsigned short>(coarse[i] >> 16)}));
    }
#pragma unroll
    for (int b = 0; b < DEPTH / 64; ++b) {
        uint4 values[4];  // dims 64b + 8g to 64b + 8g + 7 of keys 2t, 2t+1, 2t+8, 2t+9
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[i] = load_row(head, head.v, first + 2 * t + i % 2 + i / 2 * 8, 64 * b + 8 * g);
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const unsigned halves = n % 2 == 0 ? 0x5410 : 0x7632;  // both low halves, or both high halves
            const unsigned b0 = __byte_perm(word(values[0], n / 2), word(values[1], n / 2), halves);
            const unsigned b1 = __byte_perm(word(values[2], n / 2), word(values[3], n / 2), halves);
            multiply_add(sum[8 * b + n], coarse[0], coarse[1], coarse[2], coarse[3], b0, b1, T{});
            multiply_add(sum[8 * b + n], fine[0], fine[1], fine[2], fine[3], b0, b1, T{});
        }
    }
}

// Turns the products of 16 queries with TILE keys into weights, and scales `total` and `sum` down to the new maxima.
// `keys_left` of the sequence remain. score[n][0] and [1] are of query g and keys 8n + 2t and the next, [2] and [3] of
// query g + 8.
template <int TILE, int DEPTH>
__device__ __forceinline__ void take_scores(float (&score)[TILE / 8][4], float scale, int keys_left, float (&most)[2],
                                            float (&total)[2], float (&sum)[DEPTH / 8][4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = LOWEST;
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) {
            float& own = score[i / 2][2 * half + i % 2];
            own = i / 2 * 8 + 2 * t + i % 2 < keys_left ? own * scale : -infinity();
            largest = fmaxf(largest, own);
        }
        largest = fmaxf(most[half], warp_reduce<Max>(largest, 4));
        const float keep = exp2f(most[half] - largest);
        most[half] = largest;
        total[half] *= keep;
#pragma unroll
        for (int i = 0; i < TILE / 4; ++i) {
            float& own = score[i / 2][2 * half + i % 2];
            own = exp2f(own - largest);
            total[half] += own;
        }
#pragma unroll
        for (int i = 0; i < DEPTH / 4; ++i) {
            sum[i / 2][2 * half + i % 2] *= keep;
        }
    }
}

// Divides by the sums of weights, rounds and stores. sum[8b + n][0] is of query g and dim 64b + 16t + n, [1] of dim
// 64b + 16t + 8 + n, [2] and [3] of the same dims of query g + 8.
template <typename T, int DEPTH>
__device__ __forceinline__ void store_rows(const Head<T>& head, int begin, const float (&total)[2],
                                           const float (&sum)[DEPTH / 8][4]) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float share = 1.0f / warp_reduce<Sum>(total[half], 4);
        const int row = begin + g + half * 8;
#pragma unroll
        for (int i = 0; i < DEPTH / 32; ++i) {
            const int dim = i / 2 * 64 + 16 * t + i % 2 * 8;
            float values[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                values[n] = sum[i / 2 * 8 + n][2 * half + i % 2] * share;
            }
            if (row < head.length && dim < head.head_dim) {
                store_pack(head.out + row * head.out_stride + dim, PACK<T>, true, values);
            }
        }
    }
}

// Queries `begin` to `begin` + 15, by one warp. head_dim is a multiple of 8 and at most DEPTH.
template <typename T, int DEPTH, int TILE>
__device__ __forceinline__ void attend_warp(const Head<T>& head, int begin) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    uint4 query[2][DEPTH / 32];
#pragma unroll
    for (int i = 0; i < DEPTH / 16; ++i) {
        query[i % 2][i / 2] = load_row(head, head.q, begin + g + i % 2 * 8, i / 2 * 32 + 8 * t);
    }
    float most[2] = {LOWEST, LOWEST}, total[2] = {}, sum[DEPTH / 8][4] = {};
    for (int first = 0; first < head.length; first += TILE) {
        float score[TILE / 8][4] = {};
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
            for (int b = 0; b < DEPTH / 32; ++b) {
                const uint4 low = query[0][b], high = query[1][b];
                const uint4 key = load_row(head, head.k, first + 8 * n + g, 32 * b + 8 * t);
                multiply_add(score[n], low.x, high.x, low.y, high.y, key.x, key.y, T{});
                multiply_add(score[n], low.z, high.z, low.w, high.w, key.z, key.w, T{});
            }
        }
        take_scores<TILE, DEPTH>(score, head.scale * LOG2_E, head.length - first, most, total, sum);
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            add_values<T, DEPTH>(head, first + 8 * n, score[n], score[n + 1], sum);
        }
    }
    store_rows<T, DEPTH>(head, begin, total, sum);
}

// ---- Both ----

template <typename T>
__device__ __forceinline__ void packed_attention(const T* q, const T* k, const T* v, const int* offsets, T* out,
                                                 int heads, int head_dim, long long stride, float scale) {
    extern __shared__ float4 shared[];  // float4 for its alignment
    const int begin = offsets[blockIdx.z], warps = blockDim.x / WARP;
    const long long within = static_cast<long long>(blockIdx.y) * head_dim;
    const long long out_stride = static_cast<long long>(heads) * head_dim;
    const long long at = begin * stride + within;
    const Head<T> head = {q + at,     k + at, v + at, out + begin * out_stride + within,
                          stride,     out_stride,     offsets[blockIdx.z + 1] - begin,
                          head_dim,   scale};
    if constexpr (sizeof(T) == 2) {
        if (head_dim % 8 == 0 && head_dim <= 128 && rows_aligned16(q, stride) && rows_aligned16(k, stride) &&
            rows_aligned16(v, stride) && aligned16(out)) {
            const int first = (blockIdx.x * warps + threadIdx.x / WARP) * ROWS;
            if (first < head.length && head_dim <= 64) {
                attend_warp<T, 64, 32>(head, first);
            } else if (first < head.length) {
                attend_warp<T, 128, 16>(head, first);
            }
            return;
        }
    }
    const int rows = warps * (sizeof(T) == 2 ? ROWS : QUERIES);
    const int first = blockIdx.x * rows, end = min(head.length, first + rows);
    float* tiles = reinterpret_cast<float*>(shared);
    for (int tile = first; tile < end; tile += warps * QUERIES) {
        if (head_dim <= 64) {
            attend_tile<T, 2>(head, tile, tiles);
        } else if (head_dim <= 128) {
            attend_tile<T, 4>(head, tile, tiles);
        } else {
            attend_tile<T, 8>(head, tile, tiles);
        }
    }
}

// Four blocks on a multiprocessor leave 128 registers: enough for the tensor cores with heads of 64; wider heads spill.
#define ENTRY(T, suffix)                                                                                           \
    extern "C" __global__ void __launch_bounds__(128, 4) packed_attention_##suffix(                                \
        const T* q, const T* k, const T* v, const int* offsets, T* out, int tokens, int offset_count, int longest, \
        int heads, int head_dim, long long stride, float scale) {                                                  \
        packed_attention<T>(q, k, v, offsets, out, heads, head_dim, stride, scale);                                \
    }

ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
