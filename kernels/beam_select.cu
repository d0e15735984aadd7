// SPDX-License-Identifier: MIT OR Apache-2.0
//
// One step of beam search for each group of beams: candidates chosen, finished hypotheses pooled, the tables of the beams
// moved after their parents, and whether to stop. metrale/ops/beam_select.py says what is computed, and
// metrale/ops/beam_layout.py what the columns are.
//
// Layout     values: float, ids: int, [candidate_rows, most]; flags: int, [candidate_rows]; counts: int, [groups, 8];
//            settings: float, [groups, 2]; members: int, [member_count]; bans: 32 bits, [slot_count, 2, words]; running:
//            float, state: int, [slot_count]; history, ancestry: int, logps: float, [slot_count, capacity]; pool: int,
//            [slot_count, pool_width]; cells: int, [cell_count]; results: int, [groups]. The alignment of one element is
//            enough. All contiguous.
// Launch     grid x = groups; block = 256 threads; static shared memory.
// Aliasing   none.
// Numbers    Additions and divisions in float, each rounded once; no product stands near a sum. NaN counts as minus
//            infinity. An id outside the bits of bans is no EOS id. A group's result depends on nothing but the group.
// Undefined  columns out of range, a slot that two beams of the launch share, values that are not from the largest down,
//            a pool that this kernel did not write.
//
// 1. One warp merges the rows: each lane has the heads of two beams, the best head of all is the next candidate.
// 2. The places of pool and of beams are counted: how many stand before each.
// 3. What enters the pool is copied there from the tables, before they move.
// 4. The tables move by pieces of columns: a piece of all rows into shared memory, and from there, after a barrier, to
//    where it belongs.

#include "common/logits.cuh"

enum Count { ROW, MEMBER, BEAMS, KEPT, FRESH, LENGTH, MODE, EOS, COUNTS };
enum Setting { NORM, BOUND_NORM, SETTINGS };
enum Mode { AT_LIMIT = 1, EARLY = 2 };
enum State { DONE = 1, NOT_FINITE = 2, NO_CHOICE = 4, STOPPED = 8 };
enum Column { ORDER, SCORE, HELD, IDS };

constexpr int MAX_BEAMS = 64;
constexpr int MAX_KEPT = 256;
constexpr int TABLES = 3;
constexpr int PIECE = 2048;  // elements of each table that are moved at a time
constexpr float FAR = -1e9f;

struct Shared {
    int slots[MAX_BEAMS];
    float running[MAX_BEAMS];
    // candidates that are kept, best first
    float scores[MAX_KEPT];
    float logps[MAX_KEPT];
    int beams[MAX_KEPT];
    int ids[MAX_KEPT];
    bool finished[MAX_KEPT];
    float keys[MAX_KEPT];       // of a candidate that goes on
    int chosen[MAX_BEAMS];      // the candidate that beam j goes on with
    float held[MAX_BEAMS];      // scores of the pool, best first
    int storage[MAX_BEAMS];     // and the members that store them
    float entering[MAX_BEAMS];  // scores of what has finished, best first
    int candidate[MAX_BEAMS];   // and which candidates they are
    bool taken[MAX_BEAMS];      // members that store what stays
    int order[MAX_BEAMS];       // members by place in the new pool, -1 for none
    int entered[MAX_BEAMS];     // the candidate that has the place, -1 where what is there was there before
    float best[MAX_BEAMS];      // the scores of the new pool
    int held_count;
    int entering_count;
    int piece[TABLES][PIECE];
};

// What the launch was given, and one group of it.
struct Group {
    const float* values;
    const int* ids;
    const unsigned* eos;
    float* running;
    int* tables[TABLES];  // history, ancestry, and logps as bits
    int* pool;
    int most;
    int words;
    int capacity;
    int pool_width;
    int beams;
    int kept;
    int length;
    int mode;
    int row;
    bool fresh;

    __device__ __forceinline__ long long at(int slot) const {
        return static_cast<long long>(slot) * capacity;
    }

    __device__ __forceinline__ int* pool_row(int slot) const {
        return pool + static_cast<long long>(slot) * pool_width;
    }

    __device__ __forceinline__ long long candidates_of(int beam) const {
        return static_cast<long long>(row + (fresh ? 0 : beam)) * most;
    }

