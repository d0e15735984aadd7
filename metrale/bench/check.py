# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether what is about to be timed is right.

Random tokens are fed to two sequences, and their logits are kept. They must be finite, about the same in a batch of any
size that is timed, and close to a float32 run of the same checkpoint on the same device; each peer compares them with
its own afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import metrale
from gpu_runtime import DevicePtr, GpuBackend, dtypes
from metrale.bench.decode import Batch
from metrale.bench.protocol import (
    CHECK_SOURCES,
    CHECK_STEPS,
    SOURCE_TOKENS,
    Array,
    Lengths,
    compare_logits,
    forced_ids,
)
from metrale.nllb.model import NllbModel

MOST_FLOAT32_BYTES = 4 << 30
"""Weights in float32 up to which the float32 run is made: for larger ones, loading takes longer than all the rest."""


def forced_logits(model: NllbModel, size: int = CHECK_SOURCES, source_tokens: int = SOURCE_TOKENS) -> Array:
    """Return the logits of the first two sequences of a batch, after the language and after each forced token.

    Returns
    -------
    ndarray
        float32 ``[sequences, steps, vocab]``; one sequence when the batch has no more.
    """
    shown = min(size, CHECK_SOURCES)
    lanes = [forced_ids(model.vocab_size())[lane % CHECK_SOURCES] for lane in range(size)]
    with Batch(model, size, Lengths(source_tokens, CHECK_STEPS)) as batch:
        steps = [_rows(model, batch.prefill(), shown)]
        steps += [_rows(model, batch.decode(list(tokens)), shown) for tokens in zip(*lanes, strict=True)]
    return np.stack(steps, axis=1)


def _rows(model: NllbModel, first: DevicePtr, count: int) -> Array:
    step = model.logits_row_bytes()
    return np.stack([model.copy_logits_to_host(first.offset(row * step)) for row in range(count)])


def check(
    model: NllbModel, folder: Path, gpu: GpuBackend, dtype: str, limits: Mapping[str, Any], batches: Sequence[int]
) -> dict[str, Any]:
    """Keep the model's logits as ``logits.npz`` in the folder, for the peers, and judge them.

    Returns
    -------
    dict
        ``finite``; ``batches``: the same sequences among others, for each batch size that is timed; ``float32``, absent
        when the weights are too large for it; and ``passed``, whether all of them are well.
    """
    ours = forced_logits(model)
    np.savez(folder / "logits.npz", logits=ours)
    found: dict[str, Any] = {
        "finite": bool(np.isfinite(ours).all()),
        "batches": {
            str(size): compare_logits(forced_logits(model, size), ours[: min(size, CHECK_SOURCES)], dtype)
            for size in batches
        },
    }
    itemsize = dtypes.itemsize(dtypes.short_name(dtype))
    if model.memory_plan().weights * 4 // itemsize <= MOST_FLOAT32_BYTES:
        with metrale.load(folder, gpu, "float32", **{**limits, "max_batch": CHECK_SOURCES}) as exact:
            found["float32"] = compare_logits(ours, forced_logits(exact), dtype)
    parts = [*found["batches"].values(), *([found["float32"]] if "float32" in found else [])]
    found["passed"] = found["finite"] and all(part["passed"] for part in parts)
    return found


def exact_logits(
    folder: Path, gpu: GpuBackend, limits: Mapping[str, Any], source_lengths: Sequence[int]
) -> dict[int, Array]:
    """Return the logits of the first two sequences in float32, by the length of their sources."""
    with metrale.load(folder, gpu, "float32", **{**limits, "max_batch": CHECK_SOURCES}) as model:
        return {length: forced_logits(model, CHECK_SOURCES, length) for length in source_lengths}


class Judge:
    """Says of a batch size and a length of sources whether a model is right, before it is timed so.

    Parameters
    ----------
    model : NllbModel
    dtype : str
        What it computes in, by its long name.
    exact : mapping of int to ndarray
        What `exact_logits` returned; a length that it lacks is not compared with float32.
    """

    def __init__(self, model: NllbModel, dtype: str, exact: Mapping[int, Array]) -> None:
        self._model, self._dtype, self._exact = model, dtype, exact
        self._known: dict[tuple[int, int], Array] = {}

    def __call__(self, size: int, source_tokens: int) -> dict[str, Any]:
        """Compare the first rows of a batch with those of a sequence alone, of two sequences, and of float32.

        Returns
        -------
        dict
            ``finite``; ``alone``, ``pair`` and, if there is one, ``float32``, each as of `compare_logits`; ``passed``.
        """
        ours = self._rows(size, source_tokens)
        parts = {
            "alone": compare_logits(ours[:1], self._rows(1, source_tokens), self._dtype),
            "pair": compare_logits(ours, self._rows(CHECK_SOURCES, source_tokens)[: len(ours)], self._dtype),
        }
        if source_tokens in self._exact:
            parts["float32"] = compare_logits(ours, self._exact[source_tokens][: len(ours)], self._dtype)
        finite = bool(np.isfinite(ours).all())
        return {"finite": finite, **parts, "passed": finite and all(part["passed"] for part in parts.values())}

    def _rows(self, size: int, source_tokens: int) -> Array:
        key = size, source_tokens
        if key not in self._known:
            self._known[key] = forced_logits(self._model, size, source_tokens)
        return self._known[key]
