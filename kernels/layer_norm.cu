// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out[r, c] = (x[r, c] - mean_r) / sqrt(var_r + eps) * weight[c] + bias[c]
//
// Layout     x, out: [rows, width]; weight, bias: [width]; T, contiguous. The alignment of one element is enough; packs
//            are moved whole where all addresses are multiples of 16 bytes and width is a multiple of a pack.
// Launch     grid x = rows; block = GROUP threads for each chain of a row, in whole warps; static shared memory. May begin
//            before the kernel ahead has ended, if nothing that is still under way writes weight or bias.
// Aliasing   out may be x: a thread reads a pack before it writes it, and no thread reads another's.
// Order      That of common/chains.cuh: a row's bits depend on its own elements, weight and bias alone. In f16 and bf16
//            they are those that thin_linear multiplies.
//
// A thread has a pack of each ROUND columns of its chain. The first ones, which are all of a row of up to 2,048 16-bit
// elements, are read once and stay in registers; the others are read again for the result.

#include "common/attention.cuh"
#include "common/chains.cuh"
#include "common/dependent.cuh"

constexpr int CHUNKS = 4;              // that a chain's threads have at a time
constexpr int GROUP = CHUNKS * LANES;  // threads of a chain
static_assert(CHUNKS == 2 * MERGED && MERGED == 2, "two pairs of chunks");

// Columns that a chain's threads have at a time.
template <typename T>
inline constexpr int ROUND = GROUP * PACK<T>;

// What the lane has whose number differs in one bit.
__device__ __forceinline__ PackMoments from_lane(const PackMoments& own, int apart) {
    return {__shfl_xor_sync(ALL_LANES, own.count, apart), __shfl_xor_sync(ALL_LANES, own.sum, apart),
            __shfl_xor_sync(ALL_LANES, own.mean, apart), __shfl_xor_sync(ALL_LANES, own.squares, apart)};
}

__device__ __forceinline__ Moments from_lane(const Moments& own, int apart) {
    return {__shfl_xor_sync(ALL_LANES, own.count, apart), __shfl_xor_sync(ALL_LANES, own.mean, apart),
            __shfl_xor_sync(ALL_LANES, own.squares, apart)};
}

// Adds what a chain's threads have of a round to what has been seen of the chain. The threads of its first chunk come to
// what they should; the others help them to it.
template <typename T>
__device__ __forceinline__ Moments observed(const Moments& seen, const uint4& pack, int count) {
    const PackMoments own = pack_moments<T, false>(pack, count);
    const PackMoments both[MERGED] = {own, from_lane(own, LANES)};
    const Moments first = joined(both), last = from_lane(first, MERGED * LANES);
    const Moments moments = first.count > 0.0f ? merged(seen, first) : seen;
    return last.count > 0.0f ? merged(moments, last) : moments;
}

template <typename T>
struct Row {
    const T *x, *weight, *bias;
    T* out;
    int width;
    bool whole;

    // How many elements of a pack there are.
    __device__ __forceinline__ int count(int column, int end) const {
        return columns_from(column, PACK<T>, end);
    }

    __device__ __forceinline__ uint4 load(int column, int end) const {
        const int there = count(column, end);
        return whole ? load_fresh(x + column, there > 0) : gather_fresh(x + column, there);
    }

    __device__ __forceinline__ uint4 load_vector(const T* vector, int column, int end) const {
        const int there = count(column, end);
        if (whole) {
            return there > 0 ? load_words(vector + column) : make_uint4(0, 0, 0, 0);
        }
        return gather_words(vector + column, there);
    }

    __device__ __forceinline__ void store(const uint4& pack, int column, int end) const {
        const int there = count(column, end);
        if (!whole) {
            float values[PACK<T>];
            unpack(pack, values, T{});  // elements already: nothing is rounded again
            store_pack(out + column, there, false, values);
        } else if (there > 0) {
            *reinterpret_cast<uint4*>(out + column) = pack;
        }
    }
};

template <typename T>
__device__ __forceinline__ void layer_norm(const T* x, const T* weight, const T* bias, T* out, int rows, int width,
                                           float eps) {
    constexpr int KEPT = UNIT / ROUND<T>;  // packs of a thread, of the shortest chain
    __shared__ float2 chains[MOST_CHAINS];
    let_next_begin();
    const long long number = blockIdx.x;
    if (number >= rows) {
        wait_for_previous();
        return;
    }
    const long long place = number * width;
    const bool whole = width % PACK<T> == 0 && aligned16(x) && aligned16(weight) && aligned16(bias) && aligned16(out);
    const Row<T> row = {x + place, weight, bias, out + place, width, whole};
    const int chain = threadIdx.x / GROUP, begin = chain * chain_columns(width), columns = columns_of_chain(width, chain);
    const int first = begin + static_cast<int>(threadIdx.x) % GROUP * PACK<T>, end = begin + columns;

    uint4 packs[KEPT], scales[KEPT], shifts[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        scales[i] = row.load_vector(weight, first + i * ROUND<T>, end);
        shifts[i] = row.load_vector(bias, first + i * ROUND<T>, end);
    }
    wait_for_previous();
    Moments moments = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        packs[i] = row.load(first + i * ROUND<T>, end);
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        moments = observed<T>(moments, packs[i], row.count(first + i * ROUND<T>, end));
    }
#pragma unroll 1
    for (int done = KEPT * ROUND<T>; done < chain_columns(width); done += ROUND<T>) {
        moments = observed<T>(moments, row.load(first + done, end), row.count(first + done, end));
    }
    moments = merge_lanes(moments, static_cast<float>(columns), LANES);
    if (threadIdx.x % GROUP == 0) {
        chains[chain] = make_float2(moments.mean, moments.squares);
    }
    __syncthreads();
    const Norm norm = merge_chains(chains, 1, blockDim.x / GROUP, width, eps);

#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        row.store(normalised<T>(packs[i], scales[i], shifts[i], norm), first + i * ROUND<T>, end);
    }
#pragma unroll 1
    for (int column = first + KEPT * ROUND<T>; column < end; column += ROUND<T>) {
        const uint4 scale = row.load_vector(weight, column, end), shift = row.load_vector(bias, column, end);
        row.store(normalised<T>(row.load(column, end), scale, shift, norm), column, end);
    }
}

#define ENTRY(T, suffix)                                                                                 \
    extern "C" __global__ void __launch_bounds__(MOST_CHAINS * GROUP) layer_norm_##suffix(               \
        const T* x, const T* weight, const T* bias, T* out, int rows, int width, float eps) {            \
        layer_norm<T>(x, weight, bias, out, rows, width, eps);                                           \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
