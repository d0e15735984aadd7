# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text in, text out: what most callers need of a translation model."""

from metrale.translator.options import Options, TranslationOptions
from metrale.translator.stream import TranslationStream
from metrale.translator.translation import Languages, Scored, Translation, TranslationHypothesis
from metrale.translator.translator import Translator
from metrale.translator.unknown import UnknownSpan

__all__ = [
    "Languages",
    "Options",
    "Scored",
    "Translation",
    "TranslationHypothesis",
    "TranslationOptions",
    "TranslationStream",
    "Translator",
    "UnknownSpan",
]
