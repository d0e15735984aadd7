# SPDX-License-Identifier: MIT OR Apache-2.0
"""A hub that tests may ask, and an empty cache for what comes from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from tests.hub.server import FakeHub

NLLB = "facebook/nllb-tiny"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proxy of this machine's stands before the hub, and no connection outlives its test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield
    close_session()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of huggingface_hub."""
    path = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    return path


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub without repositories, which huggingface_hub takes for the real one."""
    with FakeHub() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture(scope="session")
def checkpoint(tiny_folder: Path) -> dict[str, bytes]:
    """The files of a tiny checkpoint."""
    return {path.name: path.read_bytes() for path in sorted(tiny_folder.iterdir())}


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits before it tries again."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
