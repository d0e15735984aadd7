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
//            each other as they are in memory. Block (32, warps of a pair, pairs), at most 128 threads; one of the two is
//            1. Shared memory: SPLITS * (head_dim + 2) floats a pair. May begin before the kernel ahead has ended.
// Fresh      How many of a row's last positions a kernel that is still under way may write; all other positions, spans,
//            lengths and the tables of ancestries are then read before the wait. -1: any of these may be written.
// Aliasing   out overlaps nothing that is read. Rows may share a span.
// Order      A row's bits depend on its own query, keys, values and length alone: not on the other rows, not on where it
//            lies, not on the block's shape, and not on whether an ancestry leads to its keys.
// Undefined  A length below 1, or past what the span, an ancestry or a beam's storage holds; head_dim above 256; an
//            ancestry_index or an ancestor past the last.
//
// A warp attends to a tile of keys at a time, as many as it can have under way: eight packs of keys and of values a lane.
// It keeps the largest score, the sum of weights and the weighted value (online softmax). Tiles are dealt out to up to
// SPLITS splits, and these folded in order. Who takes a split does not matter: one warp may take them one after the
// other, or each warp of a block its share, so that few rows are spread over more warps. Each key and value is read
// once, and memory is the limit where rows are many.

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
    float* parts;  // in shared memory, of each split: head_dim weighted values, the largest score, the sum of weights
    long long kv_stride;
    unsigned beam_positions;
    unsigned length;   // 0: there is no such pair
    unsigned settled;  // positions before it were written long ago
    int head_dim;
    float scale;
    bool early;  // the wait is still to come

    // How many elements after `keys` and `values` those of the row's position p are.
    __device__ __forceinline__ long long place(unsigned p) const {
        return static_cast<long long>(ancestors == nullptr ? p : ancestors[p] * beam_positions + p) * kv_stride;
    }
};

// Elements from `dim` on, of a head that begins at `from`; `pack` keeps what it holds where there are none.
template <bool WHOLE, typename T>
__device__ __forceinline__ void load_dims(uint4& pack, const T* from, int dim, int head_dim, bool there) {
    const bool some = there && dim < head_dim;
    if constexpr (WHOLE) {
        load_over(pack, from + dim, some);
    } else if (some) {
        pack = gather_fresh(from + dim, head_dim - dim);
    }
}

// The query's elements from `dim` on; its address need not be that of a pack.
template <typename T>
__device__ __forceinline__ uint4 load_query_dims(const Pair<T>& pair, int dim) {
    uint4 pack = make_uint4(0, 0, 0, 0);
    if (pair.head_dim % PACK<T> == 0 && aligned16(pair.query)) {
        load_dims<true>(pack, pair.query, dim, pair.head_dim, pair.length > 0);
    } else {
        load_dims<false>(pack, pair.query, dim, pair.head_dim, pair.length > 0);
    }
    return pack;
}

// A warp's keys and values, and what it keeps of those before (online softmax). LANES lanes hold a key, CHUNKS packs each.
// WHOLE: keys and values are loaded 16 bytes at a time.
template <typename T, int LANES, int CHUNKS, bool WHOLE_PACKS>
struct KeyTile {
    static constexpr bool WHOLE = WHOLE_PACKS;
    static constexpr int VEC = PACK<T>, COUNT = CHUNKS * VEC;
    static constexpr int LOADS = 8 / CHUNKS;          // keys of a lane
    static constexpr unsigned GROUPS = WARP / LANES;  // keys that the warp loads at once
    static constexpr unsigned KEYS = LOADS * GROUPS;

    uint4 key[LOADS][CHUNKS] = {}, value[LOADS][CHUNKS] = {};
    float query[COUNT];
    float most, total, sum[COUNT];

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
            const long long at = there ? pair.place(p) : 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                load_dims<WHOLE>(key[i][c], pair.keys + at, dim(c), pair.head_dim, there);
                load_dims<WHOLE>(value[i][c], pair.values + at, dim(c), pair.head_dim, there);
            }
        }
    }

    __device__ __forceinline__ void load_query(const Pair<T>& pair) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float values[VEC];
            unpack(load_query_dims(pair, dim(c)), values, T{});
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                query[c * VEC + e] = values[e] * pair.scale;
            }
        }
    }

    __device__ __forceinline__ void begin() {
        most = LOWEST;
        total = 0.0f;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            sum[e] = 0.0f;
        }
    }

    __device__ __forceinline__ void attend(const Pair<T>& pair, unsigned tile) {
        float score[LOADS], largest = most;
#pragma unroll(WHOLE ? LOADS : 1)
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
            score[i] = position(tile, i) < pair.length ? score[i] : -infinity();
            largest = fmaxf(largest, score[i]);
        }
        largest = across<Max>(largest);
        const float keep = expf(most - largest);
        most = largest;
        total *= keep;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            sum[e] *= keep;
        }
