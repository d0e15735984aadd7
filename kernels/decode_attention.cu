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
// Launch     Grid (rows * heads / pairs, rounded up), where a pair is one head of one row, the heads of a row next to
//            each other as they are in memory. Block (32, warps of a pair, pairs), at most 256 threads; one of the two is
//            1. Shared memory: SPLITS * (head_dim + 2) floats a pair. May begin before the kernel ahead has ended.
// Fresh      How many of a row's last positions a kernel that is still under way may write; all other positions, spans,
//            lengths and the tables of ancestries are then read before the wait. -1: any of these may be written.
// Aliasing   out overlaps nothing that is read. Rows may share a span.
// Order      A row's bits depend on its own query, keys, values and length alone: not on the other rows, not on where it
//            lies, not on the block's shape, and not on whether an ancestry leads to its keys.
// Undefined  A length below 1, or past what the span, an ancestry or a beam's storage holds; head_dim above 256; an
//            ancestry_index or an ancestor past the last.
//
// A warp attends to so many keys at a time as it can have under way, eight packs of keys and of values a lane, and
// forms their largest score, sum of weights and weighted value. Up to SPLITS such parts a pair are folded in order; a
// longer row has several to each split, folded first. Who takes a split does not matter: one warp may take them one
// after the other, or each warp of a block its share, so that few rows are spread over more warps. Each key and value is
// read once, and memory is the limit where rows are many.

#include "common/attention.cuh"
#include "common/dependent.cuh"

constexpr unsigned SPLITS = 8;  // of a row's keys, at most; the order of sums depends on it

// One head of one row: what is read, and where the result goes.
template <typename T>
struct Pair {
    const T* query;
    const T* keys;
    const T* values;
    const int* ancestors;  // the beam of each position; NULL: the row has no ancestry
    T* out;
    float* parts;  // in shared memory, of each split: head_dim weighted sums, the largest score, the sum of weights
    long long kv_stride;
    unsigned beam_positions;
    unsigned length;   // 0: there is no such pair
    unsigned settled;  // positions before it were written long ago
    int head_dim;
    float scale;
    bool early;  // the wait is still to come

    // Which position of the span holds the row's position p.
    __device__ __forceinline__ unsigned place(unsigned p) const {
        return ancestors == nullptr ? p : ancestors[p] * beam_positions + p;
    }
};

// The softmax of some keys before it is divided: the largest score, the sum of weights, and the weighted value.
template <int COUNT>
struct Part {
    float most = LOWEST, total = 0.0f, sum[COUNT] = {};

    __device__ __forceinline__ void fold(float other_most, float other_total, const float (&other)[COUNT]) {
        const float largest = fmaxf(most, other_most);
        const float keep = expf(most - largest), take = expf(other_most - largest);
        most = largest;
        total = fmaf(other_total, take, total * keep);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            sum[i] = fmaf(other[i], take, sum[i] * keep);
        }
    }
};

// A warp's keys and values of one head: LANES lanes hold a key, CHUNKS packs each.
template <typename T, int LANES, int CHUNKS, bool WHOLE>
struct KeyTile {
    static constexpr int VEC = PACK<T>, COUNT = CHUNKS * VEC;
    static constexpr int LOADS = 8 / CHUNKS;          // keys of a lane
    static constexpr unsigned GROUPS = WARP / LANES;  // keys that the warp loads at once
    static constexpr unsigned KEYS = LOADS * GROUPS;

    uint4 key[LOADS][CHUNKS] = {}, value[LOADS][CHUNKS] = {};

    __device__ __forceinline__ static int dim(int chunk) {
        return (chunk * LANES + static_cast<int>(threadIdx.x) % LANES) * VEC;
    }
    __device__ __forceinline__ static unsigned position(unsigned tile, int load) {
        return tile * KEYS + load * GROUPS + threadIdx.x / LANES;
    }

