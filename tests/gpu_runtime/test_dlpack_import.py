# SPDX-License-Identifier: MIT OR Apache-2.0
"""Taking memory from DLPack producers: whose it is, how long it is kept, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_runtime import DeviceBuffer, DeviceError, GpuBackend, InvalidPointer, from_dlpack, wrap
from gpu_runtime.interop import dlpack
from tests.backends import Device, host_only
from tests.gpu_runtime.exchanging import Array, Producer, X, lent, settle
from tests.gpu_runtime.toy import REGISTRY, launch, values
from tests.naming import named
from tests.ops.harness import download


def content(gpu: GpuBackend, buffer: DeviceBuffer, like: Array) -> Array:
    """Return what a buffer holds, with its packed copy's bytes."""
    with buffer.copy() as copy:
        return download(gpu, copy.ptr, np.empty(like.shape, like.dtype))


ARRAYS = [X, X.T, X[:, ::2], X[::-1], X[1], np.array(3.5), np.zeros((0, 3)), np.arange(6) > 2, np.arange(4, dtype="c8")]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}{array.strides}")
@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("as_capsule", [True, False])
def test_content(gpu: GpuBackend, array: Array, versioned: bool, as_capsule: bool) -> None:
    """On the host it is the producer's memory, on a GPU a copy; the deleter is called once either way."""
    producer = Producer(array, versioned=versioned)
    buffer = from_dlpack(gpu, producer.capsule() if as_capsule else producer)
    assert (buffer.shape, buffer.dtype) == (array.shape, from_numpy(array))
    if gpu.kind() == "host" and array.size:
        assert buffer.ptr == array.ctypes.data
        assert buffer.strides == array.strides
        assert producer.deleted == []
    assert content(gpu, buffer, array).tolist() == array.tolist()
    buffer.close()
    buffer.close()
    settle(gpu)
    assert len(producer.deleted) == 1


def from_numpy(array: Array) -> str:
    return {"f4": "f32", "f8": "f64", "b1": "bool", "c8": "c64"}[array.dtype.str[1:]]


def test_what_a_producer_is_asked(gpu: GpuBackend) -> None:
    """Host memory has no stream to order."""
    producer = Producer(X)
    from_dlpack(gpu, producer).close()
    assert producer.requests == [{"max_version": (1, 0)}]


def test_a_producer_of_before_versions(gpu: GpuBackend) -> None:
    class Old(Producer):
        def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
            return self.capsule()

    producer = Old(X, versioned=False)
    buffer = from_dlpack(gpu, producer)
    assert content(gpu, buffer, X).tolist() == X.tolist()
    buffer.close()
    settle(gpu)
    assert len(producer.deleted) == 1


def test_a_kernel_runs_on_it(gpu: GpuBackend) -> None:
    array, out = np.array([1.0, 2.0, 3.0, 4.0], np.float32), gpu.alloc(16)
    with from_dlpack(gpu, array) as buffer:
        launch(gpu, values(buffer.ptr, out))
        assert download(gpu, out, array).tolist() == (2 * array).tolist()


@host_only
@pytest.mark.parametrize("check", [True, False])
def test_a_launch_that_was_prepared_is_refused_after_close(device: Device, check: bool) -> None:
    """A backend remembers launches by their arguments."""
    with device.open(ops=REGISTRY, check=check) as gpu:
        out = gpu.alloc(16)
        with from_dlpack(gpu, np.ones(4, np.float32)) as buffer:
            ptr = buffer.ptr
            for _ in range(3):
                launch(gpu, values(ptr, out))
        with pytest.raises(InvalidPointer, match="inside a live allocation"):
            launch(gpu, values(ptr, out))
        gpu.free(out)


@host_only
def test_a_kernel_writes_it(gpu: GpuBackend) -> None:
    array = np.ones(4, np.float32)
    with from_dlpack(gpu, array) as buffer, from_dlpack(gpu, np.full(4, 3, np.float32)) as source:
        launch(gpu, values(source.ptr, buffer.ptr))
        gpu.synchronize()
    assert array.tolist() == [6, 6, 6, 6]


@host_only
def test_read_only_memory_is_not_written(gpu: GpuBackend) -> None:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    with from_dlpack(gpu, array) as buffer:
        assert buffer.readonly
        with pytest.raises(ValueError, match="read-only"):
            gpu.memset(buffer.ptr, 0, 16)
    assert array.tolist() == [1, 1, 1, 1]


