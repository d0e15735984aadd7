// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Attention of one query row each over the first lengths[r] positions of its own span of the KV cache:
// out[r, h] = sum_p softmax_p(scale * q[r, h] . k[p, h]) v[p, h].
//
// Layout     q is [rows, heads * head_dim], rows q_stride elements apart; out is the same, contiguous. Position p of
//            row r has its keys k_offset + p * kv_stride elements after spans[r], and its values v_offset +
//            p * kv_stride after it, heads * head_dim of each. head_dim is 1 to 256.
// Ancestry   ancestry, ancestry_index and beam_positions are all addresses or all NULL. A row whose ancestry_index is at
//            least 0 has an ancestry, that row a of ancestry, ancestry_capacity wide: its position p is position
//            a[p] * beam_positions[r] + p of the span, which is the storage of one beam after the other. Any other row
//            has its positions one after the other, and its beam_positions is not looked at.
// Alignment  One element. Keys and values come in loads of 16 bytes when head_dim, kv_stride and the addresses of
//            the row's first key and value are multiples of 16 bytes, else element by element; the bits are the same.
// Launch     Grid (rows * heads / pairs, rounded up), where a pair is one head of one row, the heads of a row next to
//            each other as they are in memory. Block (32, warps of a pair, pairs), at most 128 threads; one of the two is
//            1. Shared memory: metrale.ops.decode_attention.shared_bytes. May begin before the kernel ahead has ended.
// Fresh      How many of a row's last positions a kernel that is still under way may write; all other positions, spans,
//            lengths and the tables of ancestries are then read before the wait. -1: any of these may be written.
// Aliasing   out overlaps nothing that is read. Rows may share a span.
// Order      A row's bits depend on its own query, keys, values and length alone: not on the other rows, not on where it
//            lies, not on the block's shape, and not on whether an ancestry leads to its keys.
// Undefined  A length below 1, or past what the span, an ancestry or a beam's storage holds; head_dim above 256; an
//            ancestry_index or an ancestor past the last.
//
// A warp attends to a tile of keys at a time, eight packs of keys and of values a lane, and keeps the largest score, the
// sum of weights and the weighted value (online softmax). Tiles are dealt out to up to SPLITS splits, and these folded in
// order. Who takes a split does not matter: one warp may take them one after the other, or each warp of a block its
// share, so that few rows are spread over more warps. Each key and value is read once, and memory is the limit where
// rows are many: 16-bit elements are brought to shared memory while others are attended to.

#include "common/attention.cuh"
#include "common/attention_tiles.cuh"
#include "common/dependent.cuh"

constexpr unsigned SPLITS = 8;             // of a row's keys, at most; the order of sums depends on it
constexpr int STAGES = 2;                  // tiles of a warp that wait in shared memory
constexpr int STAGE_PACKS = 16 * WARP;     // of one of them

// Whether tiles wait in shared memory, and do not go to registers at once.
template <typename T>
__device__ __forceinline__ bool waits_in_shared(int head_dim) {
    return sizeof(T) == 2 && head_dim <= 128;
}

// Writes the result from the parts of a pair that its warps left in shared memory; they share the dimensions.
template <typename T>
__device__ __forceinline__ void fold_splits(const Pair<T>& pair, unsigned splits) {
    const int pitch = pair.head_dim + 2;
    for (int dim = threadIdx.y * WARP + threadIdx.x; dim < pair.head_dim; dim += WARP * blockDim.y) {
        const float* part = pair.parts;
        Folded folded;
        folded.begin(part[pair.head_dim], part[pair.head_dim + 1]);
        float sum = part[dim];
        for (unsigned split = 1; split < splits; ++split) {
            part += pitch;
            sum = folded.add(part[pair.head_dim], part[pair.head_dim + 1]).of(sum, part[dim]);
        }
        pair.out[dim] = from_float<T>(sum / folded.total);
    }
}

// The tiles that a warp takes: those of one of its splits after another.
struct Turn {
    unsigned tiles, splits, split, tile;

