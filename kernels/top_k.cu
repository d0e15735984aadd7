// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The k largest logits of each row in descending order, their indices, and log(sum(exp(row))).
//
// Layout     logits: T, [rows, vocab], rows `stride` elements apart; values: float, [rows, k]; ids: int, [rows, k];
//            lse: float, [rows]; flags: int, [rows]. The alignment of one element is enough; rows at multiples of 16 bytes
//            are read in packs.
// Launch     grid x = rows; block = 1,024 threads; static shared memory.
// Aliasing   none.
// Numbers    The lowest index wins a tie, -0 equals 0, and NaN counts as minus infinity. Sums in float, shifted by the
//            largest value, in an order that depends on vocab alone. flags[r] is 1 when the row has a NaN or an infinity.
//            What lies between rows is not read.
// Undefined  k below 1, above 64 or above vocab.
//
// 1. One pass over the row: each thread learns the best of its own elements, and its part of the sum.
// 2. The k-th best of what groups of LANES threads hold is a bound that at least k elements reach.
// 3. Threads whose best reaches the bound look through their elements again, a warp for each, and collect those that do.
//    Few more than k elements are found, unless the large ones happen to be the same few threads'.
// 4. Each candidate's place is the number of candidates before it. When there were too many to keep, the row is read
//    again for each of the k results.

#include "common/logits.cuh"

constexpr int LANES = 8;          // threads that share a holder
constexpr int HOLDERS = 128;      // of 1,024 threads
constexpr int CANDIDATES = 1024;  // most that are kept

struct Shared {
    float maxima[WARP];
    float sums[WARP];
    Key keys[2][WARP];
    Key holders[HOLDERS];
    Key candidates[CANDIDATES];
    Key bound;
    int found;
};

// Number of the keys that come before `key`.
__device__ __forceinline__ int place_of(Key key, const Key* keys, int count) {
    int place = 0;
    for (int i = 0; i < count; ++i) {
        place += keys[i] > key;
    }
    return place;
}

__device__ __forceinline__ void collect(Shared& shared, float value, int index) {
    const Key key = key_of(value, index);
    if (key >= shared.bound) {
        const int at = atomicAdd(&shared.found, 1);  // the order of the candidates does not matter
        if (at < CANDIDATES) {
            shared.candidates[at] = key;
        }
    }
}

// All lanes of a warp look through the elements of the thread `owner`.
template <typename T>
__device__ __forceinline__ void collect_of(Shared& shared, const Row<T>& row, int owner) {
    const int lane = threadIdx.x % WARP;
    const int threads = blockDim.x;
    for (int pack = owner + lane * threads; pack < row.packs; pack += WARP * threads) {
        float values[PACK<T>];
        unpack(row.bits(pack), values, T{});
#pragma unroll
        for (int i = 0; i < PACK<T>; ++i) {
            collect(shared, values[i], pack * PACK<T> + i);
        }
    }
    const int loose = row.loose(owner);
    if (lane == 0 && loose < row.vocab) {
        collect(shared, to_float(row.from[loose]), loose);
    }
}

// This thread's best element that comes after `last`.
template <typename T>
__device__ __forceinline__ Key best_after(const Row<T>& row, Key last) {
    Key best = NO_KEY;
    for (int index = threadIdx.x; index < row.vocab; index += blockDim.x) {
        const Key key = key_of(to_float(row.from[index]), index);
        best = key < last ? Max::of(best, key) : best;
    }
    return best;
}

__device__ __forceinline__ void store(float* values, int* ids, int place, Key key) {
    values[place] = value_of(key);
    ids[place] = index_of(key);
}

template <typename T>
__device__ __forceinline__ void top_k(const T* logits, float* values, int* ids, float* lse, int* flags, int rows,
                                      int vocab, int k, long long stride) {
    __shared__ Shared shared;
    const long long r = blockIdx.x;
    if (r >= rows) {
        return;
    }
    const int thread = threadIdx.x;
    const Row<T> row(logits + r * stride, vocab);
    values += r * k;
    ids += r * k;

    const Seen seen = see<T, true>(row);
    const Key best = best_of(row, seen);
    const Key holder = warp_reduce<Max>(best, LANES);
    if (thread % LANES == 0) {
        shared.holders[thread / LANES] = holder;
    }
    if (thread == 0) {
        shared.bound = NO_KEY + 1;
        shared.found = 0;
    }
    const int tainted = __syncthreads_or(seen.taint != 0);
    const float largest = block_reduce<Max>(seen.best, shared.maxima);
    const float sum = block_reduce<Sum>(seen.sum * exp_of(seen.best - largest), shared.sums);
    if (thread == 0) {
        const bool finite = largest - largest == 0.0f;
        lse[r] = finite ? largest + logf(sum) : largest;
        flags[r] = tainted;
    }

    const int holders = blockDim.x / LANES;
    if (thread < holders && shared.holders[thread] != NO_KEY &&
        place_of(shared.holders[thread], shared.holders, holders) == k - 1) {
        shared.bound = shared.holders[thread];
    }
    __syncthreads();
    for (unsigned owners = __ballot_sync(ALL_LANES, best >= shared.bound); owners != 0; owners &= owners - 1) {
        collect_of(shared, row, thread / WARP * WARP + __ffs(static_cast<int>(owners)) - 1);
    }
    __syncthreads();

    const int found = shared.found;
    if (found <= CANDIDATES) {
        for (int c = thread; c < found; c += blockDim.x) {
            const int place = place_of(shared.candidates[c], shared.candidates, found);
            if (place < k) {
                store(values, ids, place, shared.candidates[c]);
            }
        }
        return;
    }
    Key last = ~NO_KEY;
    for (int place = 0; place < k; ++place) {
        last = block_reduce<Max>(best_after(row, last), shared.keys[place % 2]);
        if (thread == 0) {
            store(values, ids, place, last);
        }
    }
}

#define ENTRY(T, suffix)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) top_k_##suffix(                                \
        const T* logits, float* values, int* ids, float* lse, int* flags, int rows, int vocab, int k, \
        long long stride) {                                                                           \
        top_k<T>(logits, values, ids, lse, flags, rows, vocab, k, stride);                            \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
