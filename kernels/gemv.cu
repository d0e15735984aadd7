// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out = activation(n(x) weight^T + bias), or out += ..., of one row; n(x) is x, or with gamma and beta LayerNorm(x),
// rounded to T. The last columns may go into the KV cache instead.
//
// Layout     x, gamma, beta: [k], gamma and beta both or neither NULL; weight: [n, k]; bias: [n] or NULL; out: [kv_from].
//            Columns from kv_from on go where common/kv_places.cuh says; spans, positions: [1], both or neither NULL, and
//            without them kv_from is n. activation is a number of common/activation.cuh, none with residual or spans.
// Alignment  One element. Packs are moved whole where all addresses are multiples of 16 bytes and k of a pack; else
//            everything goes element by element, slowly, to the same bits.
// Launch     Block (32 * W, G, 1) with W * G at most 8: W warps share a row of the weights, and there are G such groups,
//            each with ROWS rows; grid (n / (G * ROWS) rounded up, 1, 1). Shared memory: metrale.ops.gemv.shared_bytes.
//            May begin before the kernel ahead has ended, if nothing that is still under way writes gamma, beta, weight,
//            bias, spans or positions.
// Aliasing   out and the place in the KV cache overlap nothing that is read.
// Order      An element's bits depend on x, its row of the weights and k: not on n, on alignment, on the entry point.
// Numbers    Products of T summed in float on the tensor cores; LayerNorm, bias, activation and residual in float.
//
// Reading the weights once is what takes the time, and next to that the way from the end of the kernel ahead to the
// result. So a lane has all its packs of the weights under way, in registers, before it waits for x. A warp's lanes have
// neighbouring packs of a row. The tensor cores take them as they are: what the lanes 4 i to 4 i + 3 have of a row of the
// weights and of x, a row of one operand and a column of the other; the sum over those lanes is then element (i, i) of
// the product, and what else is in it goes nowhere. It takes a sixteenth of the instructions of a sum in each lane.

#include "common/activation.cuh"
#include "common/attention.cuh"
#include "common/dependent.cuh"
#include "common/kv_places.cuh"
#include "common/moments.cuh"

constexpr int MOST_WARPS = 8;      // of a block
constexpr int PACKS = 2;           // of a lane in a slice
constexpr int MOST_STAGED = 8192;  // columns that are normalised in shared memory

// Columns of which a warp has a pack in each lane, and those that it sums the products of.
template <typename T>
inline constexpr int CHUNK = WARP * PACK<T>;
template <typename T>
inline constexpr int SLICE = PACKS * CHUNK<T>;

template <typename T>
inline constexpr int MERGED = MOST_STAGED / CHUNK<T>;  // chunks whose moments are merged at once

template <typename T>
struct Layer {
    const T *x, *gamma, *beta, *weight, *bias;
    T* out;
    KvPlaces<T> kv;
    int n, k;
    float eps;
    int activation;
    bool residual;
};

// A block's shared memory.
struct Room {
    uint4* staged;    // LayerNorm(x), in whole chunks
    float2* moments;  // [MERGED]: mean and squares
    float* sums;      // [slices][PITCH]: the products with the block's rows
};

// The block's threads, whichever axis they lie along.
__device__ __forceinline__ int thread_of_block() {
    return threadIdx.y * blockDim.x + threadIdx.x;
}

// How many of `columns` from `first` on there are. Not as max(0, min(...)): where such a number is compared with
// `columns`, ptxas of CUDA 13.0 takes a predicate of VIMNMX.RELU for the result, which it is not.
__device__ __forceinline__ int columns_from(int first, int columns, int k) {
    return first < k ? min(columns, k - first) : 0;
}

