# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the rows of a decoder pass are: the values of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrale.nllb.kv import Span

SPANS: Final = ("self_spans", "write_spans", "cross_spans")
"""Columns of addresses, unsigned 64-bit: a sequence's first target position, that of the beam whose positions are
written, and the source's first position."""

COUNTS: Final = (
    *("ids", "cells", "positions", "self_lengths"),
    *("cross_lengths", "beam_positions", "adapters", "ancestry"),
)
"""Columns of 32-bit integers: an id, where the device finds it instead, or -1, and its position; what the row attends
to; target positions of a beam; an adapter's slot, or -1; the row of the ancestry table that says which beam's positions
are attended to, or -1."""

IDS, CELLS, POSITIONS, SELF_LENGTHS, CROSS_LENGTHS, BEAM_POSITIONS, ADAPTERS, ANCESTRY = range(len(COUNTS))


class Feed(NamedTuple):
    """Tokens that one sequence feeds in a pass over ids that the host knows: ``ids[i]`` goes to position ``first + i``.

    Attributes
    ----------
    ids : tuple of int
    first : int
    span : Span
    """

    ids: tuple[int, ...]
    first: int
    span: Span


class Fed(NamedTuple):
    """The rows of a pass: a value for each in every column.

    Attributes
    ----------
    spans : ndarray
        uint64 ``[3, rows]``, as `SPANS` says. Spare rows are included.
    counts : ndarray
        ``[8, rows]``, as `COUNTS` says.
    lanes : int
        Sequences, or beams, that feed ids.
    depth : int
        Rows of each.
    """

    spans: NDArray[np.uint64]
    counts: NDArray[Any]
    lanes: int
    depth: int = 1


def fed_ids(feeds: Sequence[Feed]) -> Fed:
    """Return the rows of feeds that have as many ids each, one feed's after the other's."""
    depth, lanes = len(feeds[0].ids), len(feeds)
    spans = [feed.span for feed in feeds]
    own, source = [span.target() for span in spans], [int(span.ptr) for span in spans]
    counts = np.empty((len(COUNTS), lanes, depth), np.int64)
    counts[IDS], counts[CELLS], counts[ANCESTRY] = [feed.ids for feed in feeds], -1, -1
    counts[POSITIONS] = np.array([feed.first for feed in feeds])[:, None] + np.arange(depth)
    counts[SELF_LENGTHS] = counts[POSITIONS] + 1
    counts[CROSS_LENGTHS] = np.array([span.source_len for span in spans])[:, None]
    counts[BEAM_POSITIONS] = np.array([span.beam_positions for span in spans])[:, None]
    counts[ADAPTERS] = np.array([span.adapter for span in spans])[:, None]
    return Fed(
        np.array((own, own, source), np.uint64).repeat(depth, axis=1), counts.reshape(len(COUNTS), -1), lanes, depth
    )
