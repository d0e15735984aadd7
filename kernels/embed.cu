// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out[r] = scale * table[id[r]] + position_table[positions[r]], where id[r] is cells[cell_index[r]] if cell_index[r] is
// at least 0, and ids[r] if not. Rows whose id is blank have no position: out[r] = scale * table[blank].
//
// Layout     ids, cell_index, positions: int, [rows]; cells: int, [cell_count]; table: T, [vocab, width];
//            position_table: float, [position_count, width]; out: T, [rows, width]. cell_index may be NULL: no row has a
//            cell. The alignment of one element is enough; packs are moved whole where all addresses are multiples of 16
//            bytes and width is a multiple of a pack.
// Launch     grid x = rows; block = whole warps, at most 256 threads; no shared memory.
// Aliasing   none.
// Undefined  an id outside [0, vocab), a position outside [0, position_count), or a cell_index of cell_count or more:
//            memory outside a table is read.

#include "common/element.cuh"

template <typename T>
__device__ __forceinline__ void embed(const int* ids, const int* cells, const int* cell_index, const int* positions,
                                      const T* table, const float* position_table, T* out, int rows, int width,
                                      int blank, float scale) {
    const long long row = blockIdx.x;
    if (row >= rows) {
        return;
    }
    const int cell = cell_index == nullptr ? -1 : cell_index[row];
    const int id = cell < 0 ? ids[row] : cells[cell];
    const bool placed = id != blank;
    const bool whole = width % PACK<T> == 0 && aligned16(table) && aligned16(position_table) && aligned16(out);
    table += static_cast<long long>(id) * width;
    position_table += static_cast<long long>(positions[row]) * width;
    out += row * width;
    for (int column = threadIdx.x * PACK<T>; column < width; column += blockDim.x * PACK<T>) {
        const int count = width - column;
        float values[PACK<T>];
        float shifts[PACK<T>];
        load_pack(table + column, count, whole, values);
        load_floats(position_table + column, count, whole, shifts);
#pragma unroll
        for (int i = 0; i < PACK<T>; ++i) {
            values[i] = scale * values[i] + (placed ? shifts[i] : 0.0f);
        }
        store_pack(out + column, count, whole, values);
    }
}

#define ENTRY(T, suffix)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) embed_##suffix(                                                \
        const int* ids, const int* cells, const int* cell_index, const int* positions, const T* table,               \
        const float* position_table, T* out, int rows, int width, int vocab, int position_count, int cell_count,     \
        int blank, float scale) {                                                                                    \
        embed<T>(ids, cells, cell_index, positions, table, position_table, out, rows, width, blank, scale);          \
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
