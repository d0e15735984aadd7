// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Element types of device memory, and loads and stores of 16 bytes at a time.
//
// Kernels are templates over the element type T: float, f16 or bf16. They compute in float and round once, to nearest
// even, when they store. A pack is 16 bytes: PACK<T> neighbouring elements. An op promises the alignment of one element
// alone, so whether packs may be moved whole is asked at run time; which thread handles which element never depends on
// the answer, so the address of a row does not change the bits of its result.

#ifndef METRALE_ELEMENT_CUH
#define METRALE_ELEMENT_CUH

struct f16 {
    unsigned short bits;
};

struct bf16 {
    unsigned short bits;
};

// Elements of one pack.
template <typename T>
inline constexpr int PACK = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float infinity() {
    return __int_as_float(0x7f800000);
}

__device__ __forceinline__ float to_float(float value) {
    return value;
}

__device__ __forceinline__ float to_float(f16 value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

__device__ __forceinline__ float to_float(bf16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

template <typename T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}

template <>
__device__ __forceinline__ f16 from_float<f16>(float value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

// Two floats as two 16-bit elements in one word, the first in the low half.
template <typename T>
__device__ __forceinline__ unsigned word_of(float first, float second);

template <>
__device__ __forceinline__ unsigned word_of<f16>(float first, float second) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

template <>
__device__ __forceinline__ unsigned word_of<bf16>(float first, float second) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// What a word holds is one float or two 16-bit elements. `lowest_word`: all minus infinity.
template <typename T>
__device__ __forceinline__ unsigned lowest_word();

template <>
__device__ __forceinline__ unsigned lowest_word<float>() {
    return 0xff800000u;
}

template <>
__device__ __forceinline__ unsigned lowest_word<f16>() {
    return 0xfc00fc00u;
}

template <>
__device__ __forceinline__ unsigned lowest_word<bf16>() {
    return 0xff80ff80u;
}

// The larger of each two elements; a NaN counts as less than everything else.
template <typename T>
__device__ __forceinline__ unsigned max_word(unsigned a, unsigned b);

template <>
__device__ __forceinline__ unsigned max_word<float>(unsigned a, unsigned b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
}

template <>
__device__ __forceinline__ unsigned max_word<f16>(unsigned a, unsigned b) {
    unsigned result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

template <>
__device__ __forceinline__ unsigned max_word<bf16>(unsigned a, unsigned b) {
    unsigned result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// word * 0 + taint: from 0 on it stays 0 as long as every word is finite, and a NaN or an infinity makes it NaN for good.
template <typename T>
__device__ __forceinline__ unsigned taint_word(unsigned taint, unsigned word);

template <>
__device__ __forceinline__ unsigned taint_word<float>(unsigned taint, unsigned word) {
    return __float_as_uint(fmaf(__uint_as_float(word), 0.0f, __uint_as_float(taint)));
}

template <>
__device__ __forceinline__ unsigned taint_word<f16>(unsigned taint, unsigned word) {
    unsigned result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0u), "r"(taint));
    return result;
}

template <>
__device__ __forceinline__ unsigned taint_word<bf16>(unsigned taint, unsigned word) {
    unsigned result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0u), "r"(taint));
    return result;
}

// exp(x) for x <= 0, with a relative error of about 2^-22 times 1 - x; results below 2^-126 become 0.
__device__ __forceinline__ float exp_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
    return result;
}

// Whether the address is a multiple of 16 bytes.
__device__ __forceinline__ bool aligned16(const void* address) {
    return (reinterpret_cast<unsigned long long>(address) & 15) == 0;
}

// One of the four words of a pack.
__device__ __forceinline__ unsigned word(const uint4& pack, int i) {
    return i == 0 ? pack.x : i == 1 ? pack.y : i == 2 ? pack.z : pack.w;
}

// The elements of a word, or of a pack, as floats. The last parameter names the element type.
__device__ __forceinline__ void unpack(unsigned word, float (&values)[1], float) {
    values[0] = __uint_as_float(word);
}

template <typename T>
__device__ __forceinline__ void unpack(unsigned word, float (&values)[2], T) {
    values[0] = to_float(T{static_cast<unsigned short>(word & 0xffff)});
    values[1] = to_float(T{static_cast<unsigned short>(word >> 16)});
}

template <typename T>
__device__ __forceinline__ void unpack(const uint4& pack, float (&values)[PACK<T>], T) {
    constexpr int EACH = PACK<T> / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float part[EACH];
        unpack(word(pack, i), part, T{});
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            values[EACH * i + e] = part[e];
        }
    }
}

// The floats, rounded, as a pack.
__device__ __forceinline__ uint4 packed(const float (&values)[4], float) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                      __float_as_uint(values[3]));
}

template <typename T>
__device__ __forceinline__ uint4 packed(const float (&values)[8], T) {
    return make_uint4(word_of<T>(values[0], values[1]), word_of<T>(values[2], values[3]),
                      word_of<T>(values[4], values[5]), word_of<T>(values[6], values[7]));
}

// A whole pack as its bits, loaded at once or element by element.
template <typename T>
__device__ __forceinline__ uint4 load_bits(const T* from, bool whole) {
    if (whole) {
        return *reinterpret_cast<const uint4*>(from);
    }
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
            words[i] = __float_as_uint(from[i]);
        } else {
            words[i] = from[2 * i].bits | static_cast<unsigned>(from[2 * i + 1].bits) << 16;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads `count` elements, at most a pack, as floats; the rest become 0. `whole`: one load of 16 bytes is possible.
template <typename T>
__device__ __forceinline__ void load_pack(const T* from, int count, bool whole, float (&values)[PACK<T>]) {
    if (whole) {
        unpack(*reinterpret_cast<const uint4*>(from), values, T{});
        return;
    }
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        values[i] = i < count ? to_float(from[i]) : 0.0f;
    }
}

// Loads as many floats as a pack of T has elements, as `load_pack` does.
template <int COUNT>
__device__ __forceinline__ void load_floats(const float* from, int count, bool whole, float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += PACK<float>) {
        float part[PACK<float>];
        load_pack(from + i, count - i, whole, part);
#pragma unroll
        for (int e = 0; e < PACK<float>; ++e) {
            values[i + e] = part[e];
        }
    }
}

// Stores the first `count` floats, rounded. `whole`: `count` is a pack and the address a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_pack(T* to, int count, bool whole, const float (&values)[PACK<T>]) {
    if (whole) {
        *reinterpret_cast<uint4*>(to) = packed(values, T{});
        return;
    }
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        if (i < count) {
            to[i] = from_float<T>(values[i]);
        }
    }
}

// How many of `columns` from `first` on there are. Not as max(0, min(...)): where such a number is compared with
// `columns`, ptxas of CUDA 13.0 takes a predicate of VIMNMX.RELU for the result, which it is not.
__device__ __forceinline__ int columns_from(int first, int columns, int k) {
    return first < k ? min(columns, k - first) : 0;
}

#endif