    __device__ __forceinline__ bool ends(int id) const {
        return (mode & AT_LIMIT) != 0 || (0 <= id && id >> 5 < words && (eos[id >> 5] >> (id & 31) & 1) != 0);
    }
};

enum Table { HISTORY, ANCESTRY, LOGPS };

__device__ __forceinline__ float ordered(float value) {
    return fmaxf(value, -infinity());
}

// All beams as copies of the first, and an empty pool. The caller's barrier ends it. The ancestry is cleared to its end:
// a pass over a search that is done already, enqueued before the host knew, reads columns that no step has written.
__device__ __forceinline__ void begin(const Group& group, const Shared& shared) {
    const int thread = threadIdx.x;
    const int threads = blockDim.x;
    const int* first = group.tables[HISTORY] + group.at(shared.slots[0]);
    for (int beam = 0; beam < group.beams; ++beam) {
        const long long row = group.at(shared.slots[beam]);
        for (int position = thread; position < group.capacity; position += threads) {
            group.tables[ANCESTRY][row + position] = 0;
            if (position < group.length) {
                if (beam > 0) {
                    group.tables[HISTORY][row + position] = first[position];
                }
                group.tables[LOGPS][row + position] = 0;
            }
        }
    }
    if (thread < group.beams) {
        group.running[shared.slots[thread]] = thread == 0 ? 0.0f : FAR;
        group.pool_row(shared.slots[thread])[ORDER] = -1;
    }
}

// One beam's candidates, from the best on; a beam that is not there has none.
struct Head {
    const float* values;
    const int* ids;
    float running;
    int beam;
    int rank = 0;
    float value;
    float next;  // loaded ahead

    __device__ __forceinline__ Head(const Group& group, const Shared& shared, int index)
        : values(group.values), ids(group.ids), running(0.0f), beam(index), value(0.0f), next(0.0f) {
        if (beam < group.beams) {
            values += group.candidates_of(beam);
            ids += group.candidates_of(beam);
            running = shared.running[beam];
            value = values[0];
            next = group.kept > 1 ? values[1] : value;
        }
    }

    __device__ __forceinline__ float score() const {
        return ordered(running + value);
    }

    __device__ __forceinline__ Key key(const Group& group) const {
        return beam < group.beams ? key_of(score(), beam) : NO_KEY;
    }

    // Takes the head as candidate `place`.
    __device__ __forceinline__ void take(const Group& group, Shared& shared, int place) {
        shared.scores[place] = score();
        shared.logps[place] = value;
        shared.beams[place] = beam;
        shared.ids[place] = rank;  // the id is loaded when all are known
        ++rank;
        value = next;
        if (rank + 1 < group.kept) {
            next = values[rank + 1];
        }
    }
};

// The best candidates of all beams, in order. One warp.
__device__ __forceinline__ void merge(const Group& group, Shared& shared) {
    const int lane = threadIdx.x;
    Head low(group, shared, lane);
    Head high(group, shared, lane + WARP);
    for (int place = 0; place < group.kept; ++place) {
        const int best = index_of(warp_reduce<Max>(Max::of(low.key(group), high.key(group))));
        if (best == low.beam) {
            low.take(group, shared, place);
        } else if (best == high.beam) {
            high.take(group, shared, place);
        }
    }
}

// The candidates' ids, and which of them are finished. One thread each; the caller's barrier ends it.
__device__ __forceinline__ bool identify(const Group& group, Shared& shared) {
    const int place = threadIdx.x;
    if (place >= group.kept) {
        return true;
    }
    const int id = group.ids[group.candidates_of(shared.beams[place]) + shared.ids[place]];
    const bool finished = group.ends(id);
    shared.ids[place] = id;
    shared.finished[place] = finished;
    shared.keys[place] = finished ? shared.scores[place] + FAR : shared.scores[place];
    return finished;
}

