# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ids of the Hugging Face Hub: what is taken for one, and what is fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import metrale
from metrale.errors import CheckpointError, InvalidInput
from metrale.hub import HubId, hub_id, resolve
from tests.hub.conftest import NLLB
from tests.hub.fetching import TOKENIZER, files_of, refused, shards
from tests.hub.server import FakeHub

SMALL: dict[str, Any] = {"max_batch": 1, "max_source_len": 8, "max_new_tokens": 4}
OTHERS = dict.fromkeys(
    [
        *("README.md", ".gitattributes", "flax_model.msgpack", "tf_model.h5", "rust_model.ot", "onnx/model.onnx"),
        *("model.fp16.safetensors", "training_args.bin"),
    ],
    b"not needed",
)


pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("facebook/nllb-200-distilled-600M", "facebook/nllb-200-distilled-600M", "main"),
        ("facebook/m2m100_418M@refs/pr/17", "facebook/m2m100_418M", "refs/pr/17"),
        ("a/b@0123456789abcdef0123456789abcdef01234567", "a/b", "0123456789abcdef0123456789abcdef01234567"),
        ("a/b@v1.0@x", "a/b", "v1.0@x"),
        ("a/b@", "a/b", ""),
    ],
)
def test_what_is_taken_for_an_id(text: str, name: str, revision: str) -> None:
    assert hub_id(text) == HubId(name, revision)


NO_IDS = (
    "nllb",
    "./nllb",
    "../nllb",
    "./org/name",
    ".hidden/name",
    "/nllb",
    "/org/name",
    "//x",
    "~/nllb",
    "org/name/",
    "org/name@main/",
    "org/",
    "x/y/z",
    "x/y/z@main",
    "org\\name",
    "org/na\\me",
    "C:/name",
    "C:\\models\\name",
    "org/..",
    "a..b/name",
    "org/name@../x",
    "hf://org/name",
    "https://huggingface.co/org/name",
)


@pytest.mark.parametrize("text", NO_IDS)
def test_what_looks_like_a_path_is_one(text: str, hub: FakeHub) -> None:
    assert hub_id(text) is None
    assert resolve(text) == Path(text)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        metrale.memory_plan(text, "host")
    assert hub.asked == []


def test_a_path_object_is_a_path(hub: FakeHub) -> None:
    assert resolve(Path(NLLB)) == Path(NLLB)
    assert hub.asked == []


@pytest.mark.parametrize("path", [None, "", 3, b"org/name", ["org/name"]])
def test_what_is_no_path(path: Any) -> None:
    for call in (resolve, metrale.load, metrale.memory_plan):
        with pytest.raises(InvalidInput, match="path: expected the path of a checkpoint folder, or an id"):
            call(path)


@pytest.mark.parametrize("name", [NLLB, f"{NLLB}@main"])
def test_a_folder_of_that_name_comes_first(
    name: str, hub: FakeHub, checkpoint: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NLLB, checkpoint)
    folder = tmp_path / name
    folder.mkdir(parents=True)
    for file, data in checkpoint.items():
        (folder / file).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    assert resolve(name) == Path(name)
    assert metrale.memory_plan(name, "host").total > 0
    assert hub.asked == []


def test_a_folder_that_is_no_checkpoint_comes_first_too(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NLLB, {})
    (tmp_path / NLLB).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is an empty folder"):
        metrale.memory_plan(NLLB, "host")
    assert hub.asked == []


def test_what_a_checkpoint_needs_is_fetched(hub: FakeHub, cache: Path, checkpoint: dict[str, bytes]) -> None:
    wanted = {**checkpoint, **TOKENIZER}
    commit = hub.add(NLLB, {**wanted, **OTHERS, "pytorch_model.bin": b"pickle"})
    folder = resolve(NLLB)
    assert folder == cache / "models--facebook--nllb-tiny" / "snapshots" / commit
    assert files_of(folder) == wanted
    assert sorted(hub.downloaded()) == sorted(wanted)


def test_a_model_is_loaded_by_its_id(hub: FakeHub, checkpoint: dict[str, bytes], tiny_folder: Path) -> None:
    hub.add(NLLB, checkpoint)
    with metrale.load(NLLB, "host", **SMALL) as model:
        assert model.memory_plan() == metrale.memory_plan(tiny_folder, "host", **SMALL)
    assert metrale.memory_plan(f"{NLLB}@main", "host", **SMALL) == metrale.memory_plan(tiny_folder, "host", **SMALL)
    with pytest.raises(InvalidInput, match="a checkpoint with a tokenizer"):
        metrale.Translator(NLLB, device="host", **SMALL)


