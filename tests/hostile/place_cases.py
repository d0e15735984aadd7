# SPDX-License-Identifier: MIT OR Apache-2.0
"""Binary files that are no files or cut short, and paths that lead nowhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import metrale
from tests.backends import open_host
from tests.hostile import damage, stage
from tests.hostile.case import Answer, Case, Refusal

FILES: Final[dict[str, tuple[str, Callable[[Path], object], str]]] = {
    stage.WEIGHTS: ("whole", stage.judged, "safetensors"),
    stage.SHARDS[0]: ("sharded", stage.judged, "safetensors"),
    "adapter_model.safetensors": ("adapter", stage.judged_adapter, "safetensors"),
    stage.SPM: ("whole", stage.judged, "SentencePiece"),
}

CUTS: Final = (0, 1, 7, 8, 9, 100, 1000, 5000, -1, -2, -4, -1000)


def _files() -> Iterator[Case]:
    for name, (base, run, what) in FILES.items():
        # A shard's problems are listed with the folder's: it may be one of many that are not there.
        path = "/input" if base == "sharded" else f"input/{name}"
        for length in CUTS:
            says = (
                rf"is an empty file, expected (safetensors data|a {what})"
                if length == 0
                else rf"is not a (complete|whole) {what}"
            )
            expect = Refusal("CheckpointError", says, path=path, problems=1)
            build = stage.copied(base, damage.of(name, damage.cut(length)))
            yield Case(f"places/{name}/cut_{length}", run, expect, build)
        for label, (change, says) in damage.NOT_A_FILE.items():
            expect = Refusal("CheckpointError", says, path=path, problems=1)
            yield Case(f"places/{name}/{label}", run, expect, stage.copied(base, damage.of(name, change)))
        for label, data in {
            "text": b"hello\n" * 50,
            "pickle": b"\x80\x02cos\nsystem\nX\x02\0\0\0idtR.",
            "zip": b"PK\3\4" + b"\0" * 200,
        }.items():
            expect = Refusal("CheckpointError", rf"is not a (complete|whole) {what}", path=path, problems=1)
            yield Case(
                f"places/{name}/{label}", run, expect, stage.copied(base, damage.of(name, damage.replaced(data)))
            )
        link = stage.copied(base, damage.of(name, damage.link_elsewhere))
        yield Case(f"places/{name}/link", run, Answer(stage.SAME), link)


def _everything_linked(folder: Path) -> None:
    for path in list(folder.iterdir()):
        damage.link_elsewhere(path)


class Bytes:
    """A path that is bytes, which os.PathLike allows."""

    def __init__(self, path: bytes) -> None:
        self._path = path

    def __fspath__(self) -> bytes:
        return self._path


PATHS: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "missing": (lambda folder: folder / "nowhere", "there is no such folder"),
    "empty_folder": (lambda folder: folder, "is an empty folder"),
    "a_file": (lambda folder: folder.parent / "log", "is a file, expected the folder"),
    "under_a_file": (lambda folder: folder.parent / "log" / "model", "is a file, expected|there is no such"),
    "long": (lambda folder: folder / ("x" * 5000), "cannot be read: File name too long"),
    "long_path": (lambda folder: folder / "/".join(["x"] * 5000), "cannot be read: File name too long|no such folder"),
    "nul": (lambda folder: f"{folder}\0", "cannot be read"),
    "surrogate": (lambda folder: f"{folder}/\ud800", "cannot be read|no such folder"),
    "device": (lambda folder: "/dev/null", "is a file, expected the folder"),
    "hub_name": (lambda folder: "facebook/nllb-200-distilled-600M", "there is no such folder"),
    "url": (lambda folder: "https://localhost/model", "there is no such folder"),
}

WRONG_PATHS: Final[dict[str, Callable[[Path], Any]]] = {
    "none": lambda folder: None,
    "int": lambda folder: 3,
    "bytes": lambda folder: os.fsencode(folder),
    "pathlike_of_bytes": lambda folder: Bytes(os.fsencode(folder)),
    "empty": lambda folder: "",
    "list": lambda folder: [folder],
    "object": lambda folder: object(),
}

CALLS: Final[dict[str, Callable[[Any], object]]] = {
    "load": lambda path: metrale.load(path, "host"),
    "memory_plan": lambda path: metrale.memory_plan(path, "host"),
    "Translator": lambda path: metrale.Translator(path, device="host"),
    "adapters": lambda path: metrale.load(stage.folder("tiny"), open_host(), adapters={"it": path}, **stage.LIMITS),
}


def _call(function: Callable[[Any], object], path_of: Callable[[Path], Any]) -> Callable[[Path], object]:
    return lambda folder: function(path_of(folder))


def _paths() -> Iterator[Case]:
    for call, function in CALLS.items():
        for label, (path_of, says) in PATHS.items():
            refused = Refusal("CheckpointError", says)
            yield Case(f"places/path/{call}/{label}", _call(function, path_of), refused)
        for label, wrong in WRONG_PATHS.items():
            name = r"adapters\['it'\]" if call == "adapters" else "model|path"
            refused = Refusal("InvalidInput", "the path of a", argument=name)
            yield Case(f"places/path/{call}/{label}", _call(function, wrong), refused)


def cases() -> Iterator[Case]:
    """Every file and every path."""
    yield from _files()
    yield from _paths()
    yield Case("places/all_linked", stage.judged, Answer(stage.SAME), stage.copied("whole", _everything_linked))
    yield Case(
        "places/all_linked_sharded", stage.judged, Answer(stage.SAME), stage.copied("sharded", _everything_linked)
    )
