# SPDX-License-Identifier: MIT OR Apache-2.0
"""The README tells the truth: its snippets run, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENGINE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
ADAPTERS = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
BEAMS = (ROOT / "docs" / "beam_search.md").read_text(encoding="utf-8")
EXCHANGE = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
README_SNIPPETS, ENGINE_SNIPPETS, ADAPTER_SNIPPETS, BEAM_SNIPPETS, EXCHANGE_SNIPPETS = (
    re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for page in (README, ENGINE, ADAPTERS, BEAMS, EXCHANGE)
)
SNIPPETS = [*README_SNIPPETS, *ENGINE_SNIPPETS, *ADAPTER_SNIPPETS, *BEAM_SNIPPETS, *EXCHANGE_SNIPPETS]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_runs(index: int, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPETS[index], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_there_are_snippets_for_every_level() -> None:
    assert len(README_SNIPPETS) == 6
    assert len(ENGINE_SNIPPETS) == 3
    assert len(ADAPTER_SNIPPETS) == 2
    assert len(BEAM_SNIPPETS) == 2
    assert len(EXCHANGE_SNIPPETS) == 2


def test_the_first_shell_block_is_two_commands() -> None:
    block = re.search(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert block is not None
    install, test = block[1].splitlines()
    assert install.startswith("pip install -e '.[test]' && metrale translate ")
    assert test == "pytest"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_a_draft(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text) > 400, "a page with nothing on it"
    assert not re.search(r"@[A-Z_]+@|TODO|TBD", text)
