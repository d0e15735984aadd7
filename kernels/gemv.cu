// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out = activation(n(x) weight^T + bias), or out += ..., of one row; n(x) is x, or with gamma LayerNorm(x). The last
// columns may go into the KV cache instead.
//
// Layout     x, gamma: [k]; sums: float, [2, n], those of gamma and of beta times each row of the weights; gamma and sums
//            both or neither NULL; weight: [n, k]; bias: [n] or NULL; out: [kv_from].
//            Columns from kv_from on go where common/kv_places.cuh says; spans, positions: [1], both or neither NULL, and
//            without them kv_from is n. activation is a number of common/activation.cuh, none with residual or spans.
// Alignment  One element. Packs are moved whole where all addresses are multiples of 16 bytes and k of a pack; else
//            everything goes element by element, slowly, to the same bits.
// Launch     Block (32 * W, G, 1) with W * G at most 8: W warps share a row of the weights, and there are G such groups,
//            each with ROWS rows; grid (n / (G * ROWS) rounded up, 1, 1). With a ring: W is 1, and the grid any number of
//            blocks, whose warps share all rows. Shared memory: metrale.ops.gemv.shared_bytes. May begin before the kernel
//            ahead has ended, if nothing that is still under way writes gamma, sums, weight, bias, spans or positions.
// Aliasing   out and the place in the KV cache overlap nothing that is read.
// Order      An element's bits depend on x, its row of the weights and k: not on n, on alignment, on the entry point.
// Numbers    Products of T summed in float on the tensor cores; bias, activation and residual in float. LayerNorm is
//            applied to the sums: it is (sum x' W - mean sums[0]) / deviation + sums[1], where x' is gamma x, rounded to T.
//            So its errors are those of an x whose elements are rounded to T.
//
// Reading the weights once is what takes the time, and next to that the way from the end of the kernel ahead to the
// result. So a lane has all its packs of the weights under way, in registers, before it waits for x. A warp's lanes have
// neighbouring packs of a row. The tensor cores take them as they are: what the lanes 4 i to 4 i + 3 have of a row of the
// weights and of x, a row of one operand and a column of the other; the sum over those lanes is then element (i, i) of
// the product, and what else is in it goes nowhere. It takes a sixteenth of the instructions of a sum in each lane.
//
// Weights that are many times what all registers hold, as an output head's, come through rings in shared memory instead:
// blocks that stay keep as many bytes on their way from the first to the last, with x in registers all the time.
//
// To normalise x first would take two barriers between its arrival and the first product. What LayerNorm needs of x, the
// sums of its elements and of their squares, comes out of the same reduction as the products instead.

#include "common/activation.cuh"
#include "common/attention.cuh"
#include "common/dependent.cuh"
#include "common/kv_places.cuh"
#include "common/piece_ring.cuh"

constexpr int MOST_WARPS = 8;      // of a block
constexpr int PACKS = 2;           // of a lane in a slice

// How the weights reach a warp's registers: all at once; some slices at a time; or some rows at a time, through a ring.
enum class Way { WHOLE, STREAMED, RINGED };

using Ring = PieceRing<3, 8192>;

// Columns of which a warp has a pack in each lane, and columns that it sums the products of.
template <typename T>
inline constexpr int CHUNK = WARP * PACK<T>;
template <typename T>
inline constexpr int SLICE = PACKS * CHUNK<T>;

// The block's threads, whichever axis they lie along.
__device__ __forceinline__ int thread_of_block() {
    return threadIdx.y * blockDim.x + threadIdx.x;
}

template <typename T>
struct Layer {
    const T *x, *gamma, *weight, *bias;
    const float* sums;
    T* out;
    KvPlaces<T> kv;
    int n, k;
    float eps;
    int activation;
    bool residual;
};

// Gamma x in T may be past what T holds where x is not. Of the sum, this makes no difference.
__device__ __forceinline__ float headroom(f16) { return 0.0625f; }
__device__ __forceinline__ float headroom(bf16) { return 1.0f; }

