# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a model says that it cannot serve a method of the interface."""

from __future__ import annotations

from metrale.errors import NotSupported


def refusal(model: object, method: str, why: str = "") -> NotSupported:
    """Return the error to raise when ``model`` cannot serve ``method``; the message names the model's class.

    Examples
    --------
    >>> class Tiny: ...
    >>> str(refusal(Tiny(), "decode_verify", "it drafts nothing"))
    'Tiny does not support decode_verify: it drafts nothing'
    """
    return NotSupported(type(model).__name__, method, why)
