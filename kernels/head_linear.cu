// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out = x weight^T + bias, where the weights are many times what all shared memory holds, as an output head's; and, where
// it is asked for, the largest element of each row among the columns of each block.
//
// Layout     x is [rows, k], rows x_stride elements apart; weight: [n, k]; bias: [n] or NULL; out: [rows, n], rows
//            out_stride apart; maxima: 32 bits, [rows, blocks, 4] at a multiple of 16 bytes, or NULL: what
//            common/found.cuh says of a row's columns below `counted` in tiles b, b + blocks, b + 2 blocks, ... of
//            COLUMNS columns. k is at most 1,024.
// Alignment  One element, but for maxima. The weights come in whole tiles where all addresses are multiples of 16 bytes,
//            and k and x_stride of a pack; else everything goes element by element, slowly, to the same bits.
// Launch     Grid (blocks, 1, 1); block: 8 warps. An entry point has the most rows in its name, 64 where it has none.
//            Shared memory: metrale.ops.head_linear.shared_bytes, with at least one slot from compute capability 9.0 on.
//            May begin before the kernel ahead has ended, if nothing that is still under way writes weight or bias.
// Aliasing   out and maxima overlap nothing that is read.
// Order      A row's bits depend on its own elements and the weights: not on the other rows, not on its place, not on
//            alignment, the entry point or the number of blocks.
// Numbers    Products of T summed in float on the tensor cores, and the bias in float. Of the maxima, as `argmax` has it:
//            the lowest column wins a tie, and NaN counts as minus infinity.
//
// Reading the weights is what takes the time. So blocks stay, each with a ring of tiles on their way to shared memory, from
// before the wait for the kernel ahead to the last. The warps divide k: each has its columns of all rows of x in registers,
// and takes the same of each tile, so that nothing is read twice. What they have summed they exchange in shared memory,
// of one tile while the next is multiplied.

#include "common/attention.cuh"
#include "common/dependent.cuh"
#include "common/found.cuh"
#include "common/piece_ring.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int SLICE = 128;        // columns of x that a warp multiplies
constexpr int ROWS_AT_ONCE = 16;  // rows of x that the tensor cores take
constexpr int OCTETS = 2;         // of columns of the result, in a tile
constexpr int COLUMNS = OCTETS * 8;
constexpr int QUADS = COLUMNS / 4;  // that a row has in a tile, a thread for each
constexpr int LANES = 4;            // that share a row of an operand
constexpr int BARRIER_BYTES = 128;  // of shared memory, at its beginning

template <typename T>
struct Layer {
    const T *x, *weight, *bias;
    T* out;
    unsigned* maxima;
    int rows, n, k;
    long long x_stride, out_stride;
    int counted, blocks;

    __device__ __forceinline__ int tiles() const {
        return (n + COLUMNS - 1) / COLUMNS;
    }
    __device__ __forceinline__ bool whole() const {
        return k % PACK<T> == 0 && x_stride % PACK<T> == 0 && aligned16(x) && aligned16(weight);
    }
};

// Packs of a lane in its warp's slice, LANES packs apart.
template <typename T>
inline constexpr int PACKS = SLICE / (LANES * PACK<T>);

// The lane's part of a tile of the weights: of one row in each octet.
template <typename T>
struct Weights {
    uint4 packs[OCTETS][PACKS<T>];
};

// The column of the lane's pack in its row.
template <typename T>
__device__ __forceinline__ int column_of(int pack) {
    const int lane = threadIdx.x % WARP;
    return threadIdx.x / WARP * SLICE + (pack * LANES + lane % LANES) * PACK<T>;
}

// Tiles that come straight to registers.
template <typename T, bool WHOLE>
struct Direct {
    const Layer<T>& layer;

    __device__ __forceinline__ explicit Direct(const Layer<T>& l) : layer(l) {}

    __device__ __forceinline__ void load(int tile, Weights<T>& to) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
            const int row = tile * COLUMNS + o * 8 + lane / LANES;
            const T* from = layer.weight + static_cast<long long>(row) * layer.k;
#pragma unroll
            for (int p = 0; p < PACKS<T>; ++p) {
                const int at = column_of<T>(p), count = row < layer.n ? layer.k - at : 0;
                to.packs[o][p] = WHOLE ? load_once(from + at, count > 0) : gather_words(from + at, count);
            }
        }
    }
    __device__ __forceinline__ void advance() {}
};

