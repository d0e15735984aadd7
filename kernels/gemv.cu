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
//            each with ROWS rows; grid (n / (G * ROWS) rounded up, 1, 1). With a ring: W is 1, and the grid any number of
//            blocks, whose warps share all rows. Shared memory: metrale.ops.gemv.shared_bytes. May begin before the kernel
//            ahead has ended, if nothing that is still under way writes gamma, beta, weight, bias, spans or positions.
// Aliasing   out and the place in the KV cache overlap nothing that is read.
// Order      An element's bits depend on x, its row of the weights and k: not on n, on alignment, on the entry point.
// Numbers    Products of T summed in float on the tensor cores; LayerNorm, bias, activation and residual in float.
//
// Reading the weights once is what takes the time, and next to that the way from the end of the kernel ahead to the
// result. So a lane has all its packs of the weights under way, in registers, before it waits for x. A warp's lanes have
// neighbouring packs of a row. The tensor cores take them as they are: what the lanes 4 i to 4 i + 3 have of a row of the
// weights and of x, a row of one operand and a column of the other; the sum over those lanes is then element (i, i) of
// the product, and what else is in it goes nowhere. It takes a sixteenth of the instructions of a sum in each lane.
//
// Weights that are many times what all registers hold, as an output head's, come through rings in shared memory instead:
// blocks that stay keep as many bytes on their way from the first to the last, with x in registers all the time.

#include "common/activation.cuh"
#include "common/attention.cuh"
#include "common/dependent.cuh"
#include "common/kv_places.cuh"
#include "common/piece_ring.cuh"
#include "common/row_norm.cuh"

constexpr int MOST_WARPS = 8;      // of a block
constexpr int PACKS = 2;           // of a lane in a slice

// How the weights reach a warp's registers: all at once; some slices at a time; or some rows at a time, through a ring.
enum class Way { WHOLE, STREAMED, RINGED };

using Ring = PieceRing<3, 8192>;

// Columns that a warp sums the products of.
template <typename T>
inline constexpr int SLICE = PACKS * CHUNK<T>;

template <typename T>
struct Layer {
    const T *x, *gamma, *beta, *weight, *bias;
    T* out;
    KvPlaces<T> kv;
    int n, k;
    float eps;
    int activation;
    bool residual;

    __device__ __forceinline__ RowNorm<T> norm() const { return {x, gamma, beta, k, eps}; }
};

// A block's shared memory.
struct Room {
    uint4* staged;        // LayerNorm(x), in whole chunks
    float2* moments;      // [MERGED]: mean and squares
    float* sums;          // [slices][PITCH]: the products with the block's rows
    unsigned char* ring;  // the warp's
};

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

// An element of the result, the thread's own.
template <typename T>
struct Element {
    const Layer<T>& layer;
    int column;
    bool wanted, kept;  // kept: in the KV cache
    float bias;
    KvRow row;

