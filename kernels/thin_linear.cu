// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out = activation(n(x) weight^T + bias), or out += ...; n(x) is x, or with gamma and beta LayerNorm(x), rounded to T.
// The last columns may go into the KV cache instead.
//
// Layout     x is [rows, k], rows x_stride elements apart; gamma, beta: [k], both or neither NULL; weight: [n, k]; bias:
//            [n] or NULL; out: [rows, kv_from], rows out_stride apart. Columns from kv_from on go where
//            common/kv_places.cuh says; spans, positions: [rows], both or neither NULL, and without them kv_from is n.
//            activation is a number of common/activation.cuh, none with residual or spans. part: how many chains a part
//            has (common/chains.cuh).
// Alignment  One element. Packs are moved whole where all addresses are multiples of 16 bytes, and k and x_stride of a
//            pack; else everything goes element by element, slowly, to the same bits.
// Launch     Grid (n / (8 * GROUPS) rounded up, 1, 1); block: 8 or 16 warps, one for each chain of k. Shared
//            memory: metrale.ops.thin_linear.shared_bytes. May begin before the kernel ahead has ended, if nothing that is
//            still under way writes gamma, beta, weight, bias, spans or positions.
// Aliasing   out and the places in the KV cache overlap nothing that is read.
// Order      That of common/chains.cuh: a row's bits depend on its own elements, the weights and part alone: not on the
//            other rows, not on its place, not on alignment, not on the entry point, not on the number of warps. They are
//            those of layer_norm and a chained cluster_linear, with parts as long.
// Numbers    Products of T summed in float on the tensor cores; LayerNorm, bias, activation and residual in float.
//
// For few rows, up to 64 or so: the weights are read once and are the limit. Each warp of a block has a chain of k, and
// a lane loads what it multiplies straight into registers: of one row in each of GROUPS groups of 8 rows of the weights,
// before the wait for the kernel ahead, and of one row of x, in the same columns. Which columns the tensor cores take
// together does not matter as long as both operands agree, so that a lane's share of 32 columns is 8 neighbouring ones,
// one load of 16 bytes, and lies in registers as the tensor cores want it. Of x they take 16 rows: 8 rows are given
// twice, and what comes of the last 8 goes nowhere. The warps' sums are added in shared memory.

#include "common/activation.cuh"
#include "common/attention.cuh"
#include "common/chains.cuh"
#include "common/dependent.cuh"
#include "common/kv_places.cuh"

constexpr int TILE = 8;            // rows of x that are multiplied at once
constexpr int GROUP = 8;           // rows of the weights that a lane has one of
constexpr int AT_ONCE = 8;         // warps whose sums are added at a time; the block's are a multiple of it
constexpr int MOST_STAGED = 8192;  // columns whose gamma and beta fit into shared memory
constexpr int MOST_ROWS = 64;      // of x
constexpr int MOST_GROUPS = 4;     // of a block

constexpr int PITCH = TILE * GROUP + GROUP;  // floats from group to group among a warp's sums: no bank conflicts

// threadIdx.x, of which the compiler does not know that it has been read before. What is used once a tile is found from
// it anew, so as not to take registers in between.
__device__ __forceinline__ int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

template <typename T>
struct Layer {
    const T *x, *gamma, *beta, *weight, *bias;
    T* out;
    int rows, n, k;
    long long x_stride, out_stride;
    float eps;
    int activation;
    bool residual;
    int kv_from, part;
};

// A lane's share of k. Of each of its warp's chunks it has a pack; `there` counts those that begin within k.
struct Share {
    int begin;   // the warp's first column
    int column;  // where the lane's first pack begins
    int there;
};

// What each row's columns in the KV cache are to be added to, if there are any: the first MOST_ROWS words of a block's
// shared memory. It lies where the compiler knows, so that nothing has to be kept in a register to find it.
template <typename T>
__device__ __forceinline__ T** kept_places() {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<T**>(memory);
}

