// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The next id of each row: logits processed, and then the largest or a draw. metrale/ops/sample.py says what is computed,
// and what the columns of counts and settings are.
//
// Layout     logits: T, [rows, vocab], rows `stride` elements apart; counts: int, [rows, 9]; settings: float, [rows, 4];
//            seeds: 64 bits, [rows]; bans: 32 bits, [slot_count, 2, words], a bit for each id; bad_words: int,
//            [slot_count, word_room]; history: int, [slot_count, capacity]; cells: int, [cell_count]; ids, flags: int,
//            [rows]; logprobs: float, [rows]; parts: 32 bits, [rows, 32, 4], scratch; arrivals: 32 bits, [rows],
//            multiples of 32, to which 32 is added. parts begins at a multiple of 16 bytes; else the alignment of one
//            element is enough. Rows at multiples of 16 bytes are read in packs.
// Launch     grid x = rows; block = 1,024 threads; static shared memory, and with `adjust` 2 * 4 * words bytes of dynamic.
//            The entry points for `greedy`: grid x = rows * n, n neighbouring blocks for each row, a power of two up to
//            32; block = whole warps, at most 256 threads; static shared memory.
// Aliasing   none.
// Numbers    Scores in float; sums of integers for top-k and top-p, in any order. NaN counts as minus infinity. Equal rows
//            give equal results wherever they lie. What lies between rows is not read; an id of the history outside the
//            vocabulary is passed over, and so is a bad word outside its table. ids[r] is in [0, vocab) whatever the row
//            holds.
// Undefined  a slot outside [0, slot_count) of a row that uses bans, bad words or history, a negative length, a forced id
//            outside [-1, vocab), two rows that keep their ids in one slot, words other than vocab / 32 rounded up.
//
// 1. One pass over the row for its flags, its largest logit, and the sum of its log-probability. With `greedy` that is
//    all, and several blocks share it.
// 2. With bans, bad words, penalties or masks, another for the largest of what they leave.
// 3. For a draw, top-k and top-p each find a bound on the distance from the largest: counts or weights of 2,048 ranges of
//    distances, the first range that reaches the limit, and in it again, until a range is one value. That takes one pass
//    for the first ranges, and at most three more: 2^32 distances are 11, 11 and 10 bits.
// 4. The last pass adds noise to what is within the bounds.
//
// Of a row whose id is forced there is the first pass alone.

#include "common/chosen.cuh"
#include "common/philox.cuh"
#include "common/processing.cuh"
#include "common/shares.cuh"

enum Setting { TEMPERATURE, TOP_P, MIN_P, PENALTY, SETTINGS };

using Mass = unsigned long long;

constexpr int BINS = 2048;                  // two for each thread
constexpr int BIN_BITS = 11;
constexpr float BINS_PER_UNIT = 64.0f;      // of the first pass; a power of two, so that their bounds are exact
constexpr unsigned FARTHEST = 0x7f7fffffu;  // the largest finite distance
constexpr float HOPELESS = 26.0f;           // noise differs by less than 25.7
constexpr float MOST = 3.40282347e38f;

struct Shared {
    unsigned low[BINS];  // of the sums; two words, because 64 bits are not added in shared memory by one instruction
    unsigned high[BINS];
    Mass sums[WARP];
    Key keys[2][WARP];
    Mass before;
    int bin;
    uint4 found;
    Shares shares;
};

// How far a score is behind the largest, as the bits of a float of at least 0, which are in its order.
__device__ __forceinline__ unsigned distance_of(float score) {
    return __float_as_uint(fabsf(score));
}

// 2^40 exp(score), cut to an integer.
__device__ __forceinline__ Mass weight_of(float score) {
    return __float2ull_rz(expf(score) * 1099511627776.0f);
}

// A row after penalty, bans and masks, and as scores: the distance to the largest, negative, over the temperature.
template <typename T>
struct Scores {
    Row<T> row;
    Bitmaps bitmaps;
    int mask0;
    int mask1;
    float largest;
    float temperature;

    __device__ __forceinline__ float processed(float value, int id) const {
        const float processed = bitmaps.apply(value, id);
        return id == mask0 || id == mask1 ? -infinity() : fmaxf(processed, -infinity());
    }

    // 0 or less; minus infinity for what can never be chosen.
    __device__ __forceinline__ float score(float value, int id) const {
        return fmaxf((fminf(processed(value, id), MOST) - largest) / temperature, -infinity());
    }