// Two ones.
__device__ __forceinline__ unsigned ones(f16) { return 0x3c003c00u; }
__device__ __forceinline__ unsigned ones(bf16) { return 0x3f803f80u; }

// gamma x.
template <typename T>
__device__ __forceinline__ uint4 scaled(const uint4& x, const uint4& gamma) {
    float values[PACK<T>], scales[PACK<T>];
    unpack(x, values, T{});
    unpack(gamma, scales, T{});
#pragma unroll
    for (int i = 0; i < PACK<T>; ++i) {
        values[i] *= scales[i] * headroom(T{});
    }
    return packed(values, T{});
}

// Sums over a row: of the squares of its elements, and of those.
struct RowSums {
    float squares = 0.0f, elements = 0.0f;
};

// A block's shared memory.
struct Room {
    unsigned char* ring;  // the warp's
    float* sums;          // [slices][PITCH]: the products with the block's rows
    RowSums* row_sums;    // [slices]
    uint4* staged;        // gamma x, in whole slices, where weights come through rings
};

// x and the weights by whole packs, of which a lane has some, a chunk apart.
template <typename T>
struct WholeRow {
    const Layer<T>& layer;

    template <int CHUNKS>
    __device__ __forceinline__ void load(int column, uint4 (&x)[CHUNKS]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int at = column + c * CHUNK<T>;
            x[c] = load_fresh(layer.x + at, at < layer.k);
        }
    }
    __device__ __forceinline__ static uint4 load_once_from(const T* from, int count) {
        return load_once(from, count > 0);
    }
};

// The same element by element.
template <typename T>
struct ScatteredRow {
    const Layer<T>& layer;

    template <int CHUNKS>
    __device__ __forceinline__ void load(int column, uint4 (&x)[CHUNKS]) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int at = column + c * CHUNK<T>;
            x[c] = gather_fresh(layer.x + at, columns_from(at, PACK<T>, layer.k));
        }
    }
    __device__ __forceinline__ static uint4 load_once_from(const T* from, int count) {
        return gather_words(from, count);
    }
};

// An element of the result, the thread's own.
template <typename T>
struct Element {
    const Layer<T>& layer;
    int column;
    bool wanted, kept;  // kept: in the KV cache
    float bias, gammas, betas;  // gammas, betas: the layer's `sums`
    KvRow row;