// Behind it, the bias of the block's rows of the weights.
template <typename T>
__device__ __forceinline__ float* biases() {
    return reinterpret_cast<float*>(kept_places<T>() + MOST_ROWS);
}

// The rest of it.
struct Room {
    float* sums;      // [warps][GROUPS][PITCH]: 8 rows of x by 8 of the weights
    float2* moments;  // [warps][TILE]: mean and squares
    uint4* staged;    // [warps][chunks][2][LANES]: gamma and beta
};

template <typename T>
__device__ __forceinline__ Share share_of(int k, int chunks, int thread) {
    const int begin = thread / WARP * chunks * CHUNK<T>;
    const int column = begin + thread % LANES * PACK<T>;
    return {begin, column, column < k ? min(chunks, (k - column + CHUNK<T> - 1) / CHUNK<T>) : 0};
}

// The chunks of each warp.
template <typename T>
__device__ __forceinline__ int chunks_of(int k) {
    static_assert(CHUNK<T> == STEP, "a chunk is multiplied at a time");
    return chain_columns(k) / CHUNK<T>;
}

// The elements of the lane's pack in one of the warp's chunks.
template <typename T>
__device__ __forceinline__ int elements(const Share& share, int chunk, int k) {
    return chunk < share.there ? min(PACK<T>, k - share.column - chunk * CHUNK<T>) : 0;
}

// The sums of rows lane / 4 of x with rows 2 * (lane % 4) and the next of a group, and two of which nothing is wanted.
using Sums = float[4];

template <typename T>
__device__ __forceinline__ void multiply(Sums& sums, const uint4& x, const uint4& weights) {
    multiply_add(sums, x.x, x.x, x.y, x.y, weights.x, weights.y, T{});
    multiply_add(sums, x.z, x.z, x.w, x.w, weights.z, weights.w, T{});
}

// Leaves the warp's sums with a group in shared memory: row lane / 4 of x by rows 2 * (lane % 4) and the next of the
// weights.
__device__ __forceinline__ void store_sums(const Sums& sums, float* to) {
    reinterpret_cast<float2*>(to)[thread_again() % WARP] = make_float2(sums[0], sums[1]);
}

// The thread's element of a tile. There are as many threads as elements, or more.
template <typename T>
struct Element {
    int row, within, column;

    __device__ __forceinline__ explicit Element(int groups) {
        const int thread = thread_again();
        row = thread / (groups * GROUP);
        within = thread % (groups * GROUP);
        column = blockIdx.x * (groups * GROUP) + within;
    }
    __device__ __forceinline__ bool wanted(const Layer<T>& layer, int tile) const {
        return row < TILE && tile + row < layer.rows && column < layer.n;
    }
    __device__ __forceinline__ T* place(const Layer<T>& layer, int tile) const {
        return layer.out + (tile + row) * layer.out_stride + column;
    }
    __device__ __forceinline__ T* kept_place(int tile) const {
        return kept_places<T>()[tile + row] + column;
    }
};

// Leaves the bias, and where each row's columns in the KV cache are, in shared memory. There are as many threads as rows,
// of x or of the weights, or more.
template <typename T>
__device__ __forceinline__ void store_early(const Layer<T>& layer, const KvPlaces<T>& kv, int groups) {
    const int thread = thread_again(), rows = groups * GROUP, column = blockIdx.x * rows + thread;
    if (thread < rows) {
        const bool there = layer.bias != nullptr && column < layer.n;
        biases<T>()[thread] = there ? to_float(layer.bias[column]) : 0.0f;
    }
    if (kv.spans != nullptr && thread < layer.rows) {
        kept_places<T>()[thread] = kv.place(kv.row(thread));
    }
}

// What `out` holds, if it is added to.
template <typename T>
__device__ __forceinline__ float load_before(const Layer<T>& layer, int groups, int tile) {
    const Element<T> element(groups);
    const bool there = layer.residual && element.wanted(layer, tile);
    return to_float(load_fresh_element(element.place(layer, tile), there));
}

