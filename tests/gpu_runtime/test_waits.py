# SPDX-License-Identifier: MIT OR Apache-2.0
"""A call that waits lets other threads run, and lets them call the backend.

Each waits for work that ends when another thread has made a thousand calls, and otherwise after ten seconds. One that
held the interpreter's lock, or a lock of the backend that those calls need, would take the ten seconds.

On the host backend, work runs on the thread that waits for it, so what is shown there is that a wait holds no lock of
ours. How long NumPy holds the interpreter's lock, while it computes, is NumPy's affair.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import metrale_kernels
import numpy as np
import pytest

from gpu_runtime import kernel_source
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.op import REGISTRY as OPS
from gpu_runtime.op import OpRegistry
from gpu_runtime.pointer import DevicePtr
from metrale.engine import Engine, Request
from metrale.model import BeamReq
from metrale.nllb.model import NllbModel
from tests.backends import Device, cuda_only, damaged, host_only
from tests.conftest import MakeModel
from tests.gpu_runtime.hold import OP, Held

NBYTES: Final = 64


@dataclass
class Things:
    """What the calls take. The work that is held up comes before ``event``."""

    gpu: GpuBackend
    ptr: DevicePtr
    other: DevicePtr
    pinned: PinnedMemory
    stream: int
    event: int
    data: np.ndarray[Any, np.dtype[np.uint8]]


Wait = Callable[[Things], Any]
WAITS: Final[dict[str, Wait]] = {
    "synchronize": lambda t: t.gpu.synchronize(t.stream),
    "event_synchronize": lambda t: t.gpu.event_synchronize(t.event),
    "memset": lambda t: t.gpu.memset(t.ptr, 1, NBYTES),
    "copy_h2d": lambda t: t.gpu.copy_h2d(t.data, t.ptr),
    "copy_d2h": lambda t: t.gpu.copy_d2h(t.ptr, t.data),
    "copy_d2d": lambda t: t.gpu.copy_d2d(t.ptr, t.other, NBYTES),
    "copy_d2h_on_stream": lambda t: t.gpu.copy_d2h_on_stream(t.ptr, t.data, t.stream),
    "copy_d2h_on_stream, pinned": lambda t: t.gpu.copy_d2h_on_stream(t.ptr, t.pinned.array, t.stream),
    "copy_h2d_on_stream": lambda t: t.gpu.copy_h2d_on_stream(t.data, t.ptr, t.stream),
    "destroy_stream": lambda t: t.gpu.destroy_stream(t.stream),
}
"""Calls that wait on either backend. Those without a stream wait for stream 0, which waits for the work as well."""

HOST_WAITS: Final[dict[str, Wait]] = {
    "free": lambda t: t.gpu.free(t.other),
    "free_host_pinned": lambda t: t.gpu.free_host_pinned(t.pinned),
}
"""Calls that wait on the host backend. On a GPU, memory is left to the work that is enqueued."""

CUDA_WAITS: Final[dict[str, Wait]] = {
    "copy_d2h_async": lambda t: (t.gpu.copy_d2h_async(t.ptr, t.data, t.stream), t.gpu.synchronize(t.stream)),
    "scan_redzones": lambda t: t.gpu.scan_redzones(),
    "poison_redzones": lambda t: t.gpu.poison_redzones(),
}
"""Calls that wait on a GPU alone. The copy is one to memory that is not page-locked, to which CUDA may copy at once."""


def opened(device: Device) -> GpuBackend:
    """Return a backend with all ops and the one that waits; on the host, it runs work when somebody waits for it."""
    ops = OpRegistry()
    for op in (*OPS, OP):
        ops.register(op)
    return device.open(ops=ops, **({"order": "deferred"} if device.is_host else {}))


def check(device: Device, wait: Wait) -> None:
    with opened(device) as gpu:
        ptr, other, pinned = gpu.alloc(NBYTES), gpu.alloc(NBYTES), gpu.alloc_host_pinned(NBYTES)
        gpu.memset(ptr, 0, NBYTES)
        damaged(gpu)  # CUDA may wait for running work to load a kernel
        stream, event, unused = gpu.create_stream(), gpu.create_event(), gpu.create_event()
        held = Held(gpu, stream)
        gpu.record_event(event, stream)
        gpu.stream_wait_event(0, event)

        def step() -> None:
            assert gpu.event_query(unused)
            assert gpu.live_alloc_count() > 0
            gpu.destroy_event(gpu.create_event())

        with held.until_another_thread_has(step):
            wait(Things(gpu, ptr, other, pinned, stream, event, np.ones(NBYTES, np.uint8)))
            assert held.was_let_go, "it did not wait"
            assert not held.ended_by_itself, "no other thread could run"
        gpu.sweep_unreleased()
        held.free(gpu)
        if wait is not HOST_WAITS["free_host_pinned"]:
            gpu.free_host_pinned(pinned)


@pytest.mark.parametrize("name", WAITS)
def test_a_call_that_waits(device: Device, name: str) -> None:
    check(device, WAITS[name])


@host_only
@pytest.mark.parametrize("name", HOST_WAITS)
def test_a_call_that_waits_on_the_host(device: Device, name: str) -> None:
    check(device, HOST_WAITS[name])


@cuda_only
@pytest.mark.parametrize("name", CUDA_WAITS)
def test_a_call_that_waits_on_a_gpu(device: Device, name: str) -> None:
    if "redzones" in name and not device.has_redzones:
        pytest.skip("the session asked for no redzones (--no-pool)")
    check(device, CUDA_WAITS[name])


def test_close_waits(device: Device) -> None:
    """Other threads run, but the backend refuses their calls."""
    gpu, refused = opened(device), set[str]()
    held = Held(gpu)

    def step() -> None:
        try:
            gpu.live_alloc_count()
        except DeviceError as error:
            refused.add(str(error))

    with held.until_another_thread_has(step):
        gpu.close()
        assert held.was_let_go, "it did not wait"
        assert not held.ended_by_itself, "no other thread could run"
    assert refused <= {"the backend is closed"}


def test_two_threads_wait(device: Device) -> None:
    """For the same work: neither keeps the other's."""
    with opened(device) as gpu:
        held, ended = Held(gpu), list[int]()

        def wait() -> None:
            gpu.synchronize()
            ended.append(1)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        with held.until_another_thread_has(gpu.live_alloc_count):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert held.was_let_go
            assert not held.ended_by_itself
        assert len(ended) == 2
        held.free(gpu)


