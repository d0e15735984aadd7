# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of the model share: golden cases, ways to drive a model, and views of its memory."""

from __future__ import annotations

import ctypes
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

import metrale
from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.errors import InvalidInput
from metrale.model import PrefillSlice, RowMask, SequenceState
from metrale.nllb.model import NllbModel
from tests.reference.nllb_float64 import NllbFloat64

DEMO = Path(metrale.__file__).parent / "demo_model"
EOS = 2
START = 2

Rows: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One translation: ``tokens`` are the source without language and EOS, ``ids`` all decoder ids."""

    tokens: list[int]
    source: int
    target: int
    ids: list[int]

    @property
    def src(self) -> list[int]:
        """The whole encoder input."""
        return [self.source, *self.tokens, EOS]


def golden_cases() -> list[Case]:
    """Return the golden cases with transformers' greedy ids."""
    cases = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
    return [Case(c["input_ids"][1:-1], c["input_ids"][0], c["greedy"]["ids"][1], c["greedy"]["ids"]) for c in cases]


GOLDEN = golden_cases()
LIMITS: dict[str, Any] = {"max_source_len": 64, "max_new_tokens": 64}
"""Enough for the golden cases, which were generated with ``max_new_tokens=64``."""


def begin(model: NllbModel, case: Case) -> SequenceState:
    """Return a new sequence with the case's languages."""
    seq = model.alloc_sequence()
    seq.src_lang_id, seq.tgt_lang_id = case.source, case.target
    return seq


def prefilled(model: NllbModel, case: Case, stream: StreamLike = 0) -> SequenceState:
    """Return a new sequence that has taken in the case's source."""
    seq = begin(model, case)
    model.prefill(case.tokens, seq, stream)
    return seq


def greedy(model: NllbModel, case: Case) -> list[int]:
    """Return the decoder ids of one translation alone, by the single calls."""
    seq = begin(model, case)
    token = model.argmax_on_device(model.prefill(case.tokens, seq))
    while token != EOS and seq.seq_len <= LIMITS["max_new_tokens"]:
        token = model.argmax_on_device(model.decode(token, seq))
    model.free_sequence(seq)
    return [*seq.tokens, token]


def greedy_together(model: NllbModel, cases: Sequence[Case]) -> list[list[int]]:
    """Return the decoder ids of several translations in one batch, which shrinks as they end."""
    seqs = [begin(model, case) for case in cases]
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases, seqs, strict=True)]
    first = model.prefill_batch_chunk(slices)[0]
    tokens = model.argmax_batch(first, len(seqs))
    last = dict(zip(map(id, seqs), tokens, strict=True))
    live = seqs
    while live := [s for s in live if last[id(s)] != EOS and s.seq_len <= LIMITS["max_new_tokens"]]:
        base = model.decode_batch([last[id(s)] for s in live], live)
        last.update(zip(map(id, live), model.argmax_batch(base, len(live)), strict=True))
    for seq in seqs:
        model.free_sequence(seq)
    return [[*seq.tokens, last[id(seq)]] for seq in seqs]


def forced(model: NllbModel, case: Case) -> Rows:
    """Return the logits after every id of the case but the start and the last, alone, by the single calls."""
    seq = begin(model, case)
    rows = [model.copy_logits_to_host(model.prefill(case.tokens, seq))]
    rows += [model.copy_logits_to_host(model.decode(token, seq)) for token in case.ids[2:-1]]
    assert seq.tokens == case.ids[:-1]
    model.free_sequence(seq)
    return np.stack(rows)


def forced_together(model: NllbModel, cases: Sequence[Case]) -> list[Rows]:
    """Do as `forced` for several cases in one batch, which shrinks as they end."""
    seqs = [begin(model, case) for case in cases]
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases, seqs, strict=True)]
    rows = [[model.copy_logits_to_host(ptr)] for ptr in model.prefill_batch_chunk(slices)]
    for step in range(2, max(len(case.ids) for case in cases) - 1):
        live = [i for i, case in enumerate(cases) if step < len(case.ids) - 1]
        base = model.decode_batch([cases[i].ids[step] for i in live], [seqs[i] for i in live])
        for lane, i in enumerate(live):
            rows[i].append(model.copy_logits_to_host(base.offset(lane * model.logits_row_bytes())))
    for seq in seqs:
        model.free_sequence(seq)
    return [np.stack(one) for one in rows]


def exact(judge: NllbFloat64, case: Case) -> NDArray[np.float64]:
    """Return the float64 logits that `forced` is compared with."""
    return judge.logits(case.src, case.ids[:-1])[1:]


def relative(x: NDArray[Any], reference: NDArray[Any]) -> float:
    """Return ``max|x - reference| / max|reference|`` of two finite arrays of one shape."""
    assert x.shape == reference.shape
    assert np.isfinite(x).all()
    assert np.isfinite(reference).all()
    return float(np.abs(x.astype(np.float64) - reference).max() / np.abs(reference).max())


NEIGHBOURS = {"host": 2e-6, "cuda": 1e-5}
"""How far a row may be from the same row in other company, in float32 and of the largest logit. A batch is another
matrix shape: to the host's BLAS, which then sums in another order (4e-7 as a rule), and to a GPU's library, which picks
another algorithm with another rounding error; each is within 1e-5 of the exact result."""


def company(model: NllbModel) -> float:
    """Return how far a row of the model may be from the same row in other company."""
    return NEIGHBOURS[model.gpu.kind()]


def read(gpu: GpuBackend, ptr: int, count: int, dtype: str = "f32") -> NDArray[Any]:
    """Return ``count`` elements of device memory."""
    out = np.empty(count, dtype=dtypes.NUMPY[dtype])
    gpu.copy_d2h(ptr, out)
    return out