// Adds the warps' sums, those of a part and then the parts, and writes the result.
template <typename T>
__device__ __forceinline__ void finish(const Layer<T>& layer, int groups, int tile, float before,
                                       const float* sums) {
    const Element<T> element(groups);
    if (element.wanted(layer, tile)) {
        const float* from = sums + element.within / GROUP * PITCH + element.row * GROUP + element.within % GROUP;
        float sum = 0.0f, part = 0.0f;
        int left = layer.part;
#pragma unroll 1
        for (int first = 0; first < static_cast<int>(blockDim.x) / WARP; first += AT_ONCE) {
            float sums_of[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                sums_of[i] = from[(first + i) * (groups * PITCH)];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                part += sums_of[i];
                if (--left == 0) {
                    sum += part;
                    part = 0.0f;
                    left = layer.part;
                }
            }
        }
        sum += part;
        const float value = activate(sum + biases<T>()[element.within], layer.activation);
        const T result = from_float<T>(layer.residual ? value + before : value);
        if (element.column < layer.kv_from) {
            *element.place(layer, tile) = result;
        } else {
            *element.kept_place(tile) = result;
        }
    }
}

// Leaves what the warp has of each lane's row in shared memory.
template <typename T>
__device__ __forceinline__ void store_moments(const Layer<T>& layer, const Moments& own, float2* to) {
    const int thread = thread_again(), warp = thread / WARP;
    const Moments merged = merge_lanes(own, static_cast<float>(columns_of_chain(layer.k, warp)), LANES);
    if (thread % LANES == 0) {
        to[warp * TILE + thread % WARP / LANES] = make_float2(merged.mean, merged.squares);
    }
}

// Merges what the warps have left of each lane's row.
template <typename T>
__device__ __forceinline__ Norm merge_warps(const Layer<T>& layer, const float2* from) {
    return merge_chains(from + thread_again() % WARP / LANES, TILE, blockDim.x / WARP, layer.k, layer.eps);
}

// Products by whole packs. WINDOW: chunks of x that are under way. STREAMED: the warp may have more than CHUNKS chunks;
// the weights of the next ones then replace those that have been used.
template <typename T, int GROUPS, int CHUNKS, int WINDOW, bool STREAMED>
struct Whole {
    static constexpr int STAGED = CHUNKS < 8 ? 1 : 2;  // packs of gamma and beta that a lane stages at a time,
    static constexpr int STAGED_CHUNKS = STAGED * WARP / (2 * LANES);  // which are those of so many chunks
    static constexpr bool EARLY = GROUPS <= 2 && !STREAMED;  // there is a register for what `out` holds

    const Layer<T>& layer;
    const Room& room;
    int chunks, all;  // of the warp; all: in whole batches of CHUNKS
    uint4 weights[GROUPS][CHUNKS];
    uint4 window[WINDOW];

    __device__ __forceinline__ Whole(const Layer<T>& l, const Room& r, int c)
        : layer(l), room(r), chunks(c), all(STREAMED ? (c + CHUNKS - 1) / CHUNKS * CHUNKS : CHUNKS) {}

    // Where some of a lane's packs are, a chunk apart, and how many of them are there.
    struct Packs {
        const T* from;
        int there;
    };

    // Of x from a chunk of a tile on; a chunk past the last one is of the next tile.
    __device__ __forceinline__ Packs x_from(int tile, int chunk) const {
        if (chunk >= all) {
            chunk -= all;
            tile += TILE;
        }
        const int thread = thread_again(), row = tile + thread % WARP / LANES;
        const Share share = share_of<T>(layer.k, chunks, thread);
        return {layer.x + row * layer.x_stride + share.column + chunk * CHUNK<T>,
                row < layer.rows ? share.there - chunk : 0};
    }

    // Of a group of the weights.
    __device__ __forceinline__ Packs weights_from(int group, int chunk) const {
        const int thread = thread_again(), row = (blockIdx.x * GROUPS + group) * GROUP + thread % WARP / LANES;
        const Share share = share_of<T>(layer.k, chunks, thread);
        return {layer.weight + static_cast<long long>(row) * layer.k + share.column + chunk * CHUNK<T>,
                row < layer.n ? share.there - chunk : 0};
    }