#if __CUDA_ARCH__ >= 900

// Tiles that come through a ring in shared memory, each by one copy. A slot is free when all warps have loaded what was
// there to registers.
template <typename T>
struct Ring {
    const Layer<T>& layer;
    unsigned char* slots;
    unsigned barriers;
    int count;           // of slots
    int next, slot = 0;  // the tile that is asked for next, and the slot of the one that is loaded next
    unsigned parity = 0;
    unsigned long long policy = evict_first();

    // Asks for the first tiles. `room` begins at a multiple of 16 bytes, `bytes` long.
    __device__ __forceinline__ Ring(const Layer<T>& l, unsigned barriers_at, unsigned char* room, unsigned bytes)
        : layer(l), slots(room), barriers(barriers_at), count(bytes / slot_bytes()), next(blockIdx.x) {
        count = min(count, BARRIER_BYTES / static_cast<int>(sizeof(unsigned long long)));
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; ++i) {
                open_barrier(barrier(i));
            }
            show_to_copies();
        }
        __syncthreads();
        for (int i = 0; i < count; ++i) {
            ask(i);
        }
    }

    __device__ __forceinline__ unsigned slot_bytes() const {
        return COLUMNS * layer.k * static_cast<unsigned>(sizeof(T));
    }
    __device__ __forceinline__ unsigned barrier(int i) const {
        return barriers + i * static_cast<int>(sizeof(unsigned long long));
    }

    __device__ __forceinline__ void ask(int to) {
        if (threadIdx.x == 0 && next < layer.tiles()) {
            const int rows = min(COLUMNS, layer.n - next * COLUMNS);
            const T* from = layer.weight + static_cast<long long>(next) * COLUMNS * layer.k;
            copy_bulk(shared_address(slots + to * slot_bytes()), from,
                      rows * layer.k * static_cast<unsigned>(sizeof(T)), barrier(to), policy);
        }
        next += layer.blocks;
    }

    // Eight lanes read at a time, so two rows, which mostly lie a multiple of 128 bytes apart: the second has its packs in
    // another order then, so that they are in other banks. Rows past the last hold anything, which stays among itself.
    __device__ __forceinline__ void load(int, Weights<T>& to) const {
        wait_for_bytes(barrier(slot), parity);
        const int lane = threadIdx.x % WARP, swapped = lane / LANES % 2;
        const T* from = reinterpret_cast<const T*>(slots + slot * slot_bytes());
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
            const T* row = from + (o * 8 + lane / LANES) * layer.k;
#pragma unroll
            for (int p = 0; p < PACKS<T>; ++p) {
                const int at = column_of<T>(p ^ swapped);
                to.packs[o][p] =
                    at < layer.k ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int p = 0; p < PACKS<T>; p += 2) {
                const uint4 first = to.packs[o][p], second = to.packs[o][p + 1];
                to.packs[o][p] = swapped ? second : first;
                to.packs[o][p + 1] = swapped ? first : second;
            }
        }
    }

    // After a barrier of the block: all warps have loaded the tile.
    __device__ __forceinline__ void advance() {
        ask(slot);
        if (++slot == count) {
            slot = 0;
            parity ^= 1;
        }
    }
};

#endif

// Products of TILES * 16 rows of x, from `first` on.
template <typename T, int TILES, bool WHOLE, typename Source>
struct Product {
    static constexpr int ROWS = TILES * ROWS_AT_ONCE;
    static constexpr int OCTET_PITCH = ROWS * 8 + 16;  // floats; no bank conflicts
    static constexpr int WARP_PITCH = OCTETS * OCTET_PITCH;
    static constexpr int SUMS = WARPS * WARP_PITCH;  // of a tile
    static constexpr int SUM_BYTES = 2 * SUMS * static_cast<int>(sizeof(float));
    using Sums = float[TILES][OCTETS][4];

    const Layer<T>& layer;
    Source& source;
    float* const shared;  // [2][WARPS][OCTETS][ROWS][8]
    const int first;      // row of x
    const int own_row, own_quad;  // of the thread, in the block's result
    const bool own;
    uint4 x[TILES][2][PACKS<T>];
    float best = -infinity(), taint = 0.0f;
    int best_column = 0;

