# SPDX-License-Identifier: MIT OR Apache-2.0
"""The rules of docs/embedding.md that no other test has: who owns memory that is shared, and what comes before what.

On the host backend work runs as late as it may (``deferred``) or in any order that is allowed (``adversarial``), so a
rule that is not kept is a wrong answer. On a GPU a slow kernel comes first.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import metrale
from gpu_runtime import DeviceBuffer, DevicePtr, GpuBackend, InvalidPointer, OpRegistry, view, wrap
from gpu_runtime.op import REGISTRY as OPS
from metrale.nllb.model import NllbModel
from tests.backends import Device, cuda_only, host_only
from tests.gpu_runtime.toy import OP as TOY
from tests.gpu_runtime.toy import REGISTRY, SLOW, launch, values
from tests.hammering import eager_switching
from tests.ops.harness import download, upload

X: Final = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


def taken(buffer: DeviceBuffer) -> Any:
    """Return what a library makes of a buffer: an array of NumPy's on the host, of CuPy's on a GPU."""
    if buffer.gpu.kind() == "host":
        return np.from_dlpack(buffer)
    import cupy

    return cupy.from_dlpack(buffer)


def numbers(array: Any) -> list[float]:
    found: list[float] = array.tolist()  # CuPy's waits
    return found


@pytest.fixture
def gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend with the toy kernel, whose work runs late."""
    with device.open(ops=REGISTRY, **({"order": "deferred"} if device.is_host else {})) as backend:
        yield backend
        gc.collect()
        backend.sweep_unreleased()


def slow(gpu: GpuBackend, x: int, out: int, stream: int = 0) -> None:
    """Enqueue ``out = 0.75 * x``, which a GPU takes 30 ms for, and the host backend runs when it must."""
    launch(gpu, values(x, out, factor=SLOW), stream)


# ownership


def test_a_view_owns_nothing(gpu: GpuBackend) -> None:
    ptr = upload(gpu, X)
    one, other = view(gpu, ptr, 4, "f32"), view(gpu, ptr, 4, "f32")
    one.close()
    assert other.ptr == ptr
    assert gpu.live_alloc_count() == 1
    gpu.free(ptr)
    for use in (lambda: other.ptr, lambda: taken(other), lambda: one.ptr):
        with pytest.raises(InvalidPointer, match=r"freed|closed"):
            use()


def test_an_export_holds_its_block(gpu: GpuBackend) -> None:
    """However it was made, and whatever became of the view; nothing is freed by a call that refuses."""
    other, ptr = gpu.alloc(8), upload(gpu, X)
    with view(gpu, ptr, 4, "f32") as buffer:
        array = taken(buffer)
    part = array[1:]
    del buffer, array
    gc.collect()
    for call in (lambda: gpu.free(ptr), gpu.sweep_unreleased, gpu.close):
        with pytest.raises(BufferError, match="1 live export"):
            call()
    assert gpu.live_alloc_count() == 2
    assert gpu.live_exports(ptr) == 1
    assert numbers(part) == [2, 3, 4]
    del part
    gc.collect()
    gpu.free(ptr)
    gpu.free(other)


class Owner:
    """Who has foreign memory, and says when nobody needs it any more."""


def foreign_memory(gpu: GpuBackend) -> tuple[Any, int]:
    """Return an array of another library with the numbers of `X`, and its address."""
    if gpu.kind() == "host":
        array = X.copy()
        return array, array.ctypes.data
    import cupy

    array = cupy.asarray(X)
    cupy.cuda.get_current_stream().synchronize()
    return array, array.data.ptr


def test_a_wrapped_owner_lives_until_enqueued_work_is_done(gpu: GpuBackend) -> None:
    """Its end spoils the memory: who reads too late gets zeros."""
    memory, address = foreign_memory(gpu)
    owner, out, x = Owner(), gpu.alloc(16), upload(gpu, X)
    ended = weakref.finalize(owner, memory.fill, 0)
    buffer = wrap(gpu, address, 16, owner)
    del owner
    gc.collect()
    assert ended.alive, "nobody but the buffer has it"
    slow(gpu, x, x)
    gpu.copy_d2d_async(buffer.ptr, out, 16)
    buffer.close()
    del buffer
    gc.collect()
    gpu.synchronize()
    gpu.free(gpu.alloc(8))  # a call that lets go of what is not needed any more
    assert not ended.alive
    assert download(gpu, out, X).tolist() == X.tolist()


