# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode steps that are replayed as graphs: the same bits as launch by launch, whatever is around them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime import checks
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import DeviceError
from gpu_runtime.faults import FailCall
from gpu_runtime.streams import LEGACY_STREAM, PER_THREAD_STREAM, StreamLike
from metrale.errors import InvalidInput, NotSupported
from metrale.model import BATCH_LADDER, FeedSource
from metrale.nllb import step_graphs
from metrale.nllb.model import NllbModel
from tests.backends import Device, host_only
from tests.draws import draws
from tests.nllb.adapters import Shelf
from tests.nllb.adapters import begin as begin_adapted
from tests.nllb.backends import OrderedBackend, Padding
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import arena, changed_rows, prefilled, read, results, sampled, saved
from tests.nllb.stepping import LANES, PROGRAMS, Failing, case, replays, step_of

LIMITS: dict[str, Any] = {"max_batch": LANES, "max_new_tokens": 8}


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    """A backend that pads steps; on the host one that checks memory, also when a graph is replayed."""
    if not device.is_host:
        yield shared_gpu
        shared_gpu.sweep_unreleased()
        return
    with Padding(check=True) as backend:
        yield backend


def graphs_of(model: NllbModel) -> int:
    assert model._graphs is not None
    return len(model._graphs)


def warm(model: NllbModel, lanes: int = 1) -> None:
    """Make steps of so many lanes until they are replayed."""
    seqs = [prefilled(model, case(lane)) for lane in range(lanes)]
    for turn in range(2):
        step_of(model, seqs, turn)
    for seq in seqs:
        model.free_sequence(seq)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_as_launch_by_launch(make_tiny: MakeModel, gpu: GpuBackend, name: str, dtype: str) -> None:
    """The second time, whatever was captured the first time is replayed, in another state of everything."""
    found = []
    for wanted in (False, True):
        model = make_tiny(dtype=dtype, step_graphs=wanted, **LIMITS)
        with replays(gpu) as launched:
            found += [PROGRAMS[name](model), PROGRAMS[name](model)]
        assert bool(launched) is wanted
        assert bool(model._graphs) is wanted
    assert found[0] == found[1] == found[2] == found[3]


@host_only
@pytest.mark.parametrize(("order", "seed"), draws([("deferred", 0), ("adversarial", 0), ("adversarial", 1)], 2))
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_in_any_order(make_tiny: MakeModel, tiny_folder: Path, name: str, order: Any, seed: int) -> None:
    """That streams and events allow: nothing in a graph relies on more than the step did."""
    plain = make_tiny(step_graphs=False, **LIMITS)
    expected = PROGRAMS[name](plain)
    with Padding(check=True, order=order, seed=seed) as gpu, replays(gpu) as launched:
        with metrale.load(tiny_folder, gpu, max_source_len=12, step_graphs=True, **LIMITS) as model:
            assert PROGRAMS[name](model) == expected
        assert launched


