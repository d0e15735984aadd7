# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ids of the Hugging Face Hub: what is taken for one, what is fetched, and what is said when that cannot be."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

import metrale
from metrale.errors import CheckpointError, InvalidInput
from metrale.hub import HubId, hub_id, resolve
from tests.hub.conftest import NLLB
from tests.hub.server import FakeHub, Refusal

SMALL: dict[str, Any] = {"max_batch": 1, "max_source_len": 8, "max_new_tokens": 4}
TOKENIZER = {
    name: name.encode()
    for name in (
        "sentencepiece.bpe.model",
        "vocab.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    )
}
OTHERS = dict.fromkeys(
    [
        *("README.md", ".gitattributes", "flax_model.msgpack", "tf_model.h5", "rust_model.ot", "onnx/model.onnx"),
        *("model.fp16.safetensors", "training_args.bin"),
    ],
    b"not needed",
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits before it tries again."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def refused(path: str) -> str:
    """Return the one problem for which a path is refused."""
    with pytest.raises(CheckpointError) as caught:
        resolve(path)
    assert caught.value.path == path
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


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


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


def shards(form: str) -> dict[str, bytes]:
    """An index and its two shards, whose contents nobody reads."""
    stem, suffix = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", "bin")
    names = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    placed = {"a": names[1], "b": names[0], "c": names[0]}
    index = json.dumps({"weight_map": placed}).encode()
    return {f"{stem}.{suffix}.index.json": index, **{name: name.encode() for name in names}}


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


Damage = Callable[[FakeHub], None]


def without(name: str) -> Damage:
    def change(hub: FakeHub) -> None:
        commit = hub.repositories[NLLB].refs["main"]
        del hub.repositories[NLLB].commits[commit][name]

    return change


def answers(place: str, status: int, code: str = "") -> Damage:
    def change(hub: FakeHub) -> None:
        hub.refuse[place] = Refusal(status, code)

    return change


BY_HAND = f"download it by hand (`hf download {NLLB}`) and name the folder"
GATED = (
    f"the repository is gated: ask for access on its page on the Hub, {NLLB}, then log in (`hf auth login`, "
    "or HF_TOKEN)"
)
NOBODY = (
    "the Hugging Face Hub has no such repository either, or it is private: check the name, or log in (`hf auth login`, "
    "or HF_TOKEN)"
)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda hub: hub.repositories.clear(), NOBODY),
        (answers("api", 404, "RepoNotFound"), NOBODY),
        (answers("api", 403, "GatedRepo"), GATED),
        (answers("config.json", 401, "GatedRepo"), GATED),
        (answers("model.safetensors", 403, "GatedRepo"), GATED),
        (answers("api", 401), "the Hugging Face Hub refuses access (401): log in with a token"),
        (answers("api", 403), "the Hugging Face Hub refuses access (403): log in with a token"),
        (answers("api", 500), f"the Hugging Face Hub answered with status 500: try again later, or {BY_HAND}"),
        (answers("api", 429), f"the Hugging Face Hub answered with status 429: try again later, or {BY_HAND}"),
        (answers("config.json", 500), "it cannot be downloaded (HfHubHTTPError: Server error '500"),
        (answers("model.safetensors", 503), "it cannot be downloaded (HfHubHTTPError: Server error '503"),
        (without("config.json"), "the repository holds no config.json, so no checkpoint in transformers' format"),
        (
            without("model.safetensors"),
            "the repository holds no weights: expected one of model.safetensors, model.safetensors.index.json, ",
        ),
    ],
)
def test_what_can_be_wrong(hub: FakeHub, checkpoint: dict[str, bytes], damage: Damage, problem: str) -> None:
    hub.add(NLLB, checkpoint)
    damage(hub)
    found = refused(NLLB)
    assert problem in found
    if "holds no" not in problem:
        assert found.startswith("there is no such folder, and ")


def test_a_shard_that_is_missing(hub: FakeHub) -> None:
    files = shards("safetensors")
    del files["model-00002-of-00002.safetensors"]
    hub.add(NLLB, {"config.json": b"{}", **files})
    expected = "the repository lacks 'model-00002-of-00002.safetensors', which its model.safetensors.index.json names"
    assert refused(NLLB) == expected


@pytest.mark.parametrize("placed", ["../../secret", "/etc/passwd", "a\\b", 7])
def test_an_index_names_files_of_its_repository(hub: FakeHub, placed: object) -> None:
    index = json.dumps({"weight_map": {"a": placed}}).encode()
    hub.add(NLLB, {"config.json": b"{}", "model.safetensors.index.json": index})
    assert sorted(files_of(resolve(NLLB))) == ["config.json", "model.safetensors.index.json"]
    assert not any("passwd" in path or "secret" in path for path in hub.asked)


def test_an_index_that_is_damaged(hub: FakeHub) -> None:
    hub.add(NLLB, {"config.json": b"{}", "model.safetensors.index.json": b"{"})
    assert "is not valid JSON" in refused(NLLB)


def test_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub() as gone:
        pass
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    assert re.fullmatch(
        r"there is no such folder, and it cannot be downloaded \(ConnectError: .*\): check the network, or "
        + re.escape(BY_HAND),
        refused(NLLB),
    )


