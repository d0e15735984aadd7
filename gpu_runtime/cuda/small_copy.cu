// SPDX-License-Identifier: MIT OR Apache-2.0
// dst[i] = src[i] for nbytes bytes. Either may be page-locked memory of the host.
//
// Any alignment; packs of 16 bytes are moved whole where both addresses are multiples of 16. The spans do not overlap.
// Grid: x such that there is a thread for every 16 bytes; block of whole warps, at most 256 threads. No shared memory.
// A thread has all its reads under way before it writes, and comes round once.
//
// May begin before the kernel ahead has ended, whatever that one reads and writes: it waits before its first read, as
// the kernel ahead may write host memory, too. It does not let the kernel behind begin: like a copy by an engine, it is
// the end of all that comes before it.
#include "common/dependent.cuh"

// A pack as the host or the device has left it: no cache that may hold what was there before answers.
__device__ __forceinline__ uint4 load_settled(const unsigned char* from) {
    uint4 pack;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
                 : "l"(from));
    return pack;
}

extern "C" __global__ void __launch_bounds__(256) small_copy(unsigned char* dst, const unsigned char* src, int nbytes) {
    constexpr int LANES = 32, BYTES = 16;  // of a warp, of a lane
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) / LANES * (LANES * BYTES);
    const int count = min(nbytes - first, LANES * BYTES);  // of this warp; none for some of the last block
    const int lane = threadIdx.x % LANES;
    dst += first;
    src += first;
    const int packs = count > 0 && aligned16(dst) && aligned16(src) ? count / BYTES : 0;
    // Byte by byte what is no pack: 15 bytes at most, or all of it. A lane's are LANES apart.
    const int begin = packs * BYTES + lane, rest = count - begin;
    uint4 pack = make_uint4(0, 0, 0, 0);
    unsigned char single[BYTES];
    wait_for_previous();
    if (lane < packs) {
        pack = load_settled(src + lane * BYTES);
    }
#pragma unroll
    for (int i = 0; i < BYTES; ++i) {
        if (i * LANES < rest) {
            single[i] = static_cast<const volatile unsigned char*>(src + begin)[i * LANES];
        }
    }
    if (lane < packs) {
        *reinterpret_cast<uint4*>(dst + lane * BYTES) = pack;
    }
#pragma unroll
    for (int i = 0; i < BYTES; ++i) {
        if (i * LANES < rest) {
            (dst + begin)[i * LANES] = single[i];
        }
    }
}