    // visit(values, first) for each four neighbours of this thread; minus infinity where the row has no such element.
    template <typename Visit>
    __device__ __forceinline__ void each_four(Visit visit) const {
        const int threads = blockDim.x;
        const int thread = threadIdx.x;
        uint4 next = thread < row.packs ? row.bits(thread) : make_uint4(0, 0, 0, 0);
        for (int pack = thread; pack < row.packs; pack += threads) {
            const uint4 bits = next;
            if (pack + threads < row.packs) {  // under way while this one is looked at
                next = row.bits(pack + threads);
            }
            float values[PACK<T>];
            unpack(bits, values, T{});
#pragma unroll
            for (int i = 0; i < PACK<T>; i += 4) {
                const float four[4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
                visit(four, pack * PACK<T> + i);
            }
        }
        const int first = row.packs * PACK<T> + 4 * thread;
        if (first < row.vocab) {
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                four[i] = first + i < row.vocab ? to_float(row.from[first + i]) : -infinity();
            }
            visit(four, first);
        }
    }

    // visit(value, id) for each element of this thread.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        each_four([&](const float(&values)[4], int first) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                visit(values[i], first + i);
            }
        });
    }
};

// The key of the best processed element that the thread has, NO_KEY when there is none above minus infinity.
template <typename T>
__device__ __forceinline__ Key best_processed(const Scores<T>& scores) {
    Key best = NO_KEY;
    scores.each([&](float value, int id) {
        const float processed = scores.processed(value, id);
        best = processed > -infinity() ? Max::of(best, key_of(processed, id)) : best;
    });
    return best;
}

__device__ __forceinline__ void add(Shared& shared, int bin, Mass mass) {
    const unsigned low = static_cast<unsigned>(mass);
    const unsigned old = atomicAdd(&shared.low[bin], low);
    const unsigned high = static_cast<unsigned>(mass >> 32) + (old + low < old);
    if (high != 0) {
        atomicAdd(&shared.high[bin], high);
    }
}

// What is in a bin, which is empty afterwards.
__device__ __forceinline__ Mass take(Shared& shared, int bin) {
    const Mass mass = static_cast<Mass>(shared.high[bin]) << 32 | shared.low[bin];
    shared.low[bin] = 0;
    shared.high[bin] = 0;
    return mass;
}

// sum * top_p, cut to an integer, at least 1; top_p is below 1, and cut to a multiple of 2^-32.
__device__ __forceinline__ Mass share_of(Mass sum, float top_p) {
    const Mass share = __float2ull_rz(fmaxf(top_p, 0.0f) * 4294967296.0f);
    const Mass low = (sum & 0xffffffffu) * share >> 32;
    return Max::of((sum >> 32) * share + low, 1);
}

// The largest distance of at most `most` such that what is nearer weighs less than a limit: `limit` elements, or, with
// WEIGHTS, the share top_p of what everything up to `most` weighs. All threads must call; the bins are empty before and
// afterwards.
template <bool WEIGHTS, typename T>
__device__ __forceinline__ unsigned bound_of(Shared& shared, const Scores<T>& scores, unsigned most, Mass limit,
                                             float top_p) {
    const int thread = threadIdx.x;
    unsigned nearest = 0;  // the range that is looked at
    unsigned farthest = most;
    Mass before = 0;  // what is nearer than that
    bool first = true;
#pragma unroll 1
    do {
        const int shift = max(32 - __clz(static_cast<int>(farthest - nearest)) - BIN_BITS, 0);
        scores.each([&](float value, int id) {
            const float score = scores.score(value, id);
            const unsigned distance = distance_of(score);
            if (nearest <= distance && distance <= farthest) {
                const int linear = min(__float2int_rz(fabsf(score) * BINS_PER_UNIT), BINS - 1);
                const int bin = first ? linear : static_cast<int>((distance - nearest) >> shift);
                const Mass mass = WEIGHTS ? weight_of(score) : 1;
                if (mass != 0) {
                    add(shared, bin, mass);
                }
            }
        });
        __syncthreads();

        const Mass even = take(shared, 2 * thread);
        const Mass odd = take(shared, 2 * thread + 1);
        Mass through = even + odd;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const Mass lower = __shfl_up_sync(ALL_LANES, through, step);
            through += thread % WARP >= step ? lower : 0;
        }
        if (thread % WARP == WARP - 1) {
            shared.sums[thread / WARP] = through;
        }
        __syncthreads();
        Mass sum = before;
        through += before;
        for (int warp = 0; warp < static_cast<int>(blockDim.x) / WARP; ++warp) {
            sum += shared.sums[warp];
            through += warp < thread / WARP ? shared.sums[warp] : 0;
        }
        if (WEIGHTS && first) {
            limit = share_of(sum, top_p);
        }
        if (sum < limit) {  // fewer elements than that
            return most;
        }
        if (through >= limit && through - odd - even < limit) {  // in one thread
            const bool second = through - odd < limit;
            shared.bin = 2 * thread + second;
            shared.before = second ? through - odd : through - odd - even;
        }
        __syncthreads();

        const int bin = shared.bin;
        before = shared.before;
        if (first) {
            const float start = static_cast<float>(bin) / BINS_PER_UNIT;
            nearest = __float_as_uint(start);
            farthest = bin == BINS - 1 ? most : min(most, __float_as_uint(start + 1.0f / BINS_PER_UNIT) - 1);
        } else {
            nearest += static_cast<unsigned>(bin) << shift;
            farthest = min(farthest, nearest + ((1u << shift) - 1));
        }
        first = false;
    } while (nearest < farthest);
    return nearest;
}

