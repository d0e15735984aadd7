# SPDX-License-Identifier: MIT OR Apache-2.0
"""What tests of the Translator share: the golden cases as texts, and a translator that must give back its lanes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from gpu_runtime.backend import GpuBackend
from metrale import Translator, demo_model_path

CASES: Final[list[dict[str, Any]]] = json.loads((demo_model_path() / "golden.json").read_text(encoding="utf-8"))[
    "cases"
]
TEXTS: Final[list[str]] = [case["text"] for case in CASES]
SOURCES: Final[list[str]] = [case["src_lang"] for case in CASES]
TARGETS: Final[list[str]] = [case["tgt_lang"] for case in CASES]
EXPECTED: Final[list[str]] = [case["greedy"]["text"] for case in CASES]


@contextmanager
def demo_translator(gpu: GpuBackend, lanes: int) -> Iterator[Translator]:
    """Give a float32 translator of the demo model, from English to French; at the end all its lanes must be free."""
    options = {"device": gpu, "dtype": "float32", "max_batch": lanes, "max_source_len": 64, "max_new_tokens": 64}
    with Translator(demo_model_path(), source="eng_Latn", target="fra_Latn", **options) as translator:
        yield translator
        seqs = [translator.model.alloc_sequence() for _ in range(lanes)]
        for seq in seqs:
            translator.model.free_sequence(seq)
