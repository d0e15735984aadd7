// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The last columns of a product that go straight into the KV cache: where they lie for each row.

#ifndef METRALE_KV_PLACES_CUH
#define METRALE_KV_PLACES_CUH

// Column c >= from of row r is element positions[r] * stride + offset + c - from after the address spans[r]. Without
// spans no column may be: `from` is then the number of columns.
//
// The two words of a row are read early, and put together late: who needs them does not wait for them.
struct KvRow {
    unsigned long long span;
    int position;
};

template <typename T>
struct KvPlaces {
    const unsigned long long* spans;
    const int* positions;
    int from;
    long long offset, stride;

    __device__ __forceinline__ KvRow row(int r) const { return {spans[r], positions[r]}; }

    // What a column is to be added to.
    __device__ __forceinline__ T* place(const KvRow& row) const {
        return reinterpret_cast<T*>(row.span) + (row.position * stride + offset - from);
    }
};

#endif