// The key of this thread's best total of score and noise among what top-k, top-p and min-p keep.
template <typename T>
__device__ __forceinline__ Key draw(Shared& shared, const Scores<T>& scores, const int* counts, const float* settings,
                                    unsigned long long seed) {
    unsigned bound = FARTHEST;
    if (0 < counts[TOP_K] && counts[TOP_K] < scores.row.vocab) {
        bound = bound_of<false>(shared, scores, bound, static_cast<Mass>(counts[TOP_K]), 1.0f);
    }
    if (settings[TOP_P] < 1.0f) {
        bound = bound_of<true>(shared, scores, bound, 0, settings[TOP_P]);
    }
    bound = min(bound, __float_as_uint(HOPELESS));
    const float lowest = settings[MIN_P] > 0.0f ? fminf(logf(settings[MIN_P]), 0.0f) : -infinity();
    const unsigned length = static_cast<unsigned>(counts[LENGTH]);
    Key best = NO_KEY;
    scores.each_four([&](const float(&values)[4], int first) {
        float kept[4];
        bool any = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float score = scores.score(values[i], first + i);
            const bool keeps = distance_of(score) <= bound && score >= lowest;
            kept[i] = keeps ? score : -infinity();
            any |= keeps;
        }
        if (any) {
            const uint4 words = philox(make_uint4(static_cast<unsigned>(first) / 4, length, 0, 0), seed);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (kept[i] > -infinity()) {
                    best = Max::of(best, key_of(kept[i] + gumbel(word(words, i)), first + i));
                }
            }
        }
    });
    return best;
}

// What a launch is given.
template <typename T>
struct Given {
    const T* logits;
    const int* counts;
    const float* settings;
    const unsigned long long* seeds;
    const unsigned* bans;
    const int* bad_words;
    int* history;
    int* cells;
    int* ids;
    float* logprobs;
    int* flags;
    unsigned* parts;
    unsigned* arrivals;
    int rows;
    int vocab;
    long long stride;
    int words;
    int word_room;
    int capacity;
    int cell_count;
    int adjust;

    // Stores what becomes of a row, by one thread. `counts` are the row's, `chosen` is the logit of the id.
    __device__ __forceinline__ void store(long long r, const int* counts, int id, float chosen, const Found& found,
                                          bool nothing) const {
        const bool scored = counts[MODE] & LOGPROB;
        const float logprob = scored ? fmaxf(chosen, -infinity()) + 0.0f - found.largest() - logf(found.sum) : 0.0f;
        const Chosen to{history, cells, ids, logprobs, flags, capacity, cell_count};
        to.store(r, counts, id, logprob, found, nothing);
    }
};

