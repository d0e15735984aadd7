# SPDX-License-Identifier: MIT OR Apache-2.0
"""Steps as graphs beside what callers do: their streams and captures, those who watch, and what goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import FailCall
from gpu_runtime.streams import LEGACY_STREAM, PER_THREAD_STREAM
from metrale.errors import NotSupported
from metrale.nllb import step_graphs
from tests.backends import Device, host_only
from tests.nllb.backends import OrderedBackend, Padding
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import prefilled, read
from tests.nllb.replaying import LIMITS, graphs_of, padding_gpu, warm
from tests.nllb.stepping import PROGRAMS, Failing, case, replays, step_of


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    yield from padding_gpu(device, shared_gpu)


# streams and captures of the caller's


@pytest.mark.parametrize("which", ["default", "created", "legacy", "per thread"])
def test_a_step_is_replayed_on_the_callers_stream(make_tiny: MakeModel, gpu: GpuBackend, which: str) -> None:
    found = []
    for wanted in (False, True):
        model = make_tiny(step_graphs=wanted, **LIMITS)
        stream = {"default": 0, "created": model.create_stream(), "legacy": LEGACY_STREAM}.get(which, PER_THREAD_STREAM)
        seq = prefilled(model, case(2), stream)
        with replays(gpu) as launched:
            logits = [model.copy_logits_to_host(model.decode(9 + turn, seq, stream)).tobytes() for turn in range(5)]
        assert len(launched) == (4 if wanted else 0)
        found.append(logits)
    assert found[0] == found[1]


@host_only
def test_a_replay_is_ordered_as_the_launches_are(make_tiny: MakeModel) -> None:
    """After the prefill of its sequence on another stream, and before who reads the row."""
    gpu = OrderedBackend()
    model = make_tiny(gpu, step_graphs=True, **LIMITS)
    warm(model)
    one, two, reader = (model.create_stream() for _ in range(3))
    with gpu.noted() as prefill:
        seq = prefilled(model, case(1), one)
    with replays(gpu) as launched, gpu.noted() as decode:
        ptr = model.decode(9, seq, two)
    assert len(launched) == 1
    assert len(decode) == 2  # the table, and the graph
    assert gpu.all_before(prefill, decode)
    with gpu.noted() as after:
        model.argmax_on_device(ptr, reader)
    assert gpu.all_before(decode, after)


def test_a_step_in_the_callers_capture_is_refused(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """As without graphs: its table changes from call to call."""
    model = make_tiny(step_graphs=True, **LIMITS)
    warm(model)
    seq, stream = prefilled(model, case(0)), model.create_stream()
    gpu.begin_capture(stream)
    with pytest.raises(NotSupported, match="capture"):
        model.decode(9, seq, stream)
    gpu.destroy_graph(gpu.end_capture(stream))
    assert seq.seq_len == 2
    with replays(gpu) as launched:
        model.decode(9, seq, stream)
    assert len(launched) == 1


def test_a_step_may_be_captured_and_replayed_beside_the_callers_capture(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """On another stream: neither finds anything of the other's in its graph."""
    plain, model = make_tiny(step_graphs=False, **LIMITS), make_tiny(step_graphs=True, **LIMITS)
    expected = PROGRAMS["sampling"](plain)
    stream, memory = model.create_stream(), gpu.alloc(4)
    gpu.memset(memory, 0, 4)
    gpu.begin_capture(stream)
    gpu.memset_async(memory, 1, 4, stream)
    with replays(gpu) as launched:
        assert PROGRAMS["sampling"](model) == expected
    graph = gpu.end_capture(stream)
    assert launched
    assert read(gpu, memory, 1, "i32").tolist() == [0]
    gpu.launch_graph(graph, stream)
    gpu.synchronize(stream)
    assert read(gpu, memory, 1, "i32").tolist() == [0x01010101]
    gpu.destroy_graph(graph)
    gpu.free(memory)


# who watches


