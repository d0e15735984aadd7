// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Copies from global to shared memory that go on while the thread does other work. A thread sees what it copied itself
// after `wait_for_copies`; other threads need a barrier after that.

#ifndef METRALE_ASYNC_COPY_CUH
#define METRALE_ASYNC_COPY_CUH

#include "common/element.cuh"

// A pack, past the L1; 0, and no access, unless `there`. Both addresses must be multiples of 16 bytes.
template <typename T>
__device__ __forceinline__ void copy_async(uint4* to, const T* from, bool there) {
    const unsigned bytes = there ? 16 : 0;
    asm volatile(
        "{ .reg .u64 place; .reg .u32 shared; cvta.to.shared.u64 place, %0; cvt.u32.u64 shared, place; "
        "cp.async.cg.shared.global [shared], [%1], 16, %2; }"
        :
        : "l"(to), "l"(from), "r"(bytes)
        : "memory");
}

// Ends a group: the thread's copies since the last one.
__device__ __forceinline__ void end_copies() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// Returns when all of the thread's groups but the last GROUPS are there.
template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(GROUPS) : "memory");
}

#endif
