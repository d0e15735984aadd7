# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text to the token ids of NLLB-200 and M2M-100, and back: `open_tokenizer` reads the files of a checkpoint's folder.

``docs/tokenizer.md`` compares the result with transformers' tokenizers.
"""

from __future__ import annotations

from metrale.nllb.tokenizer.layout import Layout
from metrale.nllb.tokenizer.opening import TOKENIZER_FILES, VOCABULARIES, has_tokenizer, open_tokenizer
from metrale.nllb.tokenizer.tokenizer import Tokenizer

__all__ = ["TOKENIZER_FILES", "VOCABULARIES", "Layout", "Tokenizer", "has_tokenizer", "open_tokenizer"]