    __device__ __forceinline__ Element(const Layer<T>& l, int c, bool own) : layer(l), column(c), wanted(own) {
        kept = wanted && column >= layer.kv.from;
        bias = wanted && layer.bias != nullptr ? to_float(layer.bias[column]) : 0.0f;
        const bool normed = wanted && layer.gamma != nullptr;
        gammas = normed ? layer.sums[column] : 0.0f;
        betas = normed ? layer.sums[layer.n + column] : 0.0f;
        row = kept ? layer.kv.row(0) : KvRow{0, 0};
    }
    __device__ __forceinline__ float load_before() const {
        return to_float(load_fresh_element(layer.out + column, wanted && layer.residual));
    }
    // Makes the sum of the products with gamma x that of those with LayerNorm(x).
    __device__ __forceinline__ float normalised(float sum, const RowSums& x) const {
        const float each = 1.0f / static_cast<float>(layer.k), mean = x.elements * each;
        const float scale = rsqrtf(fmaxf(x.squares * each - mean * mean, 0.0f) + layer.eps);
        return (sum * (1.0f / headroom(T{})) - mean * gammas) * scale + betas;
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

// The least power of two that so many sums of a warp fit into.
__device__ constexpr int room_of(int sums) {
    return sums <= 2 ? 2 : sums <= 4 ? 4 : sums <= 8 ? 8 : 16;
}

// What a lane has of the products of two rows with x: the diagonal of what the tensor cores make of its packs.
struct Pair {
    float sums[PACKS][4];

    // Of one row: the sum of the lanes 4 i to 4 i + 3, in one of these, and 0 in the others.
    __device__ __forceinline__ float of(int row) const {
        const int lane = threadIdx.x % WARP, at = row * 2;
        const bool own = lane % 4 == lane / 8, odd = lane / 4 % 2 != 0;
        const float even_sum = sums[0][at] + sums[1][at], odd_sum = sums[0][at + 1] + sums[1][at + 1];
        return own ? (odd ? odd_sum : even_sum) : 0.0f;
    }
};

// What a warp has in registers: ROWS rows of the weights, of each as many slices.
template <typename T, int ROWS, int SLICES>
struct Tile {
    static_assert(ROWS % 2 == 0, "the tensor cores take two rows");
    static constexpr int CHUNKS = SLICES * PACKS;

    uint4 weights[ROWS][CHUNKS];

    // Leaves the lane's part of the sum of slice s with row r in parts[s * PITCH + r].
    template <int PITCH, int COUNT>
    __device__ __forceinline__ void multiply(const uint4 (&x)[CHUNKS], float (&parts)[COUNT]) const {
        static_assert(SLICES * PITCH <= COUNT, "too many sums");
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            Pair pairs[ROWS / 2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int r = 0; r < ROWS; r += 2) {
#pragma unroll
                    for (int p = 0; p < PACKS; ++p) {
                        const int c = s * PACKS + p;
                        multiply_add(pairs[r / 2].sums[p], word(weights[r][c], 2 * half),
                                     word(weights[r + 1][c], 2 * half), word(weights[r][c], 2 * half + 1),
                                     word(weights[r + 1][c], 2 * half + 1), word(x[c], 2 * half),
                                     word(x[c], 2 * half + 1), T{});
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                parts[s * PITCH + r] = pairs[r / 2].of(r % 2);
            }
        }
    }
};

// The same of x with itself and with ones: in parts[s * PITCH + FIRST], and the one after it.
template <typename T, int PITCH, int FIRST, int CHUNKS, int COUNT>
__device__ __forceinline__ void multiply_itself(const uint4 (&x)[CHUNKS], float (&parts)[COUNT]) {
#pragma unroll
    for (int s = 0; s < CHUNKS / PACKS; ++s) {
        Pair pair = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                const unsigned first = word(x[s * PACKS + p], 2 * half), second = word(x[s * PACKS + p], 2 * half + 1);
                multiply_add(pair.sums[p], first, ones(T{}), second, ones(T{}), first, second, T{});
            }
        }
        parts[s * PITCH + FIRST] = pair.of(0);
        parts[s * PITCH + FIRST + 1] = pair.of(1);
    }
}

template <typename T, int CHUNKS>
__device__ __forceinline__ void scale(uint4 (&x)[CHUNKS], const uint4 (&gamma)[CHUNKS]) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        x[c] = scaled<T>(x[c], gamma[c]);
    }
}

// A warp's products with ROWS rows of the weights, SLICES slices at a time. Of the `of` rows of a warp they begin after
// `skipped`. STREAMED: there may be more slices than the warps have at a time. NORMED: they are those of LayerNorm(x).
template <typename T, int ROWS, int SLICES, bool STREAMED, bool NORMED, typename Row>
struct Product {
    static constexpr int CHUNKS = SLICES * PACKS;
    static constexpr int PITCH = MOST_WARPS * ROWS;  // from slice to slice among a block's sums
    static constexpr int COUNT = room_of(SLICES * ROWS);
    static constexpr bool TOGETHER = NORMED && room_of(SLICES * (ROWS + 2)) == COUNT;  // there is room for those of x
    static constexpr int OWN = ROWS + (TOGETHER ? 2 : 0);  // sums of a warp in a slice that are formed at once

    const Layer<T>& layer;
    int row, column;  // the warp's first row of the weights, and where the lane's first pack begins
    Tile<T, ROWS, SLICES> tile;
    uint4 gamma[CHUNKS];