def test_offline(cache: Path) -> None:
    assert refused(NLLB) == (
        "there is no such folder, and the cache of huggingface_hub does not have all of it, and HF_HUB_OFFLINE forbids "
        f"to ask the Hugging Face Hub: unset that, or {BY_HAND}"
    )
    assert f"(`hf download {NLLB} --revision refs/pr/3`)" in refused(f"{NLLB}@refs/pr/3")


def test_a_cache_that_cannot_be_written(hub: FakeHub, cache: Path, checkpoint: dict[str, bytes]) -> None:
    hub.add(NLLB, checkpoint)
    cache.write_text("a file where the folder should be")
    problem = refused(NLLB)
    assert problem.startswith("there is no such folder, and the cache of huggingface_hub cannot take it ([Errno ")
    assert str(cache) in problem
    assert problem.endswith("mend that, or choose another place (HF_HOME)")


def test_a_download_goes_on_where_the_connection_broke(
    hub: FakeHub, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # what came of a chunk is fetched again
    hub.add(NLLB, checkpoint)
    hub.cut["model.safetensors"] = 1000
    try:
        folder = resolve(NLLB)
    except CheckpointError:  # huggingface_hub 1 goes on in the next call, version 2 in the same one
        folder = resolve(NLLB)
    assert files_of(folder) == checkpoint
    assert [path.split(" ")[-1] for path in hub.asked if path.startswith("GET") and "safetensors" in path][-1] == (
        "bytes=1000-"
    )


def test_what_is_there_is_not_fetched_again(hub: FakeHub, checkpoint: dict[str, bytes]) -> None:
    hub.add(NLLB, checkpoint)
    hub.refuse["model.safetensors"] = Refusal(403)
    assert "it cannot be downloaded" in refused(NLLB)
    hub.refuse.clear()
    hub.asked.clear()
    assert files_of(resolve(NLLB)) == checkpoint
    assert hub.downloaded() == ["model.safetensors"]


def test_a_branch_that_moves_meanwhile(hub: FakeHub, checkpoint: dict[str, bytes]) -> None:
    """All files are of one commit."""
    commit = hub.add(NLLB, checkpoint)
    original = hub.repositories[NLLB]
    add = hub.asked.append

    class Watching(list[str]):
        def append(self, path: str) -> None:
            add(path)
            if path.startswith("HEAD") and "generation" in path:
                hub.add(NLLB, {**checkpoint, "generation_config.json": b"{}", "model.safetensors": b"new"})

    hub.asked = Watching()
    folder = resolve(NLLB)
    assert original.refs["main"] != commit
    assert folder.name == commit
    assert files_of(folder) == checkpoint


def put_in_cache(cache: Path, files: dict[str, bytes], commit: str = "c" * 40) -> Path:
    """Lay out files as other programs leave them in the cache, without a word on what the repository lacks."""
    repository = cache / "models--facebook--nllb-tiny"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for number, (name, data) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(data)
        (folder / name).symlink_to(Path("..", "..", "blobs", str(number)))
    return folder


@pytest.mark.parametrize("how", ["offline", "no network", "a server that is down"])
def test_a_cache_that_may_not_be_whole(
    how: str, hub: FakeHub, cache: Path, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = put_in_cache(cache, {**checkpoint, "vocab.json": b"{}"})
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "no network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        hub.refuse["api"] = Refusal(502)
    with caplog.at_level(logging.WARNING, "metrale"):
        assert resolve(NLLB) == folder
    (record,) = [record for record in caplog.records if record.name == "metrale.hub"]
    assert record.getMessage() == (
        f"{NLLB}@main: taken from the cache; the Hugging Face Hub cannot be asked whether it also has "
        "sentencepiece.bpe.model, tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json"
    )


def test_a_branch_that_another_process_moves_meanwhile(
    hub: FakeHub, cache: Path, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of two commits are never mixed up: here the second one is not even whole."""
    hub.add(NLLB, checkpoint)
    folder = resolve(NLLB)
    look_up = huggingface_hub.try_to_load_from_cache

    def move(name: str, file: str, **options: Any) -> Any:
        found = look_up(name, file, **options)
        (cache / "models--facebook--nllb-tiny" / "refs" / "main").write_text("d" * 40)
        return found

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", move)
    hub.asked.clear()
    assert resolve(NLLB) == folder
    assert hub.asked == []


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_cache_that_is_not_whole(cache: Path, checkpoint: dict[str, bytes], missing: str) -> None:
    put_in_cache(cache, {name: data for name, data in checkpoint.items() if name != missing})
    assert "does not have all of it" in refused(NLLB)


def test_a_cache_that_may_not_be_whole_is_asked_about(hub: FakeHub, cache: Path, checkpoint: dict[str, bytes]) -> None:
    commit = hub.add(NLLB, {**checkpoint, **TOKENIZER})
    folder = put_in_cache(cache, checkpoint, commit)
    assert resolve(NLLB) == folder
    assert files_of(folder) == {**checkpoint, **TOKENIZER}
    assert sorted(hub.downloaded()) == sorted(TOKENIZER)
    hub.refuse["api"] = Refusal(401)
    assert resolve(NLLB) == folder


def test_an_answer_is_believed_before_the_cache(hub: FakeHub, cache: Path, checkpoint: dict[str, bytes]) -> None:
    """A repository that is gone, or closed, is no matter of the network."""
    put_in_cache(cache, checkpoint)
    assert NOBODY in refused(NLLB)
