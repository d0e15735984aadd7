// SPDX-License-Identifier: MIT OR Apache-2.0
//
// One pass of a block over a row of logits: what each thread has seen of it, and how elements are ordered.
//
// Thread t of n takes packs t, t + n, t + 2n, ... of the row, and one of the elements after the last whole pack. Which
// elements are a thread's depends on nothing else, so equal rows give equal bits wherever they lie.

#ifndef METRALE_LOGITS_CUH
#define METRALE_LOGITS_CUH

#include "common/element.cuh"
#include "common/reduce.cuh"

// Packs that a thread loads before it looks at any of them: 64 KiB in flight from a block of 1,024 threads.
inline constexpr int GROUP = 4;

// An element in the order of the result: the larger value first, then the lower index. NaN counts as minus infinity and
// -0 as 0. Every key of an element is greater than NO_KEY, and no two elements have the same.
using Key = unsigned long long;
inline constexpr Key NO_KEY = 0;

__device__ __forceinline__ Key key_of(float value, int index) {
    const unsigned bits = __float_as_uint(fmaxf(value, -infinity()) + 0.0f);
    const unsigned rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return static_cast<Key>(rising) << 32 | ~static_cast<unsigned>(index);
}

__device__ __forceinline__ float value_of(Key key) {
    const unsigned rising = static_cast<unsigned>(key >> 32);
    return __uint_as_float(rising ^ (rising >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ int index_of(Key key) {
    return static_cast<int>(~static_cast<unsigned>(key));
}

// What one thread has seen of a row.
struct Seen {
    float best = -infinity();  // the largest value
    int group = -1;            // first pack of the first group that holds it; -1: none above minus infinity
    unsigned taint = 0;        // not 0: there was a NaN or an infinity
    float sum = 0.0f;          // of exp(value - best)
};

// A row, and how this thread reads it.
template <typename T>
struct Row {
    const T* from;
    int vocab;
    int packs;
    bool whole;

    __device__ __forceinline__ Row(const T* row, int columns)
        : from(row), vocab(columns), packs(columns / PACK<T>), whole(aligned16(row)) {}

    __device__ __forceinline__ const T* at(int pack) const {
        return from + static_cast<long long>(pack) * PACK<T>;
    }

    __device__ __forceinline__ uint4 bits(int pack) const {
        return load_bits(at(pack), whole);
    }

    // Packs group, group + n, ... for n threads; minus infinity where the row has no such pack.
    __device__ __forceinline__ void load(int group, uint4 (&loaded)[GROUP]) const {
        const unsigned lowest = lowest_word<T>();
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            loaded[g] = make_uint4(lowest, lowest, lowest, lowest);
        }
        if (whole) {  // asked once, so that nothing stands between the loads
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const int pack = group + g * static_cast<int>(blockDim.x);
                if (pack < packs) {
                    loaded[g] = load_bits(at(pack), true);
                }
            }
        } else {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const int pack = group + g * static_cast<int>(blockDim.x);
                if (pack < packs) {
                    loaded[g] = load_bits(at(pack), false);
                }
            }
        }
    }

    // Index of the thread's element after the last whole pack; `vocab` or more when it has none.
    __device__ __forceinline__ int loose(int thread) const {
        return packs * PACK<T> + thread;
    }
};

// Takes a pack's words into the larger elements of words, and into the taint.
template <typename T>
__device__ __forceinline__ void take_in(const uint4& pack, unsigned& most, unsigned& taint) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        most = max_word<T>(most, word(pack, i));
        taint = taint_word<T>(taint, word(pack, i));
    }
}

// The larger of the elements of a word.
template <typename T>
__device__ __forceinline__ float larger_of(unsigned word) {
    float values[PACK<T> / 4];
    unpack(word, values, T{});
    return fmaxf(values[0], values[PACK<T> / 4 - 1]);
}

__device__ __forceinline__ void raise(Seen& seen, float value, int group) {
    seen.sum *= exp_of(seen.best - value);
    seen.best = value;
    seen.group = group;
}

// Sees all elements of this thread. `SUM`: forms the sum too.
template <typename T, bool SUM>
__device__ __forceinline__ Seen see(const Row<T>& row) {
    Seen seen;
    const int threads = blockDim.x;
    for (int group = threadIdx.x; group < row.packs; group += GROUP * threads) {
        uint4 packs[GROUP];
        row.load(group, packs);
        unsigned most = packs[0].x;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            unsigned taint = seen.taint;
            take_in<T>(packs[g], most, taint);
            seen.taint = group + g * threads < row.packs ? taint : seen.taint;
        }
        const float value = larger_of<T>(most);
        if (value > seen.best) {
            raise(seen, value, group);
        }
        if (SUM && seen.best > -infinity()) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float values[PACK<T>];
                unpack(packs[g], values, T{});
#pragma unroll
                for (int i = 0; i < PACK<T>; ++i) {
                    seen.sum += exp_of(fmaxf(values[i], -infinity()) - seen.best);
                }
            }
        }
    }
    const int loose = row.loose(threadIdx.x);
    if (loose < row.vocab) {
        const float element = to_float(row.from[loose]);
        const float value = fmaxf(element, -infinity());
        seen.taint |= taint_word<float>(0, __float_as_uint(element));
        if (value > seen.best) {
            raise(seen, value, row.packs);
        }
        if (SUM && seen.best > -infinity()) {
            seen.sum += exp_of(value - seen.best);
        }
    }
    return seen;
}

// The key of the best element that the thread has seen, NO_KEY when it has seen none. Reads one group again.
template <typename T>
__device__ __forceinline__ Key best_of(const Row<T>& row, const Seen& seen) {
    const int threads = blockDim.x;
    const int group = seen.group < 0 ? threadIdx.x : seen.group;
    Key best = NO_KEY;
    if (group < row.packs) {
        float value = -infinity();
        int index = group * PACK<T>;
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const int pack = group + g * threads;
            if (pack < row.packs) {
                float values[PACK<T>];
                unpack(row.bits(pack), values, T{});
#pragma unroll
                for (int i = 0; i < PACK<T>; ++i) {
                    if (values[i] > value) {
                        value = values[i];
                        index = pack * PACK<T> + i;
                    }
                }
            }
        }
        best = key_of(value, index);
    }
    const int loose = row.loose(threadIdx.x);
    return loose < row.vocab ? Max::of(best, key_of(to_float(row.from[loose]), loose)) : best;
}

#endif
