// SPDX-License-Identifier: MIT OR Apache-2.0
//
// ids[r] = index of the largest logit of row r; flags[r] = 1 when the row has a NaN or an infinity, else 0.
//
// Layout     logits: T, [rows, vocab], rows `stride` elements apart; ids, flags: int, [rows]. The alignment of one element
//            is enough; rows at multiples of 16 bytes are read in packs.
// Launch     grid x = rows; block = whole warps, at most 1,024 threads; static shared memory. May begin before the kernel
//            ahead has ended.
// Aliasing   none.
// Numbers    Comparisons alone. The lowest index wins a tie, -0 equals 0, and NaN counts as minus infinity: a row of
//            nothing else gives 0. vocab is at least 1; what lies between rows is not read.

#include "common/dependent.cuh"
#include "common/logits.cuh"

template <typename T>
__device__ __forceinline__ void argmax(const T* logits, int* ids, int* flags, int rows, int vocab, long long stride) {
    __shared__ float maxima[WARP];
    __shared__ Key keys[WARP];
    let_next_begin();
    wait_for_previous();
    const int r = blockIdx.x;
    if (r >= rows) {
        return;
    }
    const Row<T> row(logits + r * stride, vocab);
    const Seen seen = see<T, false>(row);
    const int tainted = __syncthreads_or(seen.taint != 0);
    const float largest = block_reduce<Max>(seen.best, maxima);
    // Few threads hold the largest value, and they alone look for its place.
    const Key mine = seen.best == largest ? best_of(row, seen) : NO_KEY;
    const Key best = block_reduce<Max>(mine, keys);
    if (threadIdx.x == 0) {
        ids[r] = index_of(best);
        flags[r] = tainted;
    }
}

#define ENTRY(T, suffix)                                                                    \
    extern "C" __global__ void __launch_bounds__(1024) argmax_##suffix(                     \
        const T* logits, int* ids, int* flags, int rows, int vocab, long long stride) {     \
        argmax<T>(logits, ids, flags, rows, vocab, stride);                                 \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