    __device__ __forceinline__ Product(const Layer<T>& l, int of, int skipped) : layer(l) {
        row = static_cast<int>(blockIdx.x * blockDim.y + threadIdx.y) * of + skipped;
        column = static_cast<int>(threadIdx.x / WARP) * (SLICES * SLICE<T>) + threadIdx.x % WARP * PACK<T>;
    }

    // And gamma.
    __device__ __forceinline__ void load_weights(int first) {
        const T* from = layer.weight + static_cast<long long>(row) * layer.k + first + column;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int count = columns_from(first + column + c * CHUNK<T>, PACK<T>, layer.k);
                tile.weights[r][c] = Row::load_once_from(from + c * CHUNK<T>, row + r < layer.n ? count : 0);
            }
            from += layer.k;
        }
        if constexpr (NORMED) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int at = first + column + c * CHUNK<T>;
                gamma[c] = Row::load_once_from(layer.gamma + at, columns_from(at, PACK<T>, layer.k));
            }
        }
    }

    // Leaves the warp's sums in shared memory. Of those of x, all groups of warps have the same.
    __device__ __forceinline__ void store_sums(uint4 (&x)[CHUNKS], const Room& room) const {
        float parts[COUNT] = {}, own_parts[room_of(2 * SLICES)];
        if constexpr (TOGETHER) {
            multiply_itself<T, OWN, ROWS>(x, parts);
        } else if constexpr (NORMED) {
            multiply_itself<T, 2, 0>(x, own_parts);
        }
        if constexpr (NORMED) {
            scale<T>(x, gamma);
        }
        tile.template multiply<OWN>(x, parts);
        store_each<OWN, 0>(parts, room);
        if constexpr (NORMED && !TOGETHER) {
            store_each<2, ROWS>(own_parts, room);
        }
    }

    // Stores sums of each slice: with the warp's rows from FIRST on, and behind those, the two of x.
    template <int EACH, int FIRST, int ALL>
    __device__ __forceinline__ static void store_each(float (&parts)[ALL], const Room& room) {
        const float sum = warp_reduce_each<Sum>(parts);
        const int lane = threadIdx.x % WARP, which = lane / (WARP / ALL), r = FIRST + which % EACH;
        const int slice = threadIdx.x / WARP * SLICES + which / EACH;
        if (lane % (WARP / ALL) != 0 || which >= SLICES * EACH) {
            return;
        }
        if (r < ROWS) {
            room.sums[slice * PITCH + threadIdx.y * ROWS + r] = sum;
        } else if (threadIdx.y == 0) {
            (r == ROWS ? room.row_sums[slice].squares : room.row_sums[slice].elements) = sum;
        }
    }

    // Adds the warps' sums for the thread's element, in order.
    __device__ __forceinline__ void add_slices(float& sum, RowSums& row_sums, const Room& room) const {
        const int slices = blockDim.x / WARP * SLICES, thread = thread_of_block();
        if (thread < static_cast<int>(blockDim.y) * ROWS) {
#pragma unroll
            for (int s = 0; s < MOST_WARPS * SLICES; ++s) {
                sum += s < slices ? room.sums[s * PITCH + thread] : 0.0f;
                if (NORMED) {
                    row_sums.squares += s < slices ? room.row_sums[s].squares : 0.0f;
                    row_sums.elements += s < slices ? room.row_sums[s].elements : 0.0f;
                }
            }
        }
    }

    // All products for the thread's element, which is stored. The weights of the first slices have been loaded.
    __device__ __forceinline__ void run(const Row& from, const Room& room, const Element<T>& element, float before) {
        const int columns = blockDim.x / WARP * (SLICES * SLICE<T>);  // of all warps at a time
        float sum = 0.0f;
        RowSums row_sums;
        for (int first = 0;;) {
            uint4 x[CHUNKS];
            from.load(first + column, x);
            store_sums(x, room);
            first += columns;
            if (STREAMED && first < layer.k) {
                load_weights(first);
            }
            __syncthreads();
            add_slices(sum, row_sums, room);
            if (!STREAMED || first >= layer.k) {
                element.store(NORMED ? element.normalised(sum, row_sums) : sum, before);
                return;
            }
            __syncthreads();  // the sums have been read
        }
    }
};

