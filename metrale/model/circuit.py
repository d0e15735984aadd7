# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelCircuit: which forward decode runs, and what a record says of it."""

from __future__ import annotations

from metrale.errors import InvalidInput
from metrale.model.refusal import refusal
from metrale.model.types import ForwardDisclosure, ForwardSelect


class ModelCircuit:
    """The choice between a family's own layer loop and a compiled circuit. The defaults know only the former."""

    def set_forward(self, select: ForwardSelect) -> None:
        """Choose the forward that decode runs from its next step on.

        Default: ``"legacy"`` is what runs anyway.

        Raises
        ------
        metrale.errors.NotSupported
            By default, for ``"circuit"``: to run the other forward under its name would falsify records.
        metrale.errors.InvalidInput
            When ``select`` is neither.
        """
        if select == "circuit":
            raise refusal(self, "set_forward", "it has no circuit")
        if select != "legacy":
            raise InvalidInput("select", "'legacy' or 'circuit'", select)

    def forward_disclosure(self) -> ForwardDisclosure:
        """Return what decode runs now. Default: legacy, without a digest or a count of launches."""
        return ForwardDisclosure()
