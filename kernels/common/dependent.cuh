// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Kernels that may begin before the kernel ahead of them has ended (programmatic dependent launch, compute capability
// 9.0 and later), and the loads on either side of the wait.
//
// Until `wait_for_previous` a kernel reads only what no kernel writes, such as weights, and writes nothing. Every block
// calls it. Launched in the usual way, a kernel does not notice these calls.
//
// The loads keep their order among each other and with the wait, because all of them are volatile.

#ifndef METRALE_DEPENDENT_CUH
#define METRALE_DEPENDENT_CUH

#include "common/element.cuh"

// Lets the kernel behind this one begin as soon as there is room for its blocks.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the kernels ahead have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A pack that is read once, such as of weights: it makes way for others in the caches. 0, and no access, unless `there`.
// The address must be a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 load_once(const T* from, bool there) {
    uint4 pack = make_uint4(0, 0, 0, 0);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(pack.x), "+r"(pack.y), "+r"(pack.z), "+r"(pack.w)
                 : "l"(from), "r"(static_cast<unsigned>(there)));
    return pack;
}

// A pack of what the kernel ahead wrote, past the L1, which may hold what was there before. `pack` keeps what it holds
// unless `there`.
template <typename T>
__device__ __forceinline__ void load_over(uint4& pack, const T* from, bool there) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(pack.x), "+r"(pack.y), "+r"(pack.z), "+r"(pack.w)
                 : "l"(from), "r"(static_cast<unsigned>(there)));
}

// The same, and 0 unless `there`.
template <typename T>
__device__ __forceinline__ uint4 load_fresh(const T* from, bool there) {
    uint4 pack = make_uint4(0, 0, 0, 0);
    load_over(pack, from, there);
    return pack;
}

// One 16-bit element, in the same way.
template <typename T>
__device__ __forceinline__ T load_fresh_element(const T* from, bool there) {
    static_assert(sizeof(T) == 2, "a 16-bit element");
    T element = {0};
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.cg.u16 %0, [%1]; }"
                 : "+h"(element.bits)
                 : "l"(from), "r"(static_cast<unsigned>(there)));
    return element;
}

// A pack from any address, element by element; past `count` elements it is 0.
__device__ __forceinline__ uint4 gather_fresh(const float* from, int count) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = i < count ? __float_as_uint(*static_cast<const volatile float*>(from + i)) : 0;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ uint4 gather_fresh(const T* from, int count) {
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        words[i / 2] |= static_cast<unsigned>(load_fresh_element(from + i, i < count).bits) << (i % 2 * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// As `load_pack`, of what the kernel ahead wrote.
template <typename T>
__device__ __forceinline__ void load_fresh_pack(const T* from, int count, bool whole, float (&values)[PACK<T>]) {
    unpack(whole ? load_fresh(from, true) : gather_fresh(from, count), values, T{});
}

// Copies a row that the kernel ahead wrote, bit for bit, by all threads of a block: packs where both addresses are
// multiples of 16 bytes.
template <typename T>
__device__ __forceinline__ void copy_row(T* to, const T* from, int width) {
    const int packs = aligned16(to) && aligned16(from) ? width / PACK<T> : 0;
    for (int pack = threadIdx.x; pack < packs; pack += blockDim.x) {
        reinterpret_cast<uint4*>(to)[pack] = load_fresh(from + pack * PACK<T>, true);
    }
    for (int column = packs * PACK<T> + threadIdx.x; column < width; column += blockDim.x) {
        to[column] = from[column];
    }
}

#endif
