// SPDX-License-Identifier: MIT OR Apache-2.0
//
// ids[r] = index of the largest logit of row r; flags[r] = 1 when the row has a NaN or an infinity, else 0.
//
// Layout     logits: T, [rows, vocab], rows `stride` elements apart; ids, flags: int, [rows]; parts: 32 bits, [rows, 32,
//            4], scratch; arrivals: 32 bits, [rows], multiples of 32, to which 32 is added. parts begins at a multiple of
//            16 bytes; else the alignment of one element is enough. Rows at multiples of 16 bytes are read in packs.
// Launch     grid x = rows * n: n neighbouring blocks for each row, a power of two up to 32; block = whole warps, at most
//            256 threads; static shared memory. May begin before the kernel ahead has ended.
// Aliasing   none.
// Numbers    Comparisons alone. The lowest index wins a tie, -0 equals 0, and NaN counts as minus infinity: a row of
//            nothing else gives 0. vocab is at least 1; what lies between rows is not read.

#include "common/shares.cuh"

template <typename T>
__device__ __forceinline__ void argmax(const T* logits, int* ids, int* flags, unsigned* parts, unsigned* arrivals,
                                       int rows, int vocab, long long stride) {
    __shared__ Shares shared;
    let_next_begin();
    const Part part = part_of(rows);
    const long long r = part.row;
    const Row<T> row(logits + r * stride, vocab);
    wait_for_previous();
    if (r >= rows) {
        return;
    }
    read_part(shared, row, part, false);
    __syncthreads();
    if (threadIdx.x < WARP) {
        Found found = found_in_part(shared, part, false);
        if (last_of_row(found, parts, arrivals, part, false) && threadIdx.x == 0) {
            ids[r] = found.best == NO_KEY ? 0 : index_of(found.best);
            flags[r] = found.taint != 0;
        }
    }
}

#define ENTRY(T, suffix)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 5) argmax_##suffix(                                \
        const T* logits, int* ids, int* flags, unsigned int* parts, unsigned int* arrivals, int rows,    \
        int vocab, long long stride) {                                                                   \
        argmax<T>(logits, ids, flags, parts, arrivals, rows, vocab, stride);                             \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
