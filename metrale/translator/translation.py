# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a text came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from metrale.engine import FinishReason

Languages = str | Sequence[str] | None
"""A language code for all texts, one for each, or None for the model's default."""


@dataclass(frozen=True, slots=True)
class Translation:
    """One translated text.

    Attributes
    ----------
    text : str
        With ``cancelled`` and ``timeout``, as far as it came; empty with ``error``.
    token_ids : tuple of int
        The generated ids, without language, EOS and other special tokens.
    score : float or None
        The sequence's score as transformers defines it: summed log-probability over length, where the length counts
        the language token (whose log-probability is 0) and EOS. None unless it was asked for.
    finish_reason : str
        ``eos``, ``length``, ``cancelled``, ``timeout`` or ``error``.
    truncated : bool
        Whether the source was too long and only its beginning was translated.
    source_lang, target_lang : str
    error : str or None
        What went wrong, when ``finish_reason`` is ``error``.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float | None
    finish_reason: FinishReason
    truncated: bool
    source_lang: str
    target_lang: str
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {**asdict(self), "token_ids": list(self.token_ids)}