    __device__ __forceinline__ Element(const Layer<T>& l, int c, bool own) : layer(l), column(c), wanted(own) {
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

// Row `thread % rows` of those of the thread's group, which has `of` rows of which the first `skipped` are left out.
template <typename T>
__device__ __forceinline__ Element<T> element_of_thread(const Layer<T>& layer, int rows, int of, int skipped) {
    const int thread = thread_of_block();
    const int column = (static_cast<int>(blockIdx.x * blockDim.y) + thread / rows) * of + skipped + thread % rows;
    return {layer, column, thread < static_cast<int>(blockDim.y) * rows && column < layer.n};
}

// What a warp has in registers: ROWS rows of the weights, of each as many slices.
template <typename T, int ROWS, int SLICES>
struct Tile {
    static_assert(ROWS % 2 == 0, "the tensor cores take two rows");
    static constexpr int CHUNKS = SLICES * PACKS;
    static constexpr int WANTED = SLICES * ROWS, COUNT = WANTED <= 2 ? 2 : WANTED <= 4 ? 4 : WANTED <= 8 ? 8 : 16;
    static_assert(WANTED <= COUNT, "too many sums");

    uint4 weights[ROWS][CHUNKS];

    // The sums of the lanes 4 i to 4 i + 3 of the warp in one of these, and 0 in the others; of slice s with row r in
    // parts[s * ROWS + r].
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
};

// A warp's products with ROWS rows of the weights, SLICES slices at a time. Of the `of` rows of a warp they begin after
// `skipped`. STREAMED: there may be more slices than the warps have at a time.
template <typename T, int ROWS, int SLICES, bool STREAMED, typename Row>
struct Product {
    using Loaded = Tile<T, ROWS, SLICES>;
    static constexpr int CHUNKS = Loaded::CHUNKS;
    static constexpr int PITCH = MOST_WARPS * ROWS;  // from slice to slice among a block's sums

    const Layer<T>& layer;
    int row, column;  // the warp's first row of the weights, and where the lane's first pack begins
    Loaded tile;

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
                tile.weights[r][c] = Row::load_weights(from + c * CHUNK<T>, row + r < layer.n ? count : 0);
            }
            from += layer.k;
        }
    }

    // Leaves the warp's sums in shared memory.
    __device__ __forceinline__ void store_sums(const uint4 (&x)[CHUNKS], float* sums) const {
        constexpr int WANTED = Loaded::WANTED, COUNT = Loaded::COUNT;
        float parts[COUNT] = {};
        tile.multiply(x, parts);
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

// For what lies anywhere: two rows of a warp after the other, so that one function serves all kernels.
template <typename T>
__device__ __noinline__ void gemv_scattered(Layer<T> layer, Room room, int rows) {
    wait_for_previous();
    ScatteredRow<T> from = {layer, {0.0f, 0.0f}};
    if (layer.gamma != nullptr) {
        from.norm = find_norm(layer.norm(), room.moments);
    }
#pragma unroll 1
    for (int skipped = 0; skipped < rows; skipped += 2) {
        Product<T, 2, 1, true, ScatteredRow<T>> product(layer, rows, skipped);
        product.load_weights(0);
        const float sum = product.run(from, room.sums);
        const Element<T> element = element_of_thread(layer, 2, rows, skipped);
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
        scales = load_scales(layer.norm(), thread_of_block() * PACK<T>);
    }
    const Element<T> element = element_of_thread(layer, ROWS, ROWS, 0);
    wait_for_previous();
    const float before = element.load_before();
    if (normed) {
        stage(layer.norm(), room.staged, room.moments, scales);
    }
    const WholeRow<T> from = {layer, normed ? room.staged : nullptr};
    element.store(product.run(from, room.sums), before);
}

// The rows of the weights that a warp has for itself, as many as each other or one more; `first` is where they begin.
struct Share {
    int first, count;
};

__device__ __forceinline__ Share share_of(int n) {
    const int warps = static_cast<int>(gridDim.x * blockDim.y);
    const int warp = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y);
    const int each = n / warps, more = n - each * warps;
    return {each * warp + min(warp, more), each + (warp < more ? 1 : 0)};
}

// Products with ROWS rows of the weights as they lie in shared memory, one after the other: a lane has the sum of row
// `lane % ROWS`. What lies past the last row has no part in the others' sums.
template <typename T, int ROWS, int SLICES, int CHUNKS>
__device__ __forceinline__ float multiply_piece(const uint4 (&x)[CHUNKS], Ring& ring, int k) {
    using Loaded = Tile<T, ROWS, SLICES>;
    static_assert(ROWS * SLICES * SLICE<T> * sizeof(T) <= Ring::SLOT, "a piece fits into a slot");
    constexpr int EACH = WARP / Loaded::COUNT;  // lanes that get the same sum
    const int lane = threadIdx.x % WARP;
    const T* from = reinterpret_cast<const T*>(ring.wait()) + lane * PACK<T>;
    Loaded tile;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const bool there = lane * PACK<T> + c * CHUNK<T> < k;
            tile.weights[r][c] =
                there ? *reinterpret_cast<const uint4*>(from + c * CHUNK<T>) : make_uint4(0, 0, 0, 0);
        }
        from += k;
    }
    float parts[Loaded::COUNT] = {};
    tile.multiply(x, parts);  // after which the whole warp has read the piece
    ring.release();
    const float each = warp_reduce_each<Sum>(parts);
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
        sum += __shfl_sync(ALL_LANES, each, (s * ROWS + lane % ROWS) * EACH);
    }
    return sum;
}

