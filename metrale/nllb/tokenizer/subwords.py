# SPDX-License-Identifier: MIT OR Apache-2.0
"""Plain text to subword ids and back, whatever library does it. Special tokens and languages are no concern of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

SPACE = "\u2581"
"""What stands for a space in a piece."""

Span = tuple[int, int]
"""``[start, stop)`` in code points of a text."""


class Subwords(Protocol):
    """What a `Tokenizer` asks of a vocabulary. Immutable, and safe to share between threads without a lock."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that UTF-8 can express."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each of many such texts."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids of text."""

    def unknown_spans(self, text: str) -> Iterable[Span]:
        """Yield what of a text became ``<unk>``, in order; spans may touch and overlap."""


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans in order, those that touch or overlap as one."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)
