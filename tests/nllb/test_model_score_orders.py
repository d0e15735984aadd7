# SPDX-License-Identifier: MIT OR Apache-2.0
"""Scoring beside prefills on another stream, whatever order a device runs the work in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import metrale
from gpu_runtime.errors import DeviceError
from gpu_runtime.pointer import DevicePtr
from metrale import PrefillSlice, ScoreReq
from metrale.nllb.model import NllbModel
from tests.nllb.by_rows import Unhurried
from tests.nllb.lanes import LIMITS
from tests.reference.tiny import write_tiny

ORDERS = [("deferred", 0), *(("adversarial", seed) for seed in range(8))]
REQS = [ScoreReq([5, 6, 7], [9, 4, 33, 2], 80, 81), ScoreReq([8], [12, 2], 82, 83), ScoreReq([9, 10], [40], 84, 85)]
PROMPTS = [[20, 21, 22], [30, 31]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("orders") / "model", 5, encoder_layers=1, decoder_layers=1)


@contextmanager
def opened(folder: Path, order: Any, seed: int) -> Iterator[NllbModel]:
    with Unhurried(order=order, seed=seed) as gpu, metrale.load(folder, gpu, "float32", **LIMITS) as model:
        yield model


def prefill(model: NllbModel, stream: int) -> list[int]:
    """Enqueue two prefills on a stream, into the last rows; return their addresses."""
    slices = []
    for prompt in PROMPTS:
        seq = model.alloc_sequence_for(len(prompt) + 8)
        seq.src_lang_id, seq.tgt_lang_id = 80, 81
        slices.append(PrefillSlice.whole(prompt, seq))
    ptrs = model.prefill_batch_chunk_rows(slices, stream, model.shape.logits_rows - len(PROMPTS))
    return [int(ptr) for ptr in ptrs]


def run(folder: Path, order: str, seed: int, *, fails: bool) -> list[bytes]:
    """Prefill on a stream, score, prefill on another stream; return the bits of all results.

    With ``fails`` the scoring ends in an error when its passes are enqueued.
    """
    with opened(folder, order, seed) as model:
        first, second = model.create_stream(), model.create_stream()
        found: list[bytes] = []
        rows: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        before = prefill(model, first)
        if fails:
            broken = mock.patch.object(model._feed, "score", side_effect=DeviceError("failed as asked"))
            with broken, pytest.raises(DeviceError, match="as asked"):
                model.score_targets(REQS)
        else:
            for one in model.score_targets(REQS, attention=True):
                assert one.attention is not None
                found += [np.array(one.logprobs).tobytes(), one.attention.tobytes()]
            rows = [model.copy_logits_to_host(DevicePtr(ptr)) for ptr in before]
        after = prefill(model, second)  # with ``fails``, beside what was enqueued and nobody has waited for
        rows += [model.copy_logits_to_host(DevicePtr(ptr)) for ptr in after]
        for stream in (first, second):
            model.synchronize(stream)
            model.destroy_stream(stream)
        return [*found, *(row.tobytes() for row in rows)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_scores_and_prefills_have_the_same_bits_in_any_order(folder: Path, order: str, seed: int, fails: bool) -> None:
    assert run(folder, order, seed, fails=fails) == run(folder, "in_order", 0, fails=fails)
