// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Clusters: neighbouring blocks that run together and can read each other's shared memory (compute capability 9.0 and
// later). A block that was launched without one, or runs on an older device, is a cluster by itself.

#ifndef METRALE_CLUSTER_CUH
#define METRALE_CLUSTER_CUH

// The block's number within its cluster.
__device__ __forceinline__ int cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<int>(rank);
}

// How many blocks the cluster has.
__device__ __forceinline__ int cluster_size() {
    unsigned size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return static_cast<int>(size);
}

// A barrier of all threads of a cluster. What was written before it can be read after it.
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// The last one, before which no block may end: it orders no memory, so that nobody waits for what has been stored.
__device__ __forceinline__ void cluster_end() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Four floats of another block's shared memory, at the place where `own` lies in this block's. They must have been
// written before a barrier of the cluster, and that block must not end before another one.
__device__ __forceinline__ float4 load_of_rank(const float4* own, int rank) {
    float4 value;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .u32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at]; }"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(own))), "r"(rank)
        : "memory");
#else
    value = *own;
#endif
    return value;
}

#endif
