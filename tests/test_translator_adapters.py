# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator with LoRA adapters: by name, one for all texts or one for each, beside each other in a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backend import GpuBackend
from metrale import InvalidInput, SequenceError, Translator, demo_model_path
from metrale.engine import Request
from tests.backends import Device
from tests.reference.adapters import Recipe, write_raw

CASES: list[dict[str, Any]] = json.loads((demo_model_path() / "golden.json").read_text(encoding="utf-8"))["cases"]
CHOSEN = [case for case in CASES if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "fra_Latn")]
TEXTS: list[str] = [case["text"] for case in CHOSEN][:5]
EXPECTED: list[str] = [case["greedy"]["text"] for case in CHOSEN][:5]


def demo_adapter(path: Path, seed: int) -> Path:
    """Write an adapter for the demo model that changes what it says, and return its folder."""
    config = json.loads((demo_model_path() / "config.json").read_text(encoding="utf-8"))
    recipe = Recipe(seed, r"decoder.*(q_proj|fc1)", {"r": 2, "lora_alpha": 1})
    return write_raw(path, recipe.config, recipe.tensors(config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shelf = tmp_path_factory.mktemp("adapters")
    return {name: demo_adapter(shelf / name, seed) for seed, name in enumerate(("law", "sea"))}


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture
def translator(gpu: GpuBackend, folders: dict[str, Path]) -> Iterator[Translator]:
    options: dict[str, Any] = {"dtype": "float32", "max_batch": 6, "max_source_len": 64, "max_new_tokens": 64}
    languages = {"source": "eng_Latn", "target": "fra_Latn"}
    with Translator(demo_model_path(), device=gpu, adapters=folders, **options, **languages) as translator:
        yield translator


def test_each_text_has_its_own_adapter(translator: Translator) -> None:
    assert translator.adapters == ("law", "sea")
    names = [None, "law", "sea"]
    alone = {name: [one.text for one in translator.translate(TEXTS, adapter=name)] for name in names}
    assert alone[None] == EXPECTED
    assert alone["law"] != EXPECTED != alone["sea"] != alone["law"]
    texts = [text for text in TEXTS for _ in names]
    mixed = translator.translate(texts, adapter=names * len(TEXTS))
    assert [one.adapter for one in mixed] == names * len(TEXTS)
    for place, name in enumerate(names):
        assert [one.text for one in mixed[place::3]] == alone[name]
    streamed = list(translator.stream([*TEXTS, ""], adapter="law"))
    assert [one.text for one in streamed] == [*alone["law"], ""]
    assert {one.adapter for one in streamed} == {"law"}


def test_scores_beams_and_attention_are_the_adapter_s(translator: Translator) -> None:
    plain, adapted = translator.translate(
        [TEXTS[0]] * 2, adapter=[None, "law"], num_beams=2, return_scores=True, return_attention=True
    )
    base, own = (translator.score(TEXTS[0], plain.text, adapter=name) for name in (None, "law"))
    assert base.score == pytest.approx(plain.score, abs=1e-4)
    assert own.adapter == "law"
    assert abs(own.score - base.score) > 1e-2
    again = translator.score(TEXTS[0], adapted.text, adapter="law")
    assert again.token_ids == adapted.hypotheses[0].token_ids
    assert again.score == pytest.approx(adapted.score, abs=1e-4)
    assert plain.attention is not None
    assert adapted.attention is not None
    assert np.abs(plain.attention[0] - adapted.attention[0]).max() > 1e-3


@pytest.mark.parametrize("name", ["", "lex", 0])
def test_an_unknown_name_is_refused(translator: Translator, name: Any) -> None:
    with pytest.raises(InvalidInput, match=r"adapter: expected (one of law, sea|an adapter's name)"):
        translator.translate(TEXTS[0], adapter=name)


def test_names_are_one_for_each(translator: Translator) -> None:
    with pytest.raises(InvalidInput, match="adapter: expected one name for each of 2 texts, got 1 names"):
        translator.translate(TEXTS[:2], adapter=["law"])


def test_an_adapter_that_is_replaced_meanwhile_is_not_taken_for_itself(
    translator: Translator, folders: dict[str, Path]
) -> None:
    with translator.stream(["", TEXTS[0]], adapter="law", window=1) as stream:
        assert translator.adapters == ("law", "sea")
        translator.model.swap_lora_from_disk(folders["law"], "law", 0)
        assert next(stream).text == ""
        with pytest.raises(SequenceError, match="the adapter 'law' has left its slot, or was loaded anew"):
            next(stream)
    assert translator.translate(TEXTS[0], adapter="law").text


def test_its_attention_is_not_another_one_s(
    translator: Translator, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = translator._running()
    original = engine.submit

    def submit(request: Request) -> Any:
        handle = original(request)
        handle.result()
        translator.model.swap_lora_from_disk(folders["sea"], "law", 0)
        return handle

    monkeypatch.setattr(engine, "submit", submit)
    with pytest.raises(SequenceError, match="the adapter 'law' has left its slot"):
        translator.translate(TEXTS[0], adapter="law", return_attention=True)
