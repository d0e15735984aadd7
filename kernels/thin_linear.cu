// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out = activation(n(x) weight^T + bias), or out += ...; n(x) is x, or with gamma and beta LayerNorm(x), rounded to T.
//
// Layout     x is [rows, k], rows x_stride elements apart; gamma, beta: [k], both or neither NULL; weight: [n, k]; bias:
//            [n] or NULL; out: [rows, n], rows out_stride apart. activation is a number of common/activation.cuh.
// Alignment  One element. Packs are moved whole where all addresses are multiples of 16 bytes, and k and x_stride of a
//            pack; else everything goes element by element, slowly, to the same bits.
// Launch     Grid (n / (8 * GROUPS) rounded up, 1, 1); block: 8 or 16 warps. Shared memory:
//            metrale.ops.thin_linear.shared_bytes. May begin before the kernel ahead has ended, if nothing that is still
//            under way writes gamma, beta, weight or bias.
// Aliasing   out overlaps nothing that is read.
// Order      A row's bits depend on its own elements, the weights, the number of warps and whether GROUPS is above 2: not
//            on the other rows, not on its place, not on alignment.
// Numbers    Products of T summed in float on the tensor cores; LayerNorm, bias, activation and residual in float.
//
// For few rows, up to 64 or so: the weights are read once and are the limit. The warps of a block split k, and a lane
// loads what it multiplies straight into registers: of one row in each of GROUPS groups of 8 rows of the weights, before
// the wait for the kernel ahead, and of one row of x, in the same columns. Which columns the tensor cores take together
// does not matter as long as both operands agree, so that a lane's share of 32 columns is 8 neighbouring ones, one load of
// 16 bytes; and what it loads of the weights lies in the registers as the tensor cores want it. Of the 16 rows that these
// take of x, 8 are there and the others 0. The warps' sums are added in shared memory, in order.

#include "common/activation.cuh"
#include "common/attention.cuh"
#include "common/dependent.cuh"
#include "common/moments.cuh"

constexpr int LANES = 4;           // lanes that hold one row of x, or of the weights
constexpr int TILE = 8;            // rows of x that are multiplied at once
constexpr int GROUP = 8;           // rows of the weights that a lane has one of
constexpr int MOST_WARPS = 16;     // of a block
constexpr int MERGED = 2;          // chunks that moments are formed of
constexpr int MOST_STAGED = 8192;  // columns whose gamma and beta fit into shared memory

constexpr int PITCH = TILE * GROUP + GROUP;  // floats from group to group among a warp's sums: no bank conflicts

// Columns that a warp multiplies at a time.
template <typename T>
inline constexpr int CHUNK = LANES * PACK<T>;

template <typename T>
struct Layer {
    const T *x, *gamma, *beta, *weight, *bias;
    T* out;
    int rows, n, k;
    long long x_stride, out_stride;
    float eps;
    int activation;
    bool residual;
};

// A lane's share of k. Of each of its warp's chunks it has a pack; `there` counts those that begin within k.
struct Share {
    int chunks;   // of each warp
    int begin;    // the warp's first column
    int columns;  // how many the warp has
    int column;   // where the lane's first pack begins
    int there;
};

// A block's shared memory.
struct Room {
    float* sums;      // [warps][GROUPS][PITCH]: 8 rows of x by 8 of the weights
    float2* moments;  // [warps][TILE]: mean and squares
    uint4* staged;    // [warps][chunks][2][LANES]: gamma and beta
};

template <typename T>
__device__ __forceinline__ Share share_of(int k) {
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
    const int chunks = ((k + CHUNK<T> - 1) / CHUNK<T> + warps - 1) / warps;
    const int begin = warp * chunks * CHUNK<T>;
    const int column = begin + static_cast<int>(threadIdx.x) % LANES * PACK<T>;
    const int there = max(0, min(chunks, (k - column + CHUNK<T> - 1) / CHUNK<T>));
    return {chunks, begin, max(0, min(k - begin, chunks * CHUNK<T>)), column, there};
}

// The elements of the lane's pack in one of the warp's chunks.
template <typename T>
__device__ __forceinline__ int elements(const Share& share, int chunk, int k) {
    return chunk < share.there ? min(PACK<T>, k - share.column - chunk * CHUNK<T>) : 0;
}

// How many sums a group has. With two, for the halves of a chunk, fewer products wait for the one before them; with more
// groups there are others to go on with, and registers are short.
template <int GROUPS>
inline constexpr int CHAINS = GROUPS <= 2 ? 2 : 1;

// sums += one chunk of 8 rows of x by a group.
template <typename T, int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[COUNT][4], const uint4& x, const uint4& weights) {
    multiply_add(sums[0], x.x, 0, x.y, 0, weights.x, weights.y, T{});
    multiply_add(sums[COUNT - 1], x.z, 0, x.w, 0, weights.z, weights.w, T{});
}

