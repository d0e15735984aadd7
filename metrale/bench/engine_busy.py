# SPDX-License-Identifier: MIT OR Apache-2.0
"""How busy the device is while the engine serves requests, by events on its streams.

An event is recorded right before the first thing that a step enqueues, and one right after the last. What lies between
the end of a step and the begin of the next is a gap, in which the device has nothing to do. All events are created
before the run, but for those of more steps than were expected. Two events a step is all that is added to what the
engine does; only the calls of the benchmark's own model object are looked at, and the product knows nothing of it.

Within a step the device may wait for the host too, where a step is more than one launch. That counts as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from gpu_runtime import GpuBackend, StreamLike
from metrale.bench.protocol import STANDARD, Lengths, spread
from metrale.bench.serving import engine_of, serve
from metrale.nllb.model import NllbModel

ENQUEUING: Final = (
    "launch",
    "launch_graph",
    "gemm",
    "gemm_strided_batched",
    "memset_async",
    "copy_h2d_async",
    "copy_h2d_async_retained",
    "copy_d2h_async",
    "copy_d2d_async",
    "copy_d2d_2d_async",
)
"""The backend's calls that give a stream something to do, and do not wait."""

_STREAMS: Final[Mapping[str, int]] = {
    name: list(signature(getattr(GpuBackend, name)).parameters).index("stream") - 1 for name in ENQUEUING
}
"""Where each of them has its stream, where it is not given by name; ``self`` does not count."""


class Step(NamedTuple):
    """When a step's work began and ended, in milliseconds after the first step began."""

    begin: float
    end: float


class StepEvents:
    """Events around the steps that an engine enqueues. All calls of a run come from the engine's thread.

    Parameters
    ----------
    gpu : GpuBackend
    steps : int
        For how many steps events are created beforehand.
    """

    def __init__(self, gpu: GpuBackend, steps: int) -> None:
        self._gpu = gpu
        self._spare = [gpu.create_event(timing=True) for _ in range(2 * steps)]
        self._marks: list[tuple[int, int]] = []
        self._begin: int | None = None

    def _event(self) -> int:
        return self._spare.pop() if self._spare else self._gpu.create_event(timing=True)

    def expect(self) -> None:
        """Let the next thing that is enqueued be the first of a step, wherever that is."""
        for name in ENQUEUING:
            setattr(self._gpu, name, self._first(name))

    def _first(self, name: str) -> Callable[..., Any]:
        place = _STREAMS[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.forget()
            self._begin = self._event()
            stream = args[place] if len(args) > place else kwargs.get("stream", 0)
            self._gpu.record_event(self._begin, stream)
            return getattr(self._gpu, name)(*args, **kwargs)

        return call

    def forget(self) -> None:
        """Look at nothing any more: the backend's calls are its own again."""
        for name in ENQUEUING:
            vars(self._gpu).pop(name, None)

    def end(self, stream: StreamLike = 0) -> None:
        """Note that all of a step has been enqueued, and that ``stream`` comes to its end last."""
        self.forget()
        if self._begin is None:
            raise RuntimeError("a step has ended in which nothing was enqueued")
        event = self._event()
        self._gpu.record_event(event, stream)
        self._marks.append((self._begin, event))
        self._begin = None

    def steps(self) -> list[Step]:
        """Wait for every step that has ended, and return them in order."""
        if not self._marks:
            return []
        for _, last in self._marks:
            self._gpu.event_synchronize(last)
        origin = self._marks[0][0]
        elapsed = self._gpu.event_elapsed_ms
        return [Step(elapsed(origin, begin), elapsed(origin, end)) for begin, end in self._marks]

    def free(self) -> None:
        """Destroy the events."""
        self.forget()
        pairs = [event for pair in self._marks for event in pair]
        for event in [*self._spare, *pairs, *([] if self._begin is None else [self._begin])]:
            self._gpu.destroy_event(event)
        self._spare, self._marks, self._begin = [], [], None


@contextmanager
def watched(model: NllbModel, steps: int) -> Iterator[StepEvents]:
    """Put events around what an engine enqueues for its steps on ``model``, inside the context.

    A step begins with a forward, and ends with the choice of ids on the default stream, which comes after all of it.
    The engine must serve nothing but requests that choose an id in each step, and nobody else may use the model.
    """
    events = StepEvents(model.gpu, steps)
    forward, choose = model.mixed_forward_batch_fed, model.sample_batch_to_feed

    def forwarding(*args: Any, **kwargs: Any) -> Any:
        events.expect()
        return forward(*args, **kwargs)

    def choosing(*args: Any, **kwargs: Any) -> None:
        choose(*args, **kwargs)
        events.end()

    try:
        with (
            patch.object(model, "mixed_forward_batch_fed", forwarding),
            patch.object(model, "sample_batch_to_feed", choosing),
        ):
            yield events
    finally:
        events.free()


def gaps(steps: list[Step]) -> list[float]:
    """Return for each step after the first the milliseconds for which nothing was going on before it.

    Steps may overlap, as a prefill has a stream of its own.
    """
    found, latest = [], steps[0].end
    for step in steps[1:]:
        found.append(max(step.begin - latest, 0.0))
        latest = max(latest, step.end)
    return found


def share(steps: list[Step]) -> float:
    """Return the part of the time from the first step's begin to the last end in which there was a step."""
    whole = max(step.end for step in steps) - steps[0].begin
    return 1 - sum(gaps(steps)) / whole if whole > 0 else 1.0


def measure(model: NllbModel, size: int, runs: int, lengths: Lengths = STANDARD) -> dict[str, Any] | None:
    """Serve ``size`` requests with as many lanes, ``runs`` times. The same must have been served before.

    Returns
    -------
    dict or None
        ``share`` (of the runs: how busy the device was between the first step's begin and the last one's end),
        ``gap_us`` (of all gaps between steps: in microseconds), and ``steps`` (of the last run). None when so few
        tokens are put out that there is no gap.
    """
    if lengths.new < 2:
        return None
    shares: list[float] = []
    between: list[float] = []
    with engine_of(model, size, lengths) as engine:
        for _ in range(runs):
            with watched(model, lengths.new + size) as events:
                serve(engine, model, size, lengths.new, lengths)
                steps = events.steps()
            shares.append(share(steps))
            between += gaps(steps)
    return {"share": spread(shares), "gap_us": spread([1e3 * ms for ms in between]), "steps": len(steps)}