@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        ({"pytorch_model.bin": b"pickle"}, ["pytorch_model.bin"]),
        (shards("safetensors"), list(shards("safetensors"))),
        (shards("bin"), list(shards("bin"))),
        ({**shards("bin"), "pytorch_model.bin": b"pickle"}, ["pytorch_model.bin"]),
        ({**shards("bin"), **shards("safetensors")}, list(shards("safetensors"))),
        ({**shards("safetensors"), "pytorch_model.bin": b"pickle"}, list(shards("safetensors"))),
        ({**shards("safetensors"), "model.safetensors": b"data"}, ["model.safetensors"]),
    ],
)
def test_weights_come_in_one_form(hub: FakeHub, weights: dict[str, bytes], taken: list[str]) -> None:
    hub.add(NLLB, {"config.json": b"{}", **weights, **OTHERS})
    folder = resolve(NLLB)
    assert sorted(files_of(folder)) == sorted(["config.json", *taken])
    assert sorted(hub.downloaded()) == sorted(["config.json", *taken])
    hub.asked.clear()
    assert resolve(NLLB) == folder
    assert hub.asked == []


def test_what_is_whole_in_the_cache_is_not_asked_for(
    hub: FakeHub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NLLB, checkpoint)
    folder = resolve(NLLB)
    hub.asked.clear()
    hub.add(NLLB, {**checkpoint, "config.json": b"{}"})  # the branch moves
    assert resolve(NLLB) == resolve(f"{NLLB}@main") == resolve(f"{NLLB}@{folder.name}") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(NLLB) == folder
    assert hub.asked == []


def test_revisions_are_different_folders(hub: FakeHub, checkpoint: dict[str, bytes]) -> None:
    old = hub.add(NLLB, checkpoint, "v1")
    new = hub.add(NLLB, {**checkpoint, **TOKENIZER}, "refs/pr/2")
    main = hub.add(NLLB, {**checkpoint, "vocab.json": b"{}"})
    assert resolve(NLLB).name == main
    assert resolve(f"{NLLB}@refs/pr/2").name == new
    assert resolve(f"{NLLB}@v1").name == resolve(f"{NLLB}@{old}").name == old
    assert refused(f"{NLLB}@v2") == (
        "there is no such folder, and the repository has no revision 'v2': expected a branch, a tag or a commit"
    )


@pytest.mark.parametrize("revision", ["", "/etc/passwd", "a b", "a//b", "new\nline", "~1", "a:b", "*"])
def test_wrong_revisions(revision: str, hub: FakeHub) -> None:
    problem = f"there is no such folder, and expected a branch, a tag or a commit behind the @, got {revision!r}"
    assert refused(f"{NLLB}@{revision}") == problem
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        metrale.memory_plan(f"{NLLB}@{revision}", "host")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a--b/c", "Cannot have -- or .."),
        ("org/na me", "Repo id must use alphanumeric chars"),
        ("org/name.git", "cannot end by '.git'"),
        ("-org/name", "Repo id must use alphanumeric chars"),
    ],
)
def test_names_that_the_hub_does_not_allow(name: str, part: str, hub: FakeHub) -> None:
    problem = refused(name)
    assert problem.startswith("there is no such folder, and it can be no id of the Hugging Face Hub either: ")
    assert part in problem
    assert hub.asked == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refused(NLLB) == (
        "there is no such folder, and an id of the Hugging Face Hub needs the package huggingface_hub: "
        "pip install 'metrale[hub]'"
    )
    assert resolve(tiny_folder) == resolve(str(tiny_folder)) == tiny_folder


def test_with_a_package_that_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for statement in ("import a_package_that_is_missing", "from os import a_name_that_is_missing"):
        (tmp_path / "huggingface_hub.py").write_text(statement)
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
                patch.delitem(sys.modules, name)
            patch.syspath_prepend(str(tmp_path))
            assert "huggingface_hub cannot be imported: " in refused(NLLB)


def test_importing_metrale_does_not_import_the_package() -> None:
    program = "import sys, metrale.cli; print([n for n in sys.modules if 'hugging' in n or 'httpx' in n])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