// A warp's share, a lane with each element of 32 neighbouring ones.
template <typename T, int ROWS, int SLICES>
__device__ __forceinline__ void gemv_ringed(const Layer<T>& layer, const Room& room) {
    const Share share = share_of(layer.n);
    const long long row_bytes = layer.k * static_cast<long long>(sizeof(T));
    Ring ring(room.ring, layer.weight + static_cast<long long>(share.first) * layer.k, share.count * row_bytes,
              static_cast<int>(ROWS * row_bytes));
    const bool normed = layer.gamma != nullptr;
    Scales scales = {};
    if (normed) {
        scales = load_scales(layer.norm(), thread_of_block() * PACK<T>);
    }
    wait_for_previous();
    if (normed) {
        stage(layer.norm(), room.staged, room.moments, scales);
    }
    const int lane = threadIdx.x % WARP;
    const WholeRow<T> from = {layer, normed ? room.staged : nullptr};
    uint4 x[Tile<T, ROWS, SLICES>::CHUNKS];
    from.load(lane * PACK<T>, x);
#pragma unroll 1
    for (int first = 0; first < share.count; first += WARP) {
        const int count = min(WARP, share.count - first);
        const Element<T> element(layer, share.first + first + lane, lane < count);
        const float before = element.load_before();
        float own = 0.0f;
#pragma unroll 1
        for (int row = 0; row < count; row += ROWS) {
            const float sum = multiply_piece<T, ROWS, SLICES>(x, ring, layer.k);
            own = lane / ROWS == row / ROWS ? sum : own;
        }
        element.store(own, before);
    }
}

template <typename T, int ROWS, int SLICES, Way WAY>
__device__ __forceinline__ void gemv(const Layer<T>& layer) {
    extern __shared__ uint4 memory[];
    let_next_begin();
    const bool normed = layer.gamma != nullptr;
    const int slices = blockDim.x / WARP * SLICES;
    Room room;
    room.ring = reinterpret_cast<unsigned char*>(memory) + threadIdx.y * Ring::BYTES;
    const int rings = WAY == Way::RINGED ? blockDim.y * Ring::BYTES : 0;
    room.sums = reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(memory) + rings);
    room.moments = reinterpret_cast<float2*>(room.sums + MOST_WARPS * SLICES * (MOST_WARPS * ROWS));
    room.staged = reinterpret_cast<uint4*>(room.moments + MERGED<T>);
    const bool fits = WAY == Way::STREAMED || layer.k <= slices * SLICE<T>;
    const bool staged = aligned16(layer.gamma) && aligned16(layer.beta) && layer.k <= MOST_STAGED;
    const bool whole = layer.k % PACK<T> == 0 && aligned16(layer.x) && aligned16(layer.weight);
    if (whole && fits && (!normed || staged)) {
        if constexpr (WAY == Way::RINGED) {
            gemv_ringed<T, ROWS, SLICES>(layer, room);
        } else {
            gemv_whole<T, ROWS, SLICES, WAY == Way::STREAMED>(layer, room);
        }
    } else {
        const int pairs = 2 * static_cast<int>(gridDim.x * blockDim.y);  // of rows, if each warp has two
        gemv_scattered(layer, room, WAY == Way::RINGED ? 2 * ((layer.n - 1) / pairs + 1) : ROWS);
    }
}

// Two blocks on a multiprocessor, so that one of the kernel behind can begin to read its weights beside one of this.
#define ENTRY(T, suffix, rows, slices, way)                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_##suffix(                                      \
        const T* x, const T* gamma, const T* beta, const T* weight, const T* bias, T* out,                   \
        const unsigned long long* spans, const int* positions, int n, int k, float eps, int activation,      \
        int residual, int kv_from, long long kv_offset, long long kv_stride) {                               \
        gemv<T, rows, slices, Way::way>({x, gamma, beta, weight, bias, out,                                  \
                                         {spans, positions, kv_from, kv_offset, kv_stride}, n, k, eps,       \
                                         activation, residual != 0});                                        \
    }
ENTRY(f16, f16, 6, 1, STREAMED)
ENTRY(f16, f16_6x1, 6, 1, WHOLE)
ENTRY(f16, f16_8x1, 8, 1, WHOLE)
ENTRY(f16, f16_4x2, 4, 2, WHOLE)
ENTRY(f16, f16_ring4x2, 4, 2, RINGED)
ENTRY(f16, f16_ring2x4, 2, 4, RINGED)
ENTRY(bf16, bf16, 6, 1, STREAMED)
ENTRY(bf16, bf16_6x1, 6, 1, WHOLE)
ENTRY(bf16, bf16_8x1, 8, 1, WHOLE)
ENTRY(bf16, bf16_4x2, 4, 2, WHOLE)
ENTRY(bf16, bf16_ring4x2, 4, 2, RINGED)
ENTRY(bf16, bf16_ring2x4, 2, 4, RINGED)
