// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The k largest logits of each row in descending order, their indices, and log(sum(exp(row))).
//
// Layout     logits: T, [rows, vocab], rows `stride` elements apart; values: float, [rows, k]; ids: int, [rows, k];
//            lse: float, [rows]; flags: int, [rows]. The alignment of one element is enough; rows at multiples of 16 bytes
//            are read in packs.
// Launch     grid x = rows; block = 1,024 threads; static shared memory.
// Aliasing   none.
// Numbers    The lowest index wins a tie, -0 equals 0, and NaN counts as minus infinity. Sums in float, shifted by the
//            largest value, in an order that depends on vocab alone. flags[r] is 1 when the row has a NaN or an infinity.
//            What lies between rows is not read.
// Undefined  k below 1, above 64 or above vocab.
//
// One pass over the row: each thread learns the best of its own elements, and its part of the sum. From these the k best
// are selected.

#include "common/selection.cuh"

struct Shared {
    float maxima[WARP];
    float sums[WARP];
    Selection<8, 1024> selection;
};

template <typename T>
__device__ __forceinline__ void top_k(const T* logits, float* values, int* ids, float* lse, int* flags, int rows,
                                      int vocab, int k, long long stride) {
    __shared__ Shared shared;
    const long long r = blockIdx.x;
    if (r >= rows) {
        return;
    }
    const int thread = threadIdx.x;
    const Row<T> row(logits + r * stride, vocab);
    values += r * k;
    ids += r * k;

    const Seen seen = see<T, true>(row);
    const int tainted = __syncthreads_or(seen.taint != 0);
    const float largest = block_reduce<Max>(seen.best, shared.maxima);
    const float sum = block_reduce<Sum>(seen.sum * exp_of(seen.best - largest), shared.sums);
    if (thread == 0) {
        const bool finite = largest - largest == 0.0f;
        lse[r] = finite ? largest + logf(sum) : largest;
        flags[r] = tainted;
    }

    const auto order = [](float value, int index) { return key_of(value, index); };
    select(shared.selection, row, best_of(row, seen), k, order, [&](int place, Key key) {
        values[place] = value_of(key);
        ids[place] = index_of(key);
    });
}

#define ENTRY(T, suffix)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) top_k_##suffix(                                \
        const T* logits, float* values, int* ids, float* lse, int* flags, int rows, int vocab, int k, \
        long long stride) {                                                                           \
        top_k<T>(logits, values, ids, lse, flags, rows, vocab, k, stride);                            \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
