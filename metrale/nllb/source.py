# SPDX-License-Identifier: MIT OR Apache-2.0
"""The order of the encoder's input."""

from __future__ import annotations

from collections.abc import Sequence


def framed(language: int, tokens: Sequence[int], eos: int, *, legacy_order: bool) -> tuple[int, ...]:
    """Return the encoder's input: language, tokens, EOS.

    Parameters
    ----------
    language : int
    tokens : sequence of int
        The text's ids.
    eos : int
    legacy_order : bool
        Whether the language comes last instead: tokens, EOS, language. The first releases of NLLB-200's tokenizer in
        transformers had it so, against what the models were trained with.
    """
    return (*tokens, eos, language) if legacy_order else (language, *tokens, eos)
