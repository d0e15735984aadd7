// SPDX-License-Identifier: MIT OR Apache-2.0
//
// What a block does to the scores of its row before an id is chosen: penalty, n-grams, bans and bad words.
// metrale/ops/processing.py says what is computed. What depends on the row alone is put into two bitmaps once; elements
// are then looked up in them.

#ifndef METRALE_PROCESSING_CUH
#define METRALE_PROCESSING_CUH

#include "common/element.cuh"

enum Mode { BANNED = 1, SUPPRESS = 2, KEEP = 4, LOGPROB = 8, WORDS = 16 };

// What a row asks for.
struct Asked {
    int length;
    int ngram;
    int mode;
    float penalty;

    __device__ __forceinline__ bool adjusts() const {
        return penalty != 1.0f || ngram > 0 || (mode & (BANNED | SUPPRESS | WORDS)) != 0;
    }
};

// The tables of a row: the rules of one slot, the history of another or the same. Places and ids are not trusted: no more
// is read than there is.
struct SlotTables {
    const unsigned* bans;  // [2, words]
    const int* bad_words;  // [word_room]
    const int* history;    // [capacity]
    int words;
    int word_room;
    int capacity;
};

__device__ __forceinline__ SlotTables tables_of(int slot, int rules, const unsigned* bans,
                                                const int* bad_words, const int* history, int words, int word_room,
                                                int capacity) {
    const long long place = rules;
    return {bans + place * 2 * words,
            bad_words + place * word_room,
            history + static_cast<long long>(slot) * capacity,
            words,
            word_room,
            capacity};
}

// A bit for each id of the vocabulary, in shared memory; `banned` is NULL for a row that asks for nothing.
struct Bitmaps {
    unsigned* banned;
    unsigned* penalised;
    float penalty;

    // The score after all of it. NaN stays NaN where the id may be chosen.
    __device__ __forceinline__ float apply(float score, int id) const {
        if (banned != nullptr) {
            const unsigned bit = 1u << (id & 31);
            if (penalised[id >> 5] & bit) {  // a product that is rounded here, whatever is subtracted from it later
                score = score > 0.0f ? score / penalty : __fmul_rn(score, penalty);
            }
            if (banned[id >> 5] & bit) {
                score = -infinity();
            }
        }
        return score;
    }
};

__device__ __forceinline__ void set_bit(unsigned* bitmap, int id, int vocab) {
    if (0 <= id && id < vocab) {
        atomicOr(&bitmap[id >> 5], 1u << (id & 31));
    }
}

// Whether `count` ids are the same.
__device__ __forceinline__ bool same_ids(const int* one, const int* other, int count) {
    bool same = true;
    for (int i = 0; same && i < count; ++i) {
        same = one[i] == other[i];
    }
    return same;
}

// Bans the last id of each bad word whose other ids the history, of `length` ids, ends in.
__device__ __forceinline__ void ban_words(unsigned* banned, const SlotTables& tables, int length, int vocab) {
    const int* table = tables.bad_words;
    const int count = tables.word_room > 1 ? min(table[0], tables.word_room - 2) : 0;
    for (int word = threadIdx.x; word < count; word += blockDim.x) {
        const int start = table[1 + word];
        const int end = table[2 + word];
        if (0 <= start && start < end && end <= tables.word_room && end - start <= length) {
            const int before = end - start - 1;  // ids of the word before its last
            if (before > 0 && same_ids(table + start, tables.history + length - before, before)) {
                set_bit(banned, table[end - 1], vocab);
            }
        }
    }
}

// Fills the bitmaps of ids that may not be chosen, and of those that a penalty is for. All threads of the block must
// call. Ends with a barrier.
__device__ __forceinline__ void fill_bitmaps(const Bitmaps& bitmaps, const Asked& asked, const SlotTables& tables,
                                             int vocab) {
    const int thread = threadIdx.x;
    const int threads = blockDim.x;
    const unsigned* planes = tables.bans;
    for (int i = thread; i < tables.words; i += threads) {
        bitmaps.banned[i] =
            (asked.mode & BANNED ? planes[i] : 0) | (asked.mode & SUPPRESS ? planes[tables.words + i] : 0);
        bitmaps.penalised[i] = 0;
    }
    __syncthreads();
    const int* history = tables.history;
    const int length = min(asked.length, tables.capacity);
    const bool penalty = asked.penalty != 1.0f;
    for (int i = thread; penalty && i < length; i += threads) {
        set_bit(bitmaps.penalised, history[i], vocab);
    }
    const int before = asked.ngram - 1;  // ids of an n-gram before its last
    for (int i = thread; before >= 0 && i < length - before; i += threads) {
        if (same_ids(history + i, history + length - before, before)) {
            set_bit(bitmaps.banned, history[i + before], vocab);
        }
    }
    if (asked.mode & WORDS) {
        ban_words(bitmaps.banned, tables, length, vocab);
    }
    __syncthreads();
}

#endif
