# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings of every test run, made before NumPy is imported."""

from __future__ import annotations

import os

# The products are small, and BLAS threads wait by spinning: on a machine that is busy with something else, two of them
# can take many times as long as one. An explicit setting wins.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
