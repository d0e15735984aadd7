# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forward passes in order: which of them may run side by side, and what each one waits for.

Decoding and prefilling have workspaces of their own, so that a step may decode on one stream and prefill on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.ranges import open_ranges, ranged
from gpu_runtime.streams import StreamLike
from metrale.errors import NotSupported
from metrale.nllb.admission import Prompt
from metrale.nllb.decoder import Decoder, Observer
from metrale.nllb.device_weights import DeviceWeights
from metrale.nllb.encoder import Encoder
from metrale.nllb.fed import Feed, fed_ids
from metrale.nllb.kv import Span
from metrale.nllb.limits import ModelShape
from metrale.nllb.logits import LogitsRows
from metrale.nllb.slots import SlotColumns, Step
from metrale.nllb.step_graphs import StepGraphs
from metrale.nllb.turns import Turn
from metrale.nllb.workspace import Workspace

Force = Callable[[Feed, Observer | None], DevicePtr]
"""Enqueues a pass over given ids; see `Passes.forcing`."""


class Copy(NamedTuple):
    """A copy within the device."""

    source: DevicePtr
    target: DevicePtr
    nbytes: int


class Passes:
    """Enqueues decode steps and prefills. What they are given has been checked.

    Three things are shared, and each has its `Turn`: the decode workspace, the prefill workspace (the encoder's and the
    decoder prefix's), and the token feed, which reads logits rows and writes the ids that a fed step takes in. KV, rows
    and histories need no turn of their own, as these three imply their order.

    Parameters
    ----------
    gpu : GpuBackend
    shape : ModelShape
    weights : DeviceWeights
    space : Workspace
    logits : LogitsRows
    columns : SlotColumns
        What steps gather their rows from; it follows prefills.
    decoding, prefilling, feeding : Turn
    graphs : StepGraphs or None
        Where decode steps are kept as graphs; None: their launches are enqueued one by one.

    Attributes
    ----------
    hidden : DevicePtr
        The latest pass' hidden rows after the final norm.
    attention_space : DevicePtr
        Memory that the prefill side has to spare while the decoder runs there; `attention_rows` says for how much.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        shape: ModelShape,
        weights: DeviceWeights,
        space: Workspace,
        logits: LogitsRows,
        columns: SlotColumns,
        decoding: Turn,
        prefilling: Turn,
        feeding: Turn,
        graphs: StepGraphs | None,
    ) -> None:
        self._gpu = gpu
        self._shape = shape
        self._logits = logits
        self._columns = columns
        self.decoding = decoding
        self.prefilling = prefilling
        self.feeding = feeding
        self._encoder = Encoder(gpu, shape, weights, space)
        self._prefix = Decoder(gpu, shape, weights, space, "prefix")
        self._decoder = Decoder(gpu, shape, weights, space, "decoder", graphs)
        self.hidden = self._decoder.hidden
        self.attention_space = space["encoder.wide"]
        open_ranges(self, gpu.ranges)

    @ranged("decode step")
    def decode(self, step: Step, stream: StreamLike, copies: Sequence[Copy] = ()) -> DevicePtr:
        """Enqueue one step, then ``copies``, and return the address of row 0."""
        self.refuse_capture(stream)
        rows, lanes, fresh = self._logits, len(step.slots), self._columns.fresh
        any_fresh = fresh[step.slots].any()
        if any_fresh or rows.any_written_by(self.prefilling, 0, lanes):
            self.prefilling.wait(stream)
        self.feeding.wait(stream)
        rows.writing(0, lanes)
        with self.decoding.use(stream):
            self._decoder.run(self._columns.fed(step), rows.arena.base, stream)
            for copy in copies:
                self._gpu.copy_d2d_async(*copy, stream)
        rows.written(self.decoding, 0, lanes, maxima=self._decoder.leaves_maxima(lanes))
        if any_fresh:
            fresh[step.slots] = False
        self.hidden = self._decoder.hidden
        return rows.arena.base

    def prefill(self, prompts: list[Prompt], row: int, stream: StreamLike) -> list[DevicePtr]:
        """Enqueue the prefill of ``prompts``, the ``i``-th into row ``row + i``, and return the rows' addresses."""
        self.refuse_capture(stream)
        self._await_readers(stream)
        return self._prefill(prompts, row, stream)

    def mixed(
        self,
        step: Step,
        copies: Sequence[Copy],
        decode_stream: StreamLike,
        prompts: list[Prompt],
        row: int,
        stream: StreamLike,
    ) -> tuple[DevicePtr, list[DevicePtr]]:
        """Enqueue a decode step on one stream and a prefill on another, where both may run at the same time.

        There may be no prompts. Later work of ``stream`` comes after both.
        """
        self.refuse_capture(decode_stream)
        self.refuse_capture(stream)
        if prompts:
            self._await_readers(stream)  # before the step is enqueued, which the prefill need not wait for
        base = self.decode(step, decode_stream, copies)
        ptrs = self._prefill(prompts, row, stream) if prompts else []
        self.decoding.wait(stream)
        return base, ptrs

    @contextmanager
    def forcing(self, prompts: list[Prompt], stream: StreamLike) -> Iterator[Force]:
        """Enqueue the encoding of ``prompts``, and inside the context passes over ids of theirs that are given.

        Yields a function of a feed, of at most ``prefix_rows`` ids, and of an observer or None. It enqueues the feed's
        pass and returns the address of the first id's logits, which the others' follow: they take the rows from 0 on.
        """
        self.refuse_capture(stream)
        self._await_readers(stream)
        with self.prefilling.use(stream):
            self._encode(prompts, stream)
            yield partial(self._force, stream)

    def _force(self, stream: StreamLike, feed: Feed, observe: Observer | None) -> DevicePtr:
        base = self._logits.arena.base
        self._logits.writing(0, len(feed.ids))
        self._prefix.run(fed_ids([feed]), base, stream, of_all=True, observe=observe)
        self._logits.written(self.prefilling, 0, len(feed.ids))
        self.hidden = self._prefix.hidden
        return base

    def fill(self, span: Span, data: bytes, stream: StreamLike) -> None:
        """Enqueue the writing of ``data`` to the start of ``span``, as a prefill would write it."""
        self.refuse_capture(stream)
        self._await_readers(stream)
        with self.prefilling.use(stream):
            self._columns.fresh[span.slots[0]] = True
            self._gpu.copy_h2d_async(data, span.ptr, stream)

    def await_span(self, span: Span, stream: StreamLike) -> None:
        """Let later work of ``stream`` come after everything that writes ``span``."""
        (self.prefilling if self._columns.fresh[span.slots[0]] else self.decoding).wait(stream)

    def _await_readers(self, stream: StreamLike) -> None:
        """Wait for the decode steps that may still read the spans' former content, and for readers of logits rows."""
        self.decoding.wait(stream)
        self.feeding.wait(stream)

    @ranged("prefill")
    def _prefill(self, prompts: list[Prompt], row: int, stream: StreamLike) -> list[DevicePtr]:
        self._logits.writing(row, len(prompts))
        with self.prefilling.use(stream):
            self._encode(prompts, stream)
            first = 0
            for group in self._prefix_groups(prompts):
                self._feed_prefixes(group, self._logits.arena.row(row + first), stream)
                first += len(group)
        self._logits.written(self.prefilling, row, len(prompts))
        self.hidden = self._prefix.hidden
        return [self._logits.arena.row(row + index) for index in range(len(prompts))]

    def _encode(self, prompts: Sequence[Prompt], stream: StreamLike) -> None:
        for prompt in prompts:
            if prompt.seq.seq_len:  # its KV is about to be overwritten: empty, should the device fail half way
                prompt.seq.tokens, prompt.seq.seq_len, prompt.seq.prompt_len = [], 0, 0
            prompt.span.source_len, prompt.span.adapter = len(prompt.source), prompt.seq.adapter_slot
            self._columns.filled(prompt.span)
            self._columns.fresh[prompt.span.slots[0]] = True
        for group in self._encoder_groups(prompts):
            self._encoder.run([one.source for one in group], [one.span for one in group], stream)

    def _feed_prefixes(self, prompts: Sequence[Prompt], logits: DevicePtr, stream: StreamLike) -> None:
        """Enqueue decoder passes over what targets of one length begin with; the logits after it go to ``logits``."""
        depth, most = len(prompts[0].prefix), self._shape.prefix_rows
        for first in range(0, depth, most):  # more than one pass only for a single target
            feeds = [Feed(prompt.prefix[first : first + most], first, prompt.span) for prompt in prompts]
            self._prefix.run(fed_ids(feeds), logits if first + most >= depth else DevicePtr.NULL, stream)

    def _prefix_groups(self, prompts: Iterable[Prompt]) -> list[list[Prompt]]:
        """Split prompts, in order, into runs whose targets begin equally long, which the workspace can hold."""
        groups: list[list[Prompt]] = []
        for prompt in prompts:
            depth = len(prompt.prefix)
            full = not groups or (len(groups[-1]) + 1) * depth > self._shape.prefix_rows
            if full or len(groups[-1][0].prefix) != depth:
                groups.append([])
            groups[-1].append(prompt)
        return groups

    def _encoder_groups(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Split prompts, in order, into packed passes that the workspace can hold.

        Where a sequence may not depend on others, each source has a pass of its own: the bits of products of so many
        rows depend on how many they are.
        """
        if self._shape.batch_invariant:
            return [[prompt] for prompt in prompts]
        groups: list[list[Prompt]] = [[]]
        room = self._shape.limits.encoder_tokens
        for prompt in prompts:
            if len(prompt.source) > room:
                groups.append([])
                room = self._shape.limits.encoder_tokens
            groups[-1].append(prompt)
            room -= len(prompt.source)
        return groups

    def refuse_capture(self, stream: StreamLike) -> None:
        """Raise NotSupported when ``stream`` is capturing."""
        if self._gpu.stream_is_capturing(stream):
            raise NotSupported("NllbModel", "capture", "a forward writes tables that change from call to call")
