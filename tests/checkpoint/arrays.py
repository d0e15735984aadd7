# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of every form of weights compare: arrays by name, by their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def bits(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()
