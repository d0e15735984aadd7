// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Mean and variance of rows that lie spread over the lanes of a block: what each lane has is summed about its own mean,
// and the parts are merged (Chan, Golub and LeVeque 1979), so that nothing cancels and one barrier is enough.
//
// What several kernels do must give the same bits in each of them, so that nothing is left to the compiler there that
// could be rounded once or twice: what is multiplied and then added is `fmaf`, and a product that is rounded first
// `__fmul_rn`.

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
    return {count, fmaf(apart, part, a.mean), fmaf(apart * apart, a.count * part, a.squares + b.squares)};
}

// What a row is shifted and scaled by.
struct Norm {
    float mean, scale;
};

// What a lane has seen of one pack: how many elements, their sum and mean, and squared distances.
struct PackMoments {
    float count, sum, mean, squares;
};

// Of a pack whose first `count` values are elements, and whose others are 0. WHOLE: they are none or all.
template <typename T, bool WHOLE>
__device__ __forceinline__ PackMoments pack_moments(const uint4& pack, int count) {
    float values[PACK<T>], sum = 0.0f, squares = 0.0f;
    unpack(pack, values, T{});
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        sum += values[i];
    }
    const bool all = WHOLE || count == PACK<T>;
    const float mean = __fmul_rn(sum, all ? 1.0f / PACK<T> : reciprocal(static_cast<float>(max(count, 1))));
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        const float apart = values[i] - mean;
        squares = WHOLE || i < count ? fmaf(apart, apart, squares) : squares;
    }
    return {static_cast<float>(count), sum, mean, count > 0 ? squares : 0.0f};
}

// The moments of some packs, of which one has an element at least.
template <int PACKS>
__device__ __forceinline__ Moments joined(const PackMoments (&packs)[PACKS]) {
    Moments found = {0.0f, 0.0f, 0.0f};
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        found.count += packs[p].count;
        sum += packs[p].sum;
    }
    found.mean = __fmul_rn(sum, reciprocal(found.count));
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        const float apart = packs[p].mean - found.mean;
        found.squares += fmaf(packs[p].count, apart * apart, packs[p].squares);
    }
    return found;
}

// The moments of some packs, of which the first counts[i] values of each are elements and the others are 0. There is one
// element at least. WHOLE: a count is 0 or that of a pack.
template <typename T, bool WHOLE, int PACKS>
__device__ __forceinline__ Moments moments_of(const uint4 (&packs)[PACKS], const int (&counts)[PACKS]) {
    PackMoments found[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        found[p] = pack_moments<T, WHOLE>(packs[p], counts[p]);
    }
    return joined(found);
}

// The moments of the lanes that hold a row together, an aligned group of `lanes`, in all of them. `count`: how many
// values they have in all.
__device__ __forceinline__ Moments merge_lanes(const Moments& own, float count, int lanes) {
    const float sum = warp_reduce<Sum>(__fmul_rn(own.count, own.mean), lanes);
    const float mean = __fmul_rn(sum, reciprocal(fmaxf(count, 1.0f))), apart = own.mean - mean;
    return {count, mean, warp_reduce<Sum>(fmaf(own.count, apart * apart, own.squares), lanes)};
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
        values[i] = fmaf((values[i] - norm.mean) * norm.scale, scales[i], shifts[i]);
    }
    return packed(values, T{});
}

#endif
