// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Random numbers that depend on a key and a counter alone: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers:
// as easy as 1, 2, 3").

#ifndef METRALE_PHILOX_CUH
#define METRALE_PHILOX_CUH

// The four random words of a counter (x, y, z, w), low word of the key first.
__device__ __forceinline__ uint4 philox(uint4 counter, unsigned long long key) {
    unsigned first = static_cast<unsigned>(key);
    unsigned second = static_cast<unsigned>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned ahead = 0xd2511f53u * counter.x;
        const unsigned behind = 0xcd9e8d57u * counter.z;
        counter = make_uint4(__umulhi(0xcd9e8d57u, counter.z) ^ counter.y ^ first, behind,
                             __umulhi(0xd2511f53u, counter.x) ^ counter.w ^ second, ahead);
        first += 0x9e3779b9u;
        second += 0xbb67ae85u;
    }
    return counter;
}

// A draw from the Gumbel distribution for a random word; from -2.82 to 22.88.
__device__ __forceinline__ float gumbel(unsigned word) {
    const float uniform = (static_cast<float>(word) + 0.5f) * (1.0f / 4294967296.0f);
    return -logf(-log1pf(-fminf(uniform, 0.99999994f)));
}

#endif
