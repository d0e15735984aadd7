# SPDX-License-Identifier: MIT OR Apache-2.0
"""What one launch or product reads and writes, and the checks around the moment when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpu_runtime.errors import GuardViolation, UninitializedRead, UnwrittenOutput
from gpu_runtime.gemm import Gemm
from gpu_runtime.host import poison
from gpu_runtime.host.checked_memory import CheckedMemory
from gpu_runtime.host.memory import REDZONE_BYTES, Span
from gpu_runtime.host.shadow import Block, Region
from gpu_runtime.ledger import counted
from gpu_runtime.op import Dims, OpSpec

Array = np.ndarray[Any, np.dtype[Any]]

MOAT_BYTES: Final = 4096
"""How far before and after an output a kernel is watched. The redzones belong to it, where the block ends sooner."""


@dataclass(frozen=True, slots=True)
class Output:
    """Memory that work writes: as a region, as an array, and as an array of unsigned integers of its elements' size."""

    region: Region
    array: Array
    bits: Array

    @classmethod
    def of(cls, region: Region, array: Array) -> Output:
        return cls(region, array, poison.bits(array))

    def fill(self, pattern: int) -> None:
        """Fill it with a pattern of `gpu_runtime.host.poison`."""
        self.bits.fill(poison.element(pattern, self.region.itemsize))

    def holds(self, pattern: int) -> Array:
        """Return for each element whether it holds the pattern."""
        return np.asarray(self.bits == poison.element(pattern, self.region.itemsize))


@dataclass(frozen=True, slots=True)
class _Moat:
    """Bytes around an output, or between its rows, that its kernel must leave alone."""

    output: Region
    span: Array
    start: int
    """Where ``span`` begins, from the start of the output's block."""
    pitch: int = 0
    """Distance between the rows of ``span``, when it has two axes."""

    def places(self, bytes_: Array) -> Array:
        """Return where bytes of ``span``, counted without gaps, lie in the block."""
        if self.span.ndim == 1:
            return self.start + bytes_
        row, column = np.divmod(bytes_, self.span.shape[1])
        return np.asarray(self.start + row * self.pitch + column)


class Footprint:
    """The operands of one piece of work.

    Parameters
    ----------
    memory : CheckedMemory
    reads : iterable of Region
        What it reads of what was there before.
    fresh : iterable of Output
        Outputs that it must write in full: they are poisoned before it runs, and looked at afterwards.
    updates : iterable of Output
        Other outputs: their old content is read, or they are an input as well, or nobody doubts that they are written.
    scratch : iterable of Output
        Workspaces: poisoned before it runs and afterwards.
    """

    def __init__(
        self,
        memory: CheckedMemory,
        reads: Iterable[Region],
        fresh: Iterable[Output] = (),
        updates: Iterable[Output] = (),
        scratch: Iterable[Output] = (),
    ) -> None:
        self._memory = memory
        self._reads = tuple(reads)
        self._fresh = tuple(fresh)
        self._updates = tuple(updates)
        self._scratch = tuple(scratch)
        self._outputs = tuple(one.region for one in (*self._fresh, *self._updates))
        self._regions = (*self._reads, *self._outputs, *(one.region for one in self._scratch))
        self._moats: tuple[_Moat, ...] = ()
        self._rows: list[tuple[Block, Array, int]] = []

    def watch(self) -> Footprint:
        """Watch the bytes around the outputs from now on, and return the footprint itself."""
        written = [*self._outputs, *(one.region for one in self._scratch)]
        self._moats = tuple(moat for one in self._outputs for moat in _moats(one, written))
        return self

    def note_rows(self, block: Block, starts: Array, run: int) -> None:
        """Note that the work, while it runs, writes ``run`` bytes from each of ``starts`` through a table."""
        block.shadow.write_rows(starts, run)
        self._rows.append((block, starts, run))

    def run(self, compute: Callable[[], None]) -> None:
        """Check what ``compute`` will read, run it, check what it wrote, and note that.

        Raises
        ------
        InvalidPointer
            When an operand was freed.
        UninitializedRead
            When it reads what was never written, or an output that is only to be written.
        GuardViolation
            When it wrote beside its outputs.
        UnwrittenOutput
            When it left an element of an output unwritten.
        """
        memory = self._memory
        for region in self._regions:
            if region.block.freed is not None:
                memory.require_live(region.what, region.block)
        for region in self._reads:
            if not region.block.shadow.covers(region):
                memory.require_written(region)
        for one in self._scratch:
            one.fill(poison.SCRATCH)
        for one in self._fresh:
            one.fill(poison.OUTPUT)
        self._rows.clear()
        before = [moat.span.tobytes() for moat in self._moats]
        kept = [one.array.copy() for one in self._updates] if self._fresh else []
        try:
            compute()
        except BaseException:
            for one in self._fresh:
                one.region.block.shadow.forget(one.region)
            raise
        self._check_moats(before)
        for one in self._fresh:
            if one.holds(poison.OUTPUT).any():
                self._confirm(compute, kept)
                break
        for region in self._outputs:
            region.block.shadow.write(region)
        for one in self._scratch:
            one.fill(poison.SCRATCH)

    def _check_moats(self, before: list[bytes]) -> None:
        for moat, old in zip(self._moats, before, strict=True):
            new = moat.span.tobytes()
            output = moat.output
            if new == old or output.block.host_visible:  # it may have become that since the launch was prepared
                continue
            places = moat.places(np.flatnonzero(np.frombuffer(new, np.uint8) != np.frombuffer(old, np.uint8)))
            for block, starts, run in self._rows:
                if block is output.block:
                    places = places[~((starts[:, None] <= places) & (places < starts[:, None] + run)).any(axis=0)]
            if places.size:
                entry = output.block.entry
                raise GuardViolation(
                    f"{output.what}: {counted(places.size)} beside this output written, the first of them "
                    f"{entry.place(int(entry.ptr) + int(places[0]))}; launched at {self._memory.site()}"
                )

    def _confirm(self, compute: Callable[[], None], kept: list[Array]) -> None:
        """Run again over another pattern, and tell what was not written from what came out like the first pattern.

        A kernel computes the same again, so what the second run leaves is as good as what the first one left.
        """
        suspects = [one.holds(poison.OUTPUT) for one in self._fresh]
        results = [one.bits.copy() for one in self._fresh]
        for one, content in zip(self._updates, kept, strict=True):
            one.array[...] = content
        for one in self._fresh:
            one.fill(poison.SECOND_OUTPUT)
        compute()
        for one, suspect, result in zip(self._fresh, suspects, results, strict=True):
            self._judge(one, suspect & one.holds(poison.SECOND_OUTPUT), suspect & (one.bits != result))

    def _judge(self, output: Output, missed: Array, other: Array) -> None:
        """Refuse an output with elements that were not written, or that another content made come out another way."""
        region = output.region
        for elements, error, text in (
            (missed, UnwrittenOutput, "left unwritten"),
            (other, UninitializedRead, "read, although its spec says it is only written"),
        ):
            places = np.argwhere(elements)
            if len(places):
                region.block.shadow.forget(region)
                first = places[0].tolist()
                raise error(
                    f"{region.what}: {text}: {len(places):,} of {counted(elements.size, 'element')}, the first {first} "
                    f"in {region.block}; launched at {self._memory.site()}"
                )


