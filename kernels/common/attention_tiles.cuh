// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Tiles of keys and values that a warp attends to with one query, and what it keeps of those before (online softmax).
//
// A tile has KEYS positions. `load`, or `fetch`, brings in some of them, `load_query` the query; `begin` forgets what was
// kept, `attend` adds a tile to it, and `store` leaves it in memory: head_dim weighted values, the largest score, and the
// sum of weights. WHOLE: keys and values are loaded 16 bytes at a time.

#ifndef METRALE_ATTENTION_TILES_CUH
#define METRALE_ATTENTION_TILES_CUH

#include "common/async_copy.cuh"
#include "common/attention.cuh"
#include "common/dependent.cuh"

// One head of one row: what is read, and where the result goes.
template <typename T>
struct Pair {
    const T* query;
    const T* keys;
    const T* values;
    const int* ancestors;  // the beam of each position; NULL: the row has no ancestry
    T* out;
    uint4* ring;   // in shared memory, the warp's tiles
    float* parts;  // in shared memory, what is stored of each split
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

// What is folded keeps of its sums, and takes of the next one's.
struct Shares {
    float keep, take;

    __device__ __forceinline__ float of(float sum, float next) const {
        return fmaf(next, take, sum * keep);
    }
};

// The largest score and the sum of weights of some splits.
struct Folded {
    float most, total;

    __device__ __forceinline__ Shares begin(float first_most, float first_total) {
        most = first_most;
        total = first_total;
        return {0.0f, 1.0f};
    }
    __device__ __forceinline__ Shares add(float next_most, float next_total) {
        const float largest = fmaxf(most, next_most);
        const Shares shares = {exp_of(most - largest), exp_of(next_most - largest)};
        most = largest;
        total = shares.of(total, next_total);
        return shares;
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

// Products in float, element by element: LANES lanes hold a key, CHUNKS packs each.
template <typename T, int LANES, int CHUNKS, bool WHOLE_PACKS>
struct LaneTile {
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

// Two elements of a register each, those in the low halves or those in the high ones, as one register.
__device__ __forceinline__ unsigned low_halves(unsigned first, unsigned second) {
    return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ unsigned high_halves(unsigned first, unsigned second) {
    return __byte_perm(first, second, 0x7632);
}

// Products on the tensor cores, of 16-bit elements; head_dim is at most 64 * BLOCKS.
//
// With g = lane / 4, t = lane % 4: scores are query times keys, the query in all 16 rows, so that each lane gets those of
// keys 2t and 2t + 1 of each eight. Values are multiplied from the left, 16 dimensions by 16 keys, with the weights of
// keys 2t, 2t + 1, 2t + 8, 2t + 9, which a lane has already, in all 8 columns. A weight is given as the sum of two
// elements, one in the even columns and the rest in the odd ones, so that almost nothing of it is lost. The order of
// dimensions is free: a lane has eight neighbouring ones, a load of 16 bytes.
//
// A tile waits in shared memory, where each lane has what it multiplies itself, so that no lane waits for another.
template <typename T, int BLOCKS, bool WHOLE_PACKS>
struct TensorTile {
    static constexpr bool WHOLE = WHOLE_PACKS;
    static constexpr int CHUNKS = 2 * BLOCKS;  // packs of a lane in a key: 8 dimensions of each 32
    static constexpr int EIGHTS = 4 / BLOCKS;  // of keys
    static constexpr int SIXTEENS = EIGHTS / 2;
    static constexpr unsigned KEYS = 8 * EIGHTS;
    static constexpr int PACKS = 8;  // of keys, and as many of values

    uint4 query[CHUNKS];
    float most, total, sum[BLOCKS][4][4];

    __device__ __forceinline__ static unsigned g() {
        return threadIdx.x / 4;
    }
    __device__ __forceinline__ static unsigned t() {
        return threadIdx.x % 4;
    }

    // Where the lane's packs of keys are in a tile, and after them those of values: of key g of eight i the dimensions
    // 32c + 8t and on; of keys 2t, 2t + 1, 2t + 8, 2t + 9 of sixteen i / 4 the dimensions 64b + 8g and on.
    __device__ __forceinline__ static int key_pack(int i, int c) {
        return (i * CHUNKS + c) * WARP;
    }
    __device__ __forceinline__ static int value_pack(int i, int b) {
        return (PACKS + i * BLOCKS + b) * WARP;
    }

    // Whether a tile has keys past its first sixteen, which is as many as are attended to at least.
    __device__ __forceinline__ static bool is_full(const Pair<T>& pair, unsigned tile) {
        return EIGHTS == 2 || tile * KEYS + 16 < pair.length;
    }

    // Begins to bring in a tile, positions from `to` on as 0.
    __device__ __forceinline__ static void fetch(const Pair<T>& pair, uint4* packs, unsigned tile, unsigned to) {
        if constexpr (WHOLE) {
            const unsigned shared = shared_address(packs), first_key = tile * KEYS + g();
            if (pair.ancestors == nullptr) {
                const long long step = 8 * pair.kv_stride;
                const T* key = pair.keys + pair.place(first_key) + 8 * t();
                const T* value[2];  // of keys 2t and 2t + 1 of eight
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    value[e] = pair.values + pair.place(tile * KEYS + 2 * t() + e) + 8 * g();
                }
#pragma unroll
                for (int i = 0; i < EIGHTS; ++i) {
                    if (i == 2 && !is_full(pair, tile)) {
                        break;
                    }
                    fetch_key(pair, shared, i, key + i * step, first_key + 8 * i < to);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const unsigned p = tile * KEYS + 8 * i + 2 * t() + e;
                        fetch_value(pair, shared, 2 * i + e, value[e] + i * step, p < to);
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < EIGHTS; ++i) {
                    const unsigned eight = tile * KEYS + 8 * i, k = eight + g();
                    fetch_key(pair, shared, i, pair.keys + (k < to ? pair.place(k) : 0) + 8 * t(), k < to);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const unsigned v = eight + 2 * t() + e;
                        fetch_value(pair, shared, 2 * i + e, pair.values + (v < to ? pair.place(v) : 0) + 8 * g(),
                                    v < to);
                    }
                }
            }
        } else {
            fetch_scattered(pair, packs, tile, to);
        }
    }

    // Begins to bring in those positions of a tile that are in [from, to), few as a rule, and leaves the others.
    __device__ __forceinline__ static void fetch_few(const Pair<T>& pair, uint4* packs, unsigned tile, unsigned from,
                                                     unsigned to) {
        const unsigned shared = shared_address(packs), begin = tile * KEYS, end = min(to, begin + KEYS);
#pragma unroll 1
        for (unsigned p = max(from, begin); p < end; ++p) {
            const unsigned eight = (p - begin) / 8, within = (p - begin) % 8;
            const long long place = pair.place(p);
            if (within == g()) {
                fetch_key(pair, shared, eight, pair.keys + place + 8 * t(), true);
            }
            if (within / 2 == t()) {
                fetch_value(pair, shared, 2 * eight + within % 2, pair.values + place + 8 * g(), true);
            }
        }
    }

    __device__ __forceinline__ static void fetch_key(const Pair<T>& pair, unsigned shared, int i, const T* from,
                                                     bool there) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const unsigned to = shared + key_pack(i, c) * static_cast<unsigned>(sizeof(uint4));
            copy_async(to, from + 32 * c, there && 32 * c + 8 * static_cast<int>(t()) < pair.head_dim);
        }
    }