// Leaves the warp's sums with a group in shared memory: row lane / 4 of x by rows 2 * (lane % 4) and the next of the
// weights.
template <int COUNT>
__device__ __forceinline__ void store_sums(const float (&sums)[COUNT][4], float* to) {
    float2 whole = make_float2(sums[0][0], sums[0][1]);
    if constexpr (COUNT == 2) {
        whole = make_float2(whole.x + sums[1][0], whole.y + sums[1][1]);
    }
    reinterpret_cast<float2*>(to)[threadIdx.x % WARP] = whole;
}

// What the thread's element of a tile ends in. There are as many threads as elements, or more.
template <typename T>
struct Epilogue {
    int row, group, within, column;
    float bias, before;

    __device__ __forceinline__ Epilogue(const Layer<T>& layer, int groups) {
        row = static_cast<int>(threadIdx.x) / (groups * GROUP);
        within = static_cast<int>(threadIdx.x) % (groups * GROUP);
        column = blockIdx.x * (groups * GROUP) + within;
        const bool there = layer.bias != nullptr && row < TILE && column < layer.n;
        bias = there ? to_float(layer.bias[column]) : 0.0f;
        before = 0.0f;
    }

    __device__ __forceinline__ bool wanted(const Layer<T>& layer, int tile) const {
        return row < TILE && tile + row < layer.rows && column < layer.n;
    }
    __device__ __forceinline__ T* place(const Layer<T>& layer, int tile) const {
        return layer.out + (tile + row) * layer.out_stride + column;
    }

    __device__ __forceinline__ void load_before(const Layer<T>& layer, int tile) {
        before = to_float(load_fresh_element(place(layer, tile), layer.residual && wanted(layer, tile)));
    }

    // Adds the warps' sums in order, and writes the result.
    __device__ __forceinline__ void finish(const Layer<T>& layer, int tile, int groups, const float* sums) const {
        if (wanted(layer, tile)) {
            const float* from = sums + within / GROUP * PITCH + row * GROUP + within % GROUP;
            float sum = from[0];
#pragma unroll 7
            for (int warp = 1; warp < static_cast<int>(blockDim.x) / WARP; ++warp) {
                sum += from[warp * (groups * PITCH)];
            }
            const float value = activate(sum + bias, layer.activation);
            *place(layer, tile) = from_float<T>(layer.residual ? value + before : value);
        }
    }
};

// Leaves what the warp has of each lane's row in shared memory.
__device__ __forceinline__ void store_moments(const Moments& own, const Share& share, float2* to) {
    const Moments merged = merge_lanes(own, static_cast<float>(share.columns), LANES);
    if (threadIdx.x % LANES == 0) {
        to[threadIdx.x / WARP * TILE + threadIdx.x % WARP / LANES] = make_float2(merged.mean, merged.squares);
    }
}

// Merges what the warps have left of a row: each of its lanes every fourth warp, then the lanes.
template <typename T>
__device__ __forceinline__ Norm merge_warps(const Layer<T>& layer, const Share& share, const float2* from) {
    constexpr int PARTS = MOST_WARPS / LANES;
    const int warps = blockDim.x / WARP, first = threadIdx.x % LANES, width = share.chunks * CHUNK<T>;
    float2 parts[PARTS];
    float columns[PARTS], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const int warp = i * LANES + first;
        parts[i] = warp < warps ? from[warp * TILE + threadIdx.x % WARP / LANES] : make_float2(0.0f, 0.0f);
        columns[i] = static_cast<float>(max(0, min(layer.k - warp * width, width)));  // 0 past the last warp
        sum += columns[i] * parts[i].x;
    }
    const float part = reciprocal(static_cast<float>(layer.k));
    const float mean = warp_reduce<Sum>(sum, LANES) * part;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const float apart = parts[i].x - mean;
        squares += parts[i].y + columns[i] * (apart * apart);
    }
    return {mean, rsqrtf(warp_reduce<Sum>(squares, LANES) * part + layer.eps)};
}

// Products by whole packs. WINDOW: chunks of x that are under way. STREAMED: the warp may have more than CHUNKS chunks;
// the weights of the next ones then replace those that have been used.
template <typename T, int GROUPS, int CHUNKS, int WINDOW, bool STREAMED>
struct Whole {
    static constexpr int STAGED = CHUNKS * 2 * LANES / WARP;  // packs of gamma and beta that a lane stages at a time

    const Layer<T>& layer;
    const Share& share;
    const Room& room;
    const T* from_x;       // the lane's first pack in row g of x
    const T* from_weight;  // and in row g of the first group
    int g, all;            // all: chunks of the warp, in whole batches of CHUNKS
    uint4 weights[GROUPS][CHUNKS];
    uint4 window[WINDOW];