@host_only
def test_memory_is_out_of_reach_after_close(gpu: GpuBackend) -> None:
    array = np.ones(4, np.float32)
    with from_dlpack(gpu, array) as buffer, from_dlpack(gpu, array[1:3]) as part:
        ptr = buffer.ptr
        with pytest.raises(InvalidPointer, match="4 bytes past"):
            gpu.memset(ptr, 0, 20)
        gpu.memset(part.ptr, 0, 12)  # within the larger one
    with pytest.raises(InvalidPointer, match="inside a live allocation"):
        gpu.memset(ptr, 0, 16)
    assert array.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("versioned", [True, False])
def test_a_used_capsule(gpu: GpuBackend, versioned: bool) -> None:
    producer = Producer(X, versioned=versioned)
    capsule = producer.capsule()
    from_dlpack(gpu, capsule).close()
    with pytest.raises(ValueError, match="taken already"):
        from_dlpack(gpu, capsule)
    gpu.synchronize()
    gpu.live_alloc_count()  # lets go of what no work uses any more
    assert len(producer.deleted) == 1


@pytest.mark.parametrize("source", [None, 3, "x", X.tolist(), memoryview(b"x")], ids=named)
def test_what_is_no_producer(gpu: GpuBackend, source: Any) -> None:
    with pytest.raises(TypeError, match="from_dlpack: expected an object with __dlpack__ or a capsule"):
        from_dlpack(gpu, source)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"major": 2}, "expected DLPack version 1, got 2"),
        ({"code": 3}, "code 3 with 32 bits and 1 lanes"),
        ({"code": 2, "bits": 8}, "code 2 with 8 bits"),
        ({"lanes": 4}, "4 lanes"),
        ({"kind": 10}, "of DLPack's device"),
        ({"kind": 4}, "of DLPack's device"),
    ],
    ids=str,
)
def test_what_is_refused_stays_the_producers(gpu: GpuBackend, changes: dict[str, Any], words: str) -> None:
    """The capsule can still be used, and the deleter is not called."""
    producer = Producer(X, **changes)
    capsule = producer.capsule()
    with pytest.raises(BufferError, match=words):
        from_dlpack(gpu, capsule)
    assert dlpack.names_of(capsule) is dlpack.VERSIONED
    assert producer.deleted == []


@host_only
def test_memory_of_a_gpu_is_not_for_the_host(gpu: GpuBackend) -> None:
    producer = Producer(X, kind=dlpack.CUDA)
    with pytest.raises(BufferError, match="expected memory that the host can read"):
        from_dlpack(gpu, producer)
    assert producer.requests == []
    with pytest.raises(BufferError, match="of DLPack's device"):
        from_dlpack(gpu, producer.capsule())


@host_only
@pytest.mark.parametrize("kind", [dlpack.CUDA_HOST, dlpack.CUDA_MANAGED])
def test_memory_that_the_host_can_read(gpu: GpuBackend, kind: int) -> None:
    producer = Producer(X, kind=kind)
    with from_dlpack(gpu, producer.capsule()) as buffer:
        assert buffer.ptr == X.ctypes.data


def test_a_copy(gpu: GpuBackend) -> None:
    array = X.copy()
    producer, live = Producer(array), gpu.live_alloc_count()
    buffer = from_dlpack(gpu, producer, copy=True)
    settle(gpu)
    assert len(producer.deleted) == 1
    assert gpu.live_alloc_count() == live + 1
    array[:] = 0
    assert download(gpu, buffer.ptr, X).tolist() == X.tolist()
    assert not buffer.readonly
    buffer.close()
    assert gpu.live_alloc_count() == live


def test_no_copy(gpu: GpuBackend) -> None:
    producer = Producer(X)
    if gpu.kind() == "host":
        from_dlpack(gpu, producer, copy=False).close()
        assert len(producer.deleted) == 1
    else:
        with pytest.raises(BufferError, match="from_dlpack: expected a copy to be allowed"):
            from_dlpack(gpu, producer, copy=False)
        assert producer.deleted == []
    with pytest.raises(ValueError, match="copy: expected True, False or None"):
        from_dlpack(gpu, producer, copy=1)  # type: ignore[arg-type]


def test_bfloat16(gpu: GpuBackend) -> None:
    """NumPy does not know the type; another producer does."""
    array = np.arange(6).astype(ml_dtypes.bfloat16)
    producer = Producer(array.view(np.uint16), code=4)
    with from_dlpack(gpu, producer) as buffer:
        assert buffer.dtype == "bf16"
        assert content(gpu, buffer, array).tolist() == array.tolist()


