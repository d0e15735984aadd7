# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode steps that are replayed as graphs: the same bits as launch by launch, whatever is around them."""

from __future__ import annotations

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
from gpu_runtime.streams import StreamLike
from metrale.errors import InvalidInput
from metrale.model import BATCH_LADDER, BeamReq, FeedSource
from metrale.nllb import step_graphs
from metrale.nllb.model import NllbModel
from metrale.nllb.workspace import UPLOAD_PARTS, UPLOADS_AHEAD
from tests.backends import Device, host_only
from tests.draws import draws
from tests.nllb.adapters import Shelf
from tests.nllb.adapters import begin as begin_adapted
from tests.nllb.backends import Padding
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import arena, changed_rows, prefilled, read, results, sampled, saved
from tests.nllb.replaying import LIMITS, counting, graphs_of, padding_gpu, warm
from tests.nllb.stepping import LANES, PROGRAMS, case, replays, step_of


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    yield from padding_gpu(device, shared_gpu)


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


@pytest.mark.parametrize("beams", [3, 5])
def test_a_search_in_part_of_a_rung(make_tiny: MakeModel, gpu: GpuBackend, beams: int) -> None:
    """Fewer beams than a rung has rows: the graph is without the head, and yet follows each beam's ancestors."""
    request = BeamReq([5, 6, 7], 80, 81, num_beams=beams, max_new=12, num_return_sequences=beams, eos_ids=())
    found = []
    for wanted in (False, True):
        model = make_tiny(step_graphs=wanted, max_batch=8, max_new_tokens=14)
        with replays(gpu) as launched:
            found.append(model.generate_beams([request]))
        assert bool(launched) is wanted
    assert found[0] == found[1]
    assert len({tuple(one.ids) for one in found[0][0]}) == beams


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
        gpu.memset(model.logits_buffer_ptr(), 60, LANES * model.logits_row_bytes())  # as no row does
        before = arena(model)
        with replays(gpu) as launched:
            step_of(model, seqs[:lanes], lanes)
        assert len(launched) == 1
        assert changed_rows(before, arena(model)) == list(range(lanes))
    assert saved(model, idle) == before_idle
    assert (read(gpu, model._feed._space["feed.cells"], model.shape.feed_cells, "i32") == cells).all()


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


STEPS = UPLOAD_PARTS * UPLOADS_AHEAD
"""So many steps fill each slot of a table once. For each part of the slots there is an event, and a question to it."""
STEP: dict[str, int] = {
    "launch_graph": STEPS,
    "copy_h2d_async": STEPS,  # its table
    "event_query": UPLOAD_PARTS,  # whether a part of the table's page-locked slots is free
    "record_event": STEPS + UPLOAD_PARTS,  # the decode turn, for which nobody waits on the same stream; and the parts
    "stream_is_capturing": STEPS,
    "is_watched": STEPS,
}
CHOICE: dict[str, int] = {
    "launch": STEPS,
    "copy_h2d_async": STEPS,
    "copy_d2h_async": STEPS,
    "event_query": STEPS + UPLOAD_PARTS,  # the caller's event, and the parts
    "record_event": 2 * STEPS + UPLOAD_PARTS,  # the feeding turn, the caller's, and the parts
    "stream_is_capturing": STEPS,
}


@host_only
@pytest.mark.parametrize("lanes", [1, LANES])
def test_a_step_makes_a_few_calls_whatever_its_lanes(make_tiny: MakeModel, gpu: GpuBackend, lanes: int) -> None:
    """The fed step of an engine: one table, one graph; and the choice: one table, one kernel, one copy of results. None
    allocates, and none waits."""
    model = make_tiny(step_graphs=True, **{**LIMITS, "max_new_tokens": STEPS + 8})
    warm(model, lanes)
    seqs = [prefilled(model, case(lane)) for lane in range(lanes)]
    sampled(model, model.logits_buffer_ptr(), seqs)
    made = [Counter[str](), Counter[str]()]
    with results(model, 3, lanes) as (dst, event):
        for turn in range(1 + STEPS):
            with counting(gpu) as step:
                model.decode_batch_fed([FeedSource(sampled=True)] * lanes, seqs)
            for seq in seqs:
                seq.seq_len += 1
            with counting(gpu) as choice:
                model.sample_batch_to_feed(model.logits_buffer_ptr(), seqs, dst, event)
            if turn > 0:  # the first comes after prefills, for which it waits as well
                made = [made[0] + step, made[1] + choice]
    assert made == [STEP, CHOICE]


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