// Leaves what a warp has seen of the chunk from column `begin` on in shared memory; its lane has `count` elements of it.
template <typename T>
__device__ __forceinline__ void store_moments(const uint4& pack, int count, int begin, int k, float2* to) {
    Moments moments = {0.0f, 0.0f, 0.0f};
    if (begin + CHUNK<T> <= k) {
        moments = merge_equal_lanes(moments_of_pack<T>(pack), WARP);
    } else {
        const uint4 packs[1] = {pack};
        const int counts[1] = {count};
        if (count > 0) {
            moments = moments_of<T, false>(packs, counts);
        }
        moments = merge_lanes(moments, static_cast<float>(k - begin), WARP);
    }
    if (threadIdx.x % WARP == 0) {
        *to = make_float2(moments.mean, moments.squares);
    }
}

// Merges what the warps have left of at most MERGED chunks, some at a time.
template <typename T>
__device__ __forceinline__ Moments merge_chunks(const float2* from, int columns) {
    constexpr int EACH = 8;
    Moments moments = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < columns; first += EACH * CHUNK<T>) {
        const int here = columns_from(first, EACH * CHUNK<T>, columns);
        const int last = (here - 1) / CHUNK<T>;
        const float in_last = static_cast<float>(here - last * CHUNK<T>);
        float2 parts[EACH];
        float counts[EACH], sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            parts[i] = i <= last ? from[first / CHUNK<T> + i] : make_float2(0.0f, 0.0f);
            counts[i] = i < last ? static_cast<float>(CHUNK<T>) : i == last ? in_last : 0.0f;
            sum += counts[i] * parts[i].x;
        }
        const float mean = sum * reciprocal(static_cast<float>(here));
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float apart = parts[i].x - mean;
            squares += parts[i].y + counts[i] * (apart * apart);
        }
        moments = merged(moments, {static_cast<float>(here), mean, squares});
    }
    return moments;
}

__device__ __forceinline__ Norm norm_of(const Moments& moments, int k, float eps) {
    return {moments.mean, rsqrtf(moments.squares * reciprocal(static_cast<float>(k)) + eps)};
}

// x for products by whole packs, of which a lane has some, a chunk apart.
template <typename T>
struct WholeRow {
    const Layer<T>& layer;
    const uint4* staged;  // LayerNorm(x), or NULL for x itself

    template <int CHUNKS>
    __device__ __forceinline__ void load(int column, uint4 (&x)[CHUNKS]) const {
        if (staged != nullptr) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int at = column + c * CHUNK<T>;
                x[c] = at < layer.k ? staged[at / PACK<T>] : make_uint4(0, 0, 0, 0);
            }
        } else {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int at = column + c * CHUNK<T>;
                x[c] = load_fresh(layer.x + at, at < layer.k);
            }
        }
    }
    __device__ __forceinline__ static uint4 load_weights(const T* from, int count) { return load_once(from, count > 0); }
};

// The same element by element.
template <typename T>
struct ScatteredRow {
    const Layer<T>& layer;
    Norm norm;

    template <int CHUNKS>
    __device__ __forceinline__ void load(int column, uint4 (&x)[CHUNKS]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int at = column + c * CHUNK<T>, count = columns_from(at, PACK<T>, layer.k);
            x[c] = gather_fresh(layer.x + at, count);
            if (layer.gamma != nullptr) {
                const uint4 gamma = gather_words(layer.gamma + at, count);
                x[c] = normalised<T>(x[c], gamma, gather_words(layer.beta + at, count), norm);
            }
        }
    }
    __device__ __forceinline__ static uint4 load_weights(const T* from, int count) { return gather_words(from, count); }
};

// The thread's element of the result: row `thread % rows` of those of its group.
template <typename T>
struct Element {
    const Layer<T>& layer;
    int column;
    bool wanted, kept;  // kept: in the KV cache
    float bias;
    KvRow row;