    __device__ __forceinline__ Product(const Layer<T>& l, Source& s, float* sums, int first_row)
        : layer(l),
          source(s),
          shared(sums),
          first(first_row),
          own_row(static_cast<int>(threadIdx.x) / QUADS),
          own_quad(threadIdx.x % QUADS),
          own(own_row < ROWS && first_row + own_row < l.rows) {}

    __device__ __forceinline__ void load_x() {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < TILES * 2; ++i) {
            const int row = first + i * 8 + lane / LANES;
            const T* from = layer.x + row * layer.x_stride;
#pragma unroll
            for (int p = 0; p < PACKS<T>; ++p) {
                const int at = column_of<T>(p), count = row < layer.rows ? layer.k - at : 0;
                x[i / 2][i % 2][p] = WHOLE ? load_fresh(from + at, count > 0) : gather_fresh(from + at, count);
            }
        }
    }

    // The warp's sums with a tile.
    __device__ __forceinline__ void multiply(const Weights<T>& weights, Sums& sums) const {
#pragma unroll
        for (int p = 0; p < PACKS<T>; ++p) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int o = 0; o < OCTETS; ++o) {
                    const uint4& w = weights.packs[o][p];
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        const uint4 &low = x[tile][0][p], &high = x[tile][1][p];
                        multiply_add(sums[tile][o], word(low, 2 * half), word(high, 2 * half), word(low, 2 * half + 1),
                                     word(high, 2 * half + 1), word(w, 2 * half), word(w, 2 * half + 1), T{});
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void store_sums(const Sums& sums, float* room) const {
        const int lane = threadIdx.x % WARP;
        float* const to = room + threadIdx.x / WARP * WARP_PITCH + lane / LANES * 8 + lane % LANES * 2;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int o = 0; o < OCTETS; ++o) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    *reinterpret_cast<float2*>(to + o * OCTET_PITCH + (tile * ROWS_AT_ONCE + half * 8) * 8) =
                        make_float2(sums[tile][o][2 * half], sums[tile][o][2 * half + 1]);
                }
            }
        }
    }

    // The bias of the thread's four elements of a tile. It comes from far away, so it is asked for long before `finish`.
    __device__ __forceinline__ uint2 load_biases(int tile) const {
        const int column = tile * COLUMNS + own_quad * 4;
        const T* const from = layer.bias + column;
        unsigned words[2] = {0, 0};
        if (own && layer.bias != nullptr) {
            if (column + 4 <= layer.n && (reinterpret_cast<unsigned long long>(from) & 7) == 0) {
                return *reinterpret_cast<const uint2*>(from);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (column + i < layer.n) {
                    words[i / 2] |= static_cast<unsigned>(from[i].bits) << i % 2 * 16;
                }
            }
        }
        return make_uint2(words[0], words[1]);
    }

    // Adds the warps' sums of the thread's four elements of a tile, in order, and stores the result.
    __device__ __forceinline__ void finish(int tile, const float* room, const uint2& bias) {
        if (!own) {
            return;
        }
        const int column = tile * COLUMNS + own_quad * 4;
        float values[4] = {0.0f, 0.0f, 0.0f, 0.0f}, low[2], high[2];
        const float* const from = room + own_quad / 2 * OCTET_PITCH + own_row * 8 + own_quad % 2 * 4;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float4 part = *reinterpret_cast<const float4*>(from + warp * WARP_PITCH);
            values[0] += part.x;
            values[1] += part.y;
            values[2] += part.z;
            values[3] += part.w;
        }
        unpack(bias.x, low, T{});
        unpack(bias.y, high, T{});
        const unsigned words[2] = {word_of<T>(values[0] + low[0], values[1] + low[1]),
                                   word_of<T>(values[2] + high[0], values[3] + high[1])};
        T* const to = layer.out + (first + own_row) * layer.out_stride + column;
        if (column + 4 <= layer.n && (reinterpret_cast<unsigned long long>(to) & 7) == 0) {
            *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (column + i < layer.n) {
                    to[i] = T{static_cast<unsigned short>(words[i / 2] >> i % 2 * 16)};
                }
            }
        }
        if (layer.maxima != nullptr) {
            see(words, column);
        }
    }

    // Looks at the four elements as they were stored.
    __device__ __forceinline__ void see(const unsigned (&words)[2], int column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float two[2];
            unpack(words[i / 2], two, T{});
            const float value = two[i % 2];
            if (column + i < layer.counted) {
                taint = fmaf(value, 0.0f, taint);
                if (value > best) {
                    best = value;
                    best_column = column + i;
                }
            }
        }
    }

    // Leaves the block's maximum of each row, by whole warps.
    __device__ __forceinline__ void store_maxima() const {
        if (layer.maxima == nullptr || own_row >= ROWS) {
            return;
        }
        const Key key = warp_reduce<Max>(best > -infinity() ? key_of(best, best_column) : NO_KEY, QUADS);
        const float tainted = warp_reduce<Sum>(taint, QUADS);
        if (own && own_quad == 0) {
            const Found found = {key, tainted != 0.0f, 0.0f};  // so is NaN
            const long long at = static_cast<long long>(first + own_row) * layer.blocks + blockIdx.x;
            reinterpret_cast<uint4*>(layer.maxima)[at] = found.words();
        }
    }

    __device__ __forceinline__ void run() {
        load_x();
        const int tiles = layer.tiles();
        Weights<T> weights;
        if (static_cast<int>(blockIdx.x) < tiles) {
            source.load(blockIdx.x, weights);
        }
        __syncthreads();
        source.advance();
        // Of two warps that share a part of the multiprocessor, one finishes the last tile while the other multiplies.
        const bool early = threadIdx.x / WARP < WARPS / 2;
        int tile = blockIdx.x;
        float *room = shared, *other = shared + SUMS;
        uint2 bias = make_uint2(0, 0);
#pragma unroll 1
        for (; tile < tiles; tile += layer.blocks) {
            const uint2 next_bias = load_biases(tile);
            const bool again = tile != static_cast<int>(blockIdx.x);
            if (again && early) {
                finish(tile - layer.blocks, other, bias);
            }
            Sums sums = {};
            multiply(weights, sums);
            if (again && !early) {
                finish(tile - layer.blocks, other, bias);
            }
            if (tile + layer.blocks < tiles) {
                source.load(tile + layer.blocks, weights);
            }
            store_sums(sums, room);
            __syncthreads();
            source.advance();
            float* const last = room;
            room = other;
            other = last;
            bias = next_bias;
        }
        if (tile != static_cast<int>(blockIdx.x)) {
            finish(tile - layer.blocks, other, bias);
        }
        store_maxima();
    }
};

