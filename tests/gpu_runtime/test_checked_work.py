# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of work that runs later, again, or in other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import DeviceError, InvalidPointer, UninitializedRead
from gpu_runtime.host import HostBackend
from tests.gpu_runtime.checked import dropped, filled, floats, launch, made, opened, read

# replay


def captured(gpu: HostBackend, work: Callable[[], None]) -> int:
    gpu.begin_capture()
    work()
    return gpu.end_capture()


def replayed(gpu: HostBackend, graph: int) -> None:
    gpu.launch_graph(graph)


def test_a_read_is_judged_when_the_graph_is_replayed() -> None:
    with opened() as gpu:
        x, out = made(gpu), made(gpu)
        graph = captured(gpu, lambda: launch(gpu, x=x, out=out))
        with pytest.raises(UninitializedRead, match=r"probe: x: .* in launch, replayed at .* in replayed"):
            replayed(gpu, graph)
        gpu.memset(x, 1, 32)
        replayed(gpu, graph)
        read(gpu, out)
        gpu.sweep_unreleased()


def test_what_a_graph_writes_counts_from_its_replay_on() -> None:
    with opened() as gpu:
        x, middle, out = filled(gpu), made(gpu), made(gpu)

        def chain() -> None:
            launch(gpu, x=x, out=middle)
            launch(gpu, x=middle, out=out)

        graph = captured(gpu, chain)
        with pytest.raises(UninitializedRead):
            read(gpu, out)
        replayed(gpu, graph)
        read(gpu, out)
        gpu.sweep_unreleased()


def test_a_graph_in_a_graph_names_every_place() -> None:
    with opened() as gpu:
        x, out = made(gpu), made(gpu)
        inner = captured(gpu, lambda: launch(gpu, x=x, out=out))
        outer = captured(gpu, lambda: replayed(gpu, inner))
        with pytest.raises(
            UninitializedRead, match=r"in launch, replayed at .* in replayed, replayed at .* in test_a_graph_in_a_graph"
        ):
            gpu.launch_graph(outer)
        gpu.sweep_unreleased()


def test_bounds_are_judged_while_capturing() -> None:
    with opened() as gpu:
        x = filled(gpu)
        gpu.begin_capture()
        with pytest.raises(InvalidPointer, match="ends 4 bytes past"):
            launch(gpu, x=x + 4, out=made(gpu))
        gpu.destroy_graph(gpu.end_capture())
        gpu.sweep_unreleased()


def test_a_graph_may_be_replayed_after_other_blocks_were_freed() -> None:
    with opened() as gpu:
        x, out, other = filled(gpu), made(gpu), made(gpu)
        graph = captured(gpu, lambda: launch(gpu, x=x, out=out))
        dropped(gpu, other)
        replayed(gpu, graph)
        read(gpu, out)
        gpu.sweep_unreleased()


# later


def test_work_that_runs_later_is_named_by_the_place_that_enqueued_it() -> None:
    gpu = opened(order="deferred")
    x, out = made(gpu), made(gpu)
    launch(gpu, x=x, out=out)
    with pytest.raises(UninitializedRead, match=r"probe: x: .*; read at .* in launch\nenqueued at .* in launch$"):
        gpu.synchronize()


def test_the_state_counts_at_the_time_when_work_runs() -> None:
    with opened(order="deferred") as gpu:
        x, out = made(gpu), made(gpu)
        gpu.memset_async(x, 1, 32)
        launch(gpu, x=x, out=out)
        read(gpu, out)
        gpu.sweep_unreleased()


def test_work_may_use_a_block_that_is_freed_after_it_was_enqueued() -> None:
    """It runs before the block goes to quarantine, as a GPU's stream order has it."""
    with opened(order="deferred") as gpu:
        stream = gpu.create_stream()
        x, out = made(gpu), made(gpu)
        gpu.memset_async(x, 1, 32, stream)
        launch(gpu, stream, x=x, out=out)
        dropped(gpu, x)
        read(gpu, out)
        gpu.sweep_unreleased()


# threads


@pytest.fixture
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def hammer(work: Callable[[int], None], threads: int = 8) -> None:
    """Run ``work(index)`` in all threads at once and raise what any of them raised."""
    barrier = threading.Barrier(threads)

    def run(index: int) -> None:
        barrier.wait()
        work(index)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


@pytest.mark.usefixtures("switch_often")
def test_threads_side_by_side_in_one_arena_raise_no_false_alarm() -> None:
    """Each thread's outputs are the others' surroundings, and each frees blocks while the others launch."""
    with opened() as gpu:
        arena, x = made(gpu, 8 * 64), filled(gpu)

        def work(index: int) -> None:
            stream, out = gpu.create_stream(), arena + 64 * index
            for turn in range(30):
                own = made(gpu, 96)
                gpu.copy_h2d_async(np.full(8, turn, np.float32), own, stream)
                launch(gpu, stream, x=own, out=out)
                launch(gpu, stream, x=x, out=own + 32)
                assert floats(gpu, out) == [2.0 * turn] * 8
                dropped(gpu, own)

        hammer(work)
        gpu.free(arena)
        gpu.free(x)


@pytest.mark.usefixtures("switch_often")
def test_each_thread_is_told_of_its_own_fault() -> None:
    with opened() as gpu:

        def work(index: int) -> None:
            for turn in range(20):
                ptr = made(gpu, 64, tag=f"block {index}.{turn}.")
                with pytest.raises(UninitializedRead, match=rf"for block {index}\.{turn}\., .* in read"):
                    read(gpu, ptr)
                dropped(gpu, ptr)
                with pytest.raises(
                    InvalidPointer, match=rf"for block {index}\.{turn}\., .* in dropped; used at .* in read"
                ):
                    read(gpu, ptr)

        hammer(work)


@pytest.mark.usefixtures("switch_often")
def test_one_thread_alone_frees_a_block() -> None:
    with opened() as gpu:
        ptr = made(gpu)
        refused: list[str] = []

        def work(_: int) -> None:
            try:
                dropped(gpu, ptr)
            except InvalidPointer as error:
                refused.append(str(error))

        hammer(work)
        assert len(refused) == 7
        assert all("freed twice" in text for text in refused)


def test_a_block_is_not_taken_away_while_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a free that does not finish the work first."""
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def waits(*, x: Any, **_: Any) -> None:
        inside.set()
        assert leave.wait(10)
        seen.append(x.tobytes())

    with opened(waits) as gpu:
        monkeypatch.setattr(gpu, "_finish_work", lambda: None)
        x = filled(gpu)
        threads = [
            threading.Thread(target=launch, args=(gpu,), kwargs={"x": x}),
            threading.Thread(target=dropped, args=(gpu, x)),
        ]
        threads[0].start()
        assert inside.wait(10)
        threads[1].start()
        threads[1].join(0.05)
        assert threads[1].is_alive(), "it waits"
        leave.set()
        for thread in threads:
            thread.join()
    assert seen == [b"\x01" * 32]


def test_the_place_of_a_thread_is_not_that_of_another() -> None:
    """An error at enqueueing names the caller, though another thread's work is running."""
    inside, leave = threading.Event(), threading.Event()

    def waits(**_: Any) -> None:
        inside.set()
        assert leave.wait(10)

    with opened(waits) as gpu:
        x = filled(gpu)
        thread = threading.Thread(target=launch, args=(gpu,), kwargs={"x": x})
        thread.start()
        assert inside.wait(10)
        with pytest.raises(DeviceError, match=r"used at .* in test_the_place_of_a_thread"):
            gpu.memset_async(0x1000, 0, 8)
        leave.set()
        thread.join()
        gpu.free(x)
