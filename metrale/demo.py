# SPDX-License-Identifier: MIT OR Apache-2.0
"""The small translation model that the package brings along."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

DEMO_LANGUAGES: Final = (
    "eng_Latn",
    "fra_Latn",
    "deu_Latn",
    "spa_Latn",
    "ita_Latn",
    "por_Latn",
    "nld_Latn",
    "rus_Cyrl",
    "pol_Latn",
)
"""The languages that the demo model was trained on. Its vocabulary has the codes of NLLB's other languages as well."""


def demo_model_path() -> Path:
    """Return the folder of the demo checkpoint: nine European languages, any to any. Its README says what it can do."""
    return Path(__file__).parent / "demo_model"


def is_demo_model(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is the demo checkpoint's, by whatever path."""
    return Path(path).resolve() == demo_model_path().resolve()
