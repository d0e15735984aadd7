# SPDX-License-Identifier: MIT OR Apache-2.0
"""English sentences for benchmarks, from the phrase frames that the demo model's recipe brings along."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

from metrale import demo_model_path


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` different sentences of 3 to about 25 tokens; the same ones for the same seed."""
    path = demo_model_path() / "recipe" / "everyday.py"
    spec = importlib.util.spec_from_file_location("everyday", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    english = sorted({row["eng_Latn"] for row, _kind in module.generate(random.Random(seed))})
    return random.Random(seed).sample(english, count)
