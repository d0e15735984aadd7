# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelLogits: reading what a forward left behind, by address."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.device_buffer import DeviceBuffer
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.model.refusal import refusal
from metrale.model.types import LogitsDtype


class ModelLogits(ABC):
    """Logits rows and what can be learnt of them.

    Row ``i`` of the logits arena lies ``i * logits_row_bytes()`` bytes after row 0. Its first ``vocab_size()`` elements
    are logits; the padding after them is -inf, or NaN in a row whose logits are not finite. A row's bytes are there
    once ``logits_event(ptr)`` has happened: the reading calls below wait for it by themselves.
    """

    @abstractmethod
    def vocab_size(self) -> int:
        """Return the number of logits in a row, which is the number of rows of the checkpoint's output matrix."""

    @abstractmethod
    def logits_row_bytes(self) -> int:
        """Return the distance in bytes between two rows, padding included."""

    @abstractmethod
    def logits_dtype(self) -> LogitsDtype:
        """Return the element type of the rows."""

    @abstractmethod
    def logits_event(self, ptr: DevicePtr) -> int:
        """Return the event that says that the row at ``ptr`` is written, for readers that wait on the device.

        Raises
        ------
        metrale.errors.InvalidInput
            When ``ptr`` is not the address of a row.
        """

    def logits_view(self, ptr: DevicePtr, n: int = 1, stream: StreamLike = 0) -> DeviceBuffer:
        """Return ``n`` rows, the first of them at ``ptr``, for other libraries to take without a copy.

        Parameters
        ----------
        ptr : DevicePtr
            Address of the first row, as a forward returned it.
        n : int
            Number of rows.
        stream : StreamLike
            Made to wait for the rows on the device, and what the buffer is ordered after: an importer's stream comes
            after it. The host does not wait.

        Returns
        -------
        DeviceBuffer
            ``[n, vocab]`` in the rows' own type, its rows ``logits_row_bytes()`` apart. The next forward that writes
            these rows writes them under whoever has imported it. While an import lives, the model cannot be closed.

        Raises
        ------
        metrale.errors.InvalidInput
            When ``ptr`` is not the address of a row, or the arena has fewer than ``n`` rows from there.
        metrale.errors.NotSupported
            By default.
        """
        raise refusal(self, "logits_view")

    @abstractmethod
    def copy_logits_to_host(self, ptr: DevicePtr, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Copy one row to the host as float32, whatever the row's own type; blocks until the row is written.

        Parameters
        ----------
        ptr : DevicePtr
            Address of the row.
        out : NDArray[np.float32], optional
            Where to put it, float32 ``[vocab]``. A new array otherwise.

        Returns
        -------
        NDArray[np.float32]
            ``out``, or the new array: float32 ``[vocab]``.

        Raises
        ------
        metrale.errors.InvalidInput
            When ``ptr`` is not the address of a row, or ``out`` has another shape or type.
        """

    def logits_ptr_is_fp32(self, ptr: DevicePtr) -> bool:
        """Return whether the row at ``ptr`` holds float32. Default: False."""
        return False

    @abstractmethod
    def logits_buffer_ptr(self) -> DevicePtr:
        """Return the address of decode row 0, where the arena starts."""

    @abstractmethod
    def argmax_on_device(self, ptr: DevicePtr, stream: StreamLike = 0) -> int:
        """Return the id of the largest logit of the row at ``ptr``, the lowest id where several are largest.

        ``stream`` waits for the row; the host waits for the id.

        Raises
        ------
        metrale.errors.InvalidInput
            When ``ptr`` is not the address of a row.
        """

    @abstractmethod
    def argmax_batch(self, ptr: DevicePtr, n: int, stream: StreamLike = 0) -> list[int]:
        """Return ``argmax_on_device`` of ``n`` rows, the first of them at ``ptr``, in order.

        Raises
        ------
        metrale.errors.InvalidInput
            When ``ptr`` is not the address of a row, or the arena has fewer than ``n`` rows from there.
        """

    @abstractmethod
    def argmax_rows(self, ptr: DevicePtr, n: int, stream: StreamLike = 0) -> tuple[list[int], list[int]]:
        """Do as ``argmax_batch``, for callers that go on with the sound rows of a batch.

        Returns
        -------
        ids, bad : list[int], list[int]
            The id of each row, and the indices of the rows that hold a NaN or an infinity; their ids mean nothing.
        """

    def hidden_after_norm(self) -> DevicePtr:
        """Return the address of the last step's hidden rows after the final norm. Default: NULL, they are not kept."""
        return DevicePtr.NULL

    def decode_logits_fp32(self) -> bool:
        """Return whether ``decode`` of one sequence writes float32, to be read at ``decode_logits_ptr``.

        Default: False.
        """
        return False

    @abstractmethod
    def decode_logits_ptr(self) -> DevicePtr:
        """Return the address of the row that ``decode`` of one sequence wrote last."""
