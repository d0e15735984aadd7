# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command with an id of the Hugging Face Hub: in a process of its own, by the environment that users have."""

from __future__ import annotations

import json
import os
import pty
import signal
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale.cli import main
from metrale.demo import demo_model_path
from tests.cli.process import SECONDS, errors_of, run_to_end, started
from tests.hub.conftest import NLLB
from tests.hub.server import FakeHub, Refusal

DEMO = {
    path.name: path.read_bytes()
    for path in demo_model_path().iterdir()
    if path.name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    or path.name in ("sentencepiece.bpe.model", "tokenizer_config.json")
}
TEXT = "My sister works in a small school near the river."
TRANSLATED = "Meine Schwester arbeitet in einer kleinen Schule."


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the demo model, and the environment that leads to it."""
    with FakeHub() as hub:
        hub.add(NLLB, DEMO)
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def run(*arguments: object, **options: Any) -> tuple[int, str, list[str]]:
    with started(*arguments, **options) as (process, source, result):
        source.close()
        out = result.read().decode()
        errors = errors_of(process) if process.stderr is not None else []
        return process.wait(SECONDS), out, errors


def test_a_text_is_translated_by_a_model_of_the_hub(server: FakeHub, tmp_path: Path) -> None:
    arguments = ("translate", "--model", NLLB, "--from", "eng_Latn", "--to", "deu_Latn", "--device", "host", TEXT)
    assert run(*arguments) == (0, f"{TRANSLATED}\n", [])  # no bar where there is no terminal
    assert (tmp_path / "home" / "hub" / "models--facebook--nllb-tiny").is_dir()
    server.refuse["api"] = Refusal(500)
    assert run(*arguments) == (0, f"{TRANSLATED}\n", [])


@pytest.mark.parametrize(("quiet", "shown"), [(False, True), (True, False)])
def test_the_download_has_a_bar_on_a_terminal(server: FakeHub, quiet: bool, shown: bool) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    seen: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, seen))
    arguments = ["translate", "--model", NLLB, "--list-languages", *(["--quiet"] if quiet else [])]
    with started(*arguments, stderr=theirs) as (process, source, result):
        os.close(theirs)
        reader.start()
        source.close()
        assert "eng_Latn" in result.read().decode()
        assert process.wait(SECONDS) == 0
    reader.join()
    os.close(ours)
    text = b"".join(seen).decode()
    assert ("model.safetensors: 100%" in text) == shown
    assert shown or text == ""


def _read_all(fd: int, into: list[bytes]) -> None:
    try:
        while data := os.read(fd, 4096):
            into.append(data)
    except OSError:  # as Linux says that nobody has the other end any more
        return


def test_an_interrupt_ends_a_download(server: FakeHub, tmp_path: Path) -> None:
    server.stall.add("model.safetensors")
    with started("inspect", "--model", NLLB) as (process, _, result):
        assert server.stalled.wait(SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert result.read() == b""
        assert errors_of(process)[-1] == "metrale: interrupted"
    server.stall.clear()
    server.asked.clear()
    assert run("inspect", "--model", NLLB, "--json")[0] == 0
    assert server.downloaded() == ["model.safetensors"], "what was whole is kept"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("inspect", "--model", "org/none"), "org/none: there is no such folder, and the Hugging Face Hub has no such"),
        (("translate", "--model", f"{NLLB}@v9", "x"), f"{NLLB}@v9: there is no such folder, and the repository has no"),
        (
            ("score", "--model", "org/a--b", "--from", "x", "--to", "y"),
            "it can be no id of the Hugging Face Hub either",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(server: FakeHub, arguments: tuple[str, ...], part: str) -> None:
    code, errors = run_to_end(*arguments)
    assert code == 3
    assert len(errors) == 1
    assert errors[0].startswith("metrale: error: ")
    assert part in errors[0]


def test_the_environment_s_model_may_be_an_id(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_MODEL", f"{NLLB}@main")
    code, out, errors = run("inspect", "--json")
    assert (code, errors) == (0, [])
    assert json.loads(out)["model"].endswith(server.repositories[NLLB].refs["main"])


def test_offline_the_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", NLLB]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"metrale: error: {NLLB}: there is no such folder, and the cache of huggingface_hub")
    assert "HF_HUB_OFFLINE" in err
    assert f"hf download {NLLB}" in err
