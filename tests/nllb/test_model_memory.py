# SPDX-License-Identifier: MIT OR Apache-2.0
"""Device memory is planned, taken at load, never grown, and all given back."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import metrale
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError, OutOfMemory
from gpu_runtime.faults import Budget, FailCall
from metrale.errors import SequenceError
from metrale.model import GREEDY, FeedSource, PrefillSlice, RowMask
from metrale.nllb.config import NllbConfig
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.model import NllbModel
from metrale.nllb.plan import MemoryPlan
from metrale.nllb.workspace import workspace_layout
from tests.backends import ON_CUDA, Device, damaged, open_host
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import DEMO, Case, begin, prefilled
from tests.reference.tiny import tiny_config, write_tiny

ONE = Case([5, 6, 7], 80, 81, [])
SMALL: dict[str, Any] = {"max_batch": 2, "max_source_len": 8, "max_new_tokens": 4}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "limits",
    [
        SMALL,
        {"max_batch": 3, "max_source_len": 30, "max_new_tokens": 50, "max_encoder_tokens": 33, "kv_bytes": 5000},
        {"max_batch": 1, "max_source_len": 2, "max_new_tokens": 2},
    ],
)
def test_the_plan_is_what_is_allocated(gpu: GpuBackend, tiny_folder: Path, dtype: str, limits: dict[str, Any]) -> None:
    plan = metrale.memory_plan(tiny_folder, gpu, dtype, **limits)
    assert (gpu.live_bytes(), gpu.live_alloc_count()) == (0, 0)
    model = metrale.load(tiny_folder, gpu, dtype, **limits)
    assert model.memory_plan() == plan
    assert {entry.tag: entry.nbytes for entry in gpu.alloc_report()} == {
        "weights": plan.weights,
        "KV cache": plan.kv,
        "workspace": plan.workspace,
        "logits": plan.logits,
    }
    assert gpu.live_bytes() == plan.total
    model.close()
    assert gpu.live_alloc_count() == 0


def test_the_plan_of_the_demo_model() -> None:
    """10,797,312 parameters, 6 KiB of KV a position (3 layers, 2 * 256 floats), rows of 8,256 logits.

    The output head has as many rows, 16 more than there are ids, and a bias for each.
    """
    plan = metrale.memory_plan(DEMO, "host", "float32", max_batch=4, max_source_len=100, max_new_tokens=60)
    table, head = 100 * 256 * 4, (16 * 256 + 8256) * 4
    assert plan.kv == 4 * (100 + 61) * 3 * 2 * 256 * 4
    assert plan.logits == 2 * 4 * 8256 * 4
    assert 0 <= plan.weights - (10_797_312 * 4 + table + head) < 200 * 256  # regions begin at multiples of 256
    half = metrale.memory_plan(DEMO, "host", "bfloat16", max_batch=4, max_source_len=100, max_new_tokens=60)
    assert (half.kv, half.logits) == (plan.kv // 2, plan.logits // 2)
    assert metrale.memory_plan(DEMO, "host", max_batch=4, max_source_len=100, max_new_tokens=60) == plan


def test_a_plan_says_what_is_for_what() -> None:
    plan = MemoryPlan(weights=1 << 20, kv=2 << 20, logits=3 << 19, workspace=5 << 30)
    assert plan.total == (1 << 20) + (2 << 20) + (3 << 19) + (5 << 30)
    assert str(plan) == "weights 1.0 MiB, kv 2.0 MiB, logits 1.5 MiB, workspace 5,120.0 MiB, total 5,124.5 MiB"


def use(model: NllbModel) -> None:
    """One of everything, up to the limits of `SMALL`."""
    seqs = [begin(model, ONE), begin(model, Case(list(range(40, 46)), 82, 83, []))]
    model.prefill(ONE.tokens, seqs[0])
    model.prefill_batch_chunk([PrefillSlice.whole(list(range(40, 46)), seq) for seq in seqs])
    for token in (9, 10, 11):
        base = model.decode_batch([token, token], seqs)
        model.argmax_batch(base, 2)
        model.copy_logits_to_host(base)
    model.compact_sequence(seqs[0], 0)
    for seq in seqs:
        model.free_sequence(seq)


def test_nothing_grows(make_tiny: MakeModel) -> None:
    model = make_tiny(**SMALL)
    before = model.gpu.alloc_report()
    for _ in range(3):
        use(model)
        assert model.gpu.alloc_report() == before
    assert damaged(model.gpu) == []


def thresholds(plan: MemoryPlan) -> list[int]:
    """The memory that is not enough, by a byte, for each of the allocations."""
    sums = np.cumsum([plan.weights, plan.kv, plan.workspace, plan.logits])
    return [int(total) - 1 for total in sums]


def test_a_plan_that_cannot_fit_is_refused_before_anything_is_read(
    device: Device, gpu: GpuBackend, tiny_folder: Path
) -> None:
    plan = metrale.memory_plan(tiny_folder, gpu, "float32", **SMALL)
    with device.open(memory_limit=plan.total - 1) as gpu, gpu.launch_trace() as trace:
        with pytest.raises(
            OutOfMemory, match=r"the model needs .* bytes \(weights .*, kv .*\), and .* are free"
        ) as full:
            metrale.load(tiny_folder, gpu, "float32", **SMALL)
        assert (full.value.requested, full.value.limit) == (plan.total, plan.total - 1)
        assert not trace


def test_limits_past_all_memory_are_refused_at_once(gpu: GpuBackend, tiny_folder: Path) -> None:
    for name in ("max_batch", "max_source_len", "max_new_tokens"):
        limits: dict[str, Any] = {name: 10**9}
        with pytest.raises(OutOfMemory, match="the model needs"):
            metrale.load(tiny_folder, gpu, "float32", **limits)


@pytest.mark.parametrize("number", range(4))
def test_out_of_memory_at_each_allocation(device: Device, gpu: GpuBackend, tiny_folder: Path, number: int) -> None:
    """On a device that gives less than it promised. Nothing stays allocated, and with more it holds the model."""
    plan = metrale.memory_plan(tiny_folder, gpu, "float32", **SMALL)
    budget = Budget(thresholds(plan)[number])
    with device.open(faults=(budget,)) as gpu:
        with pytest.raises(OutOfMemory) as full:
            metrale.load(tiny_folder, gpu, "float32", **SMALL)
        assert full.value.requested == (plan.weights, plan.kv, plan.workspace, plan.logits)[number]
        assert (gpu.live_bytes(), gpu.live_alloc_count()) == (0, 0)
        budget.limit = plan.total
        with metrale.load(tiny_folder, gpu, "float32", **SMALL) as model:
            prefilled(model, ONE)
        assert gpu.live_bytes() == 0


def test_exactly_enough_memory(device: Device, gpu: GpuBackend, tiny_folder: Path) -> None:
    total = metrale.memory_plan(tiny_folder, gpu, "float32", **SMALL).total
    with (
        device.open(memory_limit=total) as gpu,
        metrale.load(tiny_folder, gpu, "float32", **SMALL) as model,
    ):
        use(model)
        assert gpu.free_memory() == 0


def test_a_device_that_fails_while_loading_keeps_nothing(device: Device, tiny_folder: Path) -> None:
    fault = FailCall(nth=None)
    with device.open(faults=(fault,)) as gpu:
        metrale.load(tiny_folder, gpu, "float32", **SMALL).close()
        calls = fault.seen
        assert calls > 80
        for number in range(calls):
            fault.arm(number)
            with pytest.raises(DeviceError, match="was to fail"):
                metrale.load(tiny_folder, gpu, "float32", **SMALL).close()
            assert gpu.live_alloc_count() == 0
        fault.arm(None)
        with metrale.load(tiny_folder, gpu, "float32", **SMALL) as model:
            use(model)


def test_a_value_that_does_not_fit_keeps_nothing(gpu: GpuBackend, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", 4, scale_embedding=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layer_norm.bias"][3] = 1e6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(metrale.CheckpointError, match="do not fit in f16"):
        metrale.load(folder, gpu, "float16", **SMALL)
    assert gpu.live_alloc_count() == 0


def test_closing_frees_everything_once(gpu: GpuBackend, tiny_folder: Path) -> None:
    for end in (NllbModel.close, NllbModel.teardown):
        model = metrale.load(tiny_folder, gpu, "float32", **SMALL)
        prefilled(model, ONE)
        end(model)
        assert (gpu.live_bytes(), gpu.live_alloc_count()) == (0, 0)
        model.close()
        model.teardown()
    with metrale.load(tiny_folder, gpu, "float32", **SMALL):
        assert gpu.live_alloc_count() == 4
    assert gpu.live_alloc_count() == 0
    gpu.copy_h2d(b"ok", gpu.alloc(2))  # the backend is the caller's, and open


def test_closing_does_not_disturb_what_is_enqueued(device: Device, gpu: GpuBackend, tiny_folder: Path) -> None:
    """A forward and the copy of its row, which nobody has waited for; the host runs them as late as it can."""
    rows = []
    memory = gpu.alloc_host_pinned(97 * 4)
    for waits in (True, False):
        on = open_host(order="deferred") if device.is_host else gpu
        model = metrale.load(tiny_folder, on, "float32", **SMALL)
        seq, stream = prefilled(model, ONE), on.create_stream()
        ptr = model.decode(9, seq, stream)
        on.copy_d2h_async(ptr, memory.array, stream)
        if waits:
            on.synchronize(stream)
        model.close()
        on.synchronize(stream)
        rows.append(memory.array.tobytes())
        memory.array.fill(0)
        on.destroy_stream(stream)
        assert on.live_alloc_count() == 0
    gpu.free_host_pinned(memory)
    assert rows[0] == rows[1] != bytes(97 * 4)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("encoder_ffn", [8, 500])
@pytest.mark.parametrize("decoder_ffn", [8, 500])
@pytest.mark.parametrize("tokens", [40, 5000])
def test_every_region_of_the_workspace_holds_what_a_pass_writes_there(
    dtype: str, encoder_ffn: int, decoder_ffn: int, tokens: int
) -> None:
    """Regions lie side by side in one allocation, so nothing else would notice one that is too small."""
    config = NllbConfig.from_dict(
        tiny_config(encoder_ffn_dim=encoder_ffn, decoder_ffn_dim=decoder_ffn, decoder_layers=12)
    )
    shape = ModelShape(config, 97, dtype, ServingLimits(64, 40, 8, tokens))
    layout = workspace_layout(shape)
    ends = [*list(layout.offsets.values())[1:], layout.nbytes]
    size = {name: end - at for (name, at), end in zip(layout.offsets.items(), ends, strict=True)}
    item, rows, lanes = (4 if dtype == "f32" else 2), 128, 64
    cross = min(tokens, 2048) * 12 * 2 * 32
    assert size["encoder.wide"] >= item * max(tokens * 3 * 32, tokens * encoder_ffn, cross)
    for side, count in (("prefix", rows), ("decoder", lanes)):
        assert size[f"{side}.wide"] >= item * max(count * 3 * 32, count * decoder_ffn)
        assert size[f"{side}.hidden"] >= item * count * 32
        assert size[f"{side}.table"] >= count * (8 + 8 + 4 + 4 + 4 + 4 + 4)
    for side, count in (("encoder", tokens), ("prefix", rows), ("decoder", lanes)):
        assert min(size[f"{side}.x"], size[f"{side}.h"]) >= item * count * 32
    assert size["encoder.table"] >= tokens * (8 + 4 + 4) + (tokens + 1) * 4
    assert size["argmax"] >= 2 * rows * 4
    assert size["feed.cells"] >= (rows + lanes) * 4
    assert size["feed.history"] >= lanes * 9 * 4
    assert size["feed.bans"] >= lanes * 2 * 4 * 4  # 97 ids are four words of bits
    assert size["feed.results"] >= 3 * rows * 4
    assert size["feed.table"] >= rows * (8 + 8 * 4 + 4 * 4)
    assert size["prefill.gemm"] == size["decoder.gemm"] == 0
    assert "decoder.spare" not in size
    wanting = ModelShape(config, 97, dtype, ServingLimits(64, 40, 8, tokens), 12345)
    assert workspace_layout(wanting).nbytes - layout.nbytes == 2 * 12544  # the next multiple of 256, for either side
    padded = ModelShape(config, 97, dtype, ServingLimits(64, 40, 8, tokens), pad_batches=True)
    assert workspace_layout(padded).nbytes - layout.nbytes == 15 * 12 * 2 * 32 * item  # 33 lanes are padded to 48


def test_a_closed_model_refuses_calls(make_tiny: MakeModel) -> None:
    model = make_tiny()
    seq, ptr = prefilled(model, ONE), model.logits_buffer_ptr()
    model.close()
    calls: list[Callable[[], Any]] = [
        model.alloc_sequence,
        lambda: model.alloc_sequence_for(10),
        lambda: model.prefill(ONE.tokens, seq),
        lambda: model.prefill_chunk(ONE.tokens, seq, 0, 3, True),
        lambda: model.prefill_batch_chunk([PrefillSlice.whole(ONE.tokens, seq)]),
        lambda: model.prefill_batch_chunk_rows([], 0, 1),
        lambda: model.decode(9, seq),
        lambda: model.decode_batch([9], [seq]),
        lambda: model.mixed_forward([9], [seq], [], seq, 0, 0, True),
        lambda: model.mixed_forward_batch([9], [seq], []),
        lambda: model.mixed_forward_batch_fed([FeedSource(9)], [seq], []),
        lambda: model.decode_batch_fed([FeedSource(9)], [seq]),
        lambda: model.argmax_batch_to_feed(ptr, [RowMask()], np.zeros(1, np.int32), 0),
        lambda: model.sample_batch_to_feed(ptr, [seq], np.zeros((3, 1), np.int32), 0),
        lambda: model.begin_sampling(seq, GREEDY),
        lambda: model.save_sequence_state(seq, io.BytesIO()),
        lambda: model.restore_sequence_state(seq, 0, io.BytesIO()),
        lambda: model.compact_sequence(seq, 1),
        lambda: model.copy_logits_to_host(ptr),
        lambda: model.argmax_on_device(ptr),
        lambda: model.argmax_batch(ptr, 1),
        lambda: model.argmax_rows(ptr, 1),
        lambda: model.logits_event(ptr),
        model.logits_buffer_ptr,
        model.decode_logits_ptr,
        model.hidden_after_norm,
    ]
    with model.gpu.launch_trace() as trace:
        for call in calls:
            with pytest.raises(SequenceError, match="the model is closed"):
                call()
    assert not trace
    model.free_sequence(seq)  # tidying up afterwards is fine
    model.detach_slot_for_reuse(seq)
    assert seq.is_detached
    assert (model.vocab_size(), model.memory_plan().kv) == (97, 4 * 21 * 768)


@pytest.mark.parametrize("name", ["host", ON_CUDA])
def test_a_model_closes_the_backend_that_it_opened(tiny_folder: Path, name: str) -> None:
    model = metrale.load(tiny_folder, name, **SMALL)
    assert model.gpu.kind() == name
    prefilled(model, ONE)
    model.close()
    with pytest.raises(DeviceError, match="closed"):
        model.gpu.alloc(1)
    model.close()


def test_sequences_give_their_kv_back(make_tiny: MakeModel) -> None:
    """Ten times as many sequences as the pool holds, freed and detached in turn, in both orders."""
    model = make_tiny()
    for turn in range(10):
        seqs = [prefilled(model, ONE) for _ in range(4)]
        for seq in seqs if turn % 2 else reversed(seqs):
            (model.free_sequence if turn % 3 else model.detach_slot_for_reuse)(seq)
