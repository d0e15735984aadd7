// SPDX-License-Identifier: MIT OR Apache-2.0
//
// out[b] = exclusive or of the words that block b reads. It reads memory as fast as the device can, which measures the
// bandwidth, and leaves nothing else in the L2.
//
// Layout     src: unsigned 64-bit, [count], aligned to 16 bytes; out: unsigned 64-bit, [blocks]. count is even.
// Launch     grid x = blocks; block = 512 threads; static shared memory.
// Aliasing   none.

extern "C" __global__ void __launch_bounds__(512) read_all_f32(
    const unsigned long long* src, unsigned long long* out, long long count, int blocks) {
    __shared__ unsigned long long parts[512];
    const ulonglong2* packs = reinterpret_cast<const ulonglong2*>(src);
    const long long total = count / 2;
    const long long step = static_cast<long long>(blocks) * blockDim.x;
    const int block = blockIdx.x;
    unsigned long long word = 0;
    long long at = static_cast<long long>(block) * blockDim.x + threadIdx.x;
    for (; at + 3 * step < total; at += 4 * step) {  // four loads in flight
        const ulonglong2 a = packs[at], b = packs[at + step], c = packs[at + 2 * step], d = packs[at + 3 * step];
        word ^= a.x ^ a.y ^ b.x ^ b.y ^ c.x ^ c.y ^ d.x ^ d.y;
    }
    for (; at < total; at += step) {
        word ^= packs[at].x ^ packs[at].y;
    }
    parts[threadIdx.x] = word;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            parts[threadIdx.x] ^= parts[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        out[block] = parts[0];
    }
}
