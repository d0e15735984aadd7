# SPDX-License-Identifier: MIT OR Apache-2.0
"""docs/embedding.md tells the truth: its rules have the tests that it names, its mistakes the errors that it shows."""

from __future__ import annotations

import ast
import contextlib
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gpu_runtime.errors import GpuRuntimeError
from gpu_runtime.host import HostBackend

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
MISTAKES: Final = {
    name: (code, error)
    for name, code, error in re.findall(
        r"^\*\*([^*]+)\.\*\*(?:(?!^\*\*).)*?\n\n^```python\n(.*?)^```\n\n^```text\n(.*?)^```$",
        PAGE[PAGE.index("## Common mistakes") :],
        re.DOTALL | re.MULTILINE,
    )
}
TESTS: Final = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
ROWS: Final = [line for line in PAGE.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]


def plain(text: str) -> str:
    """Return an error's text without what differs from run to run: addresses, their neighbours, places of lines."""
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", " ".join(text.split()))
    text = re.sub(r"the nearest is [\d,]+ bytes (before|past).*?; used at", "the nearest is SOMEWHERE; used at", text)
    return re.sub(r"\S+:\d+ in \S+?(?=[,;:]|$| and | \()", "PLACE", text)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the snippets begin with, as the page says."""
    found: dict[str, Any] = {}
    (prelude,) = re.findall(r"^Each begins with these lines:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(prelude, found)
    yield found
    gpu: HostBackend = found["gpu"]
    found.clear()
    gc.collect()
    with contextlib.suppress(BufferError, GpuRuntimeError):  # what a mistake has left behind may be an error here, too
        gpu.abort_capture_if_active()
        gpu.close()


def test_the_page_has_mistakes_and_rules() -> None:
    assert len(MISTAKES) == len(re.findall(r"^```text$", PAGE, re.MULTILINE)) >= 15
    assert len(ROWS) >= 20


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_the_error_that_is_shown(names: dict[str, Any], mistake: str) -> None:
    code, expected = MISTAKES[mistake]
    *before, last = ast.parse(code).body
    exec(compile(ast.Module(before, []), "example.py", "exec"), names)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is compared below
        exec(compile(ast.Module([last], []), "example.py", "exec"), names)
    assert plain(f"{caught.type.__name__}: {caught.value}") == plain(expected)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_rule_names_a_test(row: str) -> None:
    assert re.search(r"`tests/[\w/]+\.py::\w+`", row)


@pytest.mark.parametrize(("path", "name"), sorted(set(TESTS)))
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", ["cuda/lifetime.py", "interpreter.py", "../metrale/engine/engine.py"])
def test_the_errors_of_processes_are_what_is_said(path: str) -> None:
    """They come in a child or a subinterpreter; the tests that the page names for them meet them there."""
    source = ast.walk(ast.parse((ROOT / "gpu_runtime" / path).read_text(encoding="utf-8")))
    said = {node.value for node in source if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert said & set(re.findall(r"`\w+Error: ([^`]+)`", " ".join(PAGE.split()))), f"the page has no error of {path}"