def block(gpu: GpuBackend, tag: str) -> bytes:
    """Return the bytes of the one allocation with this tag, whether they have been written or not."""
    [entry] = [entry for entry in gpu.alloc_report() if entry.tag == tag]
    if gpu.kind() == "host":  # by its address, because the backend's copies refuse bytes that were never written
        return ctypes.string_at(entry.ptr, entry.nbytes)
    return read(gpu, entry.ptr, entry.nbytes, "u8").tobytes()


def arena(model: NllbModel) -> NDArray[Any]:
    """Return every row of the logits arena with its padding."""
    dtype = dtypes.short_name(model.logits_dtype())
    width = model.logits_row_bytes() // dtypes.itemsize(dtype)
    rows = 2 * model.shape.limits.max_batch
    return read(model.gpu, model.logits_buffer_ptr(), rows * width, dtype).reshape(rows, width)


def poke(model: NllbModel, row: int, values: dict[int, float]) -> None:
    """Write single logits of a row by its address."""
    dtype = dtypes.NUMPY[dtypes.short_name(model.logits_dtype())]
    for column, value in values.items():
        at = model.logits_buffer_ptr().offset(row * model.logits_row_bytes() + column * dtype.itemsize)
        model.gpu.copy_h2d(np.array([value], dtype=dtype), at)


def next_row(model: NllbModel, token: int, seq: SequenceState) -> bytes:
    """Decode one token and return the logits."""
    return model.copy_logits_to_host(model.decode(token, seq)).tobytes()


def saved(model: NllbModel, seq: SequenceState) -> bytes:
    """Return a sequence as bytes."""
    writer = io.BytesIO()
    model.save_sequence_state(seq, writer)
    return writer.getvalue()


def row_index(model: NllbModel, ptr: DevicePtr) -> int:
    """Return which row of the arena ``ptr`` is the address of, by the published row size alone."""
    index, rest = divmod(ptr - model.logits_buffer_ptr(), model.logits_row_bytes())
    assert rest == 0
    return index


def head_product(model: NllbModel) -> str:
    """Return ``n x k`` of the output head's product as a trace of launches has it: elements of a logits row, width."""
    elements = model.logits_row_bytes() // dtypes.itemsize(dtypes.short_name(model.logits_dtype()))
    return f"{elements}x{model.shape.config.d_model}"


def changed_rows(before: NDArray[Any], after: NDArray[Any]) -> list[int]:
    """Return in which rows two states of the arena differ."""
    return [row for row in range(len(before)) if before[row].tobytes() != after[row].tobytes()]


def state(seq: SequenceState) -> tuple[Any, ...]:
    """Return everything that a sequence says of itself."""
    return (seq.slot_idx, list(seq.tokens), seq.seq_len, seq.prompt_len, seq.src_lang_id, seq.tgt_lang_id)


@contextmanager
def results(model: NllbModel, *shape: int) -> Iterator[tuple[NDArray[np.int32], int]]:
    """Give page-locked memory for what is chosen, full of -77, and an event for it."""
    memory, event = model.alloc_host_pinned(4 * math.prod(shape)), model.create_event()
    dst = memory.array.view(np.int32).reshape(shape)
    dst.fill(-77)
    yield dst, event
    model.destroy_event(event)
    model.free_host_pinned(memory)


def to_feed(model: NllbModel, ptr: DevicePtr, masks: Sequence[RowMask], stream: StreamLike = 0) -> list[int]:
    """Choose greedily into the feed cells, wait, and return the ids."""
    with results(model, len(masks)) as (dst, event):
        model.argmax_batch_to_feed(ptr, masks, dst, event, stream)
        model.event_synchronize(event)
        ids: list[int] = dst.tolist()
    return ids


@dataclass(frozen=True)
class Choice:
    """What was sampled for each sequence."""

    ids: list[int]
    logprobs: NDArray[np.float32]
    flags: list[int]


def sampled(
    model: NllbModel, ptr: DevicePtr, seqs: Sequence[SequenceState], stream: StreamLike = 0, *, logprobs: bool = False
) -> Choice:
    """Sample into the feed cells, wait, and return what was chosen."""
    with results(model, 3, len(seqs)) as (dst, event):
        model.sample_batch_to_feed(ptr, seqs, dst, event, stream, logprobs=logprobs)
        model.event_synchronize(event)
        return Choice(dst[0].tolist(), dst[1].view(np.float32).copy(), dst[2].tolist())


Call: TypeAlias = Callable[[NllbModel, SequenceState, SequenceState], Any]


def assert_refused(model: NllbModel, call: Call, argument: str, error: type[Exception] = InvalidInput) -> None:
    """``call`` is made with a sequence that has decoded a token and one that is new; nothing may come of it."""
    case = Case([5, 6, 7], 80, 81, [])
    live, fresh = prefilled(model, case), begin(model, case)
    model.decode(9, live)
    before = [state(live), state(fresh)]
    kv, rows = block(model.gpu, "KV cache"), arena(model).tobytes()
    with model.gpu.launch_trace() as trace, pytest.raises(error) as refused:
        call(model, live, fresh)
    if isinstance(refused.value, InvalidInput):
        assert refused.value.argument == argument
    assert argument in str(refused.value)
    assert not trace
    assert [state(live), state(fresh)] == before
    assert (block(model.gpu, "KV cache"), arena(model).tobytes()) == (kv, rows)
    model.prefill(case.tokens, fresh)
    model.decode_batch([10, 11], [live, fresh])
    assert (live.tokens, fresh.tokens) == ([2, 81, 9, 10], [2, 81, 11])
