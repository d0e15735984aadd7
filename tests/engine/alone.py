# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a request yields alone, by the model's own calls, and products whose rows do not depend on one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import metrale
from gpu_runtime.gemm import gemm_reference
from gpu_runtime.host import HostBackend, product_calls
from metrale.engine.request import Generated, Request
from metrale.model import GREEDY
from metrale.nllb.model import NllbModel
from tests.engine.job import MAX_NEW, MAX_PROMPT, Job, judge
from tests.engine.serving import POSITION_BYTES

POSITIONS = MAX_PROMPT + 2 + MAX_NEW + 1
"""KV positions of the longest sequence: its source with language and EOS, the decoder start and what is generated."""

Array = np.ndarray[Any, np.dtype[Any]]


def load(folder: Path, gpu: HostBackend, lanes: int, positions: int = POSITIONS) -> NllbModel:
    """Return the tiny model with the limits of the jobs, and a KV pool of ``positions``."""
    limits = {"max_batch": lanes, "max_source_len": MAX_PROMPT + 2, "max_new_tokens": MAX_NEW}
    return metrale.load(folder, gpu, "float32", kv_bytes=positions * POSITION_BYTES, **limits)


@contextmanager
def products_by_rows() -> Iterator[None]:
    """Compute every row of a product by itself: BLAS sums in an order that depends on the number of rows."""

    def by_rows(a: Array, w: Array, c: Array, bias: Array | None = None, **options: Any) -> None:
        for row in range(len(a)):
            gemm_reference(a[row : row + 1], w, c[row : row + 1], bias, **options)

    with mock.patch.object(product_calls, "gemm_reference", by_rows):
        yield


def alone(model: NllbModel, request: Request) -> Generated:
    """Run a request on a model that nobody else uses, one step after the other."""
    result = Generated(logprobs=[])
    assert result.logprobs is not None
    if request.most_tokens > 1:
        seq = model.alloc_sequence()
        seq.src_lang_id, seq.tgt_lang_id = request.src_lang_id, request.tgt_lang_id
        event, memory = model.create_event(), model.alloc_host_pinned(3 * 4)
        dst = memory.array[: 3 * 4].view(np.int32).reshape(3, 1)
        row = model.prefill(request.prompt_tokens, seq)
        if request.sampling != GREEDY:
            model.begin_sampling(seq, request.sampling)
        while True:
            model.sample_batch_to_feed(row, [seq], dst, event, logprobs=True)
            model.event_synchronize(event)
            token = int(dst[0, 0])
            result.length += 1
            result.logprobs.append(float(dst[1].view(np.float32)[0]))
            if token in request.end_ids:
                result.finish_reason = "eos"
                break
            result.ids.append(token)
            if result.length >= request.most_tokens:
                break
            row = model.decode(token, seq)
        model.free_sequence(seq)
        model.destroy_event(event)
        model.free_host_pinned(memory)
    result.logprob = sum(result.logprobs)
    return result


def judge_all(folder: Path, jobs: list[Job], now: float, capacity: int) -> Counter[str]:
    """Hold every job against what its request yields alone; return how often what became of one."""
    with products_by_rows(), HostBackend() as gpu, load(folder, gpu, 1) as model:
        return Counter(judge(job, alone(model, job.request), now, capacity) for job in jobs if job.handle is not None)
