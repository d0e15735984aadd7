# SPDX-License-Identifier: MIT OR Apache-2.0
"""A trial of the host backend: the demo model translates one sentence."""

from __future__ import annotations

from typing import Any

from metrale.demo import demo_model_path
from metrale.translator import Translator


def probe() -> dict[str, Any]:
    """Return the backend's ``name`` and the ``translation`` of a sentence.

    Raises
    ------
    RuntimeError
        When the sentence is not translated.
    """
    limits = {"max_batch": 1, "max_source_len": 32, "max_new_tokens": 32}
    with Translator(demo_model_path(), device="host", **limits) as translator:
        result = translator.translate("The garage door is open.", "eng_Latn", "fra_Latn")
        if result.finish_reason != "eos" or not result.text:
            raise RuntimeError(f"the demo model did not translate: {result.finish_reason} {result.error or ''}".strip())
        return {"name": translator.model.gpu.name(), "translation": result.text}
