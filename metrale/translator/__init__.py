# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text in, text out: what most callers need of a translation model."""

from metrale.translator.stream import TranslationStream
from metrale.translator.translation import Languages, Translation
from metrale.translator.translator import Translator

__all__ = ["Languages", "Translation", "TranslationStream", "Translator"]
