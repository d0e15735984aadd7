# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ids of the Hugging Face Hub: what is said when files cannot be had, and what downloads and caches leave behind."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from metrale.errors import CheckpointError
from metrale.hub import resolve
from tests.hub.conftest import NLLB
from tests.hub.fetching import TOKENIZER, files_of, refused, shards
from tests.hub.server import FakeHub, Refusal

pytestmark = pytest.mark.usefixtures("no_waiting")

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