// What the pool holds, and what comes to it. Ends with a barrier.
__device__ __forceinline__ void contenders(const Group& group, Shared& shared, float norm, int state) {
    const int member = threadIdx.x;
    const bool there = member < group.beams;
    const int storage = there ? group.pool_row(shared.slots[member])[ORDER] : -1;
    const bool holds = storage >= 0;
    const int held = __syncthreads_count(holds);
    if (there) {
        shared.taken[member] = false;
        shared.order[member] = -1;
        shared.entered[member] = -1;
    }
    if (holds) {
        shared.storage[member] = storage;
        shared.held[member] = __int_as_float(group.pool_row(shared.slots[storage])[SCORE]);
    }
    const bool enters = there && shared.finished[member];
    if (enters) {
        int before = 0;
        for (int other = 0; other < member; ++other) {
            before += shared.finished[other];
        }
        float score = shared.scores[member] / norm;
        if ((group.mode & EARLY) != 0 && held == group.beams) {
            score += FAR;
        }
        if ((state & STOPPED) != 0) {
            score += FAR;
        }
        shared.entering[before] = ordered(score);
        shared.candidate[before] = member;
    }
    const int entering = __syncthreads_count(enters);
    if (member == 0) {
        shared.held_count = held;
        shared.entering_count = entering;
    }
    __syncthreads();
}

// The new pool: who has which place, and where what is new is stored. Ends with a barrier.
__device__ __forceinline__ int rank_pool(const Group& group, Shared& shared) {
    const int thread = threadIdx.x;
    bool placed = false;
    if (thread < shared.held_count) {
        const float score = shared.held[thread];
        int place = thread;
        for (int i = 0; i < shared.entering_count; ++i) {
            place += shared.entering[i] > score;
        }
        placed = place < group.beams;
        if (placed) {
            shared.best[place] = score;
            shared.order[place] = shared.storage[thread];
            shared.taken[shared.storage[thread]] = true;
        }
    }
    const int mine = thread - MAX_BEAMS;
    if (0 <= mine && mine < shared.entering_count) {
        const float score = shared.entering[mine];
        int place = mine;
        for (int i = 0; i < shared.held_count; ++i) {
            place += shared.held[i] >= score;
        }
        placed = score > FAR && place < group.beams;
        if (placed) {
            shared.best[place] = score;
            shared.entered[place] = shared.candidate[mine];
        }
    }
    const int held = __syncthreads_count(placed);
    if (thread < group.beams && shared.entered[thread] >= 0) {  // the n-th that is new has the n-th row that is free
        int before = 0;
        for (int place = 0; place < thread; ++place) {
            before += shared.entered[place] >= 0;
        }
        int member = 0;
        while (shared.taken[member] || before-- > 0) {
            ++member;
        }
        shared.order[thread] = member;
    }
    __syncthreads();
    return held;
}

// Writes the pool's order and what has entered it.
__device__ __forceinline__ void store_pool(const Group& group, const Shared& shared) {
    const int thread = threadIdx.x;
    const int threads = blockDim.x;
    if (thread < group.beams) {
        group.pool_row(shared.slots[thread])[ORDER] = shared.order[thread];
    }
    for (int place = 0; place < group.beams; ++place) {
        const int candidate = shared.entered[place];
        if (candidate < 0) {
            continue;
        }
        int* row = group.pool_row(shared.slots[shared.order[place]]);
        const long long parent = group.at(shared.slots[shared.beams[candidate]]);
        for (int position = thread; position < group.length; position += threads) {
            row[IDS + position] = group.tables[HISTORY][parent + position];
            row[IDS + group.capacity + position] = group.tables[LOGPS][parent + position];
        }
        if (thread == 0) {
            row[SCORE] = __float_as_int(shared.best[place]);
            row[HELD] = group.length + 1;
            row[IDS + group.length] = shared.ids[candidate];
            row[IDS + group.capacity + group.length] = __float_as_int(shared.logps[candidate]);
        }
    }
}

// The candidates that go on. Ends with a barrier.
__device__ __forceinline__ void choose(const Group& group, Shared& shared) {
    const int mine = threadIdx.x;
    if (mine < group.kept) {
        const float key = shared.keys[mine];
        int place = 0;
        for (int i = 0; i < group.kept; ++i) {
            place += shared.keys[i] > key || (shared.keys[i] == key && i < mine);
        }
        if (place < group.beams) {
            shared.chosen[place] = mine;
        }
    }
    __syncthreads();
}

