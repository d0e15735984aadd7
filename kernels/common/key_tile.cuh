// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What a warp computes of attention: a tile of keys at a time, wherever these lie, and always in the same order.

#ifndef METRALE_KEY_TILE_CUH
#define METRALE_KEY_TILE_CUH

#include "common/attention.cuh"

constexpr unsigned SPLITS = 8;  // of a row's keys, at most; the order of sums depends on it

// Splits of a pair, folded one after the other: the largest score, the sum of weights, and DIMS weighted values.
template <int DIMS>
struct Folded {
    float most, total, sum[DIMS];

    __device__ __forceinline__ void add(const Folded& split) {
        const float largest = fmaxf(most, split.most);
        const float keep = expf(most - largest), take = expf(split.most - largest);
        most = largest;
        total = fmaf(split.total, take, total * keep);
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            sum[i] = fmaf(split.sum[i], take, sum[i] * keep);
        }
    }

    template <typename T>
    __device__ __forceinline__ T value(int i) const {
        return from_float<T>(sum[i] / total);
    }
};

// exp(x), where x is at most 0: for 16-bit keys in one instruction, which is as exact as they are.
template <typename T>
__device__ __forceinline__ float weight_of(float x, T) {
    return exp_of(x);
}
__device__ __forceinline__ float weight_of(float x, float) {
    return expf(x);
}

// The scores of SOME keys of each group of LANES lanes, before they are scaled, in all of its lanes. A key has CHUNKS packs
// in a lane, as the query has.
template <int LANES, int CHUNKS, int SOME, int ALL>
__device__ __forceinline__ void multiply(const uint4 (&query)[CHUNKS], const uint4 (&keys)[ALL], float (&scores)[SOME],
                                         float) {
    constexpr int VEC = PACK<float>;
#pragma unroll
    for (int i = 0; i < SOME; ++i) {
        scores[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float q[VEC], k[VEC];
            unpack(query[c], q, 0.0f);
            unpack(keys[i * CHUNKS + c], k, 0.0f);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                scores[i] = fmaf(q[e], k[e], scores[i]);
            }
        }
    }
    warp_reduce_all<Sum>(scores, LANES);
}

// The same of 16-bit keys, by the tensor cores, which take packs as they are: what the lanes 4 i to 4 i + 3 have of a key
// is a row of one operand, and what they have of the query a column of the other. So a key is PARTS rows, and of the
// product the elements count whose row and column are of the same part. A second key is in rows 8 and up.
template <int LANES, int CHUNKS, int SOME, int ALL, typename T>
__device__ __forceinline__ void multiply(const uint4 (&query)[CHUNKS], const uint4 (&keys)[ALL], float (&scores)[SOME],
                                         T) {
    static_assert(CHUNKS == 1, "a pack of a key in a lane");
    constexpr int PARTS = LANES / 4;
    const int row = threadIdx.x / 4 % PARTS, column = threadIdx.x % 4 * 2 % PARTS;  // of a part; the lane has two columns
    const bool odd = row % 2 != 0, own = row - row % 2 == column;
#pragma unroll
    for (int i = 0; i < SOME; i += 2) {
        const bool two = i + 1 < SOME;
        const uint4 first = keys[i], second = two ? keys[i + two] : make_uint4(0, 0, 0, 0);
        float sums[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            multiply_add(sums, word(first, 2 * half), word(second, 2 * half), word(first, 2 * half + 1),
                         word(second, 2 * half + 1), word(query[0], 2 * half), word(query[0], 2 * half + 1), T{});
        }
        scores[i] = own ? (odd ? sums[1] : sums[0]) : 0.0f;
        if (two) {
            scores[i + two] = own ? (odd ? sums[3] : sums[2]) : 0.0f;
        }
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        if (step >= 4 || step < PARTS / 2) {  // lanes that have other rows, or other columns
#pragma unroll
            for (int i = 0; i < SOME; ++i) {
                scores[i] += __shfl_xor_sync(ALL_LANES, scores[i], step);
            }
        }
    }
}

