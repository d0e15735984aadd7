# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which cases a run has: batch sizes, greedy and with beams, and what is swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from metrale.bench.protocol import Lengths

SWEEPS: Final[Mapping[str, tuple[int, ...]]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "source": (8, 16, 32, 64, 128, 256, 512, 1000),
    "produced": (1, 2, 8, 16, 32, 64, 128, 256, 500),
}
"""What can be swept, and the values it goes through: sequences, tokens of a source, tokens that are put out."""

COLUMNS: Final[Mapping[str, str]] = {"batch": "batch", "source": "source_tokens", "produced": "new_tokens"}
"""The keys of a case in a report that hold them."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed together: so many sequences of such lengths, each with so many beams; 1 is greedy."""

    batch: int
    beams: int
    lengths: Lengths

    @property
    def lanes(self) -> int:
        """Rows of a step."""
        return self.batch * self.beams


def plan(batches: Sequence[int], beams: int, lengths: Lengths, sweep: str | None = None) -> list[Case]:
    """Return the cases of a run, greedy ones first.

    Parameters
    ----------
    batches : sequence of int
    beams : int
        Width of the searches that come after; 0 for none.
    lengths : Lengths
    sweep : {"batch", "source", "produced"} or None
        "source" and "produced" take the place of one of the lengths, for each batch size; "batch" changes nothing, as
        the batch sizes are those given.
    """
    widths = (1, beams) if beams else (1,)
    each = [lengths]
    if sweep == "source":
        each = [Lengths(value, lengths.new) for value in SWEEPS[sweep]]
    elif sweep == "produced":
        each = [Lengths(lengths.source, value) for value in SWEEPS[sweep]]
    return [Case(batch, width, one) for width in widths for batch in batches for one in each]