def test_a_trace_sees_every_launch(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """Also of a step that would be replayed; when the trace ends, it is again."""
    model = make_tiny(step_graphs=True, **LIMITS)
    seq = prefilled(model, case(0))
    with gpu.launch_trace() as first:
        step_of(model, [seq], 0)
    step_of(model, [seq], 1)
    with replays(gpu) as launched:
        step_of(model, [seq], 2)
        with gpu.launch_trace() as again:
            step_of(model, [seq], 3)
        step_of(model, [seq], 4)
    assert len(launched) == 2
    assert [(one.kind, one.name, one.grid) for one in again] == [(one.kind, one.name, one.grid) for one in first]
    assert len(first) > 20


def test_launches_that_are_waited_for_are_no_graph(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    model = make_tiny(step_graphs=True, **LIMITS)
    warm(model)
    seq = prefilled(model, case(0))
    gpu.debug_sync_kernels = True
    try:
        with replays(gpu) as launched:
            step_of(model, [seq], 0)
        assert launched == []
    finally:
        gpu.debug_sync_kernels = False
    with replays(gpu) as launched:
        step_of(model, [seq], 0)
    assert len(launched) == 1


@host_only
def test_with_faults_there_are_no_graphs(make_tiny: MakeModel) -> None:
    """A fault hears of every launch, and may refuse it."""
    fault = FailCall("launch", nth=None)
    model = make_tiny(Padding(check=True, faults=[fault]), step_graphs=True, **LIMITS)
    warm(model)
    seq = prefilled(model, case(0))
    fault.arm(3)
    with pytest.raises(DeviceError, match="was to fail"):
        step_of(model, [seq], 0)
    fault.arm(None)
    step_of(model, [seq], 0)
    assert not model._graphs


# what goes wrong


@pytest.mark.parametrize("call", ["begin_capture", "launch", "gemm", "end_capture"])
def test_a_capture_that_fails_is_said_and_the_steps_go_on(
    make_tiny: MakeModel, gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Launch by launch, those of this kind; others are captured. No stream is left capturing."""
    expected = PROGRAMS["mixed"](make_tiny(step_graphs=False, **LIMITS))
    model = make_tiny(step_graphs=True, **LIMITS)
    seq = prefilled(model, case(0))
    step_of(model, [seq], 0)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger=step_graphs.__name__):
        patch.setattr(gpu, call, Failing(getattr(gpu, call), DeviceError("the device would not")))
        step_of(model, [seq], 1)
    assert "the device would not" in caplog.text
    assert graphs_of(model) == 0
    with replays(gpu) as launched:
        step_of(model, [seq], 2)
        assert launched == []
        model.free_sequence(seq)
        assert PROGRAMS["mixed"](model) == expected
    assert launched
    assert not gpu.stream_is_capturing(model._graphs._stream)  # type: ignore[union-attr]


def test_a_capture_that_is_interrupted_is_dropped(
    make_tiny: MakeModel, gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt is the caller's, whose sequence stays as it was; the next step is captured."""
    model, plain = make_tiny(step_graphs=True, **LIMITS), make_tiny(step_graphs=False, **LIMITS)
    seq, other = prefilled(model, case(0)), prefilled(plain, case(0))
    expected = [step_of(plain, [other], turn) for turn in range(3)]
    found = [step_of(model, [seq], 0)]
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "launch", Failing(gpu.launch, KeyboardInterrupt(), 5))
        with pytest.raises(KeyboardInterrupt):
            step_of(model, [seq], 1)
    assert seq.seq_len == 3
    with replays(gpu) as launched:
        found += [step_of(model, [seq], turn) for turn in (1, 2)]
    assert len(launched) == 2
    assert found == expected


def test_a_replay_that_fails_leaves_everything_as_it_was(
    make_tiny: MakeModel, gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = make_tiny(step_graphs=True, **LIMITS), make_tiny(step_graphs=False, **LIMITS)
    warm(model)
    seq, other = prefilled(model, case(0)), prefilled(plain, case(0))
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "launch_graph", Failing(gpu.launch_graph, DeviceError("the device would not")))
        with pytest.raises(DeviceError, match="would not"):
            step_of(model, [seq], 0)
    assert (seq.seq_len, seq.tokens) == (other.seq_len, other.tokens)
    with replays(gpu) as launched:
        assert step_of(model, [seq], 0) == step_of(plain, [other], 0)
    assert len(launched) == 1