    __device__ __forceinline__ explicit Turn(unsigned count)
        : tiles(count), splits(min(count, SPLITS)), split(threadIdx.y), tile(threadIdx.y) {}
    __device__ __forceinline__ bool there() const {
        return split < splits;
    }
    __device__ __forceinline__ bool is_first() const {
        return tile < splits;
    }
    __device__ __forceinline__ bool is_last() const {
        return tile + splits >= tiles;
    }
    __device__ __forceinline__ void advance() {
        split = is_last() ? split + blockDim.y : split;
        tile = is_last() ? split : tile + splits;
    }
};

template <typename T>
__device__ __forceinline__ float* part_of(const Pair<T>& pair, unsigned split) {
    return pair.parts + split * (pair.head_dim + 2);
}

// All warps of a pair have stored their parts.
template <typename T>
__device__ __forceinline__ void finish(const Pair<T>& pair, unsigned splits) {
    if (blockDim.y == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
    if (pair.length > 0) {
        fold_splits(pair, splits);
    }
}

// What a warp does with tiles in registers.
template <typename Tile, typename T>
__device__ __forceinline__ void attend(const Pair<T>& pair) {
    Turn turn((pair.length + Tile::KEYS - 1) / Tile::KEYS);
    Tile tile;
    unsigned from = 0;
    if (pair.early) {
        if constexpr (Tile::WHOLE) {
            from = pair.settled;
            tile.load(pair, turn.tile, 0, turn.there() ? from : 0);
        }
        wait_for_previous();
    }
    tile.load_query(pair);
#pragma unroll 1
    for (; turn.there(); turn.advance()) {
        tile.load(pair, turn.tile, from, pair.length);
        from = 0;
        if (turn.is_first()) {
            tile.begin();
        }
        tile.attend(pair, turn.tile);
        if (turn.is_last()) {
            tile.store(pair, part_of(pair, turn.split));
        }
    }
    finish(pair, turn.splits);
}

// Brings in what the kernel ahead wrote of the tiles that a warp begins with.
template <typename Tile, typename T>
__device__ __forceinline__ void fetch_fresh(const Pair<T>& pair, uint4* ring, Turn turn) {
    wait_for_copies<0>();  // those places have been set to 0
    for (int stage = 0; stage < STAGES; ++stage, turn.advance()) {
        if (turn.there()) {
            Tile::fetch_few(pair, ring + stage * STAGE_PACKS, turn.tile, pair.settled, pair.length);
        }
    }
    end_copies();
    wait_for_copies<0>();
}

// What a warp does with tiles that wait in shared memory, the next one while it attends to one.
template <typename Tile, typename T>
__device__ __forceinline__ void attend_waiting(const Pair<T>& pair) {
    Turn turn((pair.length + Tile::KEYS - 1) / Tile::KEYS), ahead = turn;
    uint4* ring = pair.ring + threadIdx.x;
    const bool early = pair.early && Tile::WHOLE;
    if (pair.early && !early) {
        wait_for_previous();
    }
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage, ahead.advance()) {
        if (ahead.there()) {
            Tile::fetch(pair, ring + stage * STAGE_PACKS, ahead.tile, early ? pair.settled : pair.length);
        }
        end_copies();
    }
    Tile tile;
    typename Tile::Whole whole;
    const bool alone = blockDim.y == 1;  // one warp takes all splits
    if (early) {
        wait_for_previous();
    }
    tile.load_query(pair);
    if (early && pair.settled < pair.length) {
        fetch_fresh<Tile>(pair, ring, turn);
    }
#pragma unroll 1
    for (unsigned count = 0; turn.there(); turn.advance(), ahead.advance(), ++count) {
        uint4* packs = ring + count % STAGES * STAGE_PACKS;
        if (turn.is_first()) {
            tile.begin();
        }
        wait_for_copies<STAGES - 1>();
        tile.attend(pair, packs, turn.tile);
        if (turn.is_last()) {
            if (alone) {
                whole.add(tile, turn.split == 0);
            } else {
                tile.store(pair, part_of(pair, turn.split));
            }
        }
        if (ahead.there()) {
            Tile::fetch(pair, packs, ahead.tile, pair.length);
        }
        end_copies();
    }
    if (!alone) {
        finish(pair, turn.splits);
    } else if (pair.length > 0) {
        whole.store(pair);
    }
}

