# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model takes the device memory it said it would, and no more however long it works; running out is survivable."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import OutOfMemory
from gpu_runtime.faults import FailAllocation, FailCall
from metrale.model import PrefillSlice
from metrale.nllb.model import NllbModel
from tests.backends import Device, cuda_only
from tests.gpu.conftest import Say
from tests.nllb.decoding import DEMO, GOLDEN, LIMITS, begin, greedy, greedy_together
from tests.nllb.test_model_endurance import resident

pytestmark = cuda_only

CASES: list[dict[str, Any]] = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture
def pooled(device: Device) -> Iterator[GpuBackend]:
    """A backend on CuPy's own pool, without redzones, so that the pool holds what the model asked for."""
    with device.open(pool=True, redzones=False) as gpu:
        yield gpu


def pool_bytes() -> int:
    """Return the bytes that CuPy's pool has from the driver: this process's alone, unlike the device's free memory."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    return int(pool.total_bytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_takes_what_it_planned(pooled: GpuBackend, dtype: str, say: Say) -> None:
    """Within 3 %, loaded and after work, by what CuPy's pool has from the driver."""
    before = pool_bytes()
    with metrale.load(DEMO, pooled, dtype, max_batch=64, max_source_len=512, max_new_tokens=256) as model:
        planned = model.memory_plan().total
        loaded = pool_bytes() - before
        assert greedy_together(model, GOLDEN[:8])
        used = pool_bytes() - before
    say(f"{dtype}: planned {planned:,} bytes, loaded {loaded:,}, after work {used:,}")
    assert pooled.live_bytes() == 0
    pooled.synchronize()
    pooled.free(pooled.alloc(1))  # freed blocks that waited for a stream are let go
    assert pool_bytes() - before <= 4096
    assert abs(loaded - planned) <= 0.03 * planned
    assert abs(used - planned) <= 0.03 * planned


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from Linux's /proc")
def test_nothing_grows_over_two_thousand_translations(pooled: GpuBackend, say: Say) -> None:
    """Whole translations in ever new company, a hundred a call: ledger, pool and the process's own memory."""
    rng = np.random.default_rng(1)
    options: dict[str, Any] = {"dtype": "float32", "max_batch": 50, **LIMITS}
    resident_sizes, pool_sizes = [], []
    with metrale.Translator(DEMO, device=pooled, **options) as translator:
        report = pooled.alloc_report()
        for _ in range(20):
            drawn = [CASES[int(index)] for index in rng.integers(0, len(CASES), 100)]
            columns = ([case[name] for case in drawn] for name in ("text", "src_lang", "tgt_lang"))
            results = translator.translate(*columns)
            assert [result.text for result in results] == [case["greedy"]["text"] for case in drawn]
            assert pooled.alloc_report() == report
            resident_sizes.append(resident())
            pool_sizes.append(pool_bytes())
    say(f"resident after each hundred: {[size >> 20 for size in resident_sizes]} MiB; pool: {set(pool_sizes)} bytes")
    assert len(set(pool_sizes)) == 1
    # A logits row leaked once a translation would be 32 MiB in the second half alone; what is kept for each new shape
    # of a product is a few kilobytes, and comes in pages of 2 MiB.
    assert max(resident_sizes[10:]) - max(resident_sizes[2:10]) < 16 << 20


def test_shapes_that_never_recur_leave_memory_flat(pooled: GpuBackend, say: Say) -> None:
    """Two thousand sources of 0 to 40 tokens, in batches of ever new sizes: what is kept per shape is bounded."""
    rng = np.random.default_rng(2)
    sizes = []
    with metrale.load(DEMO, pooled, "bfloat16", max_batch=40, **LIMITS) as model:
        for done in range(80):
            slices = []
            for index in range(int(rng.integers(10, 41))):
                seq = model.alloc_sequence_for(60)
                seq.src_lang_id, seq.tgt_lang_id = 8074, (8084, 8069, 8188)[(index + done) % 3]
                slices.append(PrefillSlice.whole(rng.integers(4, 8000, rng.integers(0, 41)).tolist(), seq))
            seqs = [one.seq for one in slices]
            tokens = model.argmax_batch(model.prefill_batch_chunk(slices)[0], len(seqs))
            model.argmax_batch(model.decode_batch(tokens, seqs), len(seqs))
            for seq in seqs:
                model.free_sequence(seq)
            sizes.append(resident())
    say(f"resident after batches 20, 40, 60, 80: {[sizes[index] >> 20 for index in (19, 39, 59, 79)]} MiB")
    # Each batch has products of about 30 new shapes; a few kilobytes are kept for each, up to a limit.
    assert sizes[79] - sizes[39] < 24 << 20


Load = Callable[[GpuBackend], NllbModel]


def small(gpu: GpuBackend, **options: Any) -> NllbModel:
    return metrale.load(DEMO, gpu, "float32", **({"max_batch": 4, **LIMITS} | options))


@pytest.mark.parametrize("tag", ["weights", "KV cache", "workspace", "logits"])
def test_out_of_memory_while_loading(device: Device, tag: str) -> None:
    """Said clearly, everything given back, and the next load works."""
    fault = FailAllocation(tag=tag)
    with device.open(faults=(fault,)) as gpu:
        with pytest.raises(OutOfMemory, match=f"for {tag} do not fit"):
            small(gpu)
        assert gpu.live_bytes() == 0
        with small(gpu) as model:
            assert greedy(model, GOLDEN[0]) == GOLDEN[0].ids


def test_a_device_that_is_really_full(gpu: GpuBackend, say: Say) -> None:
    """More than the device has: the driver says no, and everything works on."""
    too_much = gpu.total_memory() + (1 << 30)
    with pytest.raises(OutOfMemory, match="for everything do not fit") as full:
        gpu.alloc(too_much, tag="everything")
    say(str(full.value).splitlines()[0])
    assert full.value.requested == too_much
    with small(gpu) as model:
        assert greedy(model, GOLDEN[0]) == GOLDEN[0].ids


def test_out_of_memory_in_the_kv_pool(gpu: GpuBackend) -> None:
    """A sequence that has no room is refused; those that have go on."""
    plan = metrale.memory_plan(DEMO, gpu, "float32", max_batch=1, **LIMITS)
    with small(gpu, kv_bytes=2 * plan.kv) as model:
        seqs = [begin(model, GOLDEN[0]), begin(model, GOLDEN[1])]
        with pytest.raises(OutOfMemory, match="KV cache: no 129 positions in a row are free"):
            model.alloc_sequence()
        for seq in seqs:
            model.free_sequence(seq)
        assert greedy_together(model, GOLDEN[:2]) == [case.ids for case in GOLDEN[:2]]


@pytest.mark.parametrize("name", ["gemm", "launch", "copy_h2d"])
def test_out_of_memory_in_the_encoder(device: Device, name: str) -> None:
    """As a library may run out in the middle of a pass: the sequence is as it was, and prefilling it again works."""
    fault = FailCall(name, nth=None, error=lambda text: OutOfMemory(text, requested=1, live=0, limit=0))
    with device.open(faults=(fault,)) as gpu, small(gpu) as model:
        other = begin(model, GOLDEN[1])
        model.prefill(GOLDEN[1].tokens, other)
        seq = begin(model, GOLDEN[0])
        fault.arm(0 if name == "copy_h2d" else 2)
        with pytest.raises(OutOfMemory, match="was to fail"):
            model.prefill(GOLDEN[0].tokens, seq)
        assert seq.tokens == []
        for case, one in ((GOLDEN[0], seq), (GOLDEN[1], other)):
            model.free_sequence(one)
            assert greedy(model, case) == case.ids