    __device__ __forceinline__ Element(const Layer<T>& l, int rows, int of, int skipped) : layer(l) {
        const int thread = thread_of_block();
        column = (static_cast<int>(blockIdx.x * blockDim.y) + thread / rows) * of + skipped + thread % rows;
        wanted = thread < static_cast<int>(blockDim.y) * rows && column < layer.n;
        kept = wanted && column >= layer.kv.from;
        bias = wanted && layer.bias != nullptr ? to_float(layer.bias[column]) : 0.0f;
        row = kept ? layer.kv.row(0) : KvRow{0, 0};
    }
    __device__ __forceinline__ float load_before() const {
        return to_float(load_fresh_element(layer.out + column, wanted && layer.residual));
    }
    __device__ __forceinline__ void store(float sum, float before) const {
        if (wanted) {
            const float value = activate(sum + bias, layer.activation);
            T* place = (kept ? layer.kv.place(row) : layer.out) + column;
            *place = from_float<T>(layer.residual ? value + before : value);
        }
    }
};

// A warp's products with ROWS rows of the weights, SLICES slices at a time. Of the `of` rows of a warp they begin after
// `skipped`. STREAMED: there may be more slices than the warps have at a time.
template <typename T, int ROWS, int SLICES, bool STREAMED, typename Row>
struct Product {
    static_assert(ROWS % 2 == 0, "the tensor cores take two rows");
    static constexpr int CHUNKS = SLICES * PACKS;
    static constexpr int PITCH = MOST_WARPS * ROWS;  // from slice to slice among a block's sums

    const Layer<T>& layer;
    int row, column;  // the warp's first row of the weights, and where the lane's first pack begins
    uint4 weights[ROWS][CHUNKS];

    __device__ __forceinline__ Product(const Layer<T>& l, int of, int skipped) : layer(l) {
        row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y) * of + skipped;
        column = static_cast<int>(threadIdx.x / WARP) * (SLICES * SLICE<T>) + threadIdx.x % WARP * PACK<T>;
    }

    __device__ __forceinline__ void load_weights(int first) {
        const T* from = layer.weight + static_cast<long long>(row) * layer.k + first + column;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int count = columns_from(first + column + c * CHUNK<T>, PACK<T>, layer.k);
                weights[r][c] = Row::load_weights(from + c * CHUNK<T>, row + r < layer.n ? count : 0);
            }
            from += layer.k;
        }
    }

    // The sums of the lanes 4 i to 4 i + 3 of the warp in one of these, and 0 in the others; of slice s with row r in
    // parts[s * ROWS + r].
    template <int COUNT>
    __device__ __forceinline__ void multiply(const uint4 (&x)[CHUNKS], float (&parts)[COUNT]) const {
        const int lane = threadIdx.x % WARP;
        const bool own = lane % 4 == lane / 8, odd = lane / 4 % 2 != 0;
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            float sums[ROWS / 2][PACKS][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int r = 0; r < ROWS; r += 2) {
#pragma unroll
                    for (int p = 0; p < PACKS; ++p) {
                        const int c = s * PACKS + p;
                        multiply_add(sums[r / 2][p], word(weights[r][c], 2 * half), word(weights[r + 1][c], 2 * half),
                                     word(weights[r][c], 2 * half + 1), word(weights[r + 1][c], 2 * half + 1),
                                     word(x[c], 2 * half), word(x[c], 2 * half + 1), T{});
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float(&two)[PACKS][4] = sums[r / 2];
                const float even_sum = two[0][r % 2 * 2] + two[1][r % 2 * 2];
                const float odd_sum = two[0][r % 2 * 2 + 1] + two[1][r % 2 * 2 + 1];
                parts[s * ROWS + r] = own ? (odd ? odd_sum : even_sum) : 0.0f;
            }
        }
    }

    // Leaves the warp's sums in shared memory.
    __device__ __forceinline__ void store_sums(const uint4 (&x)[CHUNKS], float* sums) const {
        constexpr int WANTED = SLICES * ROWS, COUNT = WANTED <= 2 ? 2 : WANTED <= 4 ? 4 : WANTED <= 8 ? 8 : 16;
        static_assert(WANTED <= COUNT, "too many sums");
        float parts[COUNT] = {};
        multiply(x, parts);
        const float sum = warp_reduce_each<Sum>(parts);
        const int lane = threadIdx.x % WARP, which = lane / (WARP / COUNT);
        if (lane % (WARP / COUNT) == 0 && which < WANTED) {
            const int slice = threadIdx.x / WARP * SLICES + which / ROWS;
            sums[slice * PITCH + threadIdx.y * ROWS + which % ROWS] = sum;
        }
    }

    // sum + the warps' sums for the thread's element, in order.
    __device__ __forceinline__ float add_slices(float sum, const float* sums) const {
        const int slices = blockDim.x / WARP * SLICES, thread = thread_of_block();
        if (thread < static_cast<int>(blockDim.y) * ROWS) {
#pragma unroll
            for (int s = 0; s < MOST_WARPS * SLICES; ++s) {
                sum += s < slices ? sums[s * PITCH + thread] : 0.0f;
            }
        }
        return sum;
    }

    // All products for the thread's element. The weights of the first slices have been loaded.
    __device__ __forceinline__ float run(const Row& from, float* sums) {
        const int columns = blockDim.x / WARP * (SLICES * SLICE<T>);  // of all warps at a time
        float sum = 0.0f;
        for (int first = 0;;) {
            uint4 x[CHUNKS];
            from.load(first + column, x);
            store_sums(x, sums);
            first += columns;
            if (STREAMED && first < layer.k) {
                load_weights(first);
            }
            __syncthreads();
            sum = add_slices(sum, sums);
            if (!STREAMED || first >= layer.k) {
                return sum;
            }
            __syncthreads();  // the sums have been read
        }
    }
};