def launch_footprint(
    memory: CheckedMemory, spec: OpSpec, values: Sequence[Any], dims: Dims, bound: Mapping[str, Any]
) -> Footprint:
    """Return the footprint of a launch, from its values and the arrays that they were bound to."""
    reads: list[Region] = []
    fresh: list[Output] = []
    updates: list[Output] = []
    scratch: list[Output] = []
    pointers = [(arg, at) for arg, at in zip(spec.args, values, strict=True) if arg.is_pointer and at]
    for arg, address in pointers:
        array: Array = bound[arg.name]
        if not array.size:
            continue
        region = _region(memory, f"{spec.name}: {arg.name}", address, array)
        if arg.reads(dims):
            reads.append(region)
        if arg.role == "in":
            continue
        shared = any(other is not arg and at == address for other, at in pointers)
        group = scratch if arg.is_scratch else updates if shared or arg.reads(dims) else fresh
        group.append(Output.of(region, array))
    return Footprint(memory, reads, fresh, updates, scratch).watch()


def product_footprint(
    memory: CheckedMemory, p: Gemm, addresses: Sequence[int], operands: Sequence[Array | None], workspace: Span
) -> Footprint:
    """Return the footprint of a product: its A, W, C and bias, and its workspace."""
    regions = {
        name: _region(memory, f"gemm: {name}", address, array[0] if p.batch == 1 and name != "bias" else array)
        for name, address, array in zip(("a", "w", "c", "bias"), addresses, operands, strict=True)
        if array is not None
    }
    reads = [region for name, region in regions.items() if name != "c" or p.accumulate]
    c = operands[2]
    assert c is not None
    scratch = []
    if workspace.nbytes:
        scratch.append(Output.of(memory.region(workspace), memory.bytes(workspace.address, workspace.nbytes)))
    return Footprint(memory, reads, updates=[Output.of(regions["c"], c)], scratch=scratch)


def _region(memory: CheckedMemory, what: str, address: int, array: Array) -> Region:
    block = memory.block_at(address)
    return Region.of(what, block, address - int(block.entry.ptr), array)


def _moats(output: Region, written: list[Region]) -> Iterator[_Moat]:
    """Yield the bytes around ``output`` and those between its rows, without other outputs of the same work.

    What lies between two outputs is watched once, before the second.
    """
    if output.block.host_visible:  # the host may write there at any time
        return
    others = [one for one in written if one is not output and one.block is output.block]
    low = max([output.start - MOAT_BYTES, -REDZONE_BYTES, *(one.end for one in others if one.end <= output.start)])
    high = min(output.end + MOAT_BYTES, output.block.entry.nbytes + REDZONE_BYTES)
    storage = output.block.storage
    for start, end in ((low, output.start), (output.end, high)):
        if start < end and not any(one.start < end and start < one.end for one in others):  # else it is the other's
            yield _Moat(output, storage[REDZONE_BYTES + start : REDZONE_BYTES + end], start)
    interleaved = any(one.start < output.end and output.start < one.end for one in others)
    if len(output.outer) == 1 and output.outer[0] > 1 and output.steps[0] > output.run and not interleaved:
        gap, start, pitch = output.steps[0] - output.run, output.start + output.run, output.steps[0]
        shape = (output.outer[0] - 1, gap)
        yield _Moat(output, np.ndarray(shape, np.uint8, storage, REDZONE_BYTES + start, (pitch, 1)), start, pitch)
