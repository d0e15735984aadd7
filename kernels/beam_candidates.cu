// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The k largest processed log-probabilities of each row, in descending order, and their ids.
// metrale/ops/beam_candidates.py says what is computed, and what the columns of counts are.
//
// Layout     logits: T, [rows, vocab], rows `stride` elements apart; counts: int, [rows, 7]; penalties: float, [rows];
//            bans: 32 bits, [slot_count, 2, words], a bit for each id; bad_words: int, [slot_count, word_room]; history:
//            int, [slot_count, capacity]; values: float, [rows, most]; ids: int, [rows, most]; flags: int, [rows]. The
//            alignment of one element is enough; rows at multiples of 16 bytes are read in packs.
// Launch     grid x = rows; block = 1,024 threads; static shared memory, and with `adjust` 2 * 4 * words bytes of dynamic.
// Aliasing   none.
// Numbers    The lowest index wins a tie, -0 equals 0, and NaN counts as minus infinity. Sums in float, shifted by the
//            largest value, in an order that depends on vocab alone. flags[r] is 1 when the row has a NaN or an infinity.
//            What lies between rows is not read; an id of the history outside the vocabulary is passed over, and so is a
//            bad word outside its table.
// Undefined  a slot outside [0, slot_count) of a row that uses bans, bad words or history, a negative length, a forced id
//            outside [-1, vocab), k below 1 or above most, most above 256, words other than vocab / 32 rounded up.
//
// One pass over the row gives the largest logit and the sum; where something is processed, another gives each thread the
// best of its own elements. From these the k best are selected, among logits, or with a penalty among log-probabilities.

#include "common/processing.cuh"
#include "common/selection.cuh"

enum Count { SLOT, LENGTH, K, NGRAM, MODE, FORCED, RULES, COUNTS };

struct Shared {
    float maxima[WARP];
    float sums[WARP];
    Selection<2, 1024> selection;  // twice as many holders as there can be results
};

// The key of an element: of its log-probability where there is a penalty, and else of its logit.
struct Order {
    Bitmaps bitmaps;
    bool penalised;
    float largest;
    float log_sum;

    // NaN when the largest logit is not finite.
    __device__ __forceinline__ float logprob(float value) const {
        return value - largest - log_sum;
    }

    __device__ __forceinline__ Key operator()(float value, int id) const {
        return key_of(bitmaps.apply(penalised ? logprob(value) : value, id), id);
    }

    // What a key stands for.
    __device__ __forceinline__ float result(Key key) const {
        const float value = value_of(key);
        return penalised ? value : fmaxf(logprob(value), -infinity());
    }
};

// The best of the elements of this thread.
template <typename T>
__device__ __forceinline__ Key best_of(const Row<T>& row, const Order& order) {
    Key best = NO_KEY;
    const int threads = blockDim.x;
    for (int group = threadIdx.x; group < row.packs; group += GROUP * threads) {
        uint4 packs[GROUP];
        row.load(group, packs);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const int pack = group + g * threads;
            if (pack < row.packs) {
                float values[PACK<T>];
                unpack(packs[g], values, T{});
#pragma unroll
                for (int i = 0; i < PACK<T>; ++i) {
                    best = Max::of(best, order(values[i], pack * PACK<T> + i));
                }
            }
        }
    }
    const int loose = row.loose(threadIdx.x);
    return loose < row.vocab ? Max::of(best, order(to_float(row.from[loose]), loose)) : best;
}

template <typename T>
__device__ __forceinline__ void beam_candidates(const T* logits, const int* counts, const float* penalties,
                                                const unsigned* bans, const int* bad_words, const int* history,
                                                float* values, int* ids, int* flags, int rows, int vocab,
                                                long long stride, int words, int word_room, int capacity, int most,
                                                int adjust) {
    extern __shared__ unsigned planes[];  // [2, words]
    __shared__ Shared shared;
    const long long r = blockIdx.x;
    if (r >= rows) {
        return;
    }
    const int thread = threadIdx.x;
    const Row<T> row(logits + r * stride, vocab);
    counts += r * COUNTS;
    values += r * most;
    ids += r * most;
    const int k = min(min(counts[K], most), vocab);
    const int forced = counts[FORCED];
    for (int place = k + thread; place < most; place += blockDim.x) {
        values[place] = -infinity();
        ids[place] = 0;
    }

    const Seen seen = see<T, true>(row);
    const int tainted = __syncthreads_or(seen.taint != 0);
    if (thread == 0) {
        flags[r] = tainted;
    }
    if (forced >= 0) {
        for (int place = thread; place < k; place += blockDim.x) {
            values[place] = place == 0 ? 0.0f : -infinity();
            ids[place] = place == 0 ? forced : place - (place <= forced);  // all others from the lowest up
        }
        return;
    }
    const float largest = block_reduce<Max>(seen.best, shared.maxima);
    const float log_sum = logf(block_reduce<Sum>(seen.sum * exp_of(seen.best - largest), shared.sums));

    const Asked asked{counts[LENGTH], counts[NGRAM], counts[MODE], penalties[r]};
    const bool adjusted = adjust != 0 && asked.adjusts();
    const bool penalised = adjusted && asked.penalty != 1.0f;
    const Order order{{adjusted ? planes : nullptr, planes + words, asked.penalty}, penalised, largest, log_sum};
    if (adjusted) {
        const SlotTables tables =
            tables_of(counts[SLOT], counts[RULES], bans, bad_words, history, words, word_room, capacity);
        fill_bitmaps(order.bitmaps, asked, tables, vocab);
    }
    const Key best = adjusted ? best_of(row, order) : best_of(row, seen);
    select(shared.selection, row, best, k, order, [&](int place, Key key) {
        values[place] = order.result(key);
        ids[place] = index_of(key);
    });
}

#define ENTRY(T, suffix)                                                                                           \
    extern "C" __global__ void __launch_bounds__(1024) beam_candidates_##suffix(                                   \
        const T* logits, const int* counts, const float* penalties, const unsigned int* bans, const int* bad_words, \
        const int* history, float* values, int* ids, int* flags, int rows, int vocab, long long stride,            \
        int slot_count, int words, int word_room, int capacity, int most, int adjust) {                            \
        beam_candidates<T>(logits, counts, penalties, bans, bad_words, history, values, ids, flags, rows, vocab,   \
                           stride, words, word_room, capacity, most, adjust);                                      \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
