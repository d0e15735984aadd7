// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A span of memory that a warp reads once, in pieces, of which the next ones are on their way to slots in shared memory.
//
// From compute capability 9.0 on one bulk copy brings a piece, and a barrier in shared memory says when it is there.
// Before, each lane copies packs of it. No kernel that may still run writes the span, so it may be asked for before
// `wait_for_previous`. It is the first to make way in the L2.

#ifndef METRALE_PIECE_RING_CUH
#define METRALE_PIECE_RING_CUH

#include "common/bulk.cuh"
#include "common/reduce.cuh"

// The hint with which copies are marked.
__device__ __forceinline__ unsigned long long evict_first() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

#if __CUDA_ARCH__ >= 900

// One arrival, with as many bytes as it announces, ends a turn of the barrier.
__device__ __forceinline__ void open_barrier(unsigned barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// What the thread did to shared memory is seen by the copies that it starts after this.
__device__ __forceinline__ void show_to_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                                          unsigned long long policy) {
    expect_bytes(barrier, bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

#else

__device__ __forceinline__ void copy_pack(unsigned to, const void* from, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

// The thread's copies since the last call are one group, also where there are none.
__device__ __forceinline__ void end_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all of the thread's groups but the last LEFT have come.
template <int LEFT>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#endif

// All lanes of the warp call each function, with equal arguments.
template <int SLOTS, int SLOT_BYTES>
struct PieceRing {
    static constexpr int SLOT = SLOT_BYTES;
    static constexpr int LINE = 128;
    static constexpr int BYTES = SLOTS * SLOT_BYTES + LINE;  // of shared memory for a warp, its barriers in the last line
    static_assert(SLOTS * sizeof(unsigned long long) <= LINE, "too many barriers");

    unsigned char* slots;
    const unsigned char* next;  // what has not been asked for
    long long left;             // its bytes
    int piece;                  // bytes of a piece; the last may have fewer
    unsigned long long policy = evict_first();
    int oldest = 0;       // slot of the piece that is read next
    unsigned parity = 0;  // of the slot's turn

    // Asks for the first pieces. `bytes` and `piece` are multiples of 16, like the addresses; a piece fits into a slot.
    __device__ __forceinline__ PieceRing(unsigned char* memory, const void* from, long long bytes, int piece_bytes)
        : slots(memory), next(static_cast<const unsigned char*>(from)), left(bytes), piece(piece_bytes) {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % WARP == 0) {
#pragma unroll
            for (int slot = 0; slot < SLOTS; ++slot) {
                open_barrier(barrier(slot));
            }
            show_to_copies();
        }
        __syncwarp();
#endif
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            ask(slot);
        }
    }

    // The oldest piece, when it is there.
    __device__ __forceinline__ const unsigned char* wait() const {
#if __CUDA_ARCH__ >= 900
        wait_for_bytes(barrier(oldest), parity);
#else
        wait_for_groups<SLOTS - 1>();
        __syncwarp();  // the other lanes' packs have come as well
#endif
        return slots + oldest * SLOT_BYTES;
    }

    // Gives the oldest piece's slot to the next piece. What the lanes have read of it is in their registers.
    __device__ __forceinline__ void release() {
        __syncwarp();
        ask(oldest);
        if (++oldest == SLOTS) {
            oldest = 0;
            parity ^= 1;
        }
    }

    __device__ __forceinline__ unsigned barrier(int slot) const {
        return shared_address(slots + SLOTS * SLOT_BYTES) + slot * static_cast<int>(sizeof(unsigned long long));
    }

    __device__ __forceinline__ void ask(int slot) {
        const int bytes = left < piece ? static_cast<int>(left) : piece, lane = threadIdx.x % WARP;
        const unsigned to = shared_address(slots + slot * SLOT_BYTES);
#if __CUDA_ARCH__ >= 900
        if (lane == 0 && bytes > 0) {
            copy_bulk(to, next, bytes, barrier(slot), policy);
        }
#else
        for (int at = lane * 16; at < bytes; at += WARP * 16) {
            copy_pack(to + at, next + at, policy);
        }
        end_group();
#endif
        next += bytes;
        left -= bytes;
    }
};

#endif