// Gamma and beta of the lane's pack in one of the chunks.
struct Scales {
    uint4 gamma, beta;
};

template <typename T>
__device__ __forceinline__ Scales load_scales(const Layer<T>& layer, int column) {
    return {load_once(layer.gamma + column, column < layer.k), load_once(layer.beta + column, column < layer.k)};
}

// Normalises x in shared memory, each pack once. `scales`: those of the warp's first chunk.
template <typename T>
__device__ __forceinline__ void stage(const Layer<T>& layer, const Room& room, Scales scales) {
    const int stride = blockDim.y * blockDim.x * PACK<T>, first = thread_of_block() * PACK<T>;
    const int lane_column = threadIdx.x % WARP * PACK<T>;
    uint4* staged = room.staged;
#pragma unroll 1
    for (int column = first; column - lane_column < layer.k; column += stride) {
        const uint4 pack = load_fresh(layer.x + column, column < layer.k);
        const int begin = column - lane_column;
        staged[column / PACK<T>] = pack;
        store_moments<T>(pack, columns_from(column, PACK<T>, layer.k), begin, layer.k,
                         room.moments + begin / CHUNK<T>);
    }
    __syncthreads();
    const Norm norm = norm_of(merge_chunks<T>(room.moments, layer.k), layer.k, layer.eps);
#pragma unroll 1
    for (int column = first; column - lane_column < layer.k; column += stride) {
        if (column != first) {
            scales = load_scales(layer, column);
        }
        staged[column / PACK<T>] = normalised<T>(staged[column / PACK<T>], scales.gamma, scales.beta, norm);
    }
    __syncthreads();
}

// What x is shifted and scaled by, element by element.
template <typename T>
__device__ __noinline__ Norm find_norm(const T* x, int k, float eps, float2* room) {
    Moments moments = {0.0f, 0.0f, 0.0f};
    const int warps = blockDim.y * blockDim.x / WARP;
#pragma unroll 1
    for (int first = 0; first < k; first += MOST_STAGED) {
        const int columns = columns_from(first, MOST_STAGED, k);
#pragma unroll 1
        for (int chunk = thread_of_block() / WARP; chunk * CHUNK<T> < columns; chunk += warps) {
            const int begin = first + chunk * CHUNK<T>, column = begin + threadIdx.x % WARP * PACK<T>;
            const int count = columns_from(column, PACK<T>, k);
            store_moments<T>(gather_fresh(x + column, count), count, begin, k, room + chunk);
        }
        __syncthreads();
        moments = merged(moments, merge_chunks<T>(room, columns));
        __syncthreads();  // they have been read
    }
    return norm_of(moments, k, eps);
}

