// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Sums and maxima over a warp or a block, always in the same order, so that equal inputs give equal bits.
//
// All threads of the block, or of the warp, must call; a block is whole warps, at most 32. Every thread gets the result.

#ifndef METRALE_REDUCE_CUH
#define METRALE_REDUCE_CUH

inline constexpr unsigned ALL_LANES = 0xffffffffu;
inline constexpr int WARP = 32;

struct Sum {
    template <typename V>
    __device__ __forceinline__ static V of(V a, V b) {
        return a + b;
    }
};

// NaN counts as less than everything else.
struct Max {
    __device__ __forceinline__ static float of(float a, float b) {
        return fmaxf(a, b);
    }
    __device__ __forceinline__ static unsigned long long of(unsigned long long a, unsigned long long b) {
        return a < b ? b : a;
    }
};

// Over each aligned group of `lanes` lanes, a power of two.
template <typename Combine, typename V>
__device__ __forceinline__ V warp_reduce(V value, int lanes = WARP) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        if (step < lanes) {
            value = Combine::of(value, __shfl_xor_sync(ALL_LANES, value, step));
        }
    }
    return value;
}

// The same of each of COUNT values. Their exchanges take turns: none waits for another value's.
template <typename Combine, int COUNT, typename V>
__device__ __forceinline__ void warp_reduce_all(V (&values)[COUNT], int lanes) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        if (step < lanes) {
            V others[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                others[i] = __shfl_xor_sync(ALL_LANES, values[i], step);
            }
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                values[i] = Combine::of(values[i], others[i]);
            }
        }
    }
}

// Over the warp, each of COUNT values, a power of two: a lane gets the sum of the value number lane / (32 / COUNT). The
// same sums as `warp_reduce` has, to the bit, with fewer exchanges: a lane hands on the half that is not its own.
template <typename Combine, int COUNT, typename V>
__device__ __forceinline__ V warp_reduce_each(V (&values)[COUNT]) {
    int step = WARP / 2;
#pragma unroll
    for (int left = COUNT / 2; left > 0; left /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const V kept = upper ? values[i + left] : values[i], given = upper ? values[i] : values[i + left];
            values[i] = Combine::of(kept, __shfl_xor_sync(ALL_LANES, given, step));
        }
        step /= 2;
    }
    return warp_reduce<Combine>(values[0], WARP / COUNT);
}

// `partial` has room for a value of each warp. It may be used again after the next barrier and no sooner: a slower warp
// may still be reading it when this returns.
template <typename Combine, typename V>
__device__ __forceinline__ V block_reduce(V value, V* partial) {
    value = warp_reduce<Combine>(value);
    if (threadIdx.x % WARP == 0) {
        partial[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    V result = partial[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / WARP; ++warp) {
        result = Combine::of(result, partial[warp]);
    }
    return result;
}

#endif