def test_steps_of_one_rung_share_a_graph(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """And those that fill it have another one, with the output head: it writes rows that are nobody else's."""
    model = make_tiny(step_graphs=True, max_batch=8, max_new_tokens=40)
    seqs = [prefilled(model, case(lane % 4)) for lane in range(8)]
    used = []
    for turn, lanes in enumerate((5, 6, 7, 5, 8, 8, 3, 3, 4, 4, 2, 2, 1, 1)):
        with replays(gpu) as launched:
            step_of(model, seqs[:lanes], turn)
        used.append(launched)
    first, *more = used[1:4]
    assert len(first) == 1
    assert more == [first, first]
    assert [len(one) for one in used[4:]] == [0, 1] * 5
    assert graphs_of(model) == len({one for launched in used for one in launched}) == 6


def test_a_step_launches_one_graph_whatever_the_lengths(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """Up to the longest: what a graph holds does not depend on lengths."""
    model = make_tiny(step_graphs=True, **LIMITS)
    warm(model)
    seq = prefilled(model, case(0))
    with replays(gpu) as launched:
        for turn in range(7):
            step_of(model, [seq], turn)
        longer = prefilled(model, case(3))
        step_of(model, [longer], 8)
    assert len(launched) == 8
    assert len(set(launched)) == 1
    assert graphs_of(model) == 1


@host_only
def test_launches_of_equal_passes_are_equal(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """To every argument, whatever the sequences, their lengths and slots, and where their ids come from: else a graph
    would compute something else than the step it stands for."""
    model = make_tiny(step_graphs=False, **LIMITS)
    seqs = [prefilled(model, case(lane)) for lane in range(LANES)]
    launches = []
    for turn in range(3):
        with launching(gpu) as made:
            model.decode_batch([9 + turn, 10, 11, 12], seqs[turn : turn + 4])
        launches.append(made)
    sampled(model, model.logits_buffer_ptr(), seqs[2:6])
    with launching(gpu) as made:
        model.decode_batch_fed([FeedSource(sampled=True)] * 4, seqs[2:6])
    assert len(made) > 20
    assert launches == [made] * 3


@host_only
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_backend_can_keep_every_launch(make_tiny: MakeModel, gpu: GpuBackend, dtype: str, lanes: int) -> None:
    """Of a prefill and a step: a launch with an argument that may mean another thing the next time is checked and
    packed anew each time, which takes the host twenty times as long as the launch."""
    model = make_tiny(dtype=dtype, step_graphs=False, **LIMITS)
    with launching(gpu) as made:
        seqs = [prefilled(model, case(lane)) for lane in range(lanes)]
        step_of(model, seqs, 0)
    kernels = [one for one in made if len(one) == 7]
    assert len(kernels) > 20
    assert [(name, arg) for name, *_, args, _ in kernels for arg in args if not checks.repeats(arg)] == []


@contextmanager
def launching(gpu: GpuBackend) -> Iterator[list[Any]]:
    """Give a list of the kernels and products that are enqueued inside the context, with all their arguments."""
    made: list[Any] = []
    real_launch, real_gemm = gpu.launch, gpu.gemm

    def launch(handle: Any, grid: Any, block: Any, shared: int, stream: Any, args: Any, **options: Any) -> None:
        made.append((handle.name, grid, block, shared, stream, tuple(args), options))
        real_launch(handle, grid, block, shared, stream, args, **options)

    def gemm(*args: Any, **options: Any) -> None:
        made.append((args, options))
        real_gemm(*args, **options)

    vars(gpu).update(launch=launch, gemm=gemm)
    try:
        yield made
    finally:
        del vars(gpu)["launch"], vars(gpu)["gemm"]


def test_rows_that_nobody_owns_stay_as_they_are(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """Of the logits, of the feed's cells and of the KV: a replay writes its lanes' alone."""
    model = make_tiny(step_graphs=True, **LIMITS)
    for lanes in range(LANES, 0, -1):  # so that a rung's graph is captured with more lanes than it has later
        warm(model, lanes)
    seqs = [prefilled(model, case(lane)) for lane in range(LANES)]
    sampled(model, model.logits_buffer_ptr(), seqs)
    idle = seqs.pop(LANES // 2)
    cells = read(gpu, model._feed._space["feed.cells"], model.shape.feed_cells, "i32")
    before_idle = saved(model, idle)
    for lanes in (5, 3, 1, 6, 2):
        before = arena(model)
        with replays(gpu) as launched:
            step_of(model, seqs[:lanes], lanes)
        assert len(launched) == 1
        assert changed_rows(before, arena(model)) == list(range(lanes))
    assert saved(model, idle) == before_idle
    assert (read(gpu, model._feed._space["feed.cells"], model.shape.feed_cells, "i32") == cells).all()


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


# adapters


def test_adapters_come_and_go_under_the_same_graphs(shelf: Shelf, gpu: GpuBackend) -> None:
    """Which rows have one, and whose, is in tables; what it computes is in the pool. That any row has one is not."""
    found: list[list[bytes]] = []
    counts = []
    for wanted in (False, True):
        with shelf.load(gpu, "ab", step_graphs=wanted) as model:
            logits = []
            for turn in range(6):
                if turn == 3:
                    model.swap_lora_from_disk(shelf["c"], "c", 0)
                slots = [(-1, 0, 1), (1, 1, -1), (-1, -1, -1)][turn % 3]
                seqs = [begin_adapted(model, slot) for slot in slots]
                for seq in seqs:
                    model.prefill([5, 6, 7], seq)
                logits += [step_of(model, seqs, turn + again) for again in range(2)]
                for seq in seqs:
                    model.free_sequence(seq)
            found.append(logits)
            counts.append(len(model._graphs) if model._graphs else 0)
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0])
    assert counts == [0, 2]


# the option


def test_graphs_are_for_devices_that_prefer_them(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    assert make_tiny().step_graphs is gpu.limits().prefers_graphs is (gpu.kind() == "cuda")
    for wanted in (False, True):
        model = make_tiny(step_graphs=wanted)
        assert model.step_graphs is wanted
        with replays(gpu) as launched:
            warm(model)
        assert bool(launched) is wanted


@pytest.mark.parametrize("wrong", [1, "on", 0.0])
def test_the_option_is_a_bool(tiny_folder: Path, wrong: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        metrale.load(tiny_folder, "host", step_graphs=wrong)
    assert refused.value.argument == "step_graphs"


def test_a_closed_model_has_destroyed_its_graphs(
    make_tiny: MakeModel, gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny(step_graphs=True, **LIMITS)
    made: list[int] = []
    gone: list[int] = []
    real_end, real_destroy = gpu.end_capture, gpu.destroy_graph

    def end_capture(stream: StreamLike = 0) -> int:
        made.append(real_end(stream))
        return made[-1]

    def destroy_graph(graph: int) -> None:
        gone.append(graph)
        real_destroy(graph)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "end_capture", end_capture)
        patch.setattr(gpu, "destroy_graph", destroy_graph)
        PROGRAMS["fed by the host"](model)
        PROGRAMS["searching"](model)
        assert len(made) > 3
        assert gone == []
        model.close()
    assert sorted(gone) == sorted(made)


def test_the_kinds_of_steps_are_few(make_tiny: MakeModel) -> None:
    """Fewer than are kept, for greedy and sampled steps, and searches, of any number of lanes up to the last rung."""
    assert 2 * 2 * len(BATCH_LADDER) <= step_graphs.MOST_GRAPHS


# how much a step asks of the device, and threads


STEP: dict[str, int] = {
    "launch_graph": 1,
    "copy_h2d_async": 1,  # its table
    "event_query": 1,  # whether the table's page-locked slot is free
    "record_event": 2,  # that slot's, and the decode turn's, for which nobody waits on the same stream
    "stream_is_capturing": 1,
    "is_watched": 1,
}
CHOICE: dict[str, int] = {
    "launch": 1,
    "copy_h2d_async": 1,
    "copy_d2h_async": 1,
    "event_query": 2,  # the caller's event, and the slot's
    "record_event": 3,  # the slot's, the feeding turn's and the caller's
    "stream_is_capturing": 1,
}
SAID = ("kernel", "limits")
"""Calls that only tell something the backend knows."""


@contextmanager
def counting(gpu: GpuBackend) -> Iterator[Counter[str]]:
    """Give a counter of the calls of the device that are made inside the context."""
    counts: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*args, **options)

        return call

    names = [name for name in GpuBackend.__abstractmethods__ if name not in SAID and callable(getattr(gpu, name))]
    vars(gpu).update({name: counted(name, getattr(gpu, name)) for name in names})
    try:
        yield counts
    finally:
        for name in names:
            del vars(gpu)[name]


@host_only
@pytest.mark.parametrize("lanes", [1, LANES])
def test_a_step_makes_a_few_calls_whatever_its_lanes(make_tiny: MakeModel, gpu: GpuBackend, lanes: int) -> None:
    """The fed step of an engine: one table, one graph; and the choice: one table, one kernel, one copy of results. None
    allocates, and none waits."""
    model = make_tiny(step_graphs=True, **LIMITS)
    warm(model, lanes)
    seqs = [prefilled(model, case(lane)) for lane in range(lanes)]
    sampled(model, model.logits_buffer_ptr(), seqs)
    with results(model, 3, lanes) as (dst, event):
        for _ in range(2):  # the first comes after prefills, for which it waits as well
            with counting(gpu) as step:
                model.decode_batch_fed([FeedSource(sampled=True)] * lanes, seqs)
            for seq in seqs:
                seq.seq_len += 1
            with counting(gpu) as choice:
                model.sample_batch_to_feed(model.logits_buffer_ptr(), seqs, dst, event)
    assert step == STEP
    assert choice == CHOICE


def test_threads_that_share_a_model_replay_its_graphs(make_tiny: MakeModel, gpu: GpuBackend) -> None:
    """Each with a sequence of its own; under the model's lock a step and its reading find what one alone finds."""
    plain, model = make_tiny(step_graphs=False, **LIMITS), make_tiny(step_graphs=True, **LIMITS)

    def run(on: NllbModel, lane: int) -> list[bytes]:
        with on.exclusive():
            seq = prefilled(on, case(lane))
        found = []
        for turn in range(6):
            with on.exclusive():
                found.append(on.copy_logits_to_host(on.decode(9 + turn + lane, seq)).tobytes())
        with on.exclusive():
            on.free_sequence(seq)
        return found

    expected = [run(plain, lane) for lane in range(LANES)]
    with replays(gpu) as launched, ThreadPoolExecutor(LANES) as pool:
        assert list(pool.map(lambda lane: run(model, lane), range(LANES))) == expected
    assert len(launched) > 5 * LANES
    assert graphs_of(model) == 1