template <typename T>
__device__ __forceinline__ void sample(const Given<T>& given) {
    extern __shared__ unsigned planes[];  // [2, words]
    __shared__ Shared shared;
    const long long r = blockIdx.x;
    if (r >= given.rows) {
        return;
    }
    const int thread = threadIdx.x;
    const Row<T> row(given.logits + r * given.stride, given.vocab);
    const int* counts = given.counts + r * COUNTS;
    const float* settings = given.settings + r * SETTINGS;
    const Asked asked{counts[LENGTH], counts[NGRAM], counts[MODE], settings[PENALTY]};
    const int forced = counts[FORCED];
    const bool scored = counts[MODE] & LOGPROB;
    take(shared, 2 * thread);
    take(shared, 2 * thread + 1);

    const Part part{1, 0, r};
    read_part(shared.shares, row, part, scored);
    __syncthreads();
    if (thread < WARP) {
        Found all = found_in_part(shared.shares, part, scored);
        last_of_row(all, given.parts, given.arrivals, part, scored);
        shared.found = all.words();
    }
    __syncthreads();

    const bool adjusted = given.adjust != 0 && forced < 0 && asked.adjusts();
    const Bitmaps bitmaps{adjusted ? planes : nullptr, planes + given.words, asked.penalty};
    if (adjusted) {
        const SlotTables tables = tables_of(counts[SLOT], counts[SLOT], given.bans, given.bad_words, given.history,
                                            given.words, given.word_room, given.capacity);
        fill_bitmaps(bitmaps, asked, tables, given.vocab);
    }
    Scores<T> scores{row, bitmaps, counts[MASK0], counts[MASK1], 0.0f, settings[TEMPERATURE]};
    Key best = found_of(shared.found).best;
    if (forced >= 0) {
        best = key_of(0.0f, forced);
    } else if (adjusted || counts[MASK0] >= 0 || counts[MASK1] >= 0) {
        best = block_reduce<Max>(best_processed(scores), shared.keys[0]);
    }
    if (forced < 0 && settings[TEMPERATURE] > 0.0f && best != NO_KEY) {
        scores.largest = fminf(value_of(best), MOST);
        best = block_reduce<Max>(draw(shared, scores, counts, settings, given.seeds[r]), shared.keys[1]);
    }
    if (thread == 0) {
        const int id = best == NO_KEY ? 0 : index_of(best);
        given.store(r, counts, id, to_float(row.from[id]), found_of(shared.found), best == NO_KEY);
    }
}

// Of rows whose ids are forced, or those of their largest logits.
template <typename T>
__device__ __forceinline__ void take_largest(const Given<T>& given) {
    __shared__ Shares shared;
    const Part part = part_of(given.rows);
    const long long r = part.row;
    if (r >= given.rows) {
        return;
    }
    const Row<T> row(given.logits + r * given.stride, given.vocab);
    const int* counts = given.counts + r * COUNTS;
    const bool scored = counts[MODE] & LOGPROB;
    read_part(shared, row, part, scored);
    __syncthreads();
    if (threadIdx.x < WARP) {
        Found found = found_in_part(shared, part, scored);
        if (last_of_row(found, given.parts, given.arrivals, part, scored) && threadIdx.x == 0) {
            const int forced = counts[FORCED];
            const bool nothing = forced < 0 && found.best == NO_KEY;
            const int id = forced >= 0 ? forced : nothing ? 0 : index_of(found.best);
            const float chosen = forced >= 0 && scored ? to_float(row.from[forced]) : found.largest();
            given.store(r, counts, id, chosen, found, nothing);
        }
    }
}

#define ENTRY(T, suffix, body, threads, blocks)                                                                      \
    extern "C" __global__ void __launch_bounds__(threads, blocks) sample_##suffix(                                   \
        const T* logits, const int* counts, const float* settings, const unsigned long long* seeds,                  \
        const unsigned int* bans, const int* bad_words, int* history, int* cells, int* ids, float* logprobs,         \
        int* flags, unsigned int* parts, unsigned int* arrivals, int rows, int vocab, long long stride,              \
        int slot_count, int words, int word_room, int capacity, int cell_count, int adjust, int greedy) {            \
        body<T>({logits, counts, settings, seeds, bans, bad_words, history, cells, ids, logprobs, flags, parts,      \
                 arrivals, rows, vocab, stride, words, word_room, capacity, cell_count, adjust});                    \
    }
ENTRY(float, f32, sample, 1024, 1)
ENTRY(f16, f16, sample, 1024, 1)
ENTRY(bf16, bf16, sample, 1024, 1)
ENTRY(float, f32_greedy, take_largest, 256, 4)
ENTRY(f16, f16_greedy, take_largest, 256, 4)
ENTRY(bf16, bf16_greedy, take_largest, 256, 4)