    __device__ __forceinline__ Whole(const Layer<T>& l, const Share& s, const Room& r)
        : layer(l), share(s), room(r), g(threadIdx.x % WARP / LANES) {
        all = STREAMED ? (share.chunks + CHUNKS - 1) / CHUNKS * CHUNKS : CHUNKS;
        from_x = layer.x + g * layer.x_stride + share.column;
        from_weight = layer.weight + (static_cast<long long>(blockIdx.x) * (GROUPS * GROUP) + g) * layer.k + share.column;
    }

    // Fills place `i` of the weights with chunk `first + i`.
    __device__ __forceinline__ void load_weights(int i, int first) {
#pragma unroll
        for (int r = 0; r < GROUPS; ++r) {
            const int row = (blockIdx.x * GROUPS + r) * GROUP + g;
            weights[r][i] = load_once(from_weight + static_cast<long long>(r * GROUP) * layer.k + (first + i) * CHUNK<T>,
                                      row < layer.n && first + i < share.there);
        }
    }

    // Fills place `i` of the window; a chunk past the last one is of the next tile.
    __device__ __forceinline__ void load_x(int i, int tile, int chunk) {
        if (chunk >= all) {
            chunk -= all;
            tile += TILE;
        }
        window[i] = load_fresh(from_x + tile * layer.x_stride + chunk * CHUNK<T>,
                               tile + g < layer.rows && chunk < share.there);
    }

    // Gamma and beta of the warp's chunks, of which a lane loads every 32nd pack.
    __device__ __forceinline__ void load_staged(uint4 (&packs)[STAGED], int first) const {
#pragma unroll
        for (int i = 0; i < STAGED; ++i) {
            const int place = first * (2 * LANES) + i * WARP + static_cast<int>(threadIdx.x) % WARP;
            const int chunk = place / (2 * LANES);
            const int column = share.begin + chunk * CHUNK<T> + place % LANES * PACK<T>;
            const T* from = place / LANES % 2 == 0 ? layer.gamma : layer.beta;
            packs[i] = load_once(from + column, chunk < share.chunks && column < layer.k);
        }
    }

    __device__ __forceinline__ void store_staged(const uint4 (&packs)[STAGED], int first) const {
        uint4* to = room.staged + static_cast<int>(threadIdx.x / WARP) * all * (2 * LANES) + threadIdx.x % WARP;
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
            moments = observe_window(moments, share.there - first);
            if (all > WINDOW) {
                const int next = first + WINDOW < all ? first + WINDOW : 0;
#pragma unroll
                for (int i = 0; i < WINDOW; ++i) {
                    load_x(i, tile, next + i);
                }
            }
        }
        store_moments(moments, share, room.moments);
        __syncthreads();
        forget();
        return merge_warps(layer, share, room.moments);
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
        const uint4* from = room.staged + (static_cast<int>(threadIdx.x / WARP) * all + chunk) * (2 * LANES) +
                            threadIdx.x % LANES;
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) {
            window[i] = normalised<T>(window[i], from[i * (2 * LANES)], from[i * (2 * LANES) + LANES], norm);
        }
    }

    // `more`: the weights of another batch follow.
    __device__ __forceinline__ void multiply_batch(int tile, int batch, bool more, bool normed, const Norm& norm,
                                                   float (&sums)[GROUPS][CHAINS<GROUPS>][4]) {
#pragma unroll
        for (int first = 0; first < CHUNKS; first += WINDOW) {
            if (normed) {
                normalise(batch + first, norm);
            }
#pragma unroll
            for (int i = 0; i < WINDOW; ++i) {
#pragma unroll
                for (int r = 0; r < GROUPS; ++r) {
                    multiply<T>(sums[r], window[i], weights[r][first + i]);
                }
                load_x(i, tile, batch + first + i + WINDOW);
                if (more) {
                    load_weights(first + i, batch + CHUNKS < all ? batch + CHUNKS : 0);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_tile(int tile, bool normed, const Norm& norm) {
        float sums[GROUPS][CHAINS<GROUPS>][4] = {};
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
            store_sums(sums[r], room.sums + (threadIdx.x / WARP * GROUPS + r) * PITCH);
        }
        __syncthreads();
    }

    __device__ __forceinline__ void run() {
        const bool normed = layer.gamma != nullptr;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            load_weights(i, 0);
        }
        uint4 staged[STAGED];
        if (normed) {
            load_staged(staged, 0);
        }
        Epilogue<T> epilogue(layer, GROUPS);
        wait_for_previous();
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) {
            load_x(i, 0, i);
        }
        if (normed) {
            store_staged(staged, 0);
            for (int first = CHUNKS; STREAMED && first < all; first += CHUNKS) {
                load_staged(staged, first);
                store_staged(staged, first);
            }
            __syncwarp();
        }
#pragma unroll 1
        for (int tile = 0; tile < layer.rows; tile += TILE) {
            epilogue.load_before(layer, tile);
            const Norm norm = normed ? find_norm(tile) : Norm{0.0f, 0.0f};
            multiply_tile(tile, normed, norm);
            epilogue.finish(layer, tile, GROUPS, room.sums);
        }
    }
};

