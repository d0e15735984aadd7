# SPDX-License-Identifier: MIT OR Apache-2.0
"""Another caller of the engine's model, who takes slots, KV and rows whenever there are some."""

from __future__ import annotations

import random
from pathlib import Path

from gpu_runtime.errors import OutOfMemory
from gpu_runtime.host import HostBackend
from metrale.errors import NoFreeSlot
from metrale.model import SequenceState
from metrale.nllb.model import NllbModel
from tests.engine.alone import load
from tests.engine.job import MAX_NEW, MAX_PROMPT


class Stranger:
    """Decodes one sequence after another, greedily and a token at a time.

    Parameters
    ----------
    model : NllbModel
    rng : random.Random
    """

    def __init__(self, model: NllbModel, rng: random.Random) -> None:
        self._model = model
        self._rng = rng
        self._prompt: list[int] = []
        self._last = 0
        self.seq: SequenceState | None = None
        self.done: list[tuple[list[int], list[int]]] = []

    def act(self) -> None:
        """Begin a sequence, take a step, or leave."""
        chance = self._rng.random()
        if self.seq is None:
            if chance < 0.3:
                self._begin()
        elif chance < 0.1 or self.seq.seq_len > MAX_NEW - 1:
            self.leave()
        elif chance < 0.7:
            with self._model.exclusive():  # from the step to the last read of its row
                self._last = self._model.argmax_on_device(self._model.decode(self._last, self.seq))

    def _begin(self) -> None:
        self._prompt = [self._rng.randrange(4, 80) for _ in range(self._rng.randint(0, MAX_PROMPT))]
        try:
            self.seq = self._model.alloc_sequence_for(len(self._prompt) + 2 + MAX_NEW)
        except (NoFreeSlot, OutOfMemory):
            return
        self.seq.src_lang_id, self.seq.tgt_lang_id = 80, 81
        with self._model.exclusive():
            self._last = self._model.argmax_on_device(self._model.prefill(self._prompt, self.seq))

    def leave(self) -> None:
        """Give the sequence up and keep what it was."""
        if self.seq is not None:
            self.done.append((self._prompt, [*self.seq.tokens, self._last]))
            self._model.free_sequence(self.seq)
            self.seq = None

    def check(self, folder: Path) -> int:
        """Check every sequence against the same one alone; return how many there were."""
        with HostBackend() as gpu, load(folder, gpu, 1) as model:
            for prompt, ids in self.done:
                seq = model.alloc_sequence()
                seq.src_lang_id, seq.tgt_lang_id = 80, 81
                token = model.argmax_on_device(model.prefill(prompt, seq))
                while len(seq.tokens) + 1 < len(ids):
                    token = model.argmax_on_device(model.decode(token, seq))
                assert [*seq.tokens, token] == ids
                model.free_sequence(seq)
        return len(self.done)
