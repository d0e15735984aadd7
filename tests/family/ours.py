# SPDX-License-Identifier: MIT OR Apache-2.0
"""The logits of a model as metrale computes them: one prefill of all sequences, then one step of all after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import metrale
from gpu_runtime.backend import GpuBackend
from metrale import PrefillSlice
from tests.family.draw import LONGEST, STEPS
from tests.family.specs import Family

Rows = npt.NDArray[np.float32]


def logits(one: Family, folder: Path, gpu: GpuBackend | str, dtype: str = "float32") -> Rows:
    """Return ``[sequences, 1 + STEPS, vocabulary]``: what follows the language, and what follows each step's id."""
    limits: dict[str, Any] = {"max_source_len": LONGEST, "max_new_tokens": STEPS + 1, "max_encoder_tokens": 2 * LONGEST}
    with metrale.load(folder, gpu, dtype, max_batch=len(one.feeds), **limits) as model:
        seqs = [model.alloc_sequence() for _ in one.feeds]
        for seq, feed in zip(seqs, one.feeds, strict=True):
            seq.src_lang_id, seq.tgt_lang_id = feed.src, feed.tgt
        slices = [PrefillSlice.whole(feed.source, seq) for feed, seq in zip(one.feeds, seqs, strict=True)]
        rows = [[model.copy_logits_to_host(ptr)] for ptr in model.prefill_batch_chunk(slices)]
        for step in range(STEPS):
            base = model.decode_batch([feed.steps[step] for feed in one.feeds], seqs)
            for lane, row in enumerate(rows):
                row.append(model.copy_logits_to_host(base.offset(lane * model.logits_row_bytes())))
        return np.array(rows, np.float32)
