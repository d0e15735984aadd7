// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A row of logits that is read once, by one block or by several.
//
// A row is SHARES shares. A warp reads one at a time, and what it finds depends on the share alone. Of the n blocks of a
// row, a power of two, each has every n-th share. Sums are joined in the order of one binary tree over all shares, which
// begins with those farthest apart, so with those of one block, and ends with neighbours: a row has the same bits however
// many blocks and warps read it. All else is the largest of numbers, in any order.
//
// Each block leaves what it found in device memory. The last one to do so joins that.

#ifndef METRALE_SHARES_CUH
#define METRALE_SHARES_CUH

#include "common/dependent.cuh"
#include "common/found.cuh"

inline constexpr int SHARES = 256;
inline constexpr int PARTS = WARP;         // most blocks of a row: a lane for what each has found
inline constexpr int SPAN = GROUP * WARP;  // packs that a warp has under way

// Which block of which row this is.
struct Part {
    int count;
    int index;
    long long row;
};

// Of a grid in which the blocks of a row are neighbours, as many for each row.
__device__ __forceinline__ Part part_of(int rows) {
    const int count = static_cast<int>(gridDim.x) / rows;
    return {count, static_cast<int>(blockIdx.x) & (count - 1), blockIdx.x >> (__ffs(count) - 1)};
}

// The sum of exp(x - largest) over some elements x, of which `largest` is the largest.
struct Exponentials {
    float largest = -infinity();
    float sum = 0.0f;

    // The sum for another largest value, which is no smaller.
    __device__ __forceinline__ float under(float value) const {
        return sum == 0.0f ? 0.0f : sum * exp_of(largest - value);
    }

    __device__ __forceinline__ void raise(float value) {
        if (value > largest) {
            sum = under(value);
            largest = value;
        }
    }

    // Adds an element that is at most the largest.
    __device__ __forceinline__ void add(float value) {
        sum += exp_of(fmaxf(value, -infinity()) - largest);
    }
};

__device__ __forceinline__ Exponentials joined(const Exponentials& one, const Exponentials& other) {
    const float largest = fmaxf(one.largest, other.largest);
    return {largest, one.under(largest) + other.under(largest)};
}

// Over the warp: lanes 16 apart first, neighbours last. Every lane gets the result.
__device__ __forceinline__ Exponentials joined(Exponentials mine) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        mine = joined(mine, {__shfl_xor_sync(ALL_LANES, mine.largest, step),
                             __shfl_xor_sync(ALL_LANES, mine.sum, step)});
    }
    return mine;
}

// Over the warp, all but the sum. Every lane gets the result.
__device__ __forceinline__ Found joined(const Found& mine) {
    const unsigned high = static_cast<unsigned>(mine.best >> 32);
    const unsigned highest = __reduce_max_sync(ALL_LANES, high);
    const unsigned low = __reduce_max_sync(ALL_LANES, high == highest ? static_cast<unsigned>(mine.best) : 0);
    const int taint = __any_sync(ALL_LANES, mine.taint != 0);
    return {static_cast<Key>(highest) << 32 | low, static_cast<unsigned>(taint), 0.0f};
}

// Shared memory of a block.
struct Shares {
    uint4 found[WARP];    // by each warp
    float2 sums[SHARES];  // of each share of the block, as `Exponentials`
};

// What a lane has seen.
template <typename T>
struct Sight {
    float best = -infinity();                        // the largest value
    int pack = 0;                                    // the first that holds it
    uint4 bits = make_uint4(0, 0, 0, 0);             // what is in that pack
    unsigned taint = 0;                              // not 0: there was a NaN or an infinity

    __device__ __forceinline__ Key key() const {
        float values[PACK<T>];
        unpack(bits, values, T{});
        int place = 0;
#pragma unroll
        for (int i = PACK<T> - 1; i >= 0; --i) {
            place = values[i] == best ? i : place;
        }
        return best > -infinity() ? key_of(best, pack * PACK<T> + place) : NO_KEY;
    }
};

// Sees the lane's packs of a span, WARP apart, of which `first` is the number of the first. With `sums`, adds them up.
template <typename T>
__device__ __forceinline__ void see_span(const Row<T>& row, int first, bool sums, Sight<T>& sight, Exponentials& mine) {
    const T* from = row.at(first);
    const unsigned lowest = lowest_word<T>();  // where the row has no such pack
    uint4 packs[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        packs[g] = make_uint4(lowest, lowest, lowest, lowest);
        load_over(packs[g], from + g * WARP * PACK<T>, row.whole && first + g * WARP < row.packs);
    }
    float largest = -infinity();
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        const int pack = first + g * WARP;
        if (!row.whole && pack < row.packs) {  // here, not above, so that it takes few registers
            packs[g] = gather_fresh(from + g * WARP * PACK<T>, PACK<T>);
        }
        unsigned taint = sight.taint;
        unsigned most = packs[g].x;
        take_in<T>(packs[g], most, taint);
        sight.taint = pack < row.packs ? taint : sight.taint;
        const float value = larger_of<T>(most);
        largest = fmaxf(largest, value);
        if (value > sight.best) {
            sight.best = value;
            sight.pack = pack;
            sight.bits = packs[g];
        }
    }
    mine.raise(largest);
    if (sums && mine.largest > -infinity()) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float values[PACK<T>];
            unpack(packs[g], values, T{});