@pytest.fixture
def gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend for a model, with the op that waits."""
    with opened(device) as backend:
        yield backend


def searched(model: NllbModel, ptr: DevicePtr) -> None:
    model.generate_beam_batch([BeamReq([5, 6, 7], 80, 81, num_beams=2, max_new=4)])


MODEL_WAITS: Final[dict[str, Callable[[NllbModel, DevicePtr], Any]]] = {
    "copy_logits_to_host": lambda model, ptr: model.copy_logits_to_host(ptr),
    "argmax_on_device": lambda model, ptr: model.argmax_on_device(ptr),
    "argmax_batch": lambda model, ptr: model.argmax_batch(ptr, 1),
    "argmax_rows": lambda model, ptr: model.argmax_rows(ptr, 1),
    "synchronize": lambda model, ptr: model.synchronize(),
    "event_synchronize": lambda model, ptr: model.event_synchronize(model.logits_event(ptr)),
    "generate_beam_batch": searched,
}


@pytest.mark.parametrize("name", MODEL_WAITS)
def test_a_model_that_waits(make_tiny: MakeModel, gpu: GpuBackend, name: str) -> None:
    """Threads that do not ask the model, which serves one at a time, go on: they have the whole backend."""
    model = make_tiny(gpu)
    seqs = model.alloc_sequence(), model.alloc_sequence()
    for seq in seqs:
        seq.src_lang_id, seq.tgt_lang_id = 80, 81
    MODEL_WAITS[name](model, model.prefill([5, 6, 7], seqs[0]))  # CUDA may wait for running work to load a kernel
    held = Held(gpu)
    ptr = model.prefill([5, 6, 7], seqs[1])
    with held.until_another_thread_has(lambda: gpu.destroy_event(gpu.create_event())):
        MODEL_WAITS[name](model, ptr)
        assert held.was_let_go, "it did not wait"
        assert not held.ended_by_itself, "no other thread could run"
    held.free(gpu)


def test_a_result_that_is_waited_for(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """The engine's thread waits for the device, the caller for the engine, and others submit and ask meanwhile."""
    model = make_tiny(gpu)
    with Engine(model) as engine:
        engine.submit(Request([5, 6, 7], 80, 81, 4)).result()  # CUDA may wait for running work to load a kernel
        held = Held(gpu)
        handle = engine.submit(Request([5, 6, 7], 80, 81, 4))

        def step() -> None:
            assert engine.stats().submitted == 2
            gpu.destroy_event(gpu.create_event())

        with held.until_another_thread_has(step):
            assert handle.result().raise_for_error().ids
            assert held.was_let_go, "it did not wait"
            assert not held.ended_by_itself, "no other thread could run"
    held.free(gpu)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy's binding of NVRTC is not installed")
def test_compiling_a_kernel() -> None:
    """It takes a second or so, in which another thread is not kept for long."""
    from gpu_runtime.cuda import nvrtc

    text = kernel_source.inlined(metrale_kernels.path("packed_attention"), (metrale_kernels.ROOT,))
    stop, times = threading.Event(), [time.monotonic()]

    def tick() -> None:
        while not stop.wait(0.001):
            times.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    nvrtc.compile_source(text, "packed_attention.cu", "compute_80", cache=None)
    took = time.monotonic() - began
    stop.set()
    thread.join()
    kept = max(later - earlier for earlier, later in itertools.pairwise([*times, time.monotonic()]))
    assert kept < took / 2, f"{kept:.3f} s of {took:.3f} s"
