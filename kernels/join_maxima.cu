// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The next id of each row: the one that is forced, or that of its largest logit, of which all parts have been found.
//
// Layout     maxima: 32 bits, [rows, blocks, 4], as common/found.cuh says; counts: int, [rows, 9], as
//            metrale/ops/sample.py says; history: int, [slot_count, capacity]; cells: int, [cell_count]; ids, flags: int,
//            [rows]; logprobs: float, [rows], set to 0. maxima begins at a multiple of 16 bytes; else the alignment of one
//            element is enough.
// Launch     grid x = rows; block = one warp.
// Aliasing   none.
// Numbers    Comparisons alone, as `argmax` has them. ids[r] is 0 where no part has an element above minus infinity.
// Undefined  a slot outside [0, slot_count) of a row that keeps its id, a negative length, two rows that keep their ids in
//            one slot.

#include "common/chosen.cuh"
#include "common/shares.cuh"

extern "C" __global__ void __launch_bounds__(32) join_maxima_f32(const unsigned int* maxima, const int* counts,
                                                                int* history, int* cells, int* ids, float* logprobs,
                                                                int* flags, int rows, int blocks, int slot_count,
                                                                int capacity, int cell_count) {
    const long long r = blockIdx.x;
    const uint4* const parts = reinterpret_cast<const uint4*>(maxima) + r * blocks;
    Found mine = {NO_KEY, 0, 0.0f};
    for (int block = threadIdx.x; block < blocks; block += WARP) {
        const Found one = found_of(parts[block]);
        mine = {Max::of(mine.best, one.best), mine.taint | one.taint, 0.0f};
    }
    const Found found = joined(mine);
    if (threadIdx.x == 0) {
        const int* own = counts + r * COUNTS;
        const int forced = own[FORCED];
        const bool nothing = forced < 0 && found.best == NO_KEY;
        const int id = forced >= 0 ? forced : nothing ? 0 : index_of(found.best);
        const Chosen to{history, cells, ids, logprobs, flags, capacity, cell_count};
        to.store(r, own, id, 0.0f, found, nothing);
    }
}
