# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend for machines without a GPU: the same contract in ordinary memory, computed by NumPy."""

from gpu_runtime.host.backend import HostBackend

__all__ = ["HostBackend"]