    __device__ __forceinline__ void load_x(int i, const Packs& packs) {
        window[i] = load_fresh(packs.from + i * CHUNK<T>, i < packs.there);
    }

    __device__ __forceinline__ void load_window(int tile, int chunk) {
        const Packs packs = x_from(tile, chunk);
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) {
            load_x(i, packs);
        }
    }

    // Gamma and beta of the warp's chunks, of which a lane loads every 32nd pack.
    __device__ __forceinline__ void load_staged(uint4 (&packs)[STAGED], int first) const {
#pragma unroll
        for (int i = 0; i < STAGED; ++i) {
            const int thread = thread_again(), place = first * (2 * LANES) + i * WARP + thread % WARP;
            const int chunk = place / (2 * LANES);
            const int column = (thread / WARP * chunks + chunk) * CHUNK<T> + place % LANES * PACK<T>;
            const T* from = place / LANES % 2 == 0 ? layer.gamma : layer.beta;
            packs[i] = load_once(from + column, chunk < chunks && column < layer.k);
        }
    }

    __device__ __forceinline__ void store_staged(const uint4 (&packs)[STAGED], int first) const {
        const int thread = thread_again();
        uint4* to = room.staged + thread / WARP * all * (2 * LANES) + thread % WARP;
#pragma unroll
        for (int i = 0; i < STAGED; ++i) {
            to[first * (2 * LANES) + i * WARP] = packs[i];
        }
    }

    // What a lane's row of a tile is shifted and scaled by. The window is at the first chunks before and after.
    __device__ __forceinline__ Norm find_norm(int tile) {
        Moments moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int first = 0; first < all; first += WINDOW) {
            moments = observe_window(moments, x_from(tile, first).there);
            if (all > WINDOW) {
                load_window(tile, first + WINDOW < all ? first + WINDOW : 0);
            }
        }
        store_moments(layer, moments, room.moments);
        __syncthreads();
        forget();
        return merge_warps(layer, room.moments);
    }

    __device__ __forceinline__ Moments observe_window(Moments moments, int there) const {
#pragma unroll
        for (int first = 0; first < WINDOW; first += MERGED) {
            uint4 packs[MERGED];
            int counts[MERGED];
#pragma unroll
            for (int i = 0; i < MERGED; ++i) {
                packs[i] = window[first + i];
                counts[i] = first + i < there ? PACK<T> : 0;
            }
            if (first < there) {
                moments = merged(moments, moments_of<T, true>(packs, counts));
            }
        }
        return moments;
    }

    // Makes the compiler unpack the window anew: what it would rather keep fills all registers.
    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) {
            asm volatile("" : "+r"(window[i].x), "+r"(window[i].y), "+r"(window[i].z), "+r"(window[i].w));
        }
    }

    __device__ __forceinline__ void normalise(int chunk, const Norm& norm) {
        const int thread = thread_again();
        const uint4* from = room.staged + (thread / WARP * all + chunk) * (2 * LANES) + thread % LANES;
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) {
            window[i] = normalised<T>(window[i], from[i * (2 * LANES)], from[i * (2 * LANES) + LANES], norm);
        }
    }

    // Adds the chunks of the batch at `batch` to the sums. `more`: other weights take the place of those that have been
    // used.
    __device__ __forceinline__ void multiply_batch(int tile, int batch, bool more, bool normed, const Norm& norm,
                                                   Sums (&sums)[GROUPS]) {
#pragma unroll
        for (int first = 0; first < CHUNKS; first += WINDOW) {
            if (normed) {
                normalise(batch + first, norm);
            }
            const Packs next = x_from(tile, batch + first + WINDOW);
#pragma unroll
            for (int i = 0; i < WINDOW; ++i) {
#pragma unroll
                for (int r = 0; r < GROUPS; ++r) {
                    multiply<T>(sums[r], window[i], weights[r][first + i]);
                }
                load_x(i, next);
                if (more) {
#pragma unroll
                    for (int r = 0; r < GROUPS; ++r) {
                        const Packs packs = weights_from(r, batch + CHUNKS < all ? batch + CHUNKS : 0);
                        weights[r][first + i] = load_once(packs.from + (first + i) * CHUNK<T>, first + i < packs.there);
                    }
                }
            }
        }
    }

    // Leaves the warps' sums of a tile in shared memory.
    __device__ __forceinline__ void multiply_tile(int tile, bool normed, const Norm& norm) {
        Sums sums[GROUPS] = {};
#pragma unroll 1
        for (int batch = 0; batch < all; batch += CHUNKS) {
            const bool more = STREAMED && (batch + CHUNKS < all || (all > CHUNKS && tile + TILE < layer.rows));
            multiply_batch(tile, batch, more, normed, norm, sums);
        }
        if (tile > 0) {
            __syncthreads();  // the sums of the tile before have been read
        }
#pragma unroll
        for (int r = 0; r < GROUPS; ++r) {
            store_sums(sums[r], room.sums + (thread_again() / WARP * GROUPS + r) * PITCH);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void run(const KvPlaces<T>& kv) {
        const bool normed = layer.gamma != nullptr;
#pragma unroll
        for (int r = 0; r < GROUPS; ++r) {
            const Packs packs = weights_from(r, 0);
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                weights[r][i] = load_once(packs.from + i * CHUNK<T>, i < packs.there);
            }
        }
        uint4 staged[STAGED];
        if (normed) {
            load_staged(staged, 0);
        }
        store_early(layer, kv, GROUPS);
        wait_for_previous();
        load_window(0, 0);
        if (normed) {
            store_staged(staged, 0);
#pragma unroll 1
            for (int first = STAGED_CHUNKS; first < all; first += STAGED_CHUNKS) {
                load_staged(staged, first);
                store_staged(staged, first);
            }
            __syncwarp();
        }
#pragma unroll 1
        for (int tile = 0; tile < layer.rows; tile += TILE) {
            const Norm norm = normed ? find_norm(tile) : Norm{0.0f, 0.0f};
            float before = EARLY ? load_before(layer, GROUPS, tile) : 0.0f;
            multiply_tile(tile, normed, norm);
            before = EARLY ? before : load_before(layer, GROUPS, tile);
            finish(layer, GROUPS, tile, before, room.sums);
        }
    }
};

