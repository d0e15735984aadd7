# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random programs of streams, events, copies and host waits, and a model of what each of them may result in.

The model knows happens-before alone: a piece of work comes after the earlier work of its stream, after what its stream
waits for by an event, and after all that the host had done and waited for when it was enqueued. Every total order that
keeps to this is admissible, and `results` follows them all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gpu_runtime.backend import GpuBackend

STREAMS: Final = 3
DEVICE: Final = ("d0", "d1", "d2")
HOST: Final = ("h0", "h1")
EVENTS: Final = 3
NBYTES: Final = 8

Result = tuple[tuple[int, ...], tuple[int, ...]]
"""What the host has read, in the order of the program, and what all places hold in the end."""

Set = int
"""A set of accesses: bit ``n`` stands for access ``n``."""


@dataclass(frozen=True)
class Step:
    """One call of a program, or one access of the host.

    ``kind`` is one of: ``fill`` (``dst`` becomes ``value``) and ``copy``, which are enqueued on ``stream``;
    ``retained``, a copy of what the host's ``src`` holds now; ``write`` and ``read`` of the host; ``record``, ``wait``,
    ``sync`` and ``sync_event``.
    """

    kind: str
    stream: int = 0
    src: str = ""
    dst: str = ""
    value: int = 0
    event: int = 0

    @property
    def touches(self) -> bool:
        return self.kind in ("fill", "copy", "retained", "write", "read")

    @property
    def reads(self) -> str:
        """The place that is read when the step runs: a retained copy has read it before."""
        return "" if self.kind == "retained" else self.src


@dataclass
class Access:
    """One access to memory, and all the accesses that happen before it."""

    step: Step
    before: Set


@dataclass
class Program:
    """Steps, and what is known of their order."""

    steps: list[Step] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    host: Set = 0
    streams: list[Set] = field(default_factory=lambda: [0] * STREAMS)
    events: list[Set] = field(default_factory=lambda: [0] * EVENTS)

    def add(self, step: Step) -> None:
        """Append a step."""
        self.steps.append(step)
        match step.kind:
            case "record":
                self.events[step.event] = self.streams[step.stream]
            case "wait":
                self.streams[step.stream] |= self.events[step.event]
            case "sync":
                self.host |= self.streams[step.stream]
            case "sync_event":
                self.host |= self.events[step.event]
            case "write" | "read":
                self.host |= self._access(step, self.host)
            case "retained":
                self.host |= self._access(Step("read", src=step.src), self.host)
                self.streams[step.stream] |= self._access(step, self.known(step.stream))
            case _:
                self.streams[step.stream] |= self._access(step, self.known(step.stream))

    def known(self, stream: int) -> Set:
        """Return what comes before the next piece of work on a stream."""
        return self.streams[stream] | self.host

    def _access(self, step: Step, before: Set) -> Set:
        self.accesses.append(Access(step, before))
        return before | 1 << (len(self.accesses) - 1)

    def conflicts(self, step: Step, before: Set) -> list[int]:
        """Return the accesses that ``step`` would race with, if ``before`` came before it."""
        return [
            number for number, other in enumerate(self.accesses) if not before >> number & 1 and clash(step, other.step)
        ]

    def races(self) -> bool:
        """Return whether two accesses to one place, at least one of them a write, come in no certain order."""
        return any(
            clash(one.step, other.step) and not other.before >> number & 1
            for later, other in enumerate(self.accesses)
            for number, one in enumerate(self.accesses[:later])
        )


def clash(one: Step, other: Step) -> bool:
    """Return whether one of two steps writes what the other one reads or writes."""
    return any(first.dst and first.dst in (second.dst, second.reads) for first, second in ((one, other), (other, one)))


def programs(seed: int, count: int, *, careful: bool, host: bool = True) -> Iterator[Program]:
    """Yield random programs.

    A careful one waits wherever two accesses would race otherwise, and nowhere else. In one without ``host``, the host
    neither writes nor reads nor waits, so that all of it can be captured.
    """
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        program = Program()
        value = 0
        while len(program.accesses) < 9:
            value += 1
            step = _random_step(rng, value)
            if not host and step.kind in ("retained", "write", "read", "sync", "sync_event"):
                continue
            if careful:
                if not step.touches:
                    continue
                _put_waits_before(program, step, rng)
            program.add(step)
        yield program


def _random_step(rng: random.Random, value: int) -> Step:
    stream, event = rng.randrange(STREAMS), rng.randrange(EVENTS)
    src, dst = rng.sample(DEVICE, 2)
    host = rng.choice(HOST)
    kinds = {
        "fill": Step("fill", stream, dst=dst, value=value),
        "d2d": Step("copy", stream, src, dst),
        "d2h": Step("copy", stream, src, host),
        "h2d": Step("copy", stream, host, dst),
        "retained": Step("retained", stream, host, dst),
        "write": Step("write", dst=host, value=value),
        "read": Step("read", src=host),
        "record": Step("record", stream, event=event),
        "wait": Step("wait", stream, event=event),
        "sync": Step("sync", stream),
        "sync_event": Step("sync_event", event=event),
    }
    weights = (3, 3, 2, 2, 1, 2, 2, 2, 2, 0.5, 0.5)
    return kinds[rng.choices(list(kinds), weights)[0]]


