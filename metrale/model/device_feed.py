# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelDeviceFeed: decode steps that take their input ids from the device, so that the host need not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.handles import PinnedMemory
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.model.refusal import refusal
from metrale.model.sampling import SamplingParams
from metrale.model.types import FeedSource, MixedBatchResult, PrefillSlice, RowMask, SequenceState

NOT_FINITE_FLAG: Final = 1
NO_CHOICE_FLAG: Final = 2


class ModelDeviceFeed:
    """Steps enqueued ahead of the host: ``decode_batch_fed`` reads ids that ``argmax_batch_to_feed`` wrote.

    The host learns the ids some steps later, from pinned memory, once an event says that they are there. A model
    without a feed keeps the defaults.
    """

    def supports_device_token_feed(self) -> bool:
        """Return whether the calls below work. Default: False."""
        return False

    def decode_batch_fed(
        self, sources: Sequence[FeedSource], seqs: Sequence[SequenceState], stream: StreamLike = 0
    ) -> DevicePtr:
        """Enqueue a decode step whose row ``i`` takes its id from ``sources[i]``; return row 0 of its logits.

        It does as ``decode_batch`` does but leaves ``tokens`` and ``seq_len`` of the sequences alone, as the ids may
        not be known yet. The id goes to position ``seq.seq_len``: a caller that enqueues another step before it
        knows the ids advances ``seq_len`` first, and ``tokens`` once it does.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "decode_batch_fed")

    def argmax_batch_to_feed(
        self,
        logits: DevicePtr,
        masks: Sequence[RowMask],
        dst: NDArray[np.integer[Any]],
        event: int,
        stream: StreamLike = 0,
    ) -> None:
        """Choose the next id of ``len(masks)`` rows and leave it in the feed cells; nothing waits.

        Parameters
        ----------
        logits : DevicePtr
            The first row. Row ``i`` goes to feed cell ``i``.
        masks : Sequence[RowMask]
            What may not be chosen, per row.
        dst : NDArray[np.integer]
            One 32-bit integer per row, a view of pinned memory; the ids are copied there on ``stream``.
        event : int
            Recorded on ``stream`` after the copy; ``dst`` may be read once it has happened.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "argmax_batch_to_feed")

    def begin_sampling(self, seq: SequenceState, params: SamplingParams, stream: StreamLike = 0) -> None:
        """Set how the ids of ``seq`` are chosen by ``sample_batch_to_feed`` from here on; until then, greedily.

        A prefill makes it greedy again.

        The history of the sequence is ``seq.tokens``, so this comes after its prefill, and after its restoration from a
        saved state. What the device keeps of it goes with the slot.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        metrale.errors.InvalidInput
            When an id is not in the vocabulary.
        metrale.errors.SequenceError
            When ``seq`` is not live or has not been prefilled.
        """
        raise refusal(self, "begin_sampling")

    def sample_batch_to_feed(
        self,
        logits: DevicePtr,
        seqs: Sequence[SequenceState],
        dst: NDArray[np.integer[Any]],
        event: int,
        stream: StreamLike = 0,
        *,
        logprobs: bool = False,
        untouched: bool = False,
    ) -> None:
        """Choose the next id of every sequence on the device, each in its own way; nothing waits.

        The id of ``seqs[i]`` is kept for ``FeedSource(sampled=True)``, and joins the sequence's history on the device.

        Parameters
        ----------
        logits : DevicePtr
            The row of ``seqs[0]``; the others follow.
        seqs : Sequence[SequenceState]
            ``seq_len`` is the position that the chosen id will have.
        dst : NDArray[np.integer]
            32-bit integers ``[3, len(seqs)]``, a view of pinned memory, filled by a copy on ``stream``: the ids; the
            bits of their float32 log-probabilities under the unprocessed logits (0 unless ``logprobs``); and flags:
            `NOT_FINITE_FLAG` when the row holds a NaN or an infinity, `NO_CHOICE_FLAG` when every id is forbidden.
        event : int
            Recorded on ``stream`` after the copy; ``dst`` may be read once it has happened.
        untouched : bool
            A promise that nobody but the model has written to these rows since the forward that filled them. The model
            may then go by what it has found of them on the way. The ids are the same.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "sample_batch_to_feed")

    def mixed_forward_batch_fed(
        self,
        sources: Sequence[FeedSource],
        decode_seqs: Sequence[SequenceState],
        prefill_streams: Sequence[PrefillSlice],
        stream: StreamLike = 0,
    ) -> MixedBatchResult:
        """Do as ``mixed_forward_batch``, with the decode lanes fed as by ``decode_batch_fed``.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "mixed_forward_batch_fed")

    def reserve_decode_block(self, seq: SequenceState) -> int:
        """Make sure that there is a KV block for position ``seq.seq_len``; return the blocks taken for it, 0 or 1.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "reserve_decode_block")

    def release_decode_blocks(self, seq: SequenceState, n: int) -> None:
        """Give back the last ``n`` blocks that were reserved for a step which was then dropped.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "release_decode_blocks")

    def fed_step_settled(self) -> None:
        """Say that a fed step is done on the device, so that the graph it ran may be evicted. Default: nothing."""

    def event_query(self, event: int) -> bool:
        """Return whether ``event`` has happened, without waiting. Default: True."""
        return True

    def event_synchronize(self, event: int) -> None:
        """Wait on the host until ``event`` has happened. Default: nothing."""

    def destroy_event(self, event: int) -> None:
        """Give back ``event``. Default: nothing."""

    def copy_d2h_async(self, src: DevicePtr, dst: NDArray[Any], stream: StreamLike = 0) -> None:
        """Enqueue a copy of ``dst.nbytes`` bytes to the host; ``dst`` may be read once ``stream`` has come past it.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "copy_d2h_async")

    def alloc_host_pinned(self, nbytes: int) -> PinnedMemory:
        """Return ``nbytes`` bytes of zeroed page-locked host memory.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "alloc_host_pinned")

    def free_host_pinned(self, memory: PinnedMemory) -> None:
        """Give back what ``alloc_host_pinned`` returned.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "free_host_pinned")