    // Loads those of the tile's positions that are in [from, to), and leaves the others as they are: what they hold is
    // of another key of the row, or 0, and gets no weight.
    __device__ __forceinline__ void load(const Pair<T>& pair, unsigned tile, unsigned from, unsigned to) {
#pragma unroll(WHOLE ? LOADS : 1)
        for (int i = 0; i < LOADS; ++i) {
            const unsigned p = position(tile, i);
            const bool there = from <= p && p < to;
            const long long at = there ? pair.place(p) * pair.kv_stride : 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const T *k = pair.keys + at + dim(c), *v = pair.values + at + dim(c);
                const int count = there ? pair.head_dim - dim(c) : 0;
                if constexpr (WHOLE) {
                    load_over(key[i][c], k, count > 0);
                    load_over(value[i][c], v, count > 0);
                } else if (count > 0) {
                    key[i][c] = gather_fresh(k, count);
                    value[i][c] = gather_fresh(v, count);
                }
            }
        }
    }

    // Folds the softmax of the tile's keys into `part`, in every lane for the dimensions that it has.
    __device__ __forceinline__ void attend(const float (&query)[COUNT], unsigned tile, unsigned length,
                                           Part<COUNT>& part) const {
        float score[LOADS], most = LOWEST, total = 0.0f, sum[COUNT] = {};
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            score[i] = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float k[VEC];
                unpack(key[i][c], k, T{});
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    score[i] = fmaf(query[c * VEC + e], k[e], score[i]);
                }
            }
            score[i] = warp_reduce<Sum>(score[i], LANES);
            score[i] = position(tile, i) < length ? score[i] : -infinity();
            most = fmaxf(most, score[i]);
        }
        most = across<Max>(most);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const float weight = expf(score[i] - most);
            total += weight;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float v[VEC];
                unpack(value[i][c], v, T{});
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    sum[c * VEC + e] = fmaf(weight, v[e], sum[c * VEC + e]);
                }
            }
        }
        total = across<Sum>(total);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            sum[e] = across<Sum>(sum[e]);
        }
        part.fold(most, total, sum);
    }

    // Over the groups of lanes that hold a key each.
    template <typename Combine>
    __device__ __forceinline__ static float across(float value) {
#pragma unroll
        for (int step = LANES; step < WARP; step *= 2) {
            value = Combine::of(value, __shfl_xor_sync(ALL_LANES, value, step));
        }
        return value;
    }
};

// Writes the result from the parts of a pair that its warps left in shared memory; they share the dimensions.
template <typename T>
__device__ __forceinline__ void fold_splits(const Pair<T>& pair, unsigned splits) {
    const int pitch = pair.head_dim + 2;
    for (int dim = threadIdx.y * WARP + threadIdx.x; dim < pair.head_dim; dim += WARP * blockDim.y) {
        Part<1> part;
        for (unsigned split = 0; split < splits; ++split) {
            const float* from = pair.parts + split * pitch;
            const float value[1] = {from[dim]};
            part.fold(from[pair.head_dim], from[pair.head_dim + 1], value);
        }
        pair.out[dim] = from_float<T>(part.sum[0] / part.total);
    }
}

// What a warp does, of LANES lanes to a key and CHUNKS packs to a lane.
template <typename T, int LANES, int CHUNKS, bool WHOLE>
struct Attention {
    using Tile = KeyTile<T, LANES, CHUNKS, WHOLE>;
    static constexpr int VEC = PACK<T>, COUNT = Tile::COUNT;

    const Pair<T>& pair;
    Tile tile;
    float query[COUNT];

    __device__ __forceinline__ explicit Attention(const Pair<T>& p) : pair(p) {}

    __device__ __forceinline__ void load_query() {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int count = pair.length > 0 ? pair.head_dim - Tile::dim(c) : 0;
            const T* from = pair.query + Tile::dim(c);
            uint4 pack = make_uint4(0, 0, 0, 0);
            if (WHOLE && aligned16(pair.query)) {
                load_over(pack, from, count > 0);
            } else if (count > 0) {
                pack = gather_fresh(from, count);
            }
            float values[VEC];
            unpack(pack, values, T{});
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                query[c * VEC + e] = values[e] * pair.scale;
            }
        }
    }

    // Leaves a split's part in shared memory.
    __device__ __forceinline__ void store(const Part<COUNT>& part, unsigned split) const {
        float* own = pair.parts + split * (pair.head_dim + 2);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const int dim = Tile::dim(e / VEC) + e % VEC;
            if (threadIdx.x < LANES && dim < pair.head_dim) {
                own[dim] = part.sum[e];
            }
        }
        if (threadIdx.x == 0) {
            own[pair.head_dim] = part.most;
            own[pair.head_dim + 1] = part.total;
        }
    }

    __device__ __forceinline__ void run() {
        const unsigned tiles = (pair.length + Tile::KEYS - 1) / Tile::KEYS, splits = min(tiles, SPLITS);
        unsigned from = 0;
        if (pair.early) {
            if constexpr (WHOLE) {
                from = pair.settled;
                tile.load(pair, threadIdx.y, 0, threadIdx.y < splits ? from : 0);
            }
            wait_for_previous();
        }
        load_query();
#pragma unroll 1
        for (unsigned split = threadIdx.y; split < splits; split += blockDim.y) {
            Part<COUNT> part;
#pragma unroll 1
            for (unsigned at = split; at < tiles; at += splits) {
                tile.load(pair, at, from, pair.length);
                from = 0;
                tile.attend(query, at, pair.length, part);
            }
            store(part, split);
        }
        if (blockDim.y == 1) {
            __syncwarp();
        } else {
            __syncthreads();
        }
        if (pair.length > 0) {
            fold_splits(pair, splits);
        }
    }
};

