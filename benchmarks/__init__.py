# SPDX-License-Identifier: MIT OR Apache-2.0
"""Benchmarks. Each script checks the result before it times it, and prints JSON."""
