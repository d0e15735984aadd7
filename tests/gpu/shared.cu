// SPDX-License-Identifier: MIT OR Apache-2.0
// out[i] = i + 1 for `count` elements, by way of `count` floats of dynamic shared memory, filled by all threads of one
// block and read back in the opposite order; the sum of 256 floats of static shared memory is 1.

extern "C" __global__ void __launch_bounds__(256) shared_f32(float* out, int count) {
    __shared__ float own[256];
    extern __shared__ float asked[];
    own[threadIdx.x] = 1.0f / 256.0f;
    for (int place = threadIdx.x; place < count; place += blockDim.x) {
        asked[place] = static_cast<float>(place);
    }
    __syncthreads();
    float one = 0.0f;
    for (int place = 0; place < 256; ++place) {
        one += own[place];
    }
    for (int place = threadIdx.x; place < count; place += blockDim.x) {
        out[count - 1 - place] = asked[count - 1 - place] + one;
    }
}
