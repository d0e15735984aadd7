# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a GPU is and allows, asked without making a context on it."""

from __future__ import annotations

from typing import Final

from cupy.cuda import runtime

from gpu_runtime.cuda import nvrtc
from gpu_runtime.cuda.driver import CUDA_ERRORS
from gpu_runtime.errors import BackendUnavailable
from gpu_runtime.limits import MINIMUM, Limits

GEMM_WORKSPACE_BYTES: Final = 32 << 20
"""What cuBLASLt's guide advises for compute capability 9.0: its fastest algorithms split sums into it."""
FIXED_ROWS: Final = 64
"""cuBLASLt chooses an algorithm by the shape. Sixty-four rows are what one tile of its fast ones holds, and so few that
reading the matrix takes most of the time."""


def device_count() -> int:
    """Return how many GPUs the driver shows. Raises BackendUnavailable when it does not work."""
    try:
        return int(runtime.getDeviceCount())
    except CUDA_ERRORS as error:
        raise BackendUnavailable(f"cuda: {error}") from None


def check_device(device: int) -> None:
    """Raise BackendUnavailable when there is no such device, or it is older than the kernels need."""
    count = device_count()
    if device >= count:
        raise BackendUnavailable(f"cuda:{device}: there are {count} CUDA devices")
    capability = _attribute("ComputeCapabilityMajor", device), _attribute("ComputeCapabilityMinor", device)
    if capability < MINIMUM.compute_capability:
        least = ".".join(map(str, MINIMUM.compute_capability))
        raise BackendUnavailable(
            f"cuda:{device}: compute capability {capability[0]}.{capability[1]}; kernels need {least} or later"
        )


_ATTRIBUTES: Final = {  # cudaDeviceAttr
    "ComputeCapabilityMajor": 75,
    "ComputeCapabilityMinor": 76,
    "MultiProcessorCount": 16,
    "MaxSharedMemoryPerBlockOptin": 97,
    "WarpSize": 10,
    "MaxThreadsPerBlock": 1,
    "MaxGridDimX": 5,
    "MaxGridDimY": 6,
    "MaxGridDimZ": 7,
}


def _attribute(name: str, device: int) -> int:
    return int(runtime.deviceGetAttribute(_ATTRIBUTES[name], device))


def limits_of(device: int) -> Limits:
    """Return what launches on a device may ask for."""
    return Limits(
        compute_capability=(_attribute("ComputeCapabilityMajor", device), _attribute("ComputeCapabilityMinor", device)),
        sm_count=_attribute("MultiProcessorCount", device),
        max_shared_bytes=_attribute("MaxSharedMemoryPerBlockOptin", device),
        warp_size=_attribute("WarpSize", device),
        max_threads_per_block=_attribute("MaxThreadsPerBlock", device),
        max_grid=(
            _attribute("MaxGridDimX", device),
            _attribute("MaxGridDimY", device),
            _attribute("MaxGridDimZ", device),
        ),
        gemm_workspace_bytes=GEMM_WORKSPACE_BYTES,
        runs_ahead=True,
        pad_batches=True,
        prefers_graphs=True,
        fixed_rows=FIXED_ROWS,
    )


def native_arch(capability: tuple[int, int]) -> str:
    """Return the target for a device: its own machine code, or PTX when NVRTC does not know it yet."""
    known = nvrtc.supported_archs()
    own = capability[0] * 10 + capability[1]
    return f"sm_{own}" if own in known else f"compute_{max(arch for arch in known if arch < own)}"


def name_of(device: int) -> str:
    """Return the name of a device, such as ``NVIDIA H200``."""
    return str(runtime.getDeviceProperties(device)["name"].decode())
