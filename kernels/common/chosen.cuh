// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Where the ids that a launch chooses go. metrale/ops/sample.py says what the columns of counts are.

#ifndef METRALE_CHOSEN_CUH
#define METRALE_CHOSEN_CUH

#include "common/found.cuh"
#include "common/processing.cuh"

enum Count { SLOT, LENGTH, TOP_K, NGRAM, MODE, MASK0, MASK1, CELL, FORCED, COUNTS };
enum Flag { NOT_FINITE = 1, NOTHING_LEFT = 2 };

// `history` is [slot_count, capacity], `cells` [cell_count], and the others have an element for each row.
struct Chosen {
    int* history;
    int* cells;
    int* ids;
    float* logprobs;
    int* flags;
    int capacity, cell_count;

    // What becomes of a row, by one thread. `counts` are the row's.
    __device__ __forceinline__ void store(long long r, const int* counts, int id, float logprob, const Found& found,
                                          bool nothing) const {
        ids[r] = id;
        flags[r] = (found.taint != 0 ? NOT_FINITE : 0) | (nothing ? NOTHING_LEFT : 0);
        logprobs[r] = logprob;
        if (0 <= counts[CELL] && counts[CELL] < cell_count) {
            cells[counts[CELL]] = id;
        }
        if ((counts[MODE] & KEEP) != 0 && counts[LENGTH] < capacity) {
            history[static_cast<long long>(counts[SLOT]) * capacity + counts[LENGTH]] = id;
        }
    }
};

#endif