    __device__ __forceinline__ static void fetch_value(const Pair<T>& pair, unsigned shared, int i, const T* from,
                                                       bool there) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const unsigned to = shared + value_pack(i, b) * static_cast<unsigned>(sizeof(uint4));
            copy_async(to, from + 64 * b, there && 64 * b + 8 * static_cast<int>(g()) < pair.head_dim);
        }
    }

    // The same element by element, at once.
    __device__ __forceinline__ static void fetch_scattered(const Pair<T>& pair, uint4* packs, unsigned tile,
                                                           unsigned to) {
#pragma unroll 1
        for (int i = 0; i < EIGHTS; ++i) {
            const unsigned k = tile * KEYS + 8 * i + g();
            const T* at = pair.keys + (k < to ? pair.place(k) : 0);
            for (int c = 0; c < CHUNKS; ++c) {
                const int dim = 32 * c + 8 * t();
                packs[key_pack(i, c)] = gather_fresh(at + dim, k < to ? pair.head_dim - dim : 0);
            }
            for (int e = 0; e < 2; ++e) {
                const unsigned v = tile * KEYS + 8 * i + 2 * t() + e;
                at = pair.values + (v < to ? pair.place(v) : 0);
                for (int b = 0; b < BLOCKS; ++b) {
                    const int dim = 64 * b + 8 * g();
                    packs[value_pack(2 * i + e, b)] = gather_fresh(at + dim, v < to ? pair.head_dim - dim : 0);
                }
            }
        }
    }

    __device__ __forceinline__ void load_query(const Pair<T>& pair) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            query[c] = load_query_dims(pair, 32 * c + 8 * t());
        }
    }

    __device__ __forceinline__ void begin() {
        most = LOWEST;
        total = 0.0f;
#pragma unroll
        for (int i = 0; i < 16 * BLOCKS; ++i) {
            sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
        }
    }

    // Adds a tile whose packs are there.
    __device__ __forceinline__ void attend(const Pair<T>& pair, const uint4* packs, unsigned tile) {
        if (is_full(pair, tile)) {
            attend_eights<EIGHTS>(pair, packs, tile);
        } else {
            attend_eights<2>(pair, packs, tile);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void attend_eights(const Pair<T>& pair, const uint4* packs, unsigned tile) {
        const int left = static_cast<int>(pair.length - tile * KEYS) - 2 * static_cast<int>(t());
        float score[COUNT][4] = {}, weight[COUNT][2], largest = most;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {  // of all keys together: a sum waits for its last product
            const uint4 q = query[c];
            uint4 k[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                k[i] = packs[key_pack(i, c)];
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                multiply_add(score[i], q.x, q.x, q.y, q.y, k[i].x, k[i].y, T{});
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                multiply_add(score[i], q.z, q.z, q.w, q.w, k[i].z, k[i].w, T{});
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                weight[i][e] = 8 * i + e < left ? score[i][e] * pair.scale : -infinity();
                largest = fmaxf(largest, weight[i][e]);
            }
        }
        largest = warp_reduce<Max>(largest, 4);
        const float keep = exp_of(most - largest);
        most = largest;
        total *= keep;
#pragma unroll
        for (int i = 0; i < 16 * BLOCKS; ++i) {
            sum[i / 16][i / 4 % 4][i % 4] *= keep;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                weight[i][e] = exp_of(weight[i][e] - most);
                total += weight[i][e];
            }
        }
#pragma unroll
        for (int s = 0; s < COUNT / 2; ++s) {
            const unsigned near = share_of(weight[2 * s]), far = share_of(weight[2 * s + 1]);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                uint4 value[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    value[i] = packs[value_pack(4 * s + i, b)];
                }
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const unsigned v0 = word(value[0], m), v1 = word(value[1], m);
                    const unsigned v2 = word(value[2], m), v3 = word(value[3], m);
                    multiply_add(sum[b][m], low_halves(v0, v1), high_halves(v0, v1), low_halves(v2, v3),
                                 high_halves(v2, v3), near, far, T{});
                }
            }
        }
    }

    // Two weights as elements, or in lanes of odd columns what these lack.
    __device__ __forceinline__ static unsigned share_of(const float (&weights)[2]) {
        const unsigned most_of = word_of<T>(weights[0], weights[1]);
        float rounded[2];
        unpack(most_of, rounded, T{});
        return g() % 2 == 0 ? most_of : word_of<T>(weights[0] - rounded[0], weights[1] - rounded[1]);
    }

    // The lane's dimensions of each 64, 8g and on.
    __device__ __forceinline__ float sum_of(int i) const {
        const float(&parts)[4] = sum[i / 8][i % 8 / 2];
        return parts[i % 2 * 2] + parts[i % 2 * 2 + 1];
    }

    __device__ __forceinline__ void store(const Pair<T>& pair, float* to) const {
        const float all = warp_reduce<Sum>(total, 4);
#pragma unroll
        for (int i = 0; i < 8 * BLOCKS; ++i) {
            const int place = i / 8 * 64 + 8 * g() + i % 8;
            const float value = sum_of(i);
            if (t() == 0 && place < pair.head_dim) {
                to[place] = value;
            }
        }
        if (threadIdx.x == 0) {
            to[pair.head_dim] = most;
            to[pair.head_dim + 1] = all;
        }
    }

    // The splits of a pair that one warp takes, folded as `fold` would those in shared memory.
    struct Whole {
        Folded folded;
        float value[8 * BLOCKS];

        __device__ __forceinline__ void add(const TensorTile& tile, bool first) {
            const float all = warp_reduce<Sum>(tile.total, 4);
            const Shares shares = first ? folded.begin(tile.most, all) : folded.add(tile.most, all);
#pragma unroll
            for (int i = 0; i < 8 * BLOCKS; ++i) {
                value[i] = first ? tile.sum_of(i) : shares.of(value[i], tile.sum_of(i));
            }
        }

        __device__ __forceinline__ void store(const Pair<T>& pair) const {
            const bool whole = pair.head_dim % PACK<T> == 0 && aligned16(pair.out);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const int dim = 64 * b + 8 * g();
                float values[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    values[e] = value[8 * b + e] / folded.total;
                }
                if (t() == 0 && dim < pair.head_dim) {
                    store_pack(pair.out + dim, pair.head_dim - dim, whole, values);
                }
            }
        }
    };
};

#endif