def test_an_export_keeps_the_owner(gpu: GpuBackend) -> None:
    memory, address = foreign_memory(gpu)
    owner = Owner()
    ended = weakref.finalize(owner, memory.fill, 0)
    with wrap(gpu, address, 16, owner) as buffer:
        array = taken(buffer)
    del owner, buffer
    gpu.free(gpu.alloc(8))
    gc.collect()
    assert ended.alive
    assert array.view(np.float32).tolist() == X.tolist()
    del array
    gc.collect()
    gpu.synchronize()
    gpu.free(gpu.alloc(8))
    assert not ended.alive


@cuda_only
def test_a_stream_that_is_an_object_lives_until_its_work_is_done(gpu: GpuBackend) -> None:
    import cupy

    class Stream:
        def __init__(self) -> None:
            self.stream = cupy.cuda.Stream(non_blocking=True)

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.stream.ptr

    x = upload(gpu, X)
    launch(gpu, values(x, x, factor=1.0))
    gpu.synchronize()
    stream = Stream()
    gone = weakref.ref(stream)
    launch(gpu, values(x, x, factor=SLOW), stream)
    del stream
    gc.collect()
    alive = gone()
    assert alive is not None
    assert numbers(taken(view(gpu, x, 4, "f32", stream=alive))) == (0.75 * X).tolist()


# what comes before what


def test_an_importer_comes_after_the_view_s_stream(gpu: GpuBackend) -> None:
    """Not after the work that is put there later."""
    x, out, stream = upload(gpu, X), gpu.alloc(16), gpu.create_stream()
    gpu.memset(out, 0, 16)
    slow(gpu, x, out, stream)
    assert numbers(taken(view(gpu, out, 4, "f32", stream=stream))) == (0.75 * X).tolist()


@host_only
def test_minus_one_asks_for_no_order(gpu: GpuBackend) -> None:
    x, out = upload(gpu, X), gpu.alloc(16)
    gpu.memset(out, 0, 16)
    slow(gpu, x, out)

    class Eager:
        def __init__(self, buffer: DeviceBuffer) -> None:
            self.buffer = buffer

        def __dlpack__(self, **options: Any) -> Any:
            return self.buffer.__dlpack__(**options | {"stream": -1})

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()

    array = np.from_dlpack(Eager(view(gpu, out, 4, "f32")))
    assert array.tolist() == [0, 0, 0, 0]
    gpu.synchronize()
    assert array.tolist() == (0.75 * X).tolist()


def test_an_export_that_needs_a_wait_is_refused_in_a_capture(gpu: GpuBackend) -> None:
    """And the capture goes on."""
    x = upload(gpu, X)
    launch(gpu, values(x, x, factor=1.0))
    gpu.synchronize()
    gpu.begin_capture()
    launch(gpu, values(x, x))
    with pytest.raises(BufferError, match="is capturing"):
        taken(view(gpu, x, 4, "f32"))
    graph = gpu.end_capture()
    gpu.launch_graph(graph)
    assert download(gpu, x, X).tolist() == (2 * X).tolist()


# logits rows

MakeOrdered = Callable[[int], NllbModel]


@pytest.fixture
def ordered(device: Device, tiny_folder: Path) -> Iterator[MakeOrdered]:
    """A function that loads the tiny model on a backend that runs its work in the order of a seed."""
    ops = OpRegistry()
    for op in (*OPS, TOY):
        ops.register(op)
    models: list[NllbModel] = []

    def make(seed: int) -> NllbModel:
        gpu = device.open(ops=ops, **({"order": "adversarial", "seed": seed} if device.is_host else {}))
        models.append(metrale.load(tiny_folder, gpu, "float32", max_batch=4, max_source_len=12, max_new_tokens=8))
        return models[-1]

    yield make
    gc.collect()
    for model in models:
        model.close()
        model.gpu.sweep_unreleased()
        model.gpu.close()


@pytest.fixture
def models(device: Device, ordered: MakeOrdered) -> Iterator[NllbModel]:
    """A model in each of some orders; on a GPU, which has one, a single model."""
    return map(ordered, range(6) if device.is_host else range(1))


def begun(model: NllbModel) -> tuple[Any, DevicePtr]:
    """Return a sequence and the address of its first row, whose forward may not have run yet."""
    seq = model.alloc_sequence()
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    return seq, model.prefill([5, 6, 7], seq)