template <typename T, bool WHOLE>
__device__ __forceinline__ void attend(const Pair<T>& pair) {
    constexpr int VEC = PACK<T>;
    if (pair.head_dim <= 64) {
        Attention<T, 64 / VEC, 1, WHOLE>(pair).run();
    } else if (pair.head_dim <= 128) {
        Attention<T, 128 / VEC, 1, WHOLE>(pair).run();
    } else {
        Attention<T, 32, 8 / VEC, WHOLE>(pair).run();  // float takes two packs a lane
    }
}

// Element by element, slowly: apart, so that the usual way has all registers to itself.
template <typename T>
__device__ __noinline__ void attend_scattered(const Pair<T>& pair) {
    attend<T, false>(pair);
}

template <typename T>
__device__ __forceinline__ void decode_attention(const T* q, const unsigned long long* spans, const int* lengths,
                                                 const int* ancestry, const int* ancestry_index,
                                                 const int* beam_positions, T* out, int rows, int heads, int head_dim,
                                                 long long q_stride, long long k_offset, long long v_offset,
                                                 long long kv_stride, float scale, long long ancestry_capacity,
                                                 int fresh) {
    extern __shared__ float parts[];
    let_next_begin();
    if (fresh < 0) {
        wait_for_previous();
    }
    const unsigned number = blockIdx.x * blockDim.z + threadIdx.z;
    const bool there = number < static_cast<unsigned>(rows) * heads;
    const long long row = there ? number / heads : 0;
    const long long within = static_cast<long long>(number % heads) * head_dim;
    const T* span = reinterpret_cast<const T*>(spans[row]) + within;
    const unsigned length = there ? lengths[row] : 0;
    const unsigned settled = fresh < 0 ? 0 : length - min(length, static_cast<unsigned>(fresh));
    const int index = ancestry == nullptr ? -1 : ancestry_index[row];
    const Pair<T> pair = {q + row * q_stride + within,
                          span + k_offset,
                          span + v_offset,
                          index < 0 ? nullptr : ancestry + index * ancestry_capacity,
                          out + row * heads * head_dim + within,
                          parts + threadIdx.z * SPLITS * (head_dim + 2),
                          kv_stride,
                          index < 0 ? 0u : beam_positions[row],
                          length,
                          settled,
                          head_dim,
                          scale,
                          fresh >= 0};
    if (head_dim % PACK<T> == 0 && rows_aligned16(pair.keys, kv_stride) && rows_aligned16(pair.values, kv_stride)) {
        attend<T, true>(pair);
    } else {
        attend_scattered(pair);
    }
}

// Two blocks of 256 threads on a multiprocessor: told nothing, the compiler saves registers for more of them, and waits
// for one load before it issues the next.
#define ENTRY(T, suffix)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 2) decode_attention_##suffix(                                    \
        const T* q, const unsigned long long* spans, const int* lengths, const int* ancestry,                          \
        const int* ancestry_index, const int* beam_positions, T* out, int rows, int heads, int head_dim,               \
        long long q_stride, long long k_offset, long long v_offset, long long kv_stride, float scale,                  \
        int ancestry_rows, int ancestry_capacity, int fresh) {                                                         \
        decode_attention<T>(q, spans, lengths, ancestry, ancestry_index, beam_positions, out, rows, heads, head_dim,   \
                            q_stride, k_offset, v_offset, kv_stride, scale, ancestry_capacity, fresh);                 \
    }

ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
