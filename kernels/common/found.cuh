// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What blocks of one launch, or of one and the next, tell each other of a row of logits: four words for each part of it.

#ifndef METRALE_FOUND_CUH
#define METRALE_FOUND_CUH

#include "common/logits.cuh"

// What was found of a row or a part of it.
struct Found {
    Key best;        // of the first of the largest elements; NO_KEY when none is above minus infinity
    unsigned taint;  // not 0: there was a NaN or an infinity
    float sum;       // of exp(x - the largest), where it was asked for

    __device__ __forceinline__ float largest() const {
        return best == NO_KEY ? -infinity() : value_of(best);
    }

    __device__ __forceinline__ uint4 words() const {
        return make_uint4(static_cast<unsigned>(best), static_cast<unsigned>(best >> 32), taint, __float_as_uint(sum));
    }
};

__device__ __forceinline__ Found found_of(const uint4& words) {
    return {static_cast<Key>(words.y) << 32 | words.x, words.z, __uint_as_float(words.w)};
}

#endif