// For what lies anywhere: 16 rows after the other.
template <typename T>
__device__ __noinline__ void multiply_scattered(Layer<T> layer, float* sums) {
    wait_for_previous();
    Direct<T, false> source(layer);
#pragma unroll 1
    for (int row = 0; row < layer.rows; row += ROWS_AT_ONCE) {
        Product<T, 1, false, Direct<T, false>>(layer, source, sums, row).run();
        __syncthreads();  // the sums have been read
    }
}

template <typename T, int TILES>
__device__ __forceinline__ void head_linear(const Layer<T>& layer) {
    extern __shared__ uint4 memory[];
    let_next_begin();
    unsigned char* const room = reinterpret_cast<unsigned char*>(memory) + BARRIER_BYTES;
    float* const sums = reinterpret_cast<float*>(room);
    if (!layer.whole()) {
        multiply_scattered(layer, sums);
        return;
    }
#if __CUDA_ARCH__ >= 900
    constexpr int SUM_BYTES = Product<T, TILES, true, Ring<T>>::SUM_BYTES;
    Ring<T> source(layer, shared_address(memory), room + SUM_BYTES,
                   dynamic_shared_bytes() - BARRIER_BYTES - SUM_BYTES);
    wait_for_previous();
    Product<T, TILES, true, Ring<T>>(layer, source, sums, 0).run();
#else
    wait_for_previous();
    Direct<T, true> source(layer);
    Product<T, TILES, true, Direct<T, true>>(layer, source, sums, 0).run();
#endif
}

#define ENTRY(T, suffix, tiles)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) head_linear_##suffix(                                   \
        const T* x, const T* weight, const T* bias, T* out, unsigned int* maxima, int rows, int n, int k,            \
        long long x_stride, long long out_stride, int counted, int blocks) {                                         \
        head_linear<T, tiles>({x, weight, bias, out, maxima, rows, n, k, x_stride, out_stride, counted, blocks});    \
    }
ENTRY(f16, f16, 4)
ENTRY(f16, f16_32, 2)
ENTRY(f16, f16_16, 1)
ENTRY(bf16, bf16, 4)
ENTRY(bf16, bf16_32, 2)
ENTRY(bf16, bf16_16, 1)
