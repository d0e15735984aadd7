# SPDX-License-Identifier: MIT OR Apache-2.0
"""Standard input from bytes, a translator that costs nothing, and an environment without settings."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from metrale.translator import Translation

Feed = Callable[[bytes], None]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("METRALE_MODEL", "METRALE_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Feed:
    """Return a function that makes bytes the standard input."""

    def set_stdin(data: bytes) -> None:
        # an encoding that would garble text: the command has to read bytes
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="latin-1"))

    return set_stdin


class FakeTranslator:
    """Turns text to upper case. Words at the start of a text choose what goes wrong with it."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.model, self.options = model, options
        self.calls: list[list[str]] = []
        self.arguments: list[dict[str, Any]] = []
        self.closed = False

    def __enter__(self) -> FakeTranslator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def translate(
        self, texts: Sequence[str], source: str, target: str, *, progress: Callable[[int], None] | None, **rest: Any
    ) -> list[Translation]:
        self.calls.append(list(texts))
        self.arguments.append(rest)
        if "interrupt" in texts:
            raise KeyboardInterrupt
        if "fault" in texts:
            raise KeyError("inside")
        if progress is not None:
            progress(len(texts))
        return [self._one(text, source, target, scored=rest["return_scores"]) for text in texts]

    @staticmethod
    def _one(text: str, source: str, target: str, *, scored: bool) -> Translation:
        kind = text.split(" ")[0]
        if kind == "fail":
            return Translation("", (), None, "error", False, source, target, "logits are not finite")
        translated = "one\r\ntwo\u2028three" if kind == "breaks" else text.upper()
        reason: Any = "length" if kind == "long" else "eos"
        score = -0.25 if scored and text else None
        return Translation(translated, (7, 8), score, reason, kind == "cut", source, target)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeTranslator]:
    """Put FakeTranslator in the place of Translator, and return the list of those that are made."""
    made: list[FakeTranslator] = []

    def make(model: Path, **options: Any) -> FakeTranslator:
        made.append(FakeTranslator(model, **options))
        return made[-1]

    monkeypatch.setattr("metrale.cli.translate.Translator", make)
    return made
