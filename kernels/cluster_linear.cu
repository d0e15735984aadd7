// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out = activation(x weight^T + bias), or out += ... The last columns may go into the KV cache instead.
//
// Layout     x is [rows, k], rows x_stride elements apart; weight: [n, k]; bias: [n] or NULL; out: [rows, kv_from], rows
//            out_stride apart. Columns from kv_from on go where common/kv_places.cuh says; spans, positions: [rows],
//            both or neither NULL, and without them kv_from is n. activation is a number of common/activation.cuh, none
//            with residual or spans.
// Alignment  One element. Rows are moved whole where all addresses are multiples of 16 bytes, and k and x_stride of a
//            pack; else everything goes element by element, slowly, to the same bits.
// Launch     Grid (n / COLUMNS rounded up * cluster, 1, 1) in clusters of `cluster` blocks; block: 8 warps. Shared
//            memory: metrale.ops.cluster_linear.shared_bytes. May begin before the kernel ahead has ended, if nothing
//            that is still under way writes weight, bias, spans or positions.
// Aliasing   out and the places in the KV cache overlap nothing that is read.
// Order      A row's bits depend on its own elements, the weights and the size of the cluster: not on the other rows,
//            not on its place, not on alignment. The entry points that are `chained` have the order of common/chains.cuh,
//            where each block of a cluster has a part: their bits are those of thin_linear with parts as long. `chained`
//            is 1 for them and 0 for the others.
// Numbers    Products of T summed in float on the tensor cores; bias, activation and residual in float.
//
// For few rows, up to 64: the weights are read once, and then x, which every block needs, is the limit. So the blocks of
// a cluster divide k among them and read a part of x each; what each has summed lies in its shared memory, where the
// others add it to their own, each for a part of the elements. The weights of the block's part, or as much as there is
// room for, are under way to shared memory before the wait for the kernel ahead.

#include "common/activation.cuh"
#include "common/attention.cuh"
#include "common/bulk.cuh"
#include "common/chains.cuh"
#include "common/cluster.cuh"
#include "common/dependent.cuh"
#include "common/kv_places.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int MOST_ROWS = 64;     // of x
constexpr int ROWS_AT_ONCE = 16;  // rows of x that the tensor cores take
constexpr int STEP_BYTES = 2 * STEP;
constexpr int PAD_BYTES = 16;     // between rows of x, or of the weights, in shared memory: no bank conflicts
constexpr int CHAINED_PAD_BYTES = 64;  // the same where rows are read by chains
constexpr int ROW_WARPS = 2;      // warps that divide the rows; the others divide the columns
constexpr int TILES = MOST_ROWS / ROWS_AT_ONCE / ROW_WARPS;  // of 16 rows, that a warp has
constexpr int COLS = 4;           // of 8 columns of the result, that a warp has
constexpr int COLUMNS = WARPS / ROW_WARPS * COLS * 8;  // of a block
constexpr int PITCH = COLUMNS + 8;  // floats from row to row of sums: no bank conflicts
constexpr int MOST_RANKS = 8;     // blocks of a cluster
static_assert(THREADS >= 2 * MOST_ROWS, "a thread for each row of x, and of the weights");

template <typename T>
struct Layer {
    const T *x, *weight, *bias;
    T* out;
    int rows, n, k;
    long long x_stride, out_stride;
    int activation;
    bool residual;
};

// The columns of x that a block multiplies. Of the last block of a cluster they may be few, or none.
struct Part {
    int begin, columns;
};

// CHAINED: sums are in the order of common/chains.cuh. Otherwise they are in that of memory, which is faster.
template <typename T, bool CHAINED>
struct Block {
    static constexpr int PAD = CHAINED ? CHAINED_PAD_BYTES : PAD_BYTES;

    const Layer<T>& layer;
    const KvPlaces<T>& kv;
    const int ranks, rank, rows, column;  // rows: of x in whole tiles; column: the block's first
    Part part;
    int at_once;     // columns of x that there is room for
    unsigned pitch;  // bytes from row to row of x and of the weights
    bool whole;

    // Shared memory, from its beginning on: counts of bytes, places, biases; then weights and x; sums lie where these
    // have been.
    unsigned weight_count, x_count;
    T** places;      // [MOST_ROWS]: what a row's columns in the KV cache are to be added to
    float* biases;   // [COLUMNS]
    float* sums;     // [rows][PITCH]
    unsigned weights, xs;  // [COLUMNS][pitch], [rows][pitch]

