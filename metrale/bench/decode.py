# SPDX-License-Identifier: MIT OR Apache-2.0
"""The model's calls, timed: encoder and prefill, decode steps, and how much of a step is the host's.

The protocol is that of `metrale.bench.protocol`: 32 source tokens and exactly 64 output tokens whatever they are, total
and first token by the wall clock, and a step as (total of 64 - total of 1) / 63.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

from gpu_runtime import DevicePtr
from metrale.bench.protocol import FIRST_WORD, LEAST_ONES, STANDARD, Lengths, sources, spread, timings
from metrale.bench.timing import Clock, Reader
from metrale.errors import NonFiniteLogits
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel

LANGUAGE: Final = FIRST_WORD
"""An id that stands for both languages; random weights do not tell words from languages."""


class Batch:
    """Live sequences with sources of equal length. A context manager that frees them.

    Parameters
    ----------
    model : NllbModel
    size : int
    lengths : Lengths
        Of each source, and the most that is put out.
    """

    def __init__(self, model: NllbModel, size: int, lengths: Lengths = STANDARD) -> None:
        self.model = model
        self.sources = [ids[1:-1] for ids in sources(size, lengths.source, model.vocab_size(), LANGUAGE)]
        self.lengths = lengths
        self.seqs: list[SequenceState] = []
        try:
            for _ in range(size):
                seq = model.alloc_sequence_for(lengths.source + lengths.budget)
                seq.src_lang_id = seq.tgt_lang_id = LANGUAGE
                self.seqs.append(seq)
        except BaseException:
            self.free()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.free()

    def free(self) -> None:
        """Free the sequences."""
        while self.seqs:
            self.model.free_sequence(self.seqs.pop())

    def prefill(self) -> DevicePtr:
        """Enqueue encoder and prefill of all sequences, from the start again; return the first logits row."""
        pairs = zip(self.sources, self.seqs, strict=True)
        return self.model.prefill_batch_chunk([PrefillSlice.whole(ids, seq) for ids, seq in pairs])[0]

    def decode(self, tokens: Sequence[int]) -> DevicePtr:
        """Enqueue a step; return the first logits row."""
        return self.model.decode_batch(tokens, self.seqs)

    def go_half_way(self, tokens: list[int]) -> list[int]:
        """Decode half of what is put out, from the first tokens on; return the likeliest ones after that."""
        for _ in range(self.lengths.half_way):
            tokens = self.choose(self.decode(tokens))
        return tokens

    def choose(self, row: DevicePtr) -> list[int]:
        """Return the likeliest token of each sequence. `NonFiniteLogits` when a row has a NaN or an infinity."""
        tokens, bad = self.model.argmax_rows(row, len(self.seqs))
        if bad:
            raise NonFiniteLogits(tuple(bad))
        return tokens


def generate(model: NllbModel, size: int, new_tokens: int, lengths: Lengths = STANDARD) -> dict[str, Any]:
    """Decode greedily and return the wall-clock milliseconds: all of it, and what the host spent enqueuing each step.

    Allocating and freeing the sequences counts, as it does in the peers' calls.
    """
    enqueuing = []
    start = time.perf_counter()
    with Batch(model, size, lengths) as batch:
        tokens = batch.choose(batch.prefill())
        ids = [tokens]
        for _ in range(new_tokens - 1):
            before = time.perf_counter()
            row = batch.decode(tokens)
            enqueuing.append(1e3 * (time.perf_counter() - before))
            tokens = batch.choose(row)
            ids.append(tokens)
    return {"ms": 1e3 * (time.perf_counter() - start), "enqueue_ms": enqueuing, "ids": ids}


def wall_times(model: NllbModel, size: int, repeats: int) -> dict[str, Any]:
    """Time whole generations of 1 and of 64 tokens, after the same calls to warm up as the peers make."""
    first = generate(model, size, STANDARD.new)
    generate(model, size, STANDARD.new)
    generate(model, size, 1)
    ones = [generate(model, size, 1)["ms"] for _ in range(max(repeats, LEAST_ONES))]
    runs = [generate(model, size, STANDARD.new) for _ in range(repeats)]
    return {
        "first_call_ms": round(first["ms"], 1),
        **timings(size, ones, [run["ms"] for run in runs]),
        "host_enqueue_ms": spread([ms for run in runs for ms in run["enqueue_ms"]]),
        "same_tokens_each_time": all(run["ids"] == first["ids"] for run in runs),
        "different_tokens": len({token for step in first["ids"] for token in step}),
        "ids": first["ids"],
    }


class Busy:
    """Keeps the device busy for at least twice the time that the host takes to enqueue a piece of work."""

    def __init__(self, clock: Clock, reader: Reader) -> None:
        self._reader = reader
        reader.read(reader.nbytes)
        self._ms = statistics.median(clock.ms(lambda: reader.read(reader.nbytes), 3))

    def during(self, host_ms: float) -> Callable[[], None]:
        """Return a function that enqueues reads on the default stream."""
        count = min(1 + int(2 * host_ms / self._ms), 64)

        def keep() -> None:
            for _ in range(count):
                self._reader.read(self._reader.nbytes)

        return keep


def device_times(model: NllbModel, size: int, clock: Clock, busy: Busy, host_ms: float, repeats: int) -> dict[str, Any]:
    """Time encoder and prefill, and decode steps half way, by the device's clock, the host being ahead of it."""
    with Batch(model, size) as batch:
        batch.choose(batch.prefill())
        prefill_host = _host_ms(lambda: batch.prefill(), model)
        prefill = clock.ms(batch.prefill, repeats, before=busy.during(prefill_host))
        tokens = batch.choose(batch.prefill())
        tokens = batch.go_half_way(tokens)
        steps = clock.ms(lambda: batch.decode(tokens), STANDARD.device_steps(repeats), before=busy.during(host_ms))
    return {
        "prefill_device_ms": spread(prefill),
        "prefill_host_enqueue_ms": round(prefill_host, 4),
        "step_device_ms": spread(steps),
    }


def _host_ms(work: Callable[[], object], model: NllbModel) -> float:
    model.synchronize()
    start = time.perf_counter()
    work()
    ms = 1e3 * (time.perf_counter() - start)
    model.synchronize()
    return ms