// For what lies anywhere: two rows of a warp after the other, so that one function serves all kernels.
template <typename T>
__device__ __noinline__ void gemv_scattered(Layer<T> layer, Room room, int rows) {
    wait_for_previous();
    ScatteredRow<T> from = {layer, {0.0f, 0.0f}};
    if (layer.gamma != nullptr) {
        from.norm = find_norm(layer.x, layer.k, layer.eps, room.moments);
    }
#pragma unroll 1
    for (int skipped = 0; skipped < rows; skipped += 2) {
        Product<T, 2, 1, true, ScatteredRow<T>> product(layer, rows, skipped);
        product.load_weights(0);
        const float sum = product.run(from, room.sums);
        const Element<T> element(layer, 2, rows, skipped);
        element.store(sum, element.load_before());
        __syncthreads();  // the sums have been read
    }
}

template <typename T, int ROWS, int SLICES, bool STREAMED>
__device__ __forceinline__ void gemv_whole(const Layer<T>& layer, const Room& room) {
    Product<T, ROWS, SLICES, STREAMED, WholeRow<T>> product(layer, ROWS, 0);
    product.load_weights(0);
    const bool normed = layer.gamma != nullptr;
    Scales scales = {};
    if (normed) {
        scales = load_scales(layer, thread_of_block() * PACK<T>);
    }
    const Element<T> element(layer, ROWS, ROWS, 0);
    wait_for_previous();
    const float before = element.load_before();
    if (normed) {
        stage(layer, room, scales);
    }
    const WholeRow<T> from = {layer, normed ? room.staged : nullptr};
    element.store(product.run(from, room.sums), before);
}

template <typename T, int ROWS, int SLICES, bool STREAMED>
__device__ __forceinline__ void gemv(const Layer<T>& layer) {
    extern __shared__ uint4 memory[];
    let_next_begin();
    const bool normed = layer.gamma != nullptr;
    const int slices = blockDim.x / WARP * SLICES;
    Room room;
    room.sums = reinterpret_cast<float*>(memory);
    room.moments = reinterpret_cast<float2*>(room.sums + MOST_WARPS * SLICES * (MOST_WARPS * ROWS));
    room.staged = reinterpret_cast<uint4*>(room.moments + MERGED<T>);
    const bool fits = STREAMED || layer.k <= slices * SLICE<T>;
    const bool staged = aligned16(layer.gamma) && aligned16(layer.beta) && layer.k <= MOST_STAGED;
    const bool whole = layer.k % PACK<T> == 0 && aligned16(layer.x) && aligned16(layer.weight);
    if (whole && fits && (!normed || staged)) {
        gemv_whole<T, ROWS, SLICES, STREAMED>(layer, room);
    } else {
        gemv_scattered(layer, room, ROWS);
    }
}

// Two blocks on a multiprocessor, so that one of the kernel behind can begin to read its weights beside one of this.
#define ENTRY(T, suffix, rows, slices, streamed)                                                             \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_##suffix(                                      \
        const T* x, const T* gamma, const T* beta, const T* weight, const T* bias, T* out,                   \
        const unsigned long long* spans, const int* positions, int n, int k, float eps, int activation,      \
        int residual, int kv_from, long long kv_offset, long long kv_stride) {                               \
        gemv<T, rows, slices, streamed>({x, gamma, beta, weight, bias, out,                                  \
                                         {spans, positions, kv_from, kv_offset, kv_stride}, n, k, eps,       \
                                         activation, residual != 0});                                        \
    }
ENTRY(f16, f16, 6, 1, true)
ENTRY(f16, f16_6x1, 6, 1, false)
ENTRY(f16, f16_8x1, 8, 1, false)
ENTRY(f16, f16_4x2, 4, 2, false)
ENTRY(bf16, bf16, 6, 1, true)
ENTRY(bf16, bf16_6x1, 6, 1, false)
ENTRY(bf16, bf16_8x1, 8, 1, false)
ENTRY(bf16, bf16_4x2, 4, 2, false)
