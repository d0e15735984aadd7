# SPDX-License-Identifier: MIT OR Apache-2.0
"""The one place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that may come from the environment. An explicit argument always wins over them;
    ``device="auto"`` is none, and leaves the choice to ``METRALE_DEVICE``.

    Attributes
    ----------
    device : str
        ``METRALE_DEVICE``: what ``device="auto"`` stands for (``auto``, ``host``, ``cuda`` or ``cuda:N``).
    model : str or None
        ``METRALE_MODEL``: the checkpoint folder that the command line uses when ``--model`` is not given.
    cache : Path or None
        ``METRALE_CACHE_DIR``: the folder for what can be made again, such as compiled kernels; by default
        ``metrale`` in ``XDG_CACHE_HOME``, or else in ``~/.cache``. None keeps nothing on disk: the case of a process
        that has none of these variables and no ``HOME``.
    nvtx : bool
        ``METRALE_NVTX``: whether a GPU's backend opens NVTX ranges, for Nsight Systems: not with ``0``, and with any
        other value.
    """

    device: str = "auto"
    model: str | None = None
    cache: Path | None = None
    nvtx: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings from ``environ`` (default: this process's environment). An empty value counts as unset."""
        env = os.environ if environ is None else environ
        return cls(
            device=env.get("METRALE_DEVICE") or "auto",
            model=env.get("METRALE_MODEL") or None,
            cache=_cache_folder(env),
            nvtx=env.get("METRALE_NVTX", "") not in ("", "0"),
        )


def _cache_folder(env: Mapping[str, str]) -> Path | None:
    if env.get("METRALE_CACHE_DIR"):
        return Path(env["METRALE_CACHE_DIR"])
    base = env.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification has relative paths ignored
        base = os.path.join(env["HOME"], ".cache") if env.get("HOME") else ""
    return Path(base, "metrale") if base else None