    __device__ __forceinline__ Block(const Layer<T>& l, const KvPlaces<T>& places_of_kv, char* memory)
        : layer(l),
          kv(places_of_kv),
          ranks(cluster_size()),
          rank(cluster_rank()),
          rows((l.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE),
          column(static_cast<int>(blockIdx.x) / ranks * COLUMNS) {
        const int unit = CHAINED ? chain_columns(l.k) : UNIT, units = (l.k + unit - 1) / unit;
        const int each = (units + ranks - 1) / ranks * unit;
        part.begin = min(l.k, rank * each);
        part.columns = min(l.k - part.begin, each);
        whole = l.k % PACK<T> == 0 && rows_aligned16(l.x, l.x_stride) && aligned16(l.weight);
        const unsigned begin = shared_address(memory), end = begin + dynamic_shared_bytes();
        weight_count = begin;
        x_count = begin + 8;
        places = reinterpret_cast<T**>(memory + 16);
        biases = reinterpret_cast<float*>(places + MOST_ROWS);
        sums = biases + COLUMNS;
        weights = shared_address(sums);
        const int room = static_cast<int>((end - weights) / (COLUMNS + rows)) - PAD;  // of a row, in bytes
        at_once = min(each, room / (UNIT * static_cast<int>(sizeof(T))) * UNIT);
        pitch = at_once * sizeof(T) + PAD;
        xs = weights + COLUMNS * pitch;
    }

    // Brings `columns` columns of some rows to shared memory, by all threads, and makes them whole steps with zeros.
    // Rows past the last there is are not touched: what is there stays among itself.
    __device__ __forceinline__ void fill(unsigned to, const T* from, long long stride, int count, int columns,
                                         unsigned counter) const {
        const int padded = (columns + STEP - 1) / STEP * (STEP / PACK<T>);  // packs
#if __CUDA_ARCH__ >= 900
        if (whole) {
            const unsigned bytes = columns * sizeof(T);
            if (threadIdx.x == 0) {
                expect_bytes(counter, count * bytes);
            }
            // A warp's lanes begin their copies one after the other, so that all warps take part.
            const int row = threadIdx.x % WARP * WARPS + threadIdx.x / WARP;
            if (row < count) {
                begin_bulk_copy(to + row * pitch, from + row * stride, bytes, counter);
            }
            if (columns % STEP != 0) {
                const int packs = columns / PACK<T>, short_by = padded - packs;
                for (int i = threadIdx.x; i < count * short_by; i += THREADS) {
                    store_shared(to + i / short_by * pitch + (packs + i % short_by) * 16, make_uint4(0, 0, 0, 0));
                }
            }
            return;
        }
#endif
        for (int i = threadIdx.x; i < count * padded; i += THREADS) {
            const int row = i / padded, pack = i % padded, left = min(PACK<T>, columns - pack * PACK<T>);
            const T* at = from + row * stride + pack * PACK<T>;
            store_shared(to + row * pitch + pack * 16, whole ? load_fresh(at, left > 0) : gather_fresh(at, left));
        }
    }

    __device__ __forceinline__ void fill_weights(int done) const {
        const T* from = layer.weight + static_cast<long long>(column) * layer.k + part.begin + done;
        fill(weights, from, layer.k, min(COLUMNS, layer.n - column), min(at_once, part.columns - done), weight_count);
    }

    __device__ __forceinline__ void fill_x(int done) const {
        fill(xs, layer.x + part.begin + done, layer.x_stride, layer.rows, min(at_once, part.columns - done), x_count);
    }

    __device__ __forceinline__ void wait_for(unsigned counter, unsigned turn) const {
#if __CUDA_ARCH__ >= 900
        if (whole) {
            wait_for_bytes(counter, turn);
        }
#endif
    }

    using Sums = float[TILES][COLS][4];

    // What a warp multiplies in a step: of each tile of x, and of each 8 rows of the weights. By chains, a lane has 8
    // columns of rows lane / 4 and lane / 4 + 8 of a tile, and of a row of the weights; otherwise what the tensor cores
    // take of a tile's left 16 columns and of its right ones, and of both of the weights.
    struct Operands {
        uint4 x[TILES][2], weights[COLS];
    };

    // Where a lane reads of rows of x, or of the weights, from row `first` on; `at_once` are an operand's.
    __device__ __forceinline__ unsigned lane_place(int first, int at_once) const {
        const int lane = threadIdx.x % WARP;
        return CHAINED ? (first + lane / LANES) * pitch + lane % LANES * 16
                       : (first + lane % at_once) * pitch + lane / at_once * 16;
    }

    __device__ __forceinline__ static uint4 load_operand(unsigned from) {
        return CHAINED ? load_shared(from) : load_matrices(from);
    }

    __device__ __forceinline__ void load(Operands& to, unsigned x_rows, unsigned weight_rows, int tiles) const {
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
            to.weights[c] = load_operand(weight_rows + c * 8 * pitch);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile < tiles) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = tile * ROWS_AT_ONCE + (CHAINED ? half * 8 : 0), byte = CHAINED ? 0 : half * 32;
                    to.x[tile][half] = load_operand(x_rows + row * pitch + byte);
                }
            }
        }
    }

    // Half of what a lane has of a tile of x, as the tensor cores take it.
    __device__ __forceinline__ static uint4 half_of(const uint4 (&x)[2], int half) {
        if (!CHAINED) {
            return x[half];
        }
        return half == 0 ? make_uint4(x[0].x, x[1].x, x[0].y, x[1].y) : make_uint4(x[0].z, x[1].z, x[0].w, x[1].w);
    }

    __device__ __forceinline__ static void multiply_step(const Operands& with, int tiles, Sums& own) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile < tiles) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 x = half_of(with.x[tile], half);
