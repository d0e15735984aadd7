# SPDX-License-Identifier: MIT OR Apache-2.0
"""A request that has a sequence of the model, and one that had to give it up for a while."""

from __future__ import annotations

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
    ids : list of int
        Those of them that the host knows, EOS included.
    pending : int or None
        The last of ``ids`` when the next step must take it from the host; None when it is on the device.
    adapter : int
        The reference that it has to an adapter of the model, or -1.
    is_search : bool
        Whether the sequence is searched with beams.
    """

    handle: RequestHandle
    seq: SequenceState
    limit: int
    chosen: int = 0
    ids: list[int] = field(default_factory=list)
    pending: int | None = None
    adapter: int = -1
    ended: bool = False
    is_search: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_search = self.handle.request.beams is not None

    @property
    def priority(self) -> int:
        return self.handle.request.priority

    @property
    def rows(self) -> int:
        """Rows of the next step: one for each beam, once the beams differ."""
        return self.handle.request.width if self.is_search and self.chosen else 1

    @property
    def is_complete(self) -> bool:
        """Whether the steps enqueued reach the request's limit."""
        request = self.handle.request
        return request.counted_from + self.chosen >= request.most_tokens

    @property
    def is_full(self) -> bool:
        """Whether the next step would need a position that the sequence does not have."""
        return self.seq.seq_len >= self.limit

    def settle(self) -> None:
        """Complete the sequence's tokens, once no step is in flight."""
        prompt = self.seq.prompt_len
        self.seq.tokens = [*self.seq.tokens[:prompt], *self.ids[: self.seq.seq_len - prompt]]


@dataclass(frozen=True, slots=True, eq=False)
class Swapped:
    """A request whose sequence is in host memory.

    Attributes
    ----------
    handle : RequestHandle
    ids : list of int
        The tokens chosen so far; the last has not been fed.
    positions : int
        Decoder positions in use.
    data : bytes
        What `save_sequence_state` wrote.
    adapter : int
        The lane's reference to an adapter, which it keeps.
    """

    handle: RequestHandle
    ids: list[int]
    positions: int
    data: bytes
    adapter: int = -1


def place(handle: RequestHandle) -> tuple[float, int]:
    """Return where a handle stands among those that wait or waited: the smaller goes first."""
    assert handle.place is not None, "every handle comes through the queue"
    return handle.place
