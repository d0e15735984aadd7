// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The k best elements of a row in order, by a block that has looked at the row once.
//
// 1. The k-th best of what groups of LANES threads hold is a bound that at least k elements reach.
// 2. Threads whose best reaches the bound look through their elements again, a warp for each, and collect those that do.
//    Few more than k elements are found, unless the large ones happen to be the same few threads'.
// 3. Each candidate's place is the number of candidates before it. When there were too many to keep, the row is read
//    again for each of the k results.

#ifndef METRALE_SELECTION_CUH
#define METRALE_SELECTION_CUH

#include "common/logits.cuh"

// Of a block of 1,024 threads. LANES threads share a holder; more holders than k leave fewer candidates. CANDIDATES is
// the most that are kept.
template <int LANES, int CANDIDATES>
struct Selection {
    static constexpr int HOLDERS = 1024 / LANES;

    Key keys[2][WARP];
    Key holders[HOLDERS];
    Key candidates[CANDIDATES];
    Key bound;
    int found;

    __device__ __forceinline__ void collect(Key key) {
        if (key >= bound) {
            const int at = atomicAdd(&found, 1);  // the order of the candidates does not matter
            if (at < CANDIDATES) {
                candidates[at] = key;
            }
        }
    }
};

// Number of the keys that come before `key`.
__device__ __forceinline__ int place_of(Key key, const Key* keys, int count) {
    int place = 0;
    for (int i = 0; i < count; ++i) {
        place += keys[i] > key;
    }
    return place;
}

// All lanes of a warp look through the elements of the thread `owner`.
template <typename Shared, typename T, typename KeyOf>
__device__ __forceinline__ void collect_of(Shared& shared, const Row<T>& row, int owner, KeyOf key) {
    const int lane = threadIdx.x % WARP;
    const int threads = blockDim.x;
    for (int pack = owner + lane * threads; pack < row.packs; pack += WARP * threads) {
        float values[PACK<T>];
        unpack(row.bits(pack), values, T{});
#pragma unroll
        for (int i = 0; i < PACK<T>; ++i) {
            shared.collect(key(values[i], pack * PACK<T> + i));
        }
    }
    const int loose = row.loose(owner);
    if (lane == 0 && loose < row.vocab) {
        shared.collect(key(to_float(row.from[loose]), loose));
    }
}

// This thread's best element that comes after `last`.
template <typename T, typename KeyOf>
__device__ __forceinline__ Key best_after(const Row<T>& row, Key last, KeyOf key_at) {
    Key best = NO_KEY;
    for (int index = threadIdx.x; index < row.vocab; index += blockDim.x) {
        const Key key = key_at(to_float(row.from[index]), index);
        best = key < last ? Max::of(best, key) : best;
    }
    return best;
}

// store(place, key) for each of the k best elements of the row, 1 <= k <= vocab, by one thread. `best` is the best of
// this thread's own elements, key(value, index) the key of an element. All threads must call, and with the same `k`; a
// barrier must be between this and what used the memory before.
template <int LANES, int CANDIDATES, typename T, typename KeyOf, typename Store>
__device__ __forceinline__ void select(Selection<LANES, CANDIDATES>& shared, const Row<T>& row, Key best, int k,
                                       KeyOf key, Store store) {
    const int thread = threadIdx.x;
    const Key holder = warp_reduce<Max>(best, LANES);
    if (thread % LANES == 0) {
        shared.holders[thread / LANES] = holder;
    }
    if (thread == 0) {
        shared.bound = NO_KEY + 1;
        shared.found = 0;
    }
    __syncthreads();

    const int holders = blockDim.x / LANES;
    if (thread < holders && shared.holders[thread] != NO_KEY &&
        place_of(shared.holders[thread], shared.holders, holders) == k - 1) {
        shared.bound = shared.holders[thread];
    }
    __syncthreads();
    for (unsigned owners = __ballot_sync(ALL_LANES, best >= shared.bound); owners != 0; owners &= owners - 1) {
        collect_of(shared, row, thread / WARP * WARP + __ffs(static_cast<int>(owners)) - 1, key);
    }
    __syncthreads();

    const int found = shared.found;
    if (found <= CANDIDATES) {
        for (int c = thread; c < found; c += blockDim.x) {
            const int place = place_of(shared.candidates[c], shared.candidates, found);
            if (place < k) {
                store(place, shared.candidates[c]);
            }
        }
        return;
    }
    Key last = ~NO_KEY;
    for (int place = 0; place < k; ++place) {
        last = block_reduce<Max>(best_after(row, last, key), shared.keys[place % 2]);
        if (thread == 0) {
            store(place, last);
        }
    }
}

#endif