// Products element by element, for what lies anywhere: the same sums in the same order. One group of the weights after
// the other, so that one function serves all kernels.
template <typename T>
struct Scattered {
    const Layer<T>& layer;
    const Share& share;
    int chunks, g;

    // Of a row of x; rows past the last are 0.
    __device__ __forceinline__ uint4 load_x(int row, int chunk) const {
        const int count = row < layer.rows ? elements<T>(share, chunk, layer.k) : 0;
        return gather_fresh(layer.x + row * layer.x_stride + share.column + chunk * CHUNK<T>, count);
    }

    __device__ __forceinline__ Norm find_norm(int row, float2* room) const {
        Moments moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int first = 0; first < share.there; first += MERGED) {
            uint4 packs[MERGED];
            int counts[MERGED];
#pragma unroll
            for (int i = 0; i < MERGED; ++i) {
                packs[i] = load_x(row, first + i);
                counts[i] = elements<T>(share, first + i, layer.k);
            }
            moments = merged(moments, moments_of<T, false>(packs, counts));
        }
        store_moments(layer, moments, room);
        __syncthreads();
        return merge_warps(layer, room);
    }

    // The warp's sums of rows of x with one group of the weights, of which the lane has a row.
    __device__ __forceinline__ void multiply_group(int row, int weight_row, const Norm& norm, float* to) const {
        Sums sums = {};
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int column = share.column + chunk * CHUNK<T>, count = elements<T>(share, chunk, layer.k);
            uint4 pack = load_x(row, chunk);
            if (layer.gamma != nullptr) {
                const uint4 gamma = gather_words(layer.gamma + column, count);
                pack = normalised<T>(pack, gamma, gather_words(layer.beta + column, count), norm);
            }
            const T* from = layer.weight + static_cast<long long>(weight_row) * layer.k + column;
            multiply<T>(sums, pack, gather_words(from, weight_row < layer.n ? count : 0));
        }
        store_sums(sums, to);
    }
};

