# SPDX-License-Identifier: MIT OR Apache-2.0
"""NllbModel: NLLB-200 and M2M-100 behind the Model interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.handles import PinnedMemory
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.checkpoint import Checkpoint
from metrale.errors import InvalidInput, NonFiniteLogits, NotSupported, SequenceError
from metrale.model import LogitsDtype, PrefillSlice, SequenceState
from metrale.nllb.admission import FRAME_LEN, PREFIX_LEN, Admission, Languages, Prompt
from metrale.nllb.checks import integer, token_id, token_ids
from metrale.nllb.decoder import Decoder, Feed
from metrale.nllb.device_weights import load_weights
from metrale.nllb.encoder import Encoder
from metrale.nllb.kv import KvPool
from metrale.nllb.limits import ModelShape
from metrale.nllb.logits import LogitsRows
from metrale.nllb.plan import MemoryPlan, check_launches, check_memory, plan_memory
from metrale.nllb.sequences import SequenceTable
from metrale.nllb.tokenizer import NllbTokenizer
from metrale.nllb.unsupported import TranslationOnly
from metrale.nllb.weights import WeightMap
from metrale.nllb.workspace import Workspace


class NllbModel(TranslationOnly):
    """A translation model on one device.

    Calls from several threads are served one at a time; threads that share rows or slots hold `exclusive` over a step
    and its reads. Forward calls enqueue and return the address of a logits row; the calls that read rows wait for them.
    A row holds until the next call that writes it: decode lane ``i`` is the same row for everyone.

    A call that is refused leaves every sequence as it was; so does one that the device fails to enqueue, except that a
    sequence which was being prefilled *again* is left empty. What fails later, on the device, is raised by the next
    call that waits for it.

    Parameters
    ----------
    gpu : GpuBackend
        Stays the caller's, unless ``owns_gpu``.
    shape : ModelShape
    checkpoint : Checkpoint
        Read during construction only.
    weights : WeightMap
        Where the checkpoint keeps each tensor.
    languages : Languages
    tokenizer : NllbTokenizer or None
        For those who want text; the model itself uses ids.
    owns_gpu : bool
        Whether `close` closes the backend.

    Raises
    ------
    OutOfMemory
        When weights, KV, logits and workspace do not fit; nothing stays allocated.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        shape: ModelShape,
        checkpoint: Checkpoint,
        weights: WeightMap,
        *,
        languages: Languages | None = None,
        tokenizer: NllbTokenizer | None = None,
        owns_gpu: bool = False,
    ) -> None:
        self.shape: Final = shape
        self.config: Final = shape.config
        self.gpu: Final = gpu
        self.tokenizer: Final = tokenizer
        self.languages: Final = languages or Languages()
        self._lock = threading.RLock()
        with ExitStack() as undo:
            if owns_gpu:
                undo.callback(gpu.close)
            check_memory(gpu, plan_memory(shape))
            check_launches(gpu, shape, checkpoint.path)
            params = load_weights(gpu, shape, checkpoint, weights)
            undo.callback(params.arena.free)
            pool = KvPool(gpu, shape.kv_bytes, shape.position_bytes)
            undo.callback(pool.free)
            space = Workspace(gpu, shape)
            undo.callback(space.free)
            self._logits = LogitsRows(gpu, shape, space["argmax"])
            undo.callback(self._logits.free)
            self._idle = gpu.create_event()  # the end of the latest forward, whose workspace the next one reuses
            undo.callback(gpu.destroy_event, self._idle)
            undo.callback(gpu.event_synchronize, self._idle)
            self._teardown: ExitStack | None = undo.pop_all()  # runs newest first
        self._encoder = Encoder(gpu, shape, params, space)
        self._decoder = Decoder(gpu, shape, params, space)
        self._hidden = space["decoder.hidden"]
        self._table = SequenceTable(pool, shape.limits.max_batch)
        self._admission = Admission(type(self).__name__, shape, self.languages, self._table)

    def __enter__(self) -> NllbModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # lifecycle

    def close(self) -> None:
        """Wait for the device and free everything the model holds, newest first. Calling it again does nothing."""
        with self._lock:
            teardown, self._teardown = self._teardown, None
            if teardown is not None:
                teardown.close()

    def teardown(self) -> None:
        self.close()

    def memory_plan(self) -> MemoryPlan:
        """Return the device memory that the model holds."""
        return plan_memory(self.shape)

    def _check_open(self) -> None:
        if self._teardown is None:
            raise SequenceError("the model is closed")

    def exclusive(self) -> AbstractContextManager[object]:
        return self._lock

    def bind_gpu_to_thread(self) -> None:
        self.gpu.bind_to_thread()

    def alloc_sequence(self) -> SequenceState:
        return self.alloc_sequence_for(self.shape.limits.positions)

    def alloc_sequence_for(self, budget_tokens: int) -> SequenceState:
        """Claim a slot, and KV for ``budget_tokens`` tokens in all.

        A sequence's tokens are its source (with language and EOS) and what its decoder consumes (with the start token
        and the language); more than the model's limits allow is cut to them.
        """
        least = FRAME_LEN + PREFIX_LEN
        budget = integer("budget_tokens", budget_tokens, least)
        with self._lock:
            self._check_open()
            return self._table.alloc(min(budget, self.shape.limits.positions))

    def cache_sequence(self, seq: SequenceState) -> None:
        """Do nothing: a translation's prefix is never met again."""

    def free_sequence(self, seq: SequenceState) -> None:
        with self._lock:
            if self._teardown is not None:
                self._table.free(seq)

    def compact_sequence(self, seq: SequenceState, new_slot: int) -> None:
        """Move ``seq`` to ``new_slot``. Its KV stays in place, found by the new slot from here on.

        Raises
        ------
        SequenceError
            When ``seq`` is not live, or another live sequence holds ``new_slot``: free or detach that first.
        InvalidInput
            When there is no such slot.
        """
        with self._lock:
            self._check_open()
            self._table.move(seq, new_slot)

    def detach_slot_for_reuse(self, seq: SequenceState) -> None:
        """Release what ``seq`` holds, as `free_sequence` does.

        Raises
        ------
        SequenceError
            When ``seq`` holds a slot of another model: detaching it here would lose that slot.
        """
        with self._lock:
            if self._teardown is not None and not self._table.owns(seq) and not seq.is_detached:
                raise SequenceError(f"detach_slot_for_reuse: slot {seq.slot_idx} is not held for seq by this model")
            self.free_sequence(seq)
            seq.slot_idx = SequenceState.DETACHED

    def num_free_blocks(self) -> int:
        """Return 2**20: the KV is not paged, so there are no blocks to run out of."""
        return 1 << 20

    # forward

    def prefill(self, tokens: Sequence[int], seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        with self._lock:
            self._check_open()
            ids = token_ids("tokens", tokens, self.shape.vocab)
            prompt = self._admission.prompt(PrefillSlice.whole(ids, seq), "tokens")
            return self._prefill([prompt], self.shape.limits.max_batch + seq.slot_idx, stream)[0]

    def prefill_chunk(
        self,
        tokens: Sequence[int],
        seq: SequenceState,
        chunk_start: int,
        chunk_len: int,
        is_last_chunk: bool,
        stream: StreamLike = 0,
    ) -> DevicePtr:
        """Prefill the whole source: the encoder reads in both directions, so a part of it has no meaning.

        Raises
        ------
        InvalidInput
            Also when the chunk is not all of ``tokens``.
        """
        with self._lock:
            self._check_open()
            ids = token_ids("tokens", tokens, self.shape.vocab)
            prompt = self._admission.prompt(PrefillSlice(ids, seq, chunk_start, chunk_len, is_last_chunk), "tokens")
            return self._prefill([prompt], self.shape.limits.max_batch + seq.slot_idx, stream)[0]

    def prefill_batch_chunk(self, streams: Sequence[PrefillSlice], stream: StreamLike = 0) -> list[DevicePtr]:
        return self.prefill_batch_chunk_rows(streams, stream, 0)

    def prefill_batch_chunk_rows(
        self, streams: Sequence[PrefillSlice], stream: StreamLike = 0, row_base: int = 0
    ) -> list[DevicePtr]:
        """Prefill several sources in one packed encoder pass; source ``i``'s logits go to row ``row_base + i``.

        Raises
        ------
        InvalidInput
            As `prefill`, for any of them; when a sequence is named twice; or when the arena has no such rows. Nothing
            is enqueued then.
        """
        with self._lock:
            self._check_open()
            if not streams:
                return []
            most = self._logits.arena.rows - len(streams)
            expected = f"a row from which {len(streams)} rows lie within the arena's {self._logits.arena.rows}"
            first = integer("row_base", row_base, 0, most, expected)
            prompts = [self._admission.prompt(one, f"streams[{index}]") for index, one in enumerate(streams)]
            self._admission.check_distinct([one.seq for one in streams], "streams")
            return self._prefill(prompts, first, stream)

    def decode(self, token: int, seq: SequenceState, stream: StreamLike = 0) -> DevicePtr:
        return self.decode_batch([token_id("token", token, self.shape.vocab)], [seq], stream)

    def decode_batch(self, tokens: Sequence[int], seqs: Sequence[SequenceState], stream: StreamLike = 0) -> DevicePtr:
        """Run one step for every sequence in one batch; sequence ``i``'s logits go to row ``i``.

        Raises
        ------
        InvalidInput
            When there are no sequences, more than ``max_batch``, one twice, or not as many tokens; or when a token is
            not in the vocabulary.
        SequenceError
            When a sequence is not live, has not been prefilled, or has reached its limit. Nothing is enqueued.
        """
        with self._lock:
            self._check_open()
            ids = token_ids("tokens", tokens, self.shape.vocab)
            if not seqs or len(ids) != len(seqs) or len(seqs) > self.shape.limits.max_batch:
                most = self.shape.limits.max_batch
                got = f"{len(ids)} tokens and {len(seqs)} sequences"
                raise InvalidInput("tokens, seqs", f"one token for each of 1 to {most} sequences", got)
            self._admission.check_distinct(seqs, "seqs")
            spans = [self._admission.decodable(seq) for seq in seqs]
            feeds = [Feed((token,), seq.seq_len, span) for token, seq, span in zip(ids, seqs, spans, strict=True)]
            with self._forward(stream):
                self._decoder.run(feeds, self._logits.arena.base, stream)
                self._logits.written(0, len(feeds), stream)
            for token, seq in zip(ids, seqs, strict=True):
                seq.tokens.append(token)
                seq.seq_len += 1
            return self._logits.arena.base

    def _prefill(self, prompts: list[Prompt], row: int, stream: StreamLike) -> list[DevicePtr]:
        start = self.config.generation.decoder_start_token_id
        with self._forward(stream):
            for prompt in prompts:
                if prompt.seq.seq_len:  # its KV is about to be overwritten: empty, should the device fail half way
                    prompt.seq.tokens, prompt.seq.seq_len, prompt.seq.prompt_len = [], 0, 0
                prompt.span.source_len = len(prompt.source)
            for group in self._encoder_groups(prompts):
                self._encoder.run([one.source for one in group], [one.span for one in group], stream)
            feeds = [Feed((start, prompt.target), 0, prompt.span) for prompt in prompts]
            self._decoder.run(feeds, self._logits.arena.row(row), stream)
            self._logits.written(row, len(prompts), stream)
        for prompt in prompts:
            prompt.seq.tokens = [start, prompt.target]
            prompt.seq.seq_len = prompt.seq.prompt_len = PREFIX_LEN
        return [self._logits.arena.row(row + index) for index in range(len(prompts))]

    def _encoder_groups(self, prompts: list[Prompt]) -> list[list[Prompt]]:
        """Split prompts, in order, into packed passes that the workspace can hold."""
        groups: list[list[Prompt]] = [[]]
        room = self.shape.limits.encoder_tokens
        for prompt in prompts:
            if len(prompt.source) > room:
                groups.append([])
                room = self.shape.limits.encoder_tokens
            groups[-1].append(prompt)
            room -= len(prompt.source)
        return groups

    @contextmanager
    def _forward(self, stream: StreamLike) -> Iterator[None]:
        """Order a forward after the last one, whose activations it overwrites, even if that failed half way."""
        if self.gpu.stream_is_capturing(stream):
            raise NotSupported(type(self).__name__, "capture", "a forward writes tables that change from call to call")
        self.gpu.stream_wait_event(stream, self._idle)
        try:
            yield
        finally:
            self.gpu.record_event(self._idle, stream)

    # logits

    def vocab_size(self) -> int:
        return self.shape.vocab

    def logits_row_bytes(self) -> int:
        return self._logits.arena.row_bytes

    def logits_dtype(self) -> LogitsDtype:
        return cast(LogitsDtype, dtypes.long_name(self.shape.dtype))

    def logits_ptr_is_fp32(self, ptr: DevicePtr) -> bool:
        self._logits.index(ptr)
        return self.shape.dtype == "f32"

    def decode_logits_fp32(self) -> bool:
        return self.shape.dtype == "f32"

    def logits_event(self, ptr: DevicePtr) -> int:
        with self._lock:
            self._check_open()
            return self._logits.event(ptr)

    def logits_buffer_ptr(self) -> DevicePtr:
        self._check_open()
        return self._logits.arena.base

    def decode_logits_ptr(self) -> DevicePtr:
        return self.logits_buffer_ptr()

    def hidden_after_norm(self) -> DevicePtr:
        """Return the address of the last forward's hidden rows after the final norm, ``[rows, d_model]``.

        A decode step has one row a sequence, a prefill two (decoder start and language).
        """
        self._check_open()
        return self._hidden

    def copy_logits_to_host(self, ptr: DevicePtr, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        with self._lock:
            self._check_open()
            return self._logits.read(ptr, out)

    def argmax_rows(self, ptr: DevicePtr, n: int, stream: StreamLike = 0) -> tuple[list[int], list[int]]:
        with self._lock:
            self._check_open()
            return self._logits.argmax(ptr, n, stream)

    def argmax_batch(self, ptr: DevicePtr, n: int, stream: StreamLike = 0) -> list[int]:
        """Return the argmax id of ``n`` rows from ``ptr``. `NonFiniteLogits` names the rows with a NaN or infinity."""
        ids, bad = self.argmax_rows(ptr, n, stream)
        if bad:
            raise NonFiniteLogits(tuple(bad))
        return ids

    def argmax_on_device(self, ptr: DevicePtr, stream: StreamLike = 0) -> int:
        """Return the argmax id of the row at ``ptr``. `NonFiniteLogits` when it has a NaN or infinity."""
        return self.argmax_batch(ptr, 1, stream)[0]

    # streams

    def default_stream(self) -> int:
        return self.gpu.default_stream()

    def create_stream(self) -> int:
        return self.gpu.create_stream()

    def create_event(self) -> int:
        return self.gpu.create_event()

    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        self.gpu.record_event(event, stream)

    def event_query(self, event: int) -> bool:
        return self.gpu.event_query(event)

    def event_synchronize(self, event: int) -> None:
        self.gpu.event_synchronize(event)

    def destroy_event(self, event: int) -> None:
        self.gpu.destroy_event(event)

    def copy_d2h_async(self, src: DevicePtr, dst: NDArray[Any], stream: StreamLike = 0) -> None:
        self.gpu.copy_d2h_async(src, dst, stream)

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        return self.gpu.alloc_host_pinned(nbytes)

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        self.gpu.free_host_pinned(memory)

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        self.gpu.stream_wait_event(stream, event)

    def synchronize(self, stream: StreamLike = 0) -> None:
        self.gpu.synchronize(stream)
