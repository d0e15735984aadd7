# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a model holds besides its device memory: workspace of products, events, streams, page-locked host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.errors import DeviceError
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from gpu_runtime.streams import StreamLike
from metrale.model import BeamReq, PrefillSlice
from metrale.nllb.slot_rules import UPLOADS_AHEAD
from metrale.nllb.workspace import UPLOAD_PARTS, gemm_bytes
from tests.backends import host_only
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, prefilled
from tests.reference.tiny import write_tiny

ONE = Case([5, 6, 7], 80, 81, [])
SMALL: dict[str, Any] = {"max_batch": 2, "max_source_len": 8, "max_new_tokens": 4}


class Workspaces(HostBackend):
    """A device whose products run best with some workspace; it notes what each product is given."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.given: set[tuple[int, int]] = set()

    def limits(self) -> Limits:
        return replace(super().limits(), gemm_workspace_bytes=self.nbytes)

    def gemm(self, *args: Any, **options: Any) -> None:
        super().gemm(*args, **options)
        self.given.add((int(options.get("workspace", 0)), options.get("workspace_bytes", 0)))


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", [0, 1 << 20, 100])
def test_every_product_gets_the_workspace(tmp_path: Path, activation: str, dtype: str, wanted: int) -> None:
    """As much as suits the device, and at least the scratch memory of the largest product that needs some.

    At the limits: the backend refuses a product whose workspace is too small.
    """
    folder = write_tiny(tmp_path / "model", 3, activation_function=activation)
    with Workspaces(wanted) as gpu:
        plan = metrale.memory_plan(folder, gpu, dtype, **SMALL)
        model = metrale.load(folder, gpu, dtype, **SMALL)
        assert model.memory_plan() == plan
        assert gpu.live_bytes() == plan.total
        longest = list(range(40, 46))
        seqs = [begin(model, ONE) for _ in range(2)]
        needed = dtype == "bfloat16" and activation != "relu"
        # rows, inner width, float32: of the encoder, which has more than the decoder's 4 * 56 for a prefix; of a step
        scratch = {"prefill": 16 * 48 * 4, "decoder": 2 * 56 * 4} if needed else {"prefill": 0, "decoder": 0}
        sizes = {side: max(wanted, size) for side, size in scratch.items()}
        assert gemm_bytes(model.shape) == sizes
        (block,) = (entry for entry in gpu.alloc_report() if entry.tag == "workspace")
        ends = []
        for side, size in sizes.items():
            gpu.given.clear()
            if side == "prefill":
                model.prefill_batch_chunk([PrefillSlice.whole(longest, seq) for seq in seqs])
            else:
                model.decode_batch([9, 9], seqs)
            ((address, nbytes),) = gpu.given
            assert nbytes == size
            assert (address == 0) == (size == 0)
            assert not size or block.ptr <= address <= address + size <= block.ptr + block.nbytes
            ends += [(address, address + size)] if size else []
        # a step may run beside a prefill: the two share nothing
        assert not ends or ends[0][1] <= ends[1][0] or ends[1][1] <= ends[0][0]
        least = metrale.memory_plan(folder, HostBackend(), "float32", **SMALL).workspace
        if dtype == "float32":
            assert plan.workspace - least == 2 * -(-wanted // 256) * 256
        model.close()
        assert not gpu.live_bytes()


class Counting(HostBackend):
    """Knows which events, streams and pieces of page-locked memory are live."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.live: set[tuple[str, int]] = set()

    def create_event(self, *, timing: bool = False) -> int:
        event = super().create_event(timing=timing)
        self.live.add(("event", event))
        return event

    def destroy_event(self, event: int) -> None:
        super().destroy_event(event)
        self.live.remove(("event", event))

    def create_stream(self) -> int:
        stream = super().create_stream()
        self.live.add(("stream", stream))
        return stream

    def destroy_stream(self, stream: int) -> None:
        super().destroy_stream(stream)
        self.live.remove(("stream", stream))

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        memory = super().alloc_host_pinned(nbytes)
        self.live.add(("pinned", memory.address))
        return memory

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        super().free_host_pinned(memory)
        self.live.remove(("pinned", memory.address))

    def count(self, kind: str) -> int:
        return sum(one == kind for one, _ in self.live)


@host_only
@pytest.mark.parametrize("step_graphs", [False, True])
def test_closing_leaves_no_event_stream_or_pinned_memory(make_tiny: MakeModel, step_graphs: bool) -> None:
    """While the model lives it has an event for each of its three turns; page-locked memory with some slots for every
    table (encoder, prefix, decoder, feed, beams), with an event for each part of them; and the same for each part of
    what is told of how ids are chosen (bans, words, history), with an event for each slot. What a search found is
    copied on a stream of its own, which does not wait for steps, to page-locked memory of its own, with an event.
    Steps are captured on another stream of its own."""
    gpu = Counting()
    model = make_tiny(gpu, step_graphs=step_graphs)
    events = 5 * UPLOAD_PARTS + 3 * UPLOADS_AHEAD
    held = {"event": 3 + events + 1, "stream": 1 + step_graphs, "pinned": 5 + 3 + 1}
    assert {kind: gpu.count(kind) for kind in held} == held
    before = set(gpu.live)
    model.decode(9, prefilled(model, ONE))
    model.generate_beams([BeamReq([5], 80, 81, num_beams=beams, max_new=4) for beams in (3, 1, 2)])
    assert gpu.live == before
    model.close()
    assert not gpu.live


class Breakable(Counting):
    """A device on which work may go wrong: waiting for it then raises, as does giving back what it uses."""

    broken = False

    def destroy_event(self, event: int) -> None:
        super().destroy_event(event)
        if self.broken:
            raise DeviceError("destroy_event: failed as asked")

    def free(self, ptr: int) -> None:
        super().free(ptr)
        if self.broken:
            raise DeviceError("free: failed as asked")

    def event_synchronize(self, event: int) -> None:
        if self.broken:
            raise DeviceError("event_synchronize: failed as asked")
        super().event_synchronize(event)

    def synchronize(self, stream: StreamLike = 0) -> None:
        if self.broken:
            raise DeviceError("synchronize: failed as asked")
        super().synchronize(stream)


def test_memory_is_freed_even_when_the_device_is_broken(tiny_folder: Path) -> None:
    gpu = Breakable()
    model = metrale.load(tiny_folder, gpu, "float32", **SMALL)
    prefilled(model, ONE)
    gpu.broken = True
    with pytest.raises(DeviceError, match="failed as asked"):
        model.close()
    assert gpu.live_alloc_count() == 0
    assert not gpu.live
    model.close()


def test_a_device_that_breaks_while_loading_keeps_nothing(tiny_folder: Path) -> None:
    gpu = Breakable()
    gpu.broken = True
    with pytest.raises(DeviceError, match="failed as asked"):
        metrale.load(tiny_folder, gpu, "float32", **SMALL)
    assert gpu.live_alloc_count() == 0
    assert not gpu.live