#pragma unroll
            for (int i = 0; i < PACK<T>; ++i) {
                mine.add(values[i]);
            }
        }
    }
}

// The element after the last whole pack that is this lane's.
template <typename T>
__device__ __forceinline__ float loose_element(const Row<T>& row, int loose) {
    float values[PACK<T> / 4];
    unpack(gather_fresh(row.from + loose, 1).x, values, T{});
    return values[0];
}

// Reads what this warp has of a part, and leaves what it found in `shared`. The elements after the last whole pack belong
// to the last share.
template <typename T>
__device__ __forceinline__ void read_part(Shares& shared, const Row<T>& row, const Part& part, bool sums) {
    const int lane = threadIdx.x % WARP;
    const int spans = (row.packs + SPAN - 1) / SPAN;
    const int each = (spans + SHARES - 1) / SHARES;
    Sight<T> sight;
    Key best = NO_KEY;
    for (int place = threadIdx.x / WARP; place * part.count < SHARES; place += blockDim.x / WARP) {
        const int share = place * part.count + part.index;
        const int end = min((share + 1) * each, spans);
        Exponentials mine;
        for (int span = share * each; span < end; ++span) {
            see_span(row, span * SPAN + lane, sums, sight, mine);
        }
        const int loose = row.loose(lane);
        if (share == SHARES - 1 && loose < row.vocab) {
            const float element = loose_element(row, loose);
            const float value = fmaxf(element, -infinity());
            sight.taint |= taint_word<float>(0, __float_as_uint(element));
            if (value > -infinity()) {
                best = key_of(value, loose);
                mine.raise(value);
                mine.add(value);
            }
        }
        if (sums) {
            const Exponentials all = joined(mine);
            shared.sums[place] = make_float2(all.largest, all.sum);
        }
    }
    shared.found[threadIdx.x / WARP] = joined(Found{Max::of(best, sight.key()), sight.taint, 0.0f}).words();
}

// Joins what the warps of a block have found, by one of them, after a barrier. Every lane gets the result.
__device__ __forceinline__ Found found_in_part(const Shares& shared, const Part& part, bool sums) {
    const int lane = threadIdx.x % WARP;
    const bool there = lane < static_cast<int>(blockDim.x) / WARP;
    Found all = joined(there ? found_of(shared.found[lane]) : Found{NO_KEY, 0, 0.0f});
    if (sums) {
        constexpr int EACH = SHARES / WARP;
        Exponentials mine[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int place = i * WARP + lane;
            if (place * part.count < SHARES) {
                mine[i] = {shared.sums[place].x, shared.sums[place].y};
            }
        }
#pragma unroll
        for (int step = EACH / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < step; ++i) {
                mine[i] = joined(mine[i], mine[i + step]);
            }
        }
        all.sum = joined(mine[0]).sum;
    }
    return all;
}

// Adds, after what this thread wrote before and before what it reads afterwards, as other threads see it.
__device__ __forceinline__ unsigned add_in_order(unsigned* to, unsigned value) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
    return before;
}

// Leaves what was found in a part for the others of its row, by one warp. Returns whether this is the last of them: then
// `found` is what was found in the row. `parts` is [rows, PARTS, 4]; `arrivals`, [rows], is a multiple of PARTS before the
// first part comes and after the last.
__device__ __forceinline__ bool last_of_row(Found& found, unsigned* parts, unsigned* arrivals, const Part& part,
                                            bool sums) {
    const int lane = threadIdx.x % WARP;
    const unsigned mine = PARTS / part.count;
    uint4* const left = reinterpret_cast<uint4*>(parts) + part.row * PARTS;
    unsigned before = 0;
    if (lane == 0) {
        left[part.index] = found.words();
        before = add_in_order(arrivals + part.row, mine);
    }
    if ((__shfl_sync(ALL_LANES, before, 0) + mine) % PARTS != 0) {
        return false;
    }
    if (part.count > 1) {
        __syncwarp();
        const Found one = lane < part.count ? found_of(load_fresh(left + lane, true)) : Found{NO_KEY, 0, 0.0f};
        found = joined(one);
        found.sum = sums ? joined(Exponentials{one.largest(), one.sum}).sum : 0.0f;
    }
    return true;
}

#endif