#pragma unroll(WHOLE ? LOADS : 1)
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
    }

    __device__ __forceinline__ void store(const Pair<T>& pair, float* to) const {
        const float all = across<Sum>(total);
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const int place = dim(e / VEC) + e % VEC;
            const float value = across<Sum>(sum[e]);
            if (threadIdx.x < LANES && place < pair.head_dim) {
                to[place] = value;
            }
        }
        if (threadIdx.x == 0) {
            to[pair.head_dim] = most;
            to[pair.head_dim + 1] = all;
        }
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
        const float* part = pair.parts;
        float most = part[pair.head_dim], total = part[pair.head_dim + 1], sum = part[dim];
        for (unsigned split = 1; split < splits; ++split) {
            part += pitch;
            const float largest = fmaxf(most, part[pair.head_dim]);
            const float keep = expf(most - largest), take = expf(part[pair.head_dim] - largest);
            most = largest;
            total = fmaf(part[pair.head_dim + 1], take, total * keep);
            sum = fmaf(part[dim], take, sum * keep);
        }
        pair.out[dim] = from_float<T>(sum / total);
    }
}

// The tiles that a warp takes: those of one of its splits after another.
struct Turn {
    unsigned tiles, splits, split, tile;

    __device__ __forceinline__ explicit Turn(unsigned count)
        : tiles(count), splits(min(count, SPLITS)), split(threadIdx.y), tile(threadIdx.y) {}
    __device__ __forceinline__ bool there() const {
        return split < splits;
    }
    __device__ __forceinline__ bool is_first() const {
        return tile < splits;
    }
    __device__ __forceinline__ bool is_last() const {
        return tile + splits >= tiles;
    }
    __device__ __forceinline__ void advance() {
        split = is_last() ? split + blockDim.y : split;
        tile = is_last() ? split : tile + splits;
    }
};

// What a warp does.
template <typename Tile, typename T>
__device__ __forceinline__ void attend(const Pair<T>& pair) {
    Turn turn((pair.length + Tile::KEYS - 1) / Tile::KEYS);
    Tile tile;
    unsigned from = 0;
    if (pair.early) {
        if constexpr (Tile::WHOLE) {
            from = pair.settled;
            tile.load(pair, turn.tile, 0, turn.there() ? from : 0);
        }
        wait_for_previous();
    }
    tile.load_query(pair);
#pragma unroll 1
    for (; turn.there(); turn.advance()) {
        const unsigned to = min(pair.length, (turn.tile + 1) * Tile::KEYS);
        if (from < to) {  // else all of it is there
            tile.load(pair, turn.tile, from, to);
        }
        from = 0;
        if (turn.is_first()) {
            tile.begin();
        }
        tile.attend(pair, turn.tile);
        if (turn.is_last()) {
            tile.store(pair, pair.parts + turn.split * (pair.head_dim + 2));
        }
    }
    if (blockDim.y == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
    if (pair.length > 0) {
        fold_splits(pair, turn.splits);
    }
}

template <bool WHOLE, typename T>
__device__ __forceinline__ void attend_by_width(const Pair<T>& pair) {
    constexpr int VEC = PACK<T>;
    if (pair.head_dim <= 64) {
        attend<KeyTile<T, 64 / VEC, 1, WHOLE>>(pair);
    } else if (pair.head_dim <= 128) {
        attend<KeyTile<T, 128 / VEC, 1, WHOLE>>(pair);
    } else {
        attend<KeyTile<T, 32, 8 / VEC, WHOLE>>(pair);  // float: two packs a lane
    }
}

// Element by element, slowly: apart, so that the usual way has all registers to itself.
template <typename T>
__device__ __noinline__ void attend_scattered(const Pair<T>& pair) {
    attend_by_width<false>(pair);
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
        attend_by_width<true>(pair);
    } else {
        attend_scattered(pair);
    }
}

// Four blocks on a multiprocessor: told nothing, the compiler saves registers for more of them, and waits for one load
// before it issues the next.
#define ENTRY(T, suffix)                                                                                               \
    extern "C" __global__ void __launch_bounds__(128, 4) decode_attention_##suffix(                                    \
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
