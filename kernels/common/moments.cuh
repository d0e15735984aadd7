// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Mean and variance of rows that lie spread over the lanes of a block: what each lane has is summed about its own mean,
// and the parts are merged (Chan, Golub and LeVeque 1979), so that nothing cancels and one barrier is enough.

#ifndef METRALE_MOMENTS_CUH
#define METRALE_MOMENTS_CUH

#include "common/element.cuh"
#include "common/reduce.cuh"

// Values seen: how many, their mean, and the sum of their squared distances from it.
struct Moments {
    float count, mean, squares;
};

// 1 / count, within a unit in the last place. A true division takes a call, and with it registers from what surrounds
// it.
__device__ __forceinline__ float reciprocal(float count) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(count));
    return result;
}

__device__ __forceinline__ Moments merged(const Moments& a, const Moments& b) {
    if (a.count == 0.0f) {
        return b;
    }
    const float count = a.count + b.count, apart = b.mean - a.mean, part = b.count * reciprocal(count);
    return {count, a.mean + apart * part, a.squares + b.squares + apart * apart * (a.count * part)};
}

// What a row is shifted and scaled by.
struct Norm {
    float mean, scale;
};

// The moments of some packs, of which the first counts[i] values of each are elements and the others are 0. There is one
// element at least. WHOLE: a count is 0 or that of a pack.
template <typename T, bool WHOLE, int PACKS>
__device__ __forceinline__ Moments moments_of(const uint4 (&packs)[PACKS], const int (&counts)[PACKS]) {
    float means[PACKS], squares[PACKS], count = 0.0f, sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        float values[PACK<T>], within = 0.0f, apart_squared = 0.0f;
        unpack(packs[p], values, T{});
#pragma unroll
        for (int i = 0; i < PACK<T>; ++i) {
            within += values[i];
        }
        const bool all = WHOLE || counts[p] == PACK<T>;
        means[p] = within * (all ? 1.0f / PACK<T> : reciprocal(static_cast<float>(max(counts[p], 1))));
#pragma unroll
        for (int i = 0; i < PACK<T>; ++i) {
            const float apart = values[i] - means[p];
            apart_squared += WHOLE || i < counts[p] ? apart * apart : 0.0f;
        }
        squares[p] = counts[p] > 0 ? apart_squared : 0.0f;
        count += static_cast<float>(counts[p]);
        sum += within;
    }
    Moments found = {count, sum * reciprocal(count), 0.0f};
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const float apart = means[p] - found.mean;
        found.squares += squares[p] + static_cast<float>(counts[p]) * (apart * apart);
    }
    return found;
}

// The moments of a whole pack. Sums are formed as trees, for the time they take.
template <typename T>
__device__ __forceinline__ Moments moments_of_pack(const uint4& pack) {
    constexpr int COUNT = PACK<T>;
    float values[COUNT], mean = 0.0f;
    unpack(pack, values, T{});
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        float sums[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float apart = values[i] - mean;
            sums[i] = pass == 0 ? values[i] : apart * apart;
        }
#pragma unroll
        for (int half = COUNT / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) {
                sums[i] += sums[i + half];
            }
        }
        if (pass == 1) {
            return {COUNT, mean, sums[0]};
        }
        mean = sums[0] * (1.0f / COUNT);
    }
    return {};
}

// The moments of the lanes that hold a row together, an aligned group of `lanes`, in all of them. `count`: how many
// values they have in all.
__device__ __forceinline__ Moments merge_lanes(const Moments& own, float count, int lanes) {
    const float mean = warp_reduce<Sum>(own.count * own.mean, lanes) * reciprocal(fmaxf(count, 1.0f));
    const float apart = own.mean - mean;
    return {count, mean, warp_reduce<Sum>(own.squares + own.count * (apart * apart), lanes)};
}

// The same where each of the lanes has seen as many values, in one reduction.
__device__ __forceinline__ Moments merge_equal_lanes(const Moments& own, int lanes) {
    Moments all = own;
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        if (step < lanes) {
            const float mean = __shfl_xor_sync(ALL_LANES, all.mean, step);
            const float squares = __shfl_xor_sync(ALL_LANES, all.squares, step), apart = mean - all.mean;
            all.squares = all.squares + squares + apart * apart * (0.5f * all.count);
            all.mean = 0.5f * (all.mean + mean);
            all.count *= 2.0f;
        }
    }
    return all;
}

// (pack - mean) * scale * gamma + beta, rounded.
template <typename T>
__device__ __forceinline__ uint4 normalised(const uint4& pack, const uint4& gamma, const uint4& beta, const Norm& norm) {
    float values[PACK<T>], scales[PACK<T>], shifts[PACK<T>];
    unpack(pack, values, T{});
    unpack(gamma, scales, T{});
    unpack(beta, shifts, T{});
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        values[i] = (values[i] - norm.mean) * norm.scale * scales[i] + shifts[i];
    }
    return packed(values, T{});
}

#endif