// For what lies anywhere: two rows of a warp after the other, so that one function serves all kernels.
template <bool NORMED, typename T>
__device__ __noinline__ void gemv_scattered(Layer<T> layer, Room room, int rows) {
    wait_for_previous();
    const ScatteredRow<T> from = {layer};
#pragma unroll 1
    for (int skipped = 0; skipped < rows; skipped += 2) {
        Product<T, 2, 1, true, NORMED, ScatteredRow<T>> product(layer, rows, skipped);
        product.load_weights(0);
        const Element<T> element = element_of_thread(layer, 2, rows, skipped);
        product.run(from, room, element, element.load_before());
        __syncthreads();  // the sums have been read
    }
}

template <bool NORMED, typename T, int ROWS, int SLICES, bool STREAMED>
__device__ __forceinline__ void gemv_whole(const Layer<T>& layer, const Room& room) {
    Product<T, ROWS, SLICES, STREAMED, NORMED, WholeRow<T>> product(layer, ROWS, 0);
    product.load_weights(0);
    const Element<T> element = element_of_thread(layer, ROWS, ROWS, 0);
    wait_for_previous();
    const float before = element.load_before();
    product.run({layer}, room, element, before);
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
    static_assert(ROWS * SLICES * SLICE<T> * sizeof(T) <= Ring::SLOT, "a piece fits into a slot");
    constexpr int COUNT = room_of(SLICES * ROWS);
    const int lane = threadIdx.x % WARP;
    const T* from = reinterpret_cast<const T*>(ring.wait()) + lane * PACK<T>;
    Tile<T, ROWS, SLICES> tile;
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
    float parts[COUNT] = {};
    tile.template multiply<ROWS>(x, parts);  // after which the whole warp has read the piece
    ring.release();
    const float each = warp_reduce_each<Sum>(parts);
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
        sum += __shfl_sync(ALL_LANES, each, (s * ROWS + lane % ROWS) * (WARP / COUNT));
    }
    return sum;
}

// gamma x and the sums of x, for all warps of a block, each of which makes some slices.
template <typename T, int SLICES>
struct Staged {
    const Layer<T>& layer;
    const Room& room;
    uint4 gamma[PACKS];  // of the warp's first slice

    __device__ __forceinline__ Staged(const Layer<T>& l, const Room& r) : layer(l), room(r) { load_gamma(threadIdx.y); }

    __device__ __forceinline__ static int column(int slice, int p) {
        return slice * SLICE<T> + p * CHUNK<T> + static_cast<int>(threadIdx.x) * PACK<T>;
    }
    __device__ __forceinline__ void load_gamma(int slice) {
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int at = column(slice, p);
            gamma[p] = load_once(layer.gamma + at, at < layer.k);
        }
    }

    // After the wait for the kernel ahead: x, as the products take it, and its sums.
    template <int CHUNKS>
    __device__ __forceinline__ RowSums load(uint4 (&x)[CHUNKS]) {
#pragma unroll 1
        for (int slice = threadIdx.y; slice < SLICES; slice += blockDim.y) {
            uint4 packs[PACKS];
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                const int at = column(slice, p);
                packs[p] = load_fresh(layer.x + at, at < layer.k);
            }
            if (slice != static_cast<int>(threadIdx.y)) {
                load_gamma(slice);
            }
            float parts[2];
            multiply_itself<T, 2, 0>(packs, parts);
            scale<T>(packs, gamma);
#pragma unroll
            for (int p = 0; p < PACKS; ++p) {
                room.staged[column(slice, p) / PACK<T>] = packs[p];
            }
            const float sum = warp_reduce_each<Sum>(parts);
            if (threadIdx.x % (WARP / 2) == 0) {
                (threadIdx.x == 0 ? room.row_sums[slice].squares : room.row_sums[slice].elements) = sum;
            }
        }
        __syncthreads();
        RowSums sums;
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            sums.squares += room.row_sums[s].squares;
            sums.elements += room.row_sums[s].elements;
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            x[c] = room.staged[c * WARP + threadIdx.x];
        }
        return sums;
    }
};

