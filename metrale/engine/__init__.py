# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generation on any `Model`: what turns logits rows into sequences of tokens. It knows no model family."""

from metrale.engine.greedy import FinishReason, Generated, Request, generate_greedy

__all__ = ["FinishReason", "Generated", "Request", "generate_greedy"]
