# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the lines of an output follow from, besides the texts: it tells whether a run can be gone on with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import metrale
from metrale.checkpoint.peft import CONFIG_FILE as ADAPTER_FILE
from metrale.checkpoint.peft import WEIGHTS_FILE as ADAPTER_WEIGHTS_FILE
from metrale.nllb.config import CONFIG_FILE, GENERATION_FILE
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import MODEL_FILE

_WEIGHTS: Final = ("*.safetensors*", "pytorch_model*.bin*")  # their indices as well
_END_BYTES: Final = 1 << 20
"""Of each file, its size and so many bytes at its beginning and its end count: other weights differ there, too."""


_FILES: Final = ("the model's ", "the adapter's ")
"""How the names of files begin."""


def fingerprint(
    model: NllbModel, folder: Path, settings: Mapping[str, object], adapter: Path | None = None
) -> dict[str, Any]:
    """Return JSON-ready values by names that a message can use.

    Parameters
    ----------
    model : NllbModel
    folder : path
        Where it was loaded from.
    settings : mapping of str to object
        The options that determine a line. ``--max-batch`` is none: a sequence does not depend on its neighbours.
    adapter : path or None
        The folder of the adapter that is applied.
    """
    files = {f"the model's {path.name}": _digest(path) for path in _files(folder)}
    if adapter is not None:
        named = (adapter / ADAPTER_FILE, adapter / ADAPTER_WEIGHTS_FILE)
        files |= {f"the adapter's {path.name}": _digest(path) for path in named}
    device = {"the kind of device": model.gpu.kind(), "the element type": model.logits_dtype()}
    return {"the version of metrale": metrale.__version__, **files, **device, **settings}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one phrase for each value that is not the same; of files, only that they differ."""
    phrases = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        phrases.append(
            f"{name} is another one" if name.startswith(_FILES) else f"{name} was {_shown(old)} and is {_shown(new)}"
        )
    return phrases


def _files(folder: Path) -> Iterator[Path]:
    weights = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    named = [folder / name for name in (CONFIG_FILE, GENERATION_FILE, MODEL_FILE)]
    yield from (path for path in [*named, *weights] if path.is_file())


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = blake2b(file.read(_END_BYTES), digest_size=16)
        file.seek(max(size - _END_BYTES, 0))
        digest.update(file.read(_END_BYTES))
    return f"{size} bytes, {digest.hexdigest()}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return "not given" if value is None else str(value)
