# SPDX-License-Identifier: MIT OR Apache-2.0
"""The one place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that may come from the environment. An explicit argument always wins over them.

    Attributes
    ----------
    device : str
        ``METRALE_DEVICE``: what ``device="auto"`` stands for (``auto``, ``host``, ``cuda`` or ``cuda:N``).
    model : str or None
        ``METRALE_MODEL``: the checkpoint folder that the command line uses when ``--model`` is not given.
    """

    device: str = "auto"
    model: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings from ``environ`` (default: this process's environment). An empty value counts as unset."""
        env = os.environ if environ is None else environ
        return cls(device=env.get("METRALE_DEVICE") or "auto", model=env.get("METRALE_MODEL") or None)
