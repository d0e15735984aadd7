# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model's calls on logits rows."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from gpu_runtime.arena import LogitsArena
from gpu_runtime.device_buffer import DeviceBuffer
from gpu_runtime.pointer import DevicePtr
from gpu_runtime.streams import StreamLike
from metrale.errors import NonFiniteLogits
from metrale.model import LogitsDtype
from metrale.nllb.core import NllbCore


class LogitsCalls(NllbCore):
    """`metrale.model.ModelLogits`."""

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

    def logits_view(self, ptr: DevicePtr, n: int = 1, stream: StreamLike = 0) -> DeviceBuffer:
        with self._lock:
            self._check_open()
            return self._logits.view(ptr, n, stream)

    def logits_buffer_ptr(self) -> DevicePtr:
        self._check_open()
        return self._logits.arena.base

    def __logits_arena__(self) -> LogitsArena:
        """Return where the rows are, for C hosts: ``gpurt_logits_from_object`` asks for it."""
        self._check_open()
        return self._logits.arena

    def decode_logits_ptr(self) -> DevicePtr:
        return self.logits_buffer_ptr()

    def hidden_after_norm(self) -> DevicePtr:
        """Return the address of the last forward's hidden rows after the final norm, ``[rows, d_model]``.

        A decode step has one row a sequence, a prefill two (decoder start and language).
        """
        self._check_open()
        return self._passes.hidden

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