template <typename T>
__device__ __noinline__ void thin_linear_scattered(Layer<T> layer, int groups, float* sums, float2* moments) {
    const int thread = threadIdx.x, chunks = chunks_of<T>(layer.k);
    const Share share = share_of<T>(layer.k, chunks, thread);
    const Scattered<T> product = {layer, share, chunks, thread % WARP / LANES};
    wait_for_previous();
#pragma unroll 1
    for (int tile = 0; tile < layer.rows; tile += TILE) {
        const float before = load_before(layer, groups, tile);
        Norm norm = {0.0f, 0.0f};
        if (layer.gamma != nullptr) {
            norm = product.find_norm(tile + product.g, moments);
        }
        __syncthreads();  // the sums of the tile before have been read
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            const int weight_row = (blockIdx.x * groups + group) * GROUP + product.g;
            float* to = sums + (threadIdx.x / WARP * groups + group) * PITCH;
            product.multiply_group(tile + product.g, weight_row, norm, to);
        }
        __syncthreads();
        finish(layer, groups, tile, before, sums);
    }
}

template <typename T, int GROUPS, int CHUNKS, int WINDOW, bool STREAMED>
__device__ __forceinline__ void thin_linear(const Layer<T>& layer, const KvPlaces<T>& kv) {
    let_next_begin();
    const int warps = blockDim.x / WARP, chunks = chunks_of<T>(layer.k);
    Room room;
    room.sums = biases<T>() + MOST_GROUPS * GROUP;
    room.moments = reinterpret_cast<float2*>(room.sums + warps * (GROUPS * PITCH));
    room.staged = reinterpret_cast<uint4*>(room.moments + warps * TILE);
    const bool whole = layer.k % PACK<T> == 0 && rows_aligned16(layer.x, layer.x_stride) && aligned16(layer.weight);
    const bool staged = aligned16(layer.gamma) && aligned16(layer.beta) && layer.k <= MOST_STAGED;
    if (whole && (layer.gamma == nullptr || staged) && (STREAMED || chunks <= CHUNKS)) {
        Whole<T, GROUPS, CHUNKS, WINDOW, STREAMED>(layer, room, chunks).run(kv);
    } else {
        store_early(layer, kv, GROUPS);
        thin_linear_scattered(layer, GROUPS, room.sums, room.moments);
    }
}

#define ENTRY(T, suffix, groups, chunks, window, streamed)                                                       \
    extern "C" __global__ void __launch_bounds__(512) thin_linear_##suffix(                                      \
        const T* x, const T* gamma, const T* beta, const T* weight, const T* bias, T* out,                       \
        const unsigned long long* spans, const int* positions, int rows, int n, int k, long long x_stride,       \
        long long out_stride, float eps, int activation, int residual, int kv_from, long long kv_offset,         \
        long long kv_stride, int part) {                                                                         \
        thin_linear<T, groups, chunks, window, streamed>({x, gamma, beta, weight, bias, out, rows, n, k,         \
                                                          x_stride, out_stride, eps, activation, residual != 0,  \
                                                          kv_from, part},                                        \
                                                         {spans, positions, kv_from, kv_offset, kv_stride});     \
    }
ENTRY(f16, f16, 2, 8, 2, true)
ENTRY(f16, f16_3x4, 3, 4, 4, false)
ENTRY(f16, f16_4x4, 4, 4, 4, false)
ENTRY(f16, f16_1x8, 1, 8, 4, false)
ENTRY(bf16, bf16, 2, 8, 2, true)
ENTRY(bf16, bf16_3x4, 3, 4, 4, false)
ENTRY(bf16, bf16_4x4, 4, 4, 4, false)
ENTRY(bf16, bf16_1x8, 1, 8, 4, false)
