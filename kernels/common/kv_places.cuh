// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The last columns of a product that go straight into the KV cache: where they lie for each row.

#ifndef METRALE_KV_PLACES_CUH
#define METRALE_KV_PLACES_CUH

// Column c >= from of row r is element positions[r] * stride + offset + c - from after the address spans[r]. Without
// spans no column may be: `from` is then the number of columns.
template <typename T>
struct KvPlaces {
    const unsigned long long* spans;
    const int* positions;
    int from;
    long long offset, stride;

    // What is to be added a column to.
    __device__ __forceinline__ T* row(int r) const {
        return reinterpret_cast<T*>(spans[r]) + (positions[r] * stride + offset - from);
    }
};

#endif