def test_a_tensor_that_begins_later(gpu: GpuBackend) -> None:
    producer = Producer(X[0], offset=16)
    with from_dlpack(gpu, producer) as buffer:
        assert content(gpu, buffer, X[0]).tolist() == X[1].tolist()


@host_only
@pytest.mark.parametrize("order", ["deferred", "adversarial"])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_work_on_it_is_done_before_the_owner_goes(device: Device, order: str, how: str) -> None:
    """Where work runs as late as it may, a deleter finds it done."""
    array, found = np.ones(4, np.float32), []

    class Watching(Producer):
        def __init__(self) -> None:
            super().__init__(array)
            self._deleter = dlpack.Deleter(lambda _: found.append(array.tolist()))

    with device.open(order=order) as gpu:
        buffer = from_dlpack(gpu, producer := Watching())
        gpu.memset_async(buffer.ptr, 0, 16, gpu.create_stream())
        if how == "close":
            buffer.close()
        del buffer
        gpu.live_bytes()
        assert found == [[0, 0, 0, 0]]
        del producer


def test_our_own_memory_comes_back(gpu: GpuBackend) -> None:
    """As the block that it is, which the round trip keeps."""
    first = lent(gpu)
    second = from_dlpack(gpu, first)
    third = from_dlpack(gpu, second)
    assert first.ptr == second.ptr == third.ptr
    assert gpu.live_exports() == 2
    with pytest.raises(BufferError, match="2 live exports"):
        gpu.free(first.ptr)
    second.close()
    assert gpu.live_exports() == 2, "the third needs what the second had"
    third.close()
    gpu.free(first.ptr)


def test_an_owner_that_is_only_dropped(gpu: GpuBackend) -> None:
    """Without `close` the deleter waits for a call of the backend that looks after memory."""
    producer = Producer(X)
    buffer = from_dlpack(gpu, producer)
    gpu.synchronize()
    del buffer
    gc.collect()
    settle(gpu)
    assert len(producer.deleted) == 1


def test_close_of_the_backend_lets_go(device: Device) -> None:
    producer = Producer(X)
    with device.open() as gpu:
        buffer = from_dlpack(gpu, producer)
    with pytest.raises(DeviceError, match="closed"):
        _ = buffer.ptr
    del buffer
    gc.collect()
    assert len(producer.deleted) == 1


def test_a_deleter_may_be_missing(gpu: GpuBackend) -> None:
    producer = Producer(X)
    capsule = producer.capsule()
    dlpack.managed_of(capsule, dlpack.VERSIONED).deleter = None
    from_dlpack(gpu, capsule).close()
    assert producer.deleted == []


def test_threads_that_come_with_one_capsule(gpu: GpuBackend) -> None:
    """One takes its tensor, and the others are told; the deleter is called once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        producers = [Producer(X) for _ in range(200)]
        capsules = [producer.capsule() for producer in producers]
        taken: list[int] = []

        def take() -> None:
            for index, capsule in enumerate(capsules):
                with suppress(ValueError):
                    from_dlpack(gpu, capsule).close()
                    taken.append(index)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(taken) == list(range(200))
    gpu.synchronize()
    gpu.live_alloc_count()
    assert [len(producer.deleted) for producer in producers] == [1] * 200


@host_only
def test_a_capsule_whose_memory_cannot_be_taken_stays_fresh(gpu: GpuBackend) -> None:
    """It begins in a block and ends past it."""
    ptr = gpu.alloc(16)
    outside = np.ctypeslib.as_array((ctypes.c_uint8 * 32).from_address(int(ptr)))
    capsule = outside.__dlpack__()
    for _ in range(2):
        with pytest.raises(InvalidPointer, match="past the end"):
            from_dlpack(gpu, capsule)
    assert sys.getrefcount(outside) >= 3  # the capsule still has it
    del capsule
    assert sys.getrefcount(outside) == 2


@host_only
def test_what_was_imported_and_dropped_is_let_go_of_by_the_next_import(gpu: GpuBackend) -> None:
    for _ in range(100):
        from_dlpack(gpu, np.zeros(8))
    assert len(gpu._blocks.orphans) <= 1
    for _ in range(100):
        wrap(gpu, X.ctypes.data, 8, object())
    assert len(gpu._blocks.orphans) <= 1


@pytest.mark.parametrize("stream", ["x", True, 1.5, -2, 1 << 64])
def test_what_is_no_stream(gpu: GpuBackend, stream: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="stream"):
        from_dlpack(gpu, X, stream=stream)
