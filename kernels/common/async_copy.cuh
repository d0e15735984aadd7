// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Copies from global to shared memory that go on while the thread does other work. A thread sees what it copied itself
// after `wait_for_copies`; other threads need a barrier after that.

#ifndef METRALE_ASYNC_COPY_CUH
#define METRALE_ASYNC_COPY_CUH

#include "common/element.cuh"

// An address in shared memory, as `copy_async` takes it.
__device__ __forceinline__ unsigned shared_address(const void* place) {
    unsigned address;
    asm("{ .reg .u64 shared; cvta.to.shared.u64 shared, %1; cvt.u32.u64 %0, shared; }" : "=r"(address) : "l"(place));
    return address;
}

// A pack, past the L1; 0, and no access, unless `there`. Both addresses must be multiples of 16 bytes.
template <typename T>
__device__ __forceinline__ void copy_async(unsigned to, const T* from, bool there) {
    const unsigned bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
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
