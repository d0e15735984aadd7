# SPDX-License-Identifier: MIT OR Apache-2.0
"""CUDA C++ sources, one file for each op, installed as ``metrale_kernels``."""