def test_a_view_of_rows_comes_after_the_forward(models: Iterator[NllbModel]) -> None:
    """Whatever reads it on the stream that it was asked for."""
    for model in models:
        gpu = model.gpu
        _, ptr = begun(model)
        stream, row = gpu.create_stream(), np.empty(model.vocab_size(), np.float32)
        with model.logits_view(ptr, stream=stream) as rows:
            gpu.copy_d2h_on_stream(rows.ptr, row, stream)
            assert row.tolist() == numbers(taken(rows)[0])
        assert row.tolist() == model.copy_logits_to_host(ptr).tolist()


def test_a_choice_comes_after_what_is_on_its_stream(models: Iterator[NllbModel]) -> None:
    """So a write of others on a stream is seen by the choice that is made on it."""
    for model in models:
        gpu = model.gpu
        _, ptr = begun(model)
        stream, wanted = gpu.create_stream(), 33
        best = gpu.alloc_host_pinned(4)
        best.array.view(np.float32)[0] = 1e30
        with model.logits_view(ptr, stream=stream) as rows:
            gpu.copy_h2d_async(best.array, rows.ptr + 4 * wanted, stream)
        assert model.argmax_on_device(ptr, stream=stream) == wanted
        gpu.free_host_pinned(best)


def test_a_reader_is_done_before_the_row_is_written_again(models: Iterator[NllbModel]) -> None:
    """When its stream is waited for, which is the reader's affair."""
    for model in models:
        gpu = model.gpu
        seq, ptr = begun(model)
        ptr = model.decode(5, seq)
        before = model.copy_logits_to_host(ptr)
        stream, event, kept = gpu.create_stream(), gpu.create_event(), gpu.alloc(before.nbytes)
        x = upload(gpu, X)
        slow(gpu, x, x, stream)
        with model.logits_view(ptr, stream=stream) as rows:
            gpu.copy_d2d_async(rows.ptr, kept, before.nbytes, stream)
        gpu.record_event(event, stream)
        gpu.stream_wait_event(0, event)
        assert model.decode(6, seq) == ptr
        assert model.copy_logits_to_host(ptr).tolist() != before.tolist()
        assert download(gpu, kept, before).tolist() == before.tolist()


@host_only
def test_without_that_wait_it_may_read_the_next_row(ordered: MakeOrdered) -> None:
    """Some order shows it, so the test above could fail. What a GPU does then is chance."""
    found = set()
    for seed in range(12):
        model = ordered(seed)
        gpu = model.gpu
        seq, ptr = begun(model)
        ptr = model.decode(5, seq)
        before = model.copy_logits_to_host(ptr)
        stream, kept = gpu.create_stream(), gpu.alloc(before.nbytes)
        gpu.copy_d2d_async(ptr, kept, before.nbytes, stream)
        model.decode(6, seq)
        out = np.empty_like(before)
        gpu.copy_d2h_on_stream(kept, out, stream)
        found.add(out.tolist() == before.tolist())
        gpu.free(kept)
    assert found == {True, False}


def test_a_model_with_an_export_is_not_closed(models: Iterator[NllbModel]) -> None:
    for model in models:
        _, ptr = begun(model)
        row = taken(model.logits_view(ptr))[0]
        with pytest.raises(BufferError, match="live export"):
            model.close()
        assert numbers(row) == model.copy_logits_to_host(ptr).tolist()
        del row
        gc.collect()
        model.close()


def test_an_import_of_a_row_sees_the_next_row(models: Iterator[NllbModel]) -> None:
    """It is the row's memory: a row holds until the next call that writes it."""
    for model in models:
        seq, _ = begun(model)
        ptr = model.decode(5, seq)
        row = taken(model.logits_view(ptr))[0]
        first = numbers(row)
        model.decode(6, seq)
        model.synchronize()
        assert numbers(row) == model.copy_logits_to_host(ptr).tolist() != first


def test_threads_that_hold_a_model_read_their_own_rows(models: Iterator[NllbModel]) -> None:
    """A step of one sequence writes row 0, whoever's it is: each thread holds the model until it has read the row."""
    model = next(models)
    targets = range(80, 84)

    def rows(target: int) -> list[bytes]:
        seq = model.alloc_sequence()
        seq.src_lang_id, seq.tgt_lang_id = 80, target
        model.prefill([5, 6, 7], seq)
        found = []
        for token in (9, 10, 11, 12, 13):
            with model.exclusive():
                found.append(model.copy_logits_to_host(model.decode(token, seq)).tobytes())
        model.free_sequence(seq)
        return found

    alone = [rows(target) for target in targets]
    assert len({row for of_one in alone for row in of_one}) == 20
    for _ in range(3):
        with eager_switching(), ThreadPoolExecutor(len(targets)) as pool:
            assert list(pool.map(rows, targets)) == alone