// What a warp keeps of the keys that it has attended to (online softmax), and how it divides them. LANES lanes hold a
// key, CHUNKS packs each. WHOLE: keys and values are loaded 16 bytes at a time.
template <typename T, int LANES, int CHUNKS, bool WHOLE_PACKS>
struct KeyTile {
    static constexpr bool WHOLE = WHOLE_PACKS;
    static constexpr int ALL = 8;                          // packs of keys that a lane has, and as many of values
    static constexpr int VEC = PACK<T>, PACKS = CHUNKS, COUNT = CHUNKS * VEC;
    static constexpr int LOADS = ALL / CHUNKS;             // keys of a lane
    static constexpr int FEW = WHOLE ? LOADS / 4 : LOADS;  // of them, attended to alone where there are no more
    static constexpr unsigned GROUPS = WARP / LANES;       // keys that the warp loads at once
    static constexpr unsigned KEYS = LOADS * GROUPS;
    static constexpr int OWN = COUNT / GROUPS;  // dimensions of a split's sum that a lane gets

    uint4 query[CHUNKS];
    float scale;
    float most, total, sum[COUNT];

    __device__ __forceinline__ static int dim(int chunk) {
        return (chunk * LANES + static_cast<int>(threadIdx.x) % LANES) * VEC;
    }
    __device__ __forceinline__ static unsigned position(unsigned tile, int load) {
        return tile * KEYS + load * GROUPS + threadIdx.x / LANES;
    }

    // Tiles of a row.
    __device__ __forceinline__ static unsigned count_of(unsigned length) {
        return (length + KEYS - 1) / KEYS;
    }

    __device__ __forceinline__ void begin() {
        most = LOWEST;
        total = 0.0f;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            sum[e] = 0.0f;
        }
    }

    // What the packs of keys past the row's length hold is of another key of the row, or 0, and gets no weight.
    __device__ __forceinline__ void attend(unsigned length, unsigned tile, const uint4 (&keys)[ALL],
                                           const uint4 (&values)[ALL]) {
        const int left = static_cast<int>(length - position(tile, 0));  // of the row, from the lane's first key on
        if (FEW < LOADS && tile * KEYS + FEW * GROUPS >= length) {
            attend_some<FEW>(left, keys, values);
        } else {
            attend_some<LOADS>(left, keys, values);
        }
    }

    template <int SOME>
    __device__ __forceinline__ void attend_some(int left, const uint4 (&keys)[ALL], const uint4 (&values)[ALL]) {
        float weights[SOME], largest = most;
        multiply<LANES, CHUNKS>(query, keys, weights, T{});
#pragma unroll
        for (int i = 0; i < SOME; ++i) {
            weights[i] = i * static_cast<int>(GROUPS) < left ? weights[i] * scale : -infinity();
            largest = fmaxf(largest, weights[i]);
        }
        largest = across<Max>(largest);
        const float keep = weight_of(most - largest, T{});
        most = largest;
        total *= keep;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            sum[e] *= keep;
        }
#pragma unroll
        for (int i = 0; i < SOME; ++i) {
            const float weight = weight_of(weights[i] - most, T{});
            total += weight;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float v[VEC];
                unpack(values[i * CHUNKS + c], v, T{});
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    sum[c * VEC + e] = fmaf(weight, v[e], sum[c * VEC + e]);
                }
            }
        }
    }

    // The sums over all of the warp's keys: of the dimensions `own_dim`, a lane each.
    __device__ __forceinline__ Folded<OWN> result() const {
        float left[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            left[e] = sum[e];
        }
#pragma unroll
        for (int step = LANES, half = COUNT / 2; step < WARP; step *= 2, half /= 2) {
            const bool upper = threadIdx.x & step;
#pragma unroll
            for (int e = 0; e < half; ++e) {  // a lane hands on the half that is not its own
                const float kept = upper ? left[e + half] : left[e], given = upper ? left[e] : left[e + half];
                left[e] = kept + __shfl_xor_sync(ALL_LANES, given, step);
            }
        }
        Folded<OWN> all;
        all.most = most;
        all.total = across<Sum>(total);
#pragma unroll
        for (int e = 0; e < OWN; ++e) {
            all.sum[e] = left[e];
        }
        return all;
    }

    __device__ __forceinline__ static int own_dim(int i) {
        int first = 0;
#pragma unroll
        for (int step = LANES, half = COUNT / 2; step < WARP; step *= 2, half /= 2) {
            first += threadIdx.x & step ? half : 0;
        }
        return dim(i / VEC) + first + i % VEC;
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

// The tiles that a warp takes: those of one of its splits after another.
struct Turn {
    unsigned tiles, splits, split, tile, warps;

    __device__ __forceinline__ Turn(unsigned count, unsigned warp, unsigned warp_count)
        : tiles(count), splits(min(count, SPLITS)), split(warp), tile(warp), warps(warp_count) {}
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
        split = is_last() ? split + warps : split;
        tile = is_last() ? split : tile + splits;
    }
};

#endif