// Moves the tables after the beams' parents, and writes the new column.
__device__ __forceinline__ void go_on(const Group& group, Shared& shared, int* cells) {
    const int thread = threadIdx.x;
    const int threads = blockDim.x;
    const int columns = PIECE / group.beams;
    for (int first = 0; first < group.length; first += columns) {
        const int width = min(columns, group.length - first);
        for (int i = thread; i < group.beams * width; i += threads) {
            const int parent = shared.beams[shared.chosen[i / width]];
            const long long from = group.at(shared.slots[parent]) + first + i % width;
#pragma unroll
            for (int table = 0; table < TABLES; ++table) {
                shared.piece[table][i] = group.tables[table][from];
            }
        }
        __syncthreads();
        for (int i = thread; i < group.beams * width; i += threads) {
            const long long to = group.at(shared.slots[i / width]) + first + i % width;
#pragma unroll
            for (int table = 0; table < TABLES; ++table) {
                group.tables[table][to] = shared.piece[table][i];
            }
        }
        __syncthreads();
    }
    if (thread < group.beams) {
        const int slot = shared.slots[thread];
        const int candidate = shared.chosen[thread];
        const long long to = group.at(slot) + group.length;
        group.running[slot] = shared.keys[candidate];
        group.tables[HISTORY][to] = shared.ids[candidate];
        group.tables[ANCESTRY][to] = thread;
        group.tables[LOGPS][to] = __float_as_int(shared.logps[candidate]);
        cells[slot] = shared.ids[candidate];
    }
}

// The state after a step: `held` hypotheses in the pool, `finished` when all candidates are.
__device__ __forceinline__ int stop(const Group& group, const Shared& shared, int state, int held, bool finished,
                                    float bound_norm) {
    const bool full = held == group.beams;
    const float worst = full ? shared.best[held - 1] : FAR;
    if (!(shared.keys[shared.chosen[0]] / bound_norm > worst)) {
        state |= STOPPED;
    }
    if ((state & STOPPED) != 0 || ((group.mode & EARLY) != 0 && full) || finished) {
        state |= held > 0 ? DONE : DONE | NO_CHOICE;
    }
    return state;
}

extern "C" __global__ void __launch_bounds__(256) beam_select_f32(
    const float* values, const int* ids, const int* flags, const int* counts, const float* settings,
    const int* members, const unsigned int* bans, float* running, int* history, int* ancestry, float* logps, int* pool,
    int* state, int* cells, int* results, int groups, int candidate_rows, int most, int member_count, int slot_count,
    int words, int capacity, int pool_width, int cell_base, int cell_count) {
    __shared__ Shared shared;
    const long long g = blockIdx.x;
    if (g >= groups) {
        return;
    }
    const int thread = threadIdx.x;
    counts += g * COUNTS;
    settings += g * SETTINGS;
    const unsigned* eos = bans + (2 * static_cast<long long>(counts[EOS]) + 1) * words;
    const Group group{values,
                      ids,
                      eos,
                      running,
                      {history, ancestry, reinterpret_cast<int*>(logps)},
                      pool,
                      most,
                      words,
                      capacity,
                      pool_width,
                      counts[BEAMS],
                      counts[KEPT],
                      counts[LENGTH],
                      counts[MODE],
                      counts[ROW],
                      counts[FRESH] != 0};
    int* const own = state + members[counts[MEMBER]];
    const int before = group.fresh ? 0 : *own;
    if ((before & DONE) != 0) {
        if (thread == 0) {
            results[g] = before;
        }
        return;
    }
    if (thread < group.beams) {
        shared.slots[thread] = members[counts[MEMBER] + thread];
    }
    __syncthreads();
    if (group.fresh) {
        begin(group, shared);
    }
    const int rows = group.fresh ? 1 : group.beams;
    const bool flagged = __syncthreads_or(thread < rows && flags[group.row + thread] != 0) != 0;
    int after = before | DONE | NOT_FINITE;
    if (!flagged) {
        if (thread < group.beams) {
            shared.running[thread] = running[shared.slots[thread]];
        }
        __syncthreads();
        if (thread < WARP) {
            merge(group, shared);
        }
        __syncthreads();
        const bool finished = __syncthreads_and(identify(group, shared)) != 0;
        contenders(group, shared, settings[NORM], before);
        const int held = rank_pool(group, shared);
        store_pool(group, shared);
        choose(group, shared);  // its barrier also stands between the pool's reads of the tables and their move
        go_on(group, shared, cells + cell_base);
        after = stop(group, shared, before, held, finished, settings[BOUND_NORM]);
    }
    if (thread == 0) {
        *own = after;
        results[g] = after;
    }
}