// Products element by element, for what lies anywhere: the same sums in the same order. One group of the weights after the
// other, so that one function serves all kernels.
template <typename T>
struct Scattered {
    const Layer<T>& layer;
    const Share& share;
    int g;

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
        store_moments(moments, share, room);
        __syncthreads();
        return merge_warps(layer, share, room);
    }

    // The warp's sums of rows of x with one group of the weights, of which the lane has a row.
    template <int COUNT>
    __device__ __forceinline__ void multiply_group(int row, int weight_row, const Norm& norm, float* to) const {
        float sums[COUNT][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < share.chunks; ++chunk) {
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
    const Share share = share_of<T>(layer.k);
    const Scattered<T> product = {layer, share, static_cast<int>(threadIdx.x) % WARP / LANES};
    Epilogue<T> epilogue(layer, groups);
    wait_for_previous();
#pragma unroll 1
    for (int tile = 0; tile < layer.rows; tile += TILE) {
        epilogue.load_before(layer, tile);
        Norm norm = {0.0f, 0.0f};
        if (layer.gamma != nullptr) {
            norm = product.find_norm(tile + product.g, moments);
        }
        __syncthreads();  // the sums of the tile before have been read
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
            const int weight_row = (blockIdx.x * groups + group) * GROUP + product.g;
            float* to = sums + (threadIdx.x / WARP * groups + group) * PITCH;
            if (groups <= 2) {
                product.template multiply_group<2>(tile + product.g, weight_row, norm, to);
            } else {
                product.template multiply_group<1>(tile + product.g, weight_row, norm, to);
            }
        }
        __syncthreads();
        epilogue.finish(layer, tile, groups, sums);
    }
}

template <typename T, int GROUPS, int CHUNKS, int WINDOW, bool STREAMED>
__device__ __forceinline__ void thin_linear(const Layer<T>& layer) {
    extern __shared__ uint4 memory[];
    let_next_begin();
    const int warps = blockDim.x / WARP;
    const Share share = share_of<T>(layer.k);
    Room room;
    room.sums = reinterpret_cast<float*>(memory);
    room.moments = reinterpret_cast<float2*>(room.sums + warps * (GROUPS * PITCH));
    room.staged = reinterpret_cast<uint4*>(room.moments + warps * TILE);
    const bool whole = layer.k % PACK<T> == 0 && rows_aligned16(layer.x, layer.x_stride) && aligned16(layer.weight);
    const bool staged = aligned16(layer.gamma) && aligned16(layer.beta) && layer.k <= MOST_STAGED;
    if (whole && (layer.gamma == nullptr || staged) && (STREAMED || share.chunks <= CHUNKS)) {
        Whole<T, GROUPS, CHUNKS, WINDOW, STREAMED>(layer, share, room).run();
    } else {
        thin_linear_scattered(layer, GROUPS, room.sums, room.moments);
    }
}

#define ENTRY(T, suffix, groups, chunks, window, streamed)                                                     \
    extern "C" __global__ void __launch_bounds__(512) thin_linear_##suffix(                                    \
        const T* x, const T* gamma, const T* beta, const T* weight, const T* bias, T* out, int rows, int n,    \
        int k, long long x_stride, long long out_stride, float eps, int activation, int residual) {            \
        thin_linear<T, groups, chunks, window, streamed>({x, gamma, beta, weight, bias, out, rows, n, k,       \
                                                          x_stride, out_stride, eps, activation,               \
                                                          residual != 0});                                     \
    }
ENTRY(f16, f16, 2, 8, 4, true)
ENTRY(f16, f16_1x4, 1, 4, 4, false)
ENTRY(f16, f16_2x4, 2, 4, 4, false)
ENTRY(f16, f16_3x4, 3, 4, 4, false)
ENTRY(f16, f16_4x4, 4, 4, 4, false)
ENTRY(f16, f16_1x8, 1, 8, 4, false)
ENTRY(f16, f16_1x16, 1, 16, 4, false)
ENTRY(bf16, bf16, 2, 8, 4, true)
ENTRY(bf16, bf16_1x4, 1, 4, 4, false)
ENTRY(bf16, bf16_2x4, 2, 4, 4, false)
ENTRY(bf16, bf16_3x4, 3, 4, 4, false)
ENTRY(bf16, bf16_4x4, 4, 4, 4, false)
ENTRY(bf16, bf16_1x8, 1, 8, 4, false)
ENTRY(bf16, bf16_1x16, 1, 16, 4, false)
