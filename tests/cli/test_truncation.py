# SPDX-License-Identifier: MIT OR Apache-2.0
"""Nothing is cut in silence: on every way in, what is too long is an error, or cut with a flag that says so, and the
command says it too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.backend import GpuBackend
from metrale import BeamReq, Engine, InvalidInput, Request, SamplingParams, ScoreReq, Translation, Translator
from metrale.cli import main
from metrale.demo import demo_model_path
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.cli.conftest import Feed
from tests.test_translator_adapters import demo_adapter

SOURCE, TARGET = 64, 16  # tokens that the model takes, and gives
SHORT = "The garage door is open."
LONG = "Turn off the lights in the living room. " * 12
LONG_PREFIX = "de la porte " * 20
OPTIONS = {"dtype": "float32", "max_batch": 2, "max_source_len": SOURCE, "max_new_tokens": TARGET}
LANGUAGES = {"source": "eng_Latn", "target": "fra_Latn"}


@pytest.fixture(scope="module")
def gpu(device: Device) -> Iterator[GpuBackend]:
    with device.open() as backend:
        yield backend


@pytest.fixture(scope="module")
def translator(gpu: GpuBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Translator]:
    adapter = demo_adapter(tmp_path_factory.mktemp("adapter") / "law", 0)
    adapted = {"adapters": {"law": adapter}}
    with Translator(demo_model_path(), device=gpu, **OPTIONS, **LANGUAGES, **adapted) as translator:
        yield translator


Way = Callable[[Translator, str], Any]

SOURCES: dict[str, Way] = {
    "translate": lambda translator, text: translator.translate(text),
    "translate, many": lambda translator, text: translator.translate([SHORT, text, ""])[1],
    "translate, beams": lambda translator, text: translator.translate(text, num_beams=2, num_return_sequences=2),
    "translate, drawn": lambda translator, text: translator.translate(text, sampling=SamplingParams(temperature=1)),
    "translate, prefix": lambda translator, text: translator.translate(text, target_prefix="La"),
    "translate, adapter": lambda translator, text: translator.translate(text, adapter="law"),
    "translate, attention": lambda translator, text: translator.translate(text, return_attention=True),
    "translate, scores": lambda translator, text: translator.translate(text, return_scores=True),
    "translate, late": lambda translator, text: translator.translate(text, timeout=1e-6),
    "stream": lambda translator, text: list(translator.stream([SHORT, text]))[1],
    "stream, adapter": lambda translator, text: next(iter(translator.stream([text], adapter="law"))),
    "score": lambda translator, text: translator.score(text, "Oui."),
    "score, many": lambda translator, text: translator.score([SHORT, text], ["Oui.", "Oui."])[1],
    "score, adapter": lambda translator, text: translator.score(text, "Oui.", adapter="law"),
}


@pytest.mark.parametrize("way", SOURCES)
def test_a_source_that_is_cut_is_flagged(way: str, translator: Translator) -> None:
    assert SOURCES[way](translator, SHORT).truncated is False
    result = SOURCES[way](translator, LONG)
    assert result.truncated is True
    assert json.loads(json.dumps(result.to_dict()))["truncated"] is True


def test_the_flag_turns_where_the_room_ends(translator: Translator) -> None:
    tokenizer = translator.model.tokenizer
    assert tokenizer is not None
    words = "open " * 80
    (most,) = {
        len(words[: 5 * count].split()) for count in range(1, 81) if len(tokenizer.encode(words[: 5 * count])) == 62
    }
    for count, cut in ((most, False), (most + 1, True)):
        text = words[: 5 * count]
        assert [SOURCES[way](translator, text).truncated for way in ("translate", "stream", "score")] == [cut] * 3
        for refusing in (translator.translate, lambda text, **how: list(translator.stream([text], **how))):
            if cut:
                with pytest.raises(
                    InvalidInput, match=r"texts\[0\]: expected a text of at most 62 tokens, got 63 tokens"
                ):
                    refusing(text, truncate=False)
            else:
                assert refusing(text, truncate=False)


@pytest.mark.parametrize(
    ("way", "match"),
    [
        (lambda t: t.translate(SHORT, target_prefix=LONG_PREFIX), "target_prefix: expected at most"),
        (lambda t: t.translate([SHORT, SHORT], target_prefix=[None, LONG_PREFIX]), "target_prefix: expected at most"),
        (lambda t: list(t.stream([SHORT], target_prefix=LONG_PREFIX)), "target_prefix: expected at most"),
        (lambda t: t.check_options(target_prefix=LONG_PREFIX), "target_prefix: expected at most"),
        (lambda t: t.translate(SHORT, num_beams=2, target_prefix=LONG_PREFIX), "target_prefix: expected at most"),
        (lambda t: t.translate(SHORT, max_new_tokens=TARGET + 1), "max_new_tokens: expected an int from 1 to 16"),
        (lambda t: t.score(SHORT, LONG_PREFIX), r"targets\[0\]: expected a text of at most 15 tokens"),
        (lambda t: t.score([LONG, SHORT], ["a", "b"], truncate=False), r"sources\[0\]: expected a text of at most 62"),
        (lambda t: t.translate([SHORT, LONG], truncate=False), r"texts\[1\]: expected a text of at most 62 tokens"),
    ],
)
def test_what_cannot_be_cut_is_refused(way: Callable[[Translator], Any], match: str, translator: Translator) -> None:
    with pytest.raises(InvalidInput, match=match):
        way(translator)


def test_a_translation_that_is_cut_says_length(translator: Translator) -> None:
    few = {"max_new_tokens": 4}
    results: list[Translation] = [
        translator.translate(SHORT, **few),  # type: ignore[call-overload]
        translator.translate(SHORT, num_beams=2, **few),  # type: ignore[call-overload]
        translator.translate(SHORT, target_prefix="La", **few),  # type: ignore[call-overload]
        *translator.stream([SHORT], **few),  # type: ignore[arg-type]
    ]
    for result in results:
        assert result.finish_reason == "length"
        assert result.hypotheses[0].token_ids[-1] != 2


@pytest.mark.parametrize("adapter_slot", [-1, 0])
def test_the_engine_refuses(adapter_slot: int, translator: Translator) -> None:
    model: NllbModel = translator.model
    first, languages = list(range(4, 4 + SOURCE - 1)), (8074, 8084)
    with Engine(model) as engine:
        with pytest.raises(InvalidInput, match="prompt_tokens: expected at most 62 tokens, the model's limit, got 63"):
            engine.submit(Request(first, *languages, adapter_slot=adapter_slot))
        with pytest.raises(InvalidInput, match="max_new_tokens: expected at most 16 tokens, the model's limit, got 17"):
            engine.submit(Request(first[:5], *languages, TARGET + 1, adapter_slot=adapter_slot))
        with pytest.raises(InvalidInput, match="prefix_tokens: expected at most 16"):
            engine.submit(Request(first[:5], *languages, prefix_tokens=first, adapter_slot=adapter_slot))


def test_the_model_refuses(translator: Translator) -> None:
    model: NllbModel = translator.model
    long = list(range(4, 4 + SOURCE - 1))
    with model.exclusive():
        seq = model.alloc_sequence()
        try:
            with pytest.raises(InvalidInput, match="at most 62 ids"):
                model.prefill(long, seq)
        finally:
            model.free_sequence(seq)
        with pytest.raises(InvalidInput, match="at most 62"):
            model.generate_beam_batch([BeamReq(long, 8074, 8084, -1, 2, 8, 1.0, False)])
        with pytest.raises(InvalidInput, match="at most 62"):
            model.score_targets([ScoreReq(long, (5, 2), 8074, 8084)])
        with pytest.raises(InvalidInput, match="expected 1 to 16 ids"):
            model.score_targets([ScoreReq((5,), (*long, 2), 8074, 8084)])


LIMITS = ("--max-source-len", str(SOURCE), "--max-new-tokens", str(TARGET), "--max-batch", "2", "--device", "host")
CUT = "only its first 62 tokens were translated (--max-source-len)"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("way", ["arguments", "file", "pipe", "adapter", "beam"])
def test_the_command_says_so(
    way: str,
    as_json: bool,
    feed: Feed,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["translate", "--to", "fra_Latn", *LIMITS, *(["--json"] if as_json else [])]
    if way == "file":
        (tmp_path / "in").write_text(f"{SHORT}\n{LONG}\n")
        arguments += ["--input", str(tmp_path / "in")]
    elif way == "arguments":
        arguments += [SHORT, LONG]
    else:
        feed(f"{SHORT}\n{LONG}\n".encode())
    if way == "adapter":
        arguments += ["--adapter", f"law={demo_adapter(tmp_path / 'law', 0)}"]
    if way == "beam":
        arguments += ["--beam", "2"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if CUT in line] == [
        f"metrale: warning: {'text' if way == 'arguments' else 'line'} 2: {CUT}"
    ]
    if as_json:
        assert [json.loads(line)["truncated"] for line in out.splitlines()] == [False, True]


def test_the_command_says_so_of_pairs(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    feed(f"{SHORT}\tOui.\n{LONG}\tOui.\n{SHORT}\t{LONG_PREFIX}\n".encode())
    assert main(["score", "--from", "eng_Latn", "--to", "fra_Latn", *LIMITS, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["truncated"] for line in out.splitlines()] == [False, True, None]
    assert (
        "metrale: warning: pair 2: only the beginning of its text was looked at (--max-source-len)" in err.splitlines()
    )
    assert "metrale: warning: pair 3: not scored: target: expected a text of at most 15 tokens" in err


@pytest.mark.parametrize("options", [[], ["--beam", "2"], ["--target-prefix", "La"], ["--forced-eos"]])
def test_the_command_says_that_a_translation_was_cut(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--max-new-tokens", "5", "--max-batch", "2", "--device", "host"]
    assert main(["translate", "--to", "fra_Latn", *limits, *options, SHORT]) == 0
    assert "warning: text 1: the translation was stopped at 5 tokens (--max-new-tokens)" in capsys.readouterr().err
    assert main(["translate", "--to", "fra_Latn", "--device", "host", *options, SHORT]) == 0
    assert "was stopped" not in capsys.readouterr().err


def test_a_translation_that_just_fits_was_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    def err(limit: int, *options: str) -> str:
        limited = ["--device", "host", "--max-new-tokens", str(limit), *options]
        assert main(["translate", "--to", "fra_Latn", *limited, SHORT]) == 0
        return capsys.readouterr().err

    assert main(["translate", "--to", "fra_Latn", "--device", "host", "--json", SHORT]) == 0
    exact = len(json.loads(capsys.readouterr().out)["token_ids"]) + 2  # the language and EOS
    assert "was stopped" not in err(exact)
    assert "was stopped" in err(exact - 1)
    assert "was stopped" not in err(exact + 1, "--forced-eos")
    assert "was stopped" in err(exact, "--forced-eos")  # nobody knows whether it would have ended there


def test_the_command_refuses_a_prefix_that_leaves_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--to", "fra_Latn", *LIMITS, "--target-prefix", LONG_PREFIX, SHORT]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "and --target-prefix: expected at most 16 tokens" in err
