# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelEp: commands between the ranks of a model that is spread over several devices."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from metrale.model.types import SequenceState


class ModelEp:
    """The command protocol of expert parallelism. The defaults are those of a model on one device."""

    def ep_worker_step(self, slots: MutableSequence[SequenceState | None]) -> bool:
        """Receive and run one command, on a rank other than the leading one.

        Parameters
        ----------
        slots : MutableSequence[SequenceState | None]
            The worker's sequences by slot; the command may fill or empty one.

        Returns
        -------
        bool
            Whether to go on; False is an order to stop. Default: True.

        Raises
        ------
        EpCommandFailed
            When the command ran and failed; the worker goes on. Any other error means that the link is lost.
        """
        return True

    def is_ep(self) -> bool:
        """Return whether the model speaks this protocol. Default: False."""
        return False

    def ep_broadcast_cmd(self, cmd: int) -> None:
        """Send the 32-bit command word ``cmd`` to every other rank. Default: nothing."""

    def ep_broadcast_cmd_for_seq(self, seq_id: int, cmd: int) -> None:
        """Send ``cmd`` with the slot it is meant for, as the first word of a command. Default: nothing."""

    def ep_protocol_v2(self) -> bool:
        """Return whether commands carry the slot they are meant for. Default: False."""
        return False

    def ep_broadcast_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Send ``tokens`` to every other rank and return what was received. Default: an empty list."""
        return []
