# SPDX-License-Identifier: MIT OR Apache-2.0
"""Standard input from bytes, a folder to spoil, a translator that costs nothing, and no settings in the environment."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from metrale.translator import Translation, UnknownSpan
from tests.cli.inspecting import linked_demo

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of the demo model whose files a test may replace."""
    return linked_demo(tmp_path)


class FakeStream(Iterator[Translation]):
    """Translates the next text when it is asked for one."""

    def __init__(self, texts: Iterable[str], translate: Callable[[str], Translation]) -> None:
        self._texts = iter(texts)
        self._translate = translate
        self._cancelled = False

    def __next__(self) -> Translation:
        if self._cancelled:
            raise StopIteration
        return self._translate(next(self._texts))

    def cancel(self) -> None:
        self._cancelled = True

    def close(self) -> None:
        self._cancelled = True


def _unknown(text: str) -> Iterator[UnknownSpan]:
    """What is unknown: every run of characters behind the basic plane."""
    for found in re.finditer("[\U00010000-\U0010ffff]+", text):
        yield UnknownSpan(found.start(), found.end(), found.group())


class FakeTranslator:
    """Turns text to upper case. Words at the start of a text choose what goes wrong with it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options
        device = SimpleNamespace(kind=lambda: "host")
        self.model = SimpleNamespace(gpu=device, logits_dtype=lambda: options["dtype"])
        self.texts: list[str] = []
        self.arguments: list[dict[str, Any]] = []
        self.closed = False

    def __enter__(self) -> FakeTranslator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def check_options(self, source: str, target: str, **rest: Any) -> None:
        """All is well."""

    def stream(self, texts: Iterable[str], source: str, target: str, **rest: Any) -> FakeStream:
        self.arguments.append(rest)
        return FakeStream(texts, lambda text: self._one(text, source, target, scored=rest["return_scores"]))

    def _one(self, text: str, source: str, target: str, *, scored: bool) -> Translation:
        self.texts.append(text)
        kind = text.split(" ")[0]
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "fault":
            raise KeyError("inside")
        if kind == "fail":
            return Translation("", (), None, "error", False, source, target, "logits are not finite")
        translated = "one\r\ntwo\u2028three" if kind == "breaks" else text.upper()
        reason: Any = {"long": "length", "late": "timeout", "stopped": "cancelled"}.get(kind, "eos")
        score = -0.25 if scored and text else None
        told: dict[str, Any] = {"unknown": tuple(_unknown(text)), "repeats": kind == "loop"}
        return Translation(translated, (7, 8), score, reason, kind == "cut", source, target, **told)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeTranslator]:
    """Put FakeTranslator in the place of Translator, and return the list of those that are made."""
    made: list[FakeTranslator] = []

    def make(path: Path, **options: Any) -> FakeTranslator:
        made.append(FakeTranslator(path, **options))
        return made[-1]

    monkeypatch.setattr("metrale.cli.translate.Translator", make)
    return made