// A warp's share, a lane with each element of 32 neighbouring ones.
template <bool NORMED, typename T, int ROWS, int SLICES>
__device__ __forceinline__ void gemv_ringed(const Layer<T>& layer, const Room& room) {
    constexpr int CHUNKS = SLICES * PACKS;
    const Share share = share_of(layer.n);
    const long long row_bytes = layer.k * static_cast<long long>(sizeof(T));
    Ring ring(room.ring, layer.weight + static_cast<long long>(share.first) * layer.k, share.count * row_bytes,
              static_cast<int>(ROWS * row_bytes));
    const int lane = threadIdx.x % WARP;
    uint4 x[CHUNKS];
    RowSums row_sums;
    if constexpr (NORMED) {
        Staged<T, SLICES> staged(layer, room);
        wait_for_previous();
        row_sums = staged.load(x);
    } else {
        wait_for_previous();
        WholeRow<T>{layer}.load(lane * PACK<T>, x);
    }
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
        element.store(NORMED ? element.normalised(own, row_sums) : own, before);
    }
}

template <bool NORMED, typename T, int ROWS, int SLICES, Way WAY>
__device__ __forceinline__ void gemv(const Layer<T>& layer, const Room& room, bool whole) {
    if (whole) {
        if constexpr (WAY == Way::RINGED) {
            gemv_ringed<NORMED, T, ROWS, SLICES>(layer, room);
        } else {
            gemv_whole<NORMED, T, ROWS, SLICES, WAY == Way::STREAMED>(layer, room);
        }
    } else {
        const int pairs = 2 * static_cast<int>(gridDim.x * blockDim.y);  // of rows, if each warp has two
        gemv_scattered<NORMED>(layer, room, WAY == Way::RINGED ? 2 * ((layer.n - 1) / pairs + 1) : ROWS);
    }
}

template <typename T, int ROWS, int SLICES, Way WAY>
__device__ __forceinline__ void gemv(const Layer<T>& layer) {
    extern __shared__ uint4 memory[];
    let_next_begin();
    const int slices = blockDim.x / WARP * SLICES;
    Room room;
    room.ring = reinterpret_cast<unsigned char*>(memory) + threadIdx.y * Ring::BYTES;
    const int rings = WAY == Way::RINGED ? blockDim.y * Ring::BYTES : 0;
    room.sums = reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(memory) + rings);
    room.row_sums = reinterpret_cast<RowSums*>(room.sums + MOST_WARPS * SLICES * (MOST_WARPS * ROWS));
    room.staged = reinterpret_cast<uint4*>(room.row_sums + MOST_WARPS * SLICES);
    const bool fits = WAY == Way::STREAMED || layer.k <= slices * SLICE<T>;
    const bool whole = fits && layer.k % PACK<T> == 0 && aligned16(layer.x) && aligned16(layer.weight);
    if (layer.gamma != nullptr) {
        gemv<true, T, ROWS, SLICES, WAY>(layer, room, whole && aligned16(layer.gamma));
    } else {
        gemv<false, T, ROWS, SLICES, WAY>(layer, room, whole);
    }
}

// Two blocks on a multiprocessor, so that one of the kernel behind can begin to read its weights beside one of this.
#define ENTRY(T, suffix, rows, slices, way)                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) gemv_##suffix(                                      \
        const T* x, const T* gamma, const float* sums, const T* weight, const T* bias, T* out,               \
        const unsigned long long* spans, const int* positions, int n, int k, float eps, int activation,      \
        int residual, int kv_from, long long kv_offset, long long kv_stride) {                               \
        gemv<T, rows, slices, Way::way>({x, gamma, weight, bias, sums, out,                                  \
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
