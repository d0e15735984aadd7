# SPDX-License-Identifier: MIT OR Apache-2.0
"""The folders of the examples and their scripts."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
EXTENSION: Final = ROOT / "examples" / "c_extension"
EMBED: Final = ROOT / "examples" / "cpp_embed"


def script(folder: Path) -> ModuleType:
    """Import an example's run.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location(f"run_{folder.name}", folder / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(folder: Path) -> list[str]:
    """Return the command that docs/c_api.md gives for an example."""
    page = (ROOT / "docs" / "c_api.md").read_text("utf-8")
    (command,) = [line[2:] for line in page.splitlines() if line.startswith(f"$ python examples/{folder.name}/run.py")]
    return [sys.executable, *shlex.split(command)[1:]]


def run(command: list[str]) -> list[str]:
    """Run a command that must succeed without a word on stderr, and return the lines that it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()