#pragma unroll
                    for (int c = 0; c < COLS; ++c) {
                        const uint4& both = with.weights[c];
                        const uint2 w = half == 0 ? make_uint2(both.x, both.y) : make_uint2(both.z, both.w);
                        multiply_add(own[tile][c], x.x, x.y, x.z, x.w, w.x, w.y, T{});
                    }
                }
            }
        }
    }

    __device__ __forceinline__ static void clear(Sums& sums) {
#pragma unroll
        for (int i = 0; i < TILES * COLS * 4; ++i) {
            sums[i / (COLS * 4)][i / 4 % COLS][i % 4] = 0.0f;
        }
    }

    // Adds the sums of a chain to those of the chains before it.
    __device__ __forceinline__ static void add(Sums& to, const Sums& chain) {
#pragma unroll
        for (int i = 0; i < TILES * COLS * 4; ++i) {
            to[i / (COLS * 4)][i / 4 % COLS][i % 4] += chain[i / (COLS * 4)][i / 4 % COLS][i % 4];
        }
    }

    // Adds some columns to the warp's sums. By chains these are `own` of a chain that has `left` steps to go; where it
    // has none, `own` is that of the next chain, and `before` of those that are done.
    __device__ __forceinline__ void multiply(int columns, unsigned x_rows, unsigned weight_rows, int tiles, int& left,
                                             Sums& before, Sums& own) const {
        const int steps = tiles > 0 ? (columns + STEP - 1) / STEP : 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            if (CHAINED && left == 0) {
                add(before, own);
                clear(own);
                left = chain_columns(layer.k) / STEP;
            }
            --left;
            Operands operands;
            load(operands, x_rows + step * STEP_BYTES, weight_rows + step * STEP_BYTES, tiles);
            multiply_step(operands, tiles, own);
        }
    }

    // Leaves the warp's sums in shared memory.
    __device__ __forceinline__ void store_sums(const Sums& own, int first_row, int first_column, int tiles) const {
        const int lane = threadIdx.x % WARP;
        float* const to = sums + (first_row + lane / 4) * PITCH + first_column + lane % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (tile < tiles) {
#pragma unroll
                for (int i = 0; i < COLS * 2; ++i) {
                    const int half = i / COLS, c = i % COLS;
                    *reinterpret_cast<float2*>(to + (tile * ROWS_AT_ONCE + half * 8) * PITCH + c * 8) =
                        make_float2(own[tile][c][2 * half], own[tile][c][2 * half + 1]);
                }
            }
        }
    }

    // Four neighbouring elements of the result.
    struct Quad {
        int row, within;

        __device__ __forceinline__ explicit Quad(int index)
            : row(index / (COLUMNS / 4)), within(index % (COLUMNS / 4) * 4) {}
    };

    __device__ __forceinline__ T* out_place(const Quad& quad) const {
        return layer.out + quad.row * layer.out_stride + column + quad.within;
    }

    // What `out` holds, if it is added to.
    struct Before {
        T elements[4];
    };

    __device__ __forceinline__ Before load_before(int index) const {
        const Quad quad(index);
        const int there = layer.residual && quad.row < layer.rows ? layer.n - column - quad.within : 0;
        const T* from = out_place(quad);
        Before before;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            before.elements[i] = load_fresh_element(from + i, i < there);
        }
        return before;
    }

    __device__ __forceinline__ void store(const Quad& quad, const float (&values)[4]) const {
        const int first = column + quad.within;
        T* to = first < kv.from ? out_place(quad) : places[quad.row] + first;
        const bool together = first + 4 <= layer.n && (first + 4 <= kv.from || first >= kv.from);
        if (together && (reinterpret_cast<unsigned long long>(to) & 7) == 0) {
            *reinterpret_cast<uint2*>(to) =
                make_uint2(word_of<T>(values[0], values[1]), word_of<T>(values[2], values[3]));
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first + i < layer.n) {
                to = first + i < kv.from ? out_place(quad) + i : places[quad.row] + first + i;
                *to = from_float<T>(values[i]);
            }
        }
    }

    // Adds the sums of the blocks in order, for this block's share of the elements, and writes the result. `before`: of
    // the thread's first four.
    __device__ __forceinline__ void finish(Before before) const {
        const int quads = layer.rows * (COLUMNS / 4), first = rank * THREADS + threadIdx.x;
#pragma unroll 1
        for (int index = first; index < quads; index += ranks * THREADS) {
            const Quad quad(index);
            const float4* from = reinterpret_cast<const float4*>(sums + quad.row * PITCH + quad.within);
            float4 parts[MOST_RANKS];
#pragma unroll
            for (int other = 0; other < MOST_RANKS; ++other) {
                if (other < ranks) {
                    parts[other] = load_of_rank(from, other);
                }
            }
            if (index != first) {
                before = load_before(index);
            }
            float4 sum = parts[0];
#pragma unroll
            for (int other = 1; other < MOST_RANKS; ++other) {
                if (other < ranks) {
                    sum.x += parts[other].x;
                    sum.y += parts[other].y;
                    sum.z += parts[other].z;
                    sum.w += parts[other].w;
                }
            }
            const float4 bias = *reinterpret_cast<const float4*>(biases + quad.within);
            float values[4] = {sum.x + bias.x, sum.y + bias.y, sum.z + bias.z, sum.w + bias.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[i] = activate(values[i], layer.activation);
                values[i] = layer.residual ? values[i] + to_float(before.elements[i]) : values[i];
            }
            store(quad, values);
        }
    }

    // Leaves the bias, and where each row's columns in the KV cache are, in shared memory.
    __device__ __forceinline__ void store_early() const {
        const int thread = threadIdx.x;
        if (thread < COLUMNS) {
            const bool there = layer.bias != nullptr && column + thread < layer.n;
            biases[thread] = there ? to_float(layer.bias[column + thread]) : 0.0f;
        }
        if (kv.spans != nullptr && thread < layer.rows) {
            places[thread] = kv.place(kv.row(thread));
        }
    }

    __device__ __forceinline__ void run() const {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            begin_count(weight_count);
            begin_count(x_count);
        }
        __syncthreads();
