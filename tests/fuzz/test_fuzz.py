# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the fuzzers judge by, on inputs drawn from a seed: it needs no atheris, and notices what it is there for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from metrale.errors import CheckpointError
from tests.fuzz.__main__ import NAMES, replay
from tests.fuzz.mutate import changed_bytes, changed_json
from tests.fuzz.targets import BETWEEN, TARGETS, Finding

ROUNDS = {"safetensors": 150, "config": 150, "tokenizer": 25, "adapter": 150, "torch": 150}


def test_the_command_has_every_target() -> None:
    assert tuple(TARGETS) == NAMES == tuple(ROUNDS)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_a_seed(name: str, tmp_path: Path) -> None:
    """The first seed is read; what is made of the seeds is read or refused, and some of it is either."""
    target, draw = TARGETS[name], random.Random(7)
    pool = target.seeds()
    assert target.check(pool[0], tmp_path / "input")
    ends = []
    for _ in range(ROUNDS[name]):
        data = target.change(draw.choice(pool), draw)
        ends.append(target.check(data, tmp_path / "input"))
        if ends[-1] and len(pool) < 20:
            pool.append(data)
    assert set(ends) == {True, False}


FAULTS: dict[str, tuple[str, str, Callable[..., object]]] = {
    "another exception": ("config", "tests.fuzz.targets.NllbConfig.from_dir", lambda path: _raise(KeyError("missing"))),
    "no reason": ("torch", "tests.fuzz.targets.open_checkpoint", lambda path: _raise(CheckpointError(path, []))),
    "another place": ("torch", "tests.fuzz.targets.open_checkpoint", lambda path: _raise(CheckpointError("/x", "y"))),
    "a long message": (
        "torch",
        "tests.fuzz.targets.open_checkpoint",
        lambda path: _raise(_Long(path)),
    ),
    "another answer": ("safetensors", "tests.fuzz.targets.read_everything", lambda path: {"a": "f32"}),
}


class _Long(CheckpointError):
    def __init__(self, path: object) -> None:
        super().__init__(path, "x")

    def __str__(self) -> str:
        return "x" * 300_000


def _raise(error: Exception) -> object:
    raise error


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_finding(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, where, instead = FAULTS[fault]
    target = TARGETS[name]
    monkeypatch.setattr(where, instead)
    with pytest.raises((Finding, KeyError)):
        target.check(target.seeds()[0], tmp_path / "input")


def test_a_finding_is_run_again_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    path.write_bytes(TARGETS["config"].seeds()[0])
    assert replay("config", path) == 0
    path.write_bytes(b"[" + BETWEEN)
    assert replay("config", path) == 0, "it is refused, as it should be"
    monkeypatch.setattr("tests.fuzz.targets.NllbConfig.from_dir", lambda path: _raise(KeyError("missing")))
    assert replay("config", path) == 1


def test_changes_change_and_are_drawn() -> None:
    text = b'{"a": [1, 2, {"b": "c"}], "d": 5}'
    for change in (changed_bytes, changed_json):
        found = [change(text, random.Random(seed)) for seed in range(60)]
        assert found == [change(text, random.Random(seed)) for seed in range(60)]
        assert len(set(found)) > 30