template <bool WHOLE>
__device__ __forceinline__ void attend_by_width(const Pair<float>& pair) {
    if (pair.head_dim <= 64) {
        attend<LaneTile<float, 16, 1, WHOLE>>(pair);
    } else if (pair.head_dim <= 128) {
        attend<LaneTile<float, 32, 1, WHOLE>>(pair);
    } else {
        attend<LaneTile<float, 32, 2, WHOLE>>(pair);
    }
}

template <bool WHOLE, typename T>
__device__ __forceinline__ void attend_by_width(const Pair<T>& pair) {
    if (pair.head_dim <= 64) {
        attend_waiting<TensorTile<T, 1, WHOLE>>(pair);
    } else if (pair.head_dim <= 128) {
        attend_waiting<TensorTile<T, 2, WHOLE>>(pair);
    } else {
        attend<LaneTile<T, 32, 1, WHOLE>>(pair);
    }
}

// Element by element, slowly: apart, so that the usual way has all registers to itself.
template <typename T>
__device__ __noinline__ void attend_scattered(const Pair<T>& pair) {
    attend_by_width<false>(pair);
}

template <typename T>
__device__ __forceinline__ void decode_attention(const T* q, const unsigned long long* spans, const int* lengths,
                                                 const int* ancestry, const int* ancestry_index,
                                                 const int* beam_positions, T* out, int rows, int heads, int head_dim,
                                                 long long q_stride, long long k_offset, long long v_offset,
                                                 long long kv_stride, float scale, long long ancestry_capacity,
                                                 int fresh) {
    extern __shared__ uint4 shared[];
    let_next_begin();
    if (fresh < 0) {
        wait_for_previous();
    }
    const unsigned number = blockIdx.x * blockDim.z + threadIdx.z;
    const bool there = number < static_cast<unsigned>(rows) * heads;
    const long long row = there ? number / heads : 0;
    const long long within = static_cast<long long>(number % heads) * head_dim;
    const T* span = reinterpret_cast<const T*>(spans[row]) + within;
    const unsigned length = there ? lengths[row] : 0;
    const unsigned settled = fresh < 0 ? 0 : length - min(length, static_cast<unsigned>(fresh));
    const int index = ancestry == nullptr ? -1 : ancestry_index[row];
    const unsigned warps = blockDim.y * blockDim.z, warp = threadIdx.z * blockDim.y + threadIdx.y;
    uint4* rings = shared;
    float* parts = reinterpret_cast<float*>(rings + (waits_in_shared<T>(head_dim) ? warps * STAGES * STAGE_PACKS : 0));
    const Pair<T> pair = {q + row * q_stride + within,
                          span + k_offset,
                          span + v_offset,
                          index < 0 ? nullptr : ancestry + index * ancestry_capacity,
                          out + row * heads * head_dim + within,
                          rings + warp * STAGES * STAGE_PACKS,
                          parts + threadIdx.z * SPLITS * (head_dim + 2),
                          kv_stride,
                          index < 0 ? 0u : beam_positions[row],
                          length,
                          settled,
                          head_dim,
                          scale,
                          fresh >= 0};
    if (head_dim % PACK<T> == 0 && rows_aligned16(pair.keys, kv_stride) && rows_aligned16(pair.values, kv_stride)) {
        attend_by_width<true>(pair);
    } else {
        attend_scattered(pair);
    }
}

// Four blocks on a multiprocessor: told nothing, the compiler saves registers for more of them, and waits for one load
// before it issues the next.
#define ENTRY(T, suffix)                                                                                               \
    extern "C" __global__ void __launch_bounds__(128, 4) decode_attention_##suffix(                                    \
        const T* q, const unsigned long long* spans, const int* lengths, const int* ancestry,                          \
        const int* ancestry_index, const int* beam_positions, T* out, int rows, int heads, int head_dim,               \
        long long q_stride, long long k_offset, long long v_offset, long long kv_stride, float scale,                  \
        int ancestry_rows, int ancestry_capacity, int fresh) {                                                         \
        decode_attention<T>(q, spans, lengths, ancestry, ancestry_index, beam_positions, out, rows, heads, head_dim,   \
                            q_stride, k_offset, v_offset, kv_stride, scale, ancestry_capacity, fresh);                 \
    }

ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
