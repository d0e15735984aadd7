// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The activations that a product can end in, in float, by their place among the names that the host knows them by
// (`gpu_runtime.gemm.ACTIVATIONS`): none, relu, gelu, gelu_tanh, silu.

#ifndef METRALE_ACTIVATION_CUH
#define METRALE_ACTIVATION_CUH

__device__ __forceinline__ float activate(float x, int activation) {
    switch (activation) {
        case 1:
            return x < 0.0f ? 0.0f : x;  // NaN stays NaN
        case 2:
            return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case 3:
            return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
        case 4: {
            const float decay = expf(-fabsf(x));
            return x * ((x >= 0.0f ? 1.0f : decay) / (1.0f + decay));
        }
        default:
            return x;
    }
}

#endif