def _put_waits_before(program: Program, step: Step, rng: random.Random) -> None:
    """Let ``step`` come after everything it would race with: by events on a stream, by waits on the host."""
    parts = [(step, step.kind in ("write", "read"))]
    if step.kind == "retained":
        parts.insert(0, (Step("read", src=step.src), True))
    for part, on_host in parts:
        while rivals := program.conflicts(part, program.host if on_host else program.known(part.stream)):
            stream, event = program.accesses[rivals[-1]].step.stream, rng.randrange(EVENTS)
            if on_host and rng.random() < 0.5:
                program.add(Step("sync", stream))
                continue
            program.add(Step("record", stream, event=event))
            program.add(Step("sync_event", event=event) if on_host else Step("wait", part.stream, event=event))


def without(program: Program, left_out: int) -> Program:
    """Return a program without one of its steps."""
    other = Program()
    for number, step in enumerate(program.steps):
        if number != left_out:
            other.add(step)
    return other


def results(program: Program) -> set[Result]:
    """Return every result that an order which keeps to happens-before leads to."""
    places = (*DEVICE, *HOST, *(f"kept {number}" for number in range(len(program.accesses))))
    index = {place: number for number, place in enumerate(places)}
    reached: dict[Set, set[tuple[int, ...]]] = {0: {(0,) * len(places)}}
    for _ in program.accesses:
        following: dict[Set, set[tuple[int, ...]]] = {}
        for done, states in reached.items():
            for number, access in enumerate(program.accesses):
                if not done >> number & 1 and access.before & ~done == 0:
                    target = following.setdefault(done | 1 << number, set())
                    target.update(_after(access.step, number, state, index) for state in states)
        reached = following
    (states,) = reached.values()
    reads = [number for number, access in enumerate(program.accesses) if access.step.kind == "read"]
    told = [number for number in reads if not _is_retained(program, number)]
    size = len(DEVICE) + len(HOST)
    return {(tuple(state[size + number] for number in told), state[:size]) for state in states}


def _is_retained(program: Program, number: int) -> bool:
    """Return whether a read is that of a retained copy, which is the next access."""
    return number + 1 < len(program.accesses) and program.accesses[number + 1].step.kind == "retained"


def _after(step: Step, number: int, state: tuple[int, ...], index: dict[str, int]) -> tuple[int, ...]:
    """Return what the places hold after a step. A read keeps its value in a place of its own."""
    new = list(state)
    match step.kind:
        case "fill" | "write":
            new[index[step.dst]] = step.value
        case "copy":
            new[index[step.dst]] = state[index[step.src]]
        case "retained":
            new[index[step.dst]] = state[index[f"kept {number - 1}"]]
        case "read":
            new[index[f"kept {number}"]] = state[index[step.src]]
    return tuple(new)


class Runner:
    """Runs programs on a backend."""

    def __init__(self, gpu: GpuBackend) -> None:
        self._gpu = gpu
        self._device = {place: gpu.alloc(NBYTES) for place in DEVICE}
        self._host = {place: np.zeros(NBYTES, np.uint8) for place in HOST}
        for ptr in self._device.values():
            gpu.memset(ptr, 0, NBYTES)
        self._streams = [gpu.create_stream() for _ in range(STREAMS)]
        self._events = [gpu.create_event() for _ in range(EVENTS)]
        self._seen: list[int] = []

    def run(self, program: Program) -> Result:
        """Run a program and return its result. Everything is waited for at the end."""
        for step in program.steps:
            self._do(step)
        return self._result()

    def run_captured(self, program: Program, *, nested: bool) -> Result:
        """Run a program without host steps as a graph, or as one in another graph."""
        gpu, first = self._gpu, self._streams[0]
        gpu.begin_capture(first)
        fork = gpu.create_event()
        gpu.record_event(fork, first)
        for stream in self._streams[1:]:
            gpu.stream_wait_event(stream, fork)
        for step in program.steps:
            self._do(step)
        for stream in self._streams[1:]:
            join = gpu.create_event()
            gpu.record_event(join, stream)
            gpu.stream_wait_event(first, join)
        graph = gpu.end_capture(first)
        if nested:
            gpu.begin_capture(first)
            gpu.launch_graph(graph, first)
            graph = gpu.end_capture(first)
        gpu.launch_graph(graph, first)
        return self._result()

    def _do(self, step: Step) -> None:
        gpu, device, host = self._gpu, self._device, self._host
        stream, event = self._streams[step.stream], self._events[step.event]
        match step.kind:
            case "fill":
                gpu.memset_async(device[step.dst], step.value, NBYTES, stream)
            case "copy" if step.src in host:
                gpu.copy_h2d_async(host[step.src], device[step.dst], stream)
            case "copy" if step.dst in host:
                gpu.copy_d2h_async(device[step.src], host[step.dst], stream)
            case "copy":
                gpu.copy_d2d_async(device[step.src], device[step.dst], NBYTES, stream)
            case "retained":
                gpu.copy_h2d_async_retained(host[step.src], device[step.dst], stream)
            case "write":
                host[step.dst][:] = step.value
            case "read":
                self._seen.append(int(host[step.src][0]))
            case "record":
                gpu.record_event(event, stream)
            case "wait":
                gpu.stream_wait_event(stream, event)
            case "sync":
                gpu.synchronize(stream)
            case _:
                gpu.event_synchronize(event)

    def _result(self) -> Result:
        for stream in self._streams:
            self._gpu.synchronize(stream)
        final = []
        for ptr in self._device.values():
            out = np.empty(NBYTES, np.uint8)
            self._gpu.copy_d2h(ptr, out)
            final.append(int(out[0]))
        self._gpu.sweep_unreleased()
        return tuple(self._seen), (*final, *(int(array[0]) for array in self._host.values()))
