# SPDX-License-Identifier: MIT OR Apache-2.0
"""The small translation model that the package brings along."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Return the folder of the demo checkpoint: nine European languages, any to any. Its README says what it can do."""
    return Path(__file__).parent / "demo_model"
