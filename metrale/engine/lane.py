# SPDX-License-Identifier: MIT OR Apache-2.0
"""A request that has a sequence of the model, and one that had to give it up for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from metrale.engine.handle import RequestHandle
from metrale.model import SequenceState


@dataclass(slots=True, eq=False)
class Lane:
    """A request with a live sequence.

    Attributes
    ----------
    handle : RequestHandle
    seq : SequenceState
    limit : int
        Decoder positions that the sequence has KV for.
    chosen : int
        Tokens that have been chosen, of each beam, or will be by the steps enqueued.
    pending : int or None
        The last of them when the next step must take it from the host; None when it is on the device.
    adapter : int
        The reference that it has to an adapter of the model, or -1.
    is_search : bool
        Whether the sequence is searched with beams.
    width : int
        Lanes that the request takes: one for each beam.
    most : int
        What ``chosen`` is once the steps enqueued reach the request's limit.
    deadline : float
        When the request is to end with "timeout"; infinity for never.
    ends : frozenset of int
        Ids that end the sequence.
    logprobs : bool
        Whether the request asks for log-probabilities.
    is_plain : bool
        Whether it asks for nothing but its tokens, one after the other.

    The last seven are the request's, here for those who look at every lane in every step.
    """

    handle: RequestHandle
    seq: SequenceState
    limit: int
    chosen: int = 0
    pending: int | None = None
    adapter: int = -1
    ended: bool = False
    is_search: bool = field(init=False)
    width: int = field(init=False)
    most: int = field(init=False)
    deadline: float = field(init=False)
    ends: frozenset[int] = field(init=False)
    logprobs: bool = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        handle, request = self.handle, self.handle.request
        self.is_search, self.width = request.beams is not None, request.width
        self.most = request.most_tokens - request.counted_from
        self.deadline = math.inf if handle.deadline is None else handle.deadline
        self.ends, self.logprobs = request.end_ids, request.logprobs
        self.is_plain = not (self.is_search or request.logprobs or request.on_token is not None)

    @property
    def priority(self) -> int:
        return self.handle.request.priority

    @property
    def rows(self) -> int:
        """Rows of the next step: one for each beam, once the beams differ."""
        return self.width if self.chosen else 1

    @property
    def is_complete(self) -> bool:
        """Whether the steps enqueued reach the request's limit."""
        return self.chosen >= self.most

    @property
    def is_full(self) -> bool:
        """Whether the next step would need a position that the sequence does not have."""
        return self.seq.seq_len >= self.limit

    def settle(self) -> None:
        """Complete the sequence's tokens, once no step is in flight."""
        prompt = self.seq.prompt_len
        self.seq.tokens = [*self.seq.tokens[:prompt], *self.handle.tokens[: self.seq.seq_len - prompt]]


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """A request whose sequence is in host memory.

    Attributes
    ----------
    handle : RequestHandle
        Of its tokens the last has not been fed.
    positions : int
        Decoder positions in use.
    data : bytes
        What `save_sequence_state` wrote.
    adapter : int
        The lane's reference to an adapter, which it keeps.
    """

    handle: RequestHandle
    positions: int
    data: bytes
    adapter: int = -1


def place(handle: RequestHandle) -> tuple[float, int]:
    """Return where a handle stands among those that wait or waited: the smaller goes first."""
    assert handle.place is not None, "every handle comes through the queue"
    return handle.place