#endif
        if (part.columns > 0) {
            fill_weights(0);
        }
        store_early();
        const int row_warp = threadIdx.x / WARP % ROW_WARPS;
        const int first_row = row_warp * (TILES * ROWS_AT_ONCE);
        const int first_column = threadIdx.x / WARP / ROW_WARPS * (COLS * 8);
        const int tiles = min(TILES, (rows - first_row) / ROWS_AT_ONCE);  // that the warp has; below 1, none
        const unsigned x_rows = xs + lane_place(first_row, ROWS_AT_ONCE);
        const unsigned weight_rows = weights + lane_place(first_column, 8);
        Sums chains = {}, own = {};
        int left = chain_columns(layer.k) / STEP;
        wait_for_previous();
        if (part.columns > 0) {
            fill_x(0);
        }
        let_next_begin();  // not before: with several kernels' weights under way at once, x comes late
        const Before before = load_before(rank * THREADS + threadIdx.x);
        unsigned turn = 0;
#pragma unroll 1
        for (int done = 0; done < part.columns; done += at_once) {
            if (done > 0) {
                __syncthreads();  // what was there has been read
                fill_weights(done);
                fill_x(done);
            }
            wait_for(weight_count, turn);
            wait_for(x_count, turn);
            turn ^= 1;
            if (!whole || __CUDA_ARCH__ < 900 || min(at_once, part.columns - done) % STEP != 0) {
                __syncthreads();  // threads have written to it
            }
            multiply(min(at_once, part.columns - done), x_rows, weight_rows, tiles, left, chains, own);
        }
        if (CHAINED) {
            add(own, chains);
        }
        __syncthreads();  // weights and x have been read
        store_sums(own, first_row, first_column, tiles);
        cluster_barrier();
        finish(before);
        cluster_end();  // the others have read this block's sums
    }
};

#define ENTRY(T, suffix, chains)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) cluster_linear_##suffix(                              \
        const T* x, const T* weight, const T* bias, T* out, const unsigned long long* spans, const int* positions, \
        int rows, int n, int k, long long x_stride, long long out_stride, int activation, int residual,            \
        int kv_from, long long kv_offset, long long kv_stride, int chained) {                                      \
        extern __shared__ uint4 memory[];                                                                          \
        const Layer<T> layer = {x, weight, bias, out, rows, n, k, x_stride, out_stride, activation, residual != 0}; \
        const KvPlaces<T> kv = {spans, positions, kv_from, kv_offset, kv_stride};                                  \
        Block<T, chains>(layer, kv, reinterpret_cast<char*>(memory)).run();                                        \
    }
ENTRY(f16, f16, false)
ENTRY(f16, f16_chained, true)
ENTRY(bf16, bf16, false)
ENTRY(bf16, bf16_chained, true)
