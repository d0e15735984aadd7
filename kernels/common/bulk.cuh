// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Copies from global into shared memory that the memory system makes by itself (compute capability 9.0 and later), and
// what threads move to and from there: packs, and matrices of 16-bit elements as mma.m16n8k16 takes them.
//
// Addresses are those of shared memory, in bytes.

#ifndef METRALE_BULK_CUH
#define METRALE_BULK_CUH

__device__ __forceinline__ unsigned shared_address(const void* place) {
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// How much shared memory the launch gave the block.
__device__ __forceinline__ unsigned dynamic_shared_bytes() {
    unsigned bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

#if __CUDA_ARCH__ >= 900

// A count of bytes that are under way. One thread begins it, before a barrier of the block.
__device__ __forceinline__ void begin_count(unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(count) : "memory");
}

// Says how many bytes will come; one thread does, each time.
__device__ __forceinline__ void expect_bytes(unsigned count, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(count), "r"(bytes) : "memory");
}

// Waits until they have come, for the first time, the second and so on: `turn` is 0, 1, 0...
__device__ __forceinline__ void wait_for_bytes(unsigned count, unsigned turn) {
    unsigned done = 0;
    while (done == 0) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(count), "r"(turn)
            : "memory");
    }
}

// Begins a copy of `bytes`, which like both addresses is a multiple of 16.
__device__ __forceinline__ void begin_bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned count) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(count)
                 : "memory");
}

#endif

__device__ __forceinline__ void store_shared(unsigned to, const uint4& pack) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pack.x), "r"(pack.y), "r"(pack.z),
                 "r"(pack.w)
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(unsigned from) {
    uint4 pack;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
                 : "r"(from)
                 : "memory");
    return pack;
}

// Four 8 by 8 matrices, a word of each. Lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 load_matrices(unsigned row) {
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(row)
                 : "memory");
    return words;
}

#endif
