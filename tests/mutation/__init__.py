# SPDX-License-Identifier: MIT OR Apache-2.0
"""Proof that the tests notice: single faults are put into the code, and each must make a test fail."""
