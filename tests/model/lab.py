# SPDX-License-Identifier: MIT OR Apache-2.0
"""A tiny NLLB model to call the methods of the Model interface on, with a judge of what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from metrale.model import PrefillSlice, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.decoding import EOS, START, relative, row_index
from tests.reference.nllb_float64 import NllbFloat64

SOURCE, TARGET = 80, 81
LANES = 4
VOCAB = 97
PROMPT, OTHER = [5, 6, 7], [8, 9]
PREFIX = [START, TARGET]
EXACT = 1e-5
"""How far a float32 row may be from the float64 one, of the largest logit: ten times what the demo model shows."""

REFUSES: Final = object()
"""In place of a value: the call raises NotSupported."""


class Watched:
    """A model that knows which of its methods were asked for."""

    def __init__(self, model: NllbModel) -> None:
        self._model = model
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._model, name)


class Lab:
    """A tiny model of 4 lanes with default languages, and sequences to call it with.

    Attributes
    ----------
    model : Watched
        For the call under test.
    real : NllbModel
        The same model, for what comes before and after.
    """

    def __init__(self, model: NllbModel, judge: NllbFloat64) -> None:
        self.real = model
        self.model: Any = Watched(model)
        self.gpu = model.gpu
        self.judge = judge

    def fresh(self) -> SequenceState:
        """Return a new sequence."""
        return self.real.alloc_sequence()

    def live(self, prompt: list[int] = PROMPT, tokens: Sequence[int] = ()) -> SequenceState:
        """Return a new sequence that has taken in ``prompt`` and decoded ``tokens``."""
        seq = self.fresh()
        self.real.prefill(prompt, seq)
        for token in tokens:
            self.real.decode(token, seq)
        return seq

    def slices(self) -> list[PrefillSlice]:
        """Return new sequences with `PROMPT` and `OTHER` to take in."""
        return [PrefillSlice.whole(prompt, self.fresh()) for prompt in (PROMPT, OTHER)]

    def step(self) -> DevicePtr:
        """Return row 0 of a step of two sequences, of which `PROMPT` takes the id 9 and `OTHER` the id 10."""
        return self.real.decode_batch([9, 10], [self.live(), self.live(OTHER)])

    def expected(self, tokens: Sequence[int] = (), prompt: list[int] = PROMPT) -> NDArray[np.float64]:
        """Return the float64 logits after the target language and ``tokens``."""
        row: NDArray[np.float64] = self.judge.logits([SOURCE, *prompt, EOS], [*PREFIX, *tokens])[-1]
        return row

    def ranked(self, tokens: Sequence[int] = (), prompt: list[int] = PROMPT) -> list[int]:
        """Return all ids by their logits after ``tokens``, the largest first."""
        ids: list[int] = np.argsort(-self.expected(tokens, prompt)).tolist()
        return ids

    def right(self, row: NDArray[np.float32], tokens: Sequence[int] = (), prompt: list[int] = PROMPT) -> bool:
        """Return whether ``row`` has the logits after ``tokens``."""
        return relative(row, self.expected(tokens, prompt)) < EXACT

    def at(self, ptr: DevicePtr, tokens: Sequence[int] = (), prompt: list[int] = PROMPT) -> int:
        """Return which row of the arena ``ptr`` is. It must have the logits after ``tokens``."""
        assert self.right(self.real.copy_logits_to_host(ptr), tokens, prompt)
        return row_index(self.real, ptr)

    def after(self, ptr: DevicePtr) -> DevicePtr:
        """Return the address of the next row."""
        return ptr.offset(self.real.logits_row_bytes())

    def at_both(self, ptrs: Sequence[DevicePtr]) -> list[int]:
        """Return which rows the prefills of `slices` wrote."""
        return [self.at(ptr, (), prompt) for ptr, prompt in zip(ptrs, (PROMPT, OTHER), strict=True)]


class Row(NamedTuple):
    """One method: a function that calls it, and what that function returns.

    Attributes
    ----------
    expected : object
        The value; a function that returns it; or `REFUSES`.
    names : str
        The method that the refusal names, where it is another one.
    """

    method: str
    call: Callable[[Lab], object]
    expected: object = None
    names: str = ""
