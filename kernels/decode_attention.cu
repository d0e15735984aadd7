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
//            1. Shared memory where it is not the warps: SPLITS * (head_dim + 2) floats. May begin before the kernel
//            ahead has ended.
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
// once. Where rows are many, what takes the time is less memory than instructions; so scores of 16-bit keys come from the
// tensor cores, which need no sums over lanes.

#include "common/dependent.cuh"
#include "common/key_tile.cuh"

// One head of one row: what is read, and where the result goes.
template <typename T>
struct Pair {
    const T* query;
    const T* keys;
    const T* values;
    const int* ancestors;  // the beam of each position; NULL: the row has no ancestry
    T* out;
    long long kv_stride;
    unsigned beam_positions;
    unsigned length;   // 0: there is no such pair
    unsigned settled;  // positions before it may be read before the wait, if that is still to come
    int head_dim;
    float scale;
    bool early;  // the wait is still to come

    // How many elements after `keys` and `values` those of the row's position p are.
    __device__ __forceinline__ long long place(unsigned p) const {
        return static_cast<long long>(ancestors == nullptr ? p : ancestors[p] * beam_positions + p) * kv_stride;
    }

    // Whether keys and values can be read 16 bytes at a time.
    __device__ __forceinline__ bool whole() const {
        return head_dim % PACK<T> == 0 && rows_aligned16(keys, kv_stride) && rows_aligned16(values, kv_stride);
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

// The lane's part of the query, whose address need not be that of a pack.
template <typename Tile, typename T>
__device__ __forceinline__ void load_query(uint4 (&packs)[Tile::PACKS], const Pair<T>& pair) {
    const bool whole = pair.head_dim % PACK<T> == 0 && aligned16(pair.query);
#pragma unroll
    for (int c = 0; c < Tile::PACKS; ++c) {
        packs[c] = make_uint4(0, 0, 0, 0);
        if (whole) {
            load_dims<true>(packs[c], pair.query, Tile::dim(c), pair.head_dim, pair.length > 0);
        } else {
            load_dims<false>(packs[c], pair.query, Tile::dim(c), pair.head_dim, pair.length > 0);
        }
    }
}

// A tile's keys and values in registers.
template <typename Tile>
struct LoadedPacks {
    static constexpr unsigned KEYS = Tile::KEYS;

    uint4 keys[Tile::ALL] = {}, values[Tile::ALL] = {};

    // Loads those of the tile's positions that are in [from, to), and leaves the others as they are.
    template <typename T>
    __device__ __forceinline__ void load(const Pair<T>& pair, unsigned tile, unsigned from, unsigned to) {
#pragma unroll(Tile::WHOLE ? Tile::LOADS : 1)
        for (int i = 0; i < Tile::LOADS; ++i) {
            const unsigned begin = tile * KEYS + i * Tile::GROUPS;
            if (begin + Tile::GROUPS <= from || begin >= to) {
                continue;  // the whole warp goes on
            }
            const unsigned p = Tile::position(tile, i);
            const bool there = from <= p && p < to;
            const long long at = there ? pair.place(p) : 0;
#pragma unroll
            for (int c = 0; c < Tile::PACKS; ++c) {
                const int pack = i * Tile::PACKS + c;
                load_dims<Tile::WHOLE>(keys[pack], pair.keys + at, Tile::dim(c), pair.head_dim, there);
                load_dims<Tile::WHOLE>(values[pack], pair.values + at, Tile::dim(c), pair.head_dim, there);
            }
        }
    }
};

// What becomes of a pair's splits. A warp that has all of them folds them in registers. Those of several warps lie in
// shared memory: of each, head_dim weighted values, the largest score and the sum of weights. All threads fold these,
// a dimension each.
template <typename Tile, typename T>
struct Outcome {
    const Pair<T>& pair;
    float* parts;
    Folded<Tile::OWN> folded;

    __device__ __forceinline__ Outcome(const Pair<T>& of, char* memory)
        : pair(of), parts(reinterpret_cast<float*>(memory)) {}

    __device__ __forceinline__ static bool alone() {
        return blockDim.y == 1;
    }

    __device__ __forceinline__ float* part(unsigned split) const {
        return parts + split * (pair.head_dim + 2);
    }

    __device__ __forceinline__ void add(unsigned split, const Folded<Tile::OWN>& found) {
        if (!alone()) {
            store(part(split), found);
        } else if (split == 0) {
            folded = found;
        } else {
            folded.add(found);
        }
    }

    __device__ __forceinline__ void store(float* to, const Folded<Tile::OWN>& found) const {
#pragma unroll
        for (int i = 0; i < Tile::OWN; ++i) {
            if (Tile::own_dim(i) < pair.head_dim) {
                to[Tile::own_dim(i)] = found.sum[i];
            }
        }
        if (threadIdx.x == 0) {
            to[pair.head_dim] = found.most;
            to[pair.head_dim + 1] = found.total;
        }
    }

    __device__ __forceinline__ Folded<1> stored(unsigned split, int dim) const {
        const float* from = part(split);
        return {from[pair.head_dim], from[pair.head_dim + 1], {from[dim]}};
    }

    // Once all splits have been added.
    __device__ __forceinline__ void write(unsigned splits) const {
        if (alone()) {
#pragma unroll
            for (int i = 0; i < Tile::OWN; ++i) {
                if (Tile::own_dim(i) < pair.head_dim && pair.length > 0) {
                    pair.out[Tile::own_dim(i)] = folded.template value<T>(i);
                }
            }
            return;
        }
        __syncthreads();
        for (int dim = threadIdx.y * WARP + threadIdx.x; dim < pair.head_dim; dim += WARP * blockDim.y) {
            Folded<1> all = stored(0, dim);
            for (unsigned split = 1; split < splits; ++split) {
                all.add(stored(split, dim));
            }
            pair.out[dim] = all.template value<T>(0);
        }
    }
};

// Loads those of the tile's positions that are not before `from`.
template <typename Packs, typename T>
__device__ __forceinline__ void load_rest(Packs& packs, const Pair<T>& pair, const Turn& turn, unsigned from) {
    const unsigned to = turn.there() ? min(pair.length, (turn.tile + 1) * Packs::KEYS) : 0;
    if (from < to) {
        packs.load(pair, turn.tile, from, to);
    }
}

// Element by element, slowly: apart, so that the usual way has all registers to itself.
template <typename T>
__device__ __noinline__ void attend_scattered(Pair<T> pair, char* memory);

// What a warp does.
template <typename Tile, typename T>
__device__ __forceinline__ void attend(const Pair<T>& pair, char* memory) {
    if (Tile::WHOLE && !pair.whole()) {
        attend_scattered(pair, memory);
        return;
    }
    Turn turn(Tile::count_of(pair.length), threadIdx.y, blockDim.y);
    Tile tile;
    LoadedPacks<Tile> packs;
    Outcome<Tile, T> outcome(pair, memory);
    unsigned from = 0;
    if (pair.early) {
        if constexpr (Tile::WHOLE) {
            from = pair.settled;
            packs.load(pair, turn.tile, 0, turn.there() ? from : 0);
        }
        wait_for_previous();
    }
    load_query<Tile>(tile.query, pair);
    tile.scale = pair.scale;
    if (from < pair.length) {  // together with the query, before anything waits for that
        load_rest(packs, pair, turn, from);
    }
#pragma unroll 1
    while (turn.there()) {
        if (turn.is_first()) {
            tile.begin();
        }
        tile.attend(pair.length, turn.tile, packs.keys, packs.values);
        if (turn.is_last()) {
            outcome.add(turn.split, tile.result());
        }
        turn.advance();
        load_rest(packs, pair, turn, 0);
    }
    outcome.write(turn.splits);
}

template <bool WHOLE, typename T>
__device__ __forceinline__ void attend_by_width(const Pair<T>& pair, char* memory) {
    constexpr int VEC = PACK<T>;
    if (pair.head_dim <= 64) {
        attend<KeyTile<T, 64 / VEC, 1, WHOLE>>(pair, memory);
    } else if (pair.head_dim <= 128) {
        attend<KeyTile<T, 128 / VEC, 1, WHOLE>>(pair, memory);
    } else {
        attend<KeyTile<T, 32, 8 / VEC, WHOLE>>(pair, memory);  // float: two packs a lane
    }
}

template <typename T>
__device__ __noinline__ void attend_scattered(Pair<T> pair, char* memory) {
    attend_by_width<false>(pair, memory);
}

template <typename T>
__device__ __forceinline__ void decode_attention(const T* q, const unsigned long long* spans, const int* lengths,
                                                 const int* ancestry, const int* ancestry_index,
                                                 const int* beam_positions, T* out, int rows, int heads, int head_dim,
                                                 long long q_stride, long long k_offset, long long v_offset,
                                                 long long kv_stride, float scale, long long ancestry_capacity,
                                                 int fresh) {
    extern __shared__ uint4 shared[];
    char* const memory = reinterpret_cast<char*>(shared);
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
    const unsigned settled = fresh < 0 ? length : length - min(length, static_cast<unsigned>(fresh));
    const int index = ancestry == nullptr ? -1 : ancestry_index[row];
    const Pair<T> pair = {q + row * q_stride + within,
                          span + k_offset,
                          span + v_offset,
                          index < 0 ? nullptr : ancestry + index * ancestry_capacity,
                          out + row * heads * head_dim + within,
                          kv_stride,
                          index < 0 ? 0u : beam_positions[row],
                          length,
                          settled,
                          head_dim,
                          scale,
                          fresh >= 0};
    attend_by_width<true>(pair, memory);
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
