# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelBeams: beam searches whose candidates, tables and finished hypotheses stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.model.beam_types import BeamParams, Hypothesis
from metrale.model.refusal import refusal
from metrale.model.sampling import SamplingParams
from metrale.model.types import SequenceState


class ModelBeams:
    """The parts of a beam search, for who runs several at once and other sequences beside them.

    A search is one sequence that holds a lane for each beam. ``alloc_beams`` claims them, a prefill takes in the source
    once for all, and ``begin_beams`` says how to search. Then ``select_beams_to_feed`` and a fed decode step take
    turns: in ``decode_batch_fed`` and its like, the sequence stands for as many rows as it has beams, and is fed with
    ``FeedSource(sampled=True)``. A step's rows are those of its sequences in their order. ``take_beams`` returns what
    was found. A model without beam search keeps the defaults.
    """

    def alloc_beams(self, num_beams: int, source_tokens: int, target_tokens: int) -> SequenceState:
        """Claim a lane for each of ``num_beams`` beams, and KV for one source and as many targets.

        Parameters
        ----------
        num_beams : int
        source_tokens : int
            Tokens of the source, its language and EOS included.
        target_tokens : int
            Tokens that the decoder is given for one beam, the start token included.

        Raises
        ------
        metrale.errors.NoFreeSlot
            When there are not so many lanes free.
        gpu_runtime.errors.OutOfMemory
            When the KV does not fit; no lane is claimed.
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "alloc_beams")

    def begin_beams(
        self, seq: SequenceState, beams: BeamParams, params: SamplingParams, stream: StreamLike = 0
    ) -> None:
        """Set how a prefilled sequence of ``alloc_beams`` is searched, before its first selection.

        ``params`` has what is done to log-probabilities, the ids that end a hypothesis (``eos_ids``) and the limit
        (``max_new_tokens``); nothing is drawn, so its temperature is 0.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        metrale.errors.InvalidInput
            When an id is not in the vocabulary, or the settings do not go together.
        metrale.errors.SequenceError
            When ``seq`` is not live or has not been prefilled, or has too little KV.
        """
        raise refusal(self, "begin_beams")

    def select_beams_to_feed(
        self,
        rows: Sequence[DevicePtr],
        seqs: Sequence[SequenceState],
        dst: NDArray[np.integer[Any]],
        event: int,
        stream: StreamLike = 0,
    ) -> None:
        """Go one step on with every search, on the device; nothing waits.

        A search that has ended stays as it is, and its rows mean nothing.

        Parameters
        ----------
        rows : sequence of DevicePtr
            For each sequence the row of its first beam's logits, which the other beams' follow; before the first
            selection there is one row for all.
        seqs : sequence of SequenceState
            ``seq_len`` is the position that the selected ids will have.
        dst : NDArray[np.integer]
            One 32-bit integer for each sequence, a view of pinned memory, filled by a copy on ``stream``: flags, as
            `metrale.model.beam_types` has them; other bits mean nothing to callers.
        event : int
            Recorded on ``stream`` after the copy; ``dst`` may be read once it has happened.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "select_beams_to_feed")

    def take_beams(self, seq: SequenceState) -> list[Hypothesis]:
        """Return the finished hypotheses of a search that has ended, the best first, at most ``num_return_sequences``.

        The caller has seen the flag that says so. Waits for a small copy, not for steps that are enqueued.

        Raises
        ------
        metrale.errors.NotSupported
            By default.
        metrale.errors.SequenceError
            When ``seq`` holds no search.
        """
        raise refusal(self, "take_beams")
