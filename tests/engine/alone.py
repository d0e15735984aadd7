# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a request yields alone, by the model's own calls, and products whose rows do not depend on one another."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

import metrale
from gpu_runtime.gemm import gemm_reference
from gpu_runtime.host import HostBackend
from metrale.engine.request import Generated, Request
from metrale.model import GREEDY, BeamReq, Hypothesis
from metrale.nllb.model import NllbModel
from tests.engine.job import ADAPTERS, MAX_NEW, MAX_PROMPT, MOST_BEAMS, Job, judge
from tests.engine.serving import POSITION_BYTES
from tests.reference.adapters import Recipe, write_adapter

POSITIONS = MAX_PROMPT + 2 + MAX_NEW + 1
"""KV positions of the longest sequence without beams: its source with language and EOS, the decoder start and what is
generated."""

RECIPES: Final = (
    Recipe(31, settings={"lora_alpha": 4}),
    Recipe(34, "encoder_attn|fc1", {"r": 3, "lora_alpha": 2, "use_rslora": True}),
)
"""The adapters of the jobs; ranks up to 4."""


@functools.cache
def adapters_of(folder: Path) -> dict[str, Path]:
    """Return the folders of the jobs' adapters for a tiny checkpoint, beside it, where they are written once."""
    assert len(RECIPES) == ADAPTERS
    beside = folder.parent / f"{folder.name} adapters"
    return {str(slot): write_adapter(beside / str(slot), recipe) for slot, recipe in enumerate(RECIPES)}


def load(
    folder: Path,
    gpu: HostBackend,
    lanes: int,
    positions: int = POSITIONS,
    *,
    adapters: bool = False,
    step_graphs: bool = False,
) -> NllbModel:
    """Return the tiny model with the limits of the jobs, and a KV pool of ``positions``."""
    limits: dict[str, Any] = {"max_batch": lanes, "max_source_len": MAX_PROMPT + 2, "max_new_tokens": MAX_NEW}
    limits["step_graphs"] = step_graphs
    if adapters:
        limits |= {"adapters": adapters_of(folder), "max_lora_rank": 4}
    return metrale.load(folder, gpu, "float32", kv_bytes=positions * POSITION_BYTES, **limits)


@contextmanager
def products_by_rows() -> Iterator[None]:
    """Compute every row of a product by itself: BLAS sums in an order that depends on the number of rows."""

    def by_rows(*operands: Any, **options: Any) -> None:
        gemm_reference(*operands, **{**options, "by_row": True})

    with mock.patch("gpu_runtime.host.product_calls.gemm_reference", by_rows):
        yield


def alone(model: NllbModel, request: Request) -> Generated:
    """Run a request, as an engine has completed it, on a model that nobody else uses."""
    if request.most_tokens == request.counted_from:
        return Generated(logprob=0.0, logprobs=[])
    return _stepwise(model, request) if request.beams is None else _searched(model, request)


def _stepwise(model: NllbModel, request: Request) -> Generated:
    """Choose one token after the other."""
    result = Generated(logprobs=[], length=request.counted_from)
    assert result.logprobs is not None
    seq = model.alloc_sequence()
    seq.src_lang_id, seq.tgt_lang_id = request.src_lang_id, request.tgt_lang_id
    seq.adapter_slot, seq.prefix_tokens = request.adapter_slot, request.prefix_tokens
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
            result.finish_reason, result.eos_id = "eos", token
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


def _searched(model: NllbModel, request: Request) -> Generated:
    found = search(model, request)
    given = 1 + len(request.prefix_tokens)
    chosen, logprobs = found[0].ids[given:], found[0].logprobs[given:]
    is_eos = chosen[-1] in request.end_ids
    return Generated(
        ids=chosen[: len(chosen) - is_eos],
        finish_reason="eos" if is_eos else "length",
        logprob=sum(logprobs),
        logprobs=logprobs,
        length=request.counted_from + len(chosen),
        score=found[0].score,
        hypotheses=found,
        eos_id=chosen[-1] if is_eos else None,
    )


def search(model: NllbModel, request: Request) -> list[Hypothesis]:
    """Return what the model's own call finds for a request with beams that an engine has completed."""
    beams, sampling = request.beams, request.sampling
    assert beams is not None
    [found] = model.generate_beams(
        [
            BeamReq(
                request.prompt_tokens,
                request.src_lang_id,
                request.tgt_lang_id,
                request.adapter_slot,
                num_beams=beams.num_beams,
                max_new=request.most_tokens,
                length_penalty=beams.length_penalty,
                early_stopping=beams.early_stopping,
                num_return_sequences=beams.num_return_sequences,
                min_new=sampling.min_new_tokens,
                no_repeat_ngram_size=sampling.no_repeat_ngram_size,
                repetition_penalty=sampling.repetition_penalty,
                bad_words_ids=sampling.bad_words,
                suppress_tokens=sampling.suppress_tokens,
                forced_eos_id=sampling.forced_eos_id,
                prefix_tokens=request.prefix_tokens,
                eos_ids=tuple(sorted(request.end_ids)),
            )
        ]
    )
    return found


def judge_all(folder: Path, jobs: list[Job], now: float, capacity: int, *, adapters: bool = False) -> Counter[str]:
    """Hold every job against what its request yields alone; return how often what became of one."""
    room = MOST_BEAMS * POSITIONS
    with products_by_rows(), HostBackend() as gpu, load(folder, gpu, MOST_BEAMS, room, adapters=adapters) as model:
        total: Counter[str] = Counter()
        for job in jobs:
            if job.handle is not None:
                total += judge(job, alone(model, job.handle.request), now, capacity)
        return total
