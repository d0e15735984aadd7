# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text in, text out."""

from __future__ import annotations
