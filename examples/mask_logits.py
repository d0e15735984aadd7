# SPDX-License-Identifier: MIT OR Apache-2.0
"""Forbid a word: code of your own, on a stream of your own, changes a logits row between the decode and the choice.

    python examples/mask_logits.py [--device host|cuda]

On a GPU a CuPy kernel writes the row on a CuPy stream; on the host NumPy writes the same memory. Neither copies it, and
the row never leaves the device. docs/embedding.md says which rule each step keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import metrale
from gpu_runtime import DevicePtr, StreamLike
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import Tokenizer

TEXT: Final = "I have no time."
FORBIDDEN: Final = "pas"

LOWEST: Final = -3.0e38
"""A logit that is never chosen. Not minus infinity: a row with an infinity is refused as the result of a fault."""

MASK_KERNEL: Final = r"""
extern "C" __global__ void mask(float* row, const int* ids, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        row[ids[i]] = -3.0e38f;
    }
}
"""


class HostMask:
    """Writes `LOWEST` to some columns of a row, with NumPy. The host's work is done when a call returns."""

    stream: StreamLike = 0

    def __init__(self, model: NllbModel, ids: Sequence[int]) -> None:
        self._model = model
        self._ids = np.array(ids)

    def apply(self, ptr: DevicePtr) -> None:
        with self._model.logits_view(ptr) as row:
            # Waits for the step that writes the row. numpy.from_dlpack does so as well, but NumPy before 2.2.1
            # makes read-only arrays of what comes from there.
            array = np.asarray(row)[0]
            assert array.ctypes.data == ptr, "a copy was made"
            array[self._ids] = LOWEST


class CupyMask:
    """Does the same by a kernel on a CuPy stream, without a wait of the host."""

    def __init__(self, model: NllbModel, ids: Sequence[int]) -> None:
        import cupy

        self._cupy = cupy
        self._model = model
        self.stream: Any = cupy.cuda.Stream(non_blocking=True)
        self._kernel = cupy.RawKernel(MASK_KERNEL, "mask")
        with self.stream:
            self._ids = cupy.asarray(np.array(ids, dtype=np.int32))

    def apply(self, ptr: DevicePtr) -> None:
        # From here on, our stream comes after the step that writes the row.
        with self.stream, self._model.logits_view(ptr, stream=self.stream) as row:
            array = self._cupy.asarray(row)[0]
            assert array.data.ptr == ptr, "a copy was made"
            count = len(self._ids)
            self._kernel(((count + 127) // 128,), (128,), (array, self._ids, np.int32(count)))


def translate(model: NllbModel, tokenizer: Tokenizer, text: str, mask: HostMask | CupyMask | None = None) -> str:
    """Return the greedy translation of a text; each row goes through ``mask`` before an id is chosen from it."""
    seq = model.alloc_sequence()
    try:
        ids: list[int] = []
        ptr = model.prefill(tokenizer.encode(text), seq)
        while True:
            stream: StreamLike = 0
            if mask is not None:
                mask.apply(ptr)
                stream = mask.stream  # on which the choice comes after the mask
            token = model.argmax_on_device(ptr, stream=stream)  # waits, so the next step may write the row again
            if token == tokenizer.eos_id or len(ids) == 60:
                return tokenizer.decode(ids)
            ids.append(token)
            ptr = model.decode(token, seq)
    finally:
        model.free_sequence(seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="host, cuda, cuda:N or auto (default)")
    device = parser.parse_args().device
    # float32, because the kernel above takes floats: a row holds the type that the model runs in.
    options: dict[str, Any] = {"dtype": "float32", "source": "eng_Latn", "target": "fra_Latn"}
    with metrale.load(metrale.demo_model_path(), device=device, **options) as model:
        tokenizer = model.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(FORBIDDEN)
        assert len(ids) == 1, "expected a word that is one id"
        mask = (CupyMask if model.gpu.kind() == "cuda" else HostMask)(model, ids)
        plain, masked = translate(model, tokenizer, TEXT), translate(model, tokenizer, TEXT, mask)
        print(f"on:             {model.gpu.name()}")
        print(f"text:           {TEXT}")
        print(f"translation:    {plain}")
        print(f"without {FORBIDDEN!r}:  {masked}")
        assert FORBIDDEN in plain.split(), "expected the word where it is allowed"
        assert FORBIDDEN not in masked.split(), "expected no such word where it is forbidden"
        assert translate(model, tokenizer, TEXT) == plain, "expected a row to be written anew by each step"


if __name__ == "__main__":
    main()
