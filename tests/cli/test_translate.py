# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale translate``, with the demo model and with a translator that goes wrong on demand."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import metrale
from metrale.cli import main
from metrale.demo import demo_model_path
from metrale.errors import NotSupported
from metrale.model import SamplingParams
from metrale.nllb.languages import FLORES_200
from tests.cli.conftest import FakeTranslator, Feed
from tests.reference.tiny import write_tiny

DEMO = demo_model_path()
GOLDEN: list[dict[str, Any]] = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
FRENCH = [case for case in GOLDEN if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "fra_Latn")][:4]
KEYS = [
    *("text", "source_text", "source_lang", "target_lang", "token_ids"),
    *("score", "finish_reason", "truncated", "error", "unknown", "repeats"),
]


def test_golden_translations_come_out_line_by_line(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FRENCH) >= 2
    feed("\r\n".join(["", *(case["text"] for case in FRENCH), ""]).encode())
    assert main(["translate"]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n") == ["", *(case["greedy"]["text"] for case in FRENCH), ""]
    assert "demo model" in err
    assert "from eng_Latn to fra_Latn" in err


def test_text_arguments_json_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in GOLDEN if case["tgt_lang"] == "deu_Latn")
    options = ["--model", str(DEMO), "--from", case["src_lang"], "--to", "deu_Latn", "--json", "--scores"]
    assert main(["translate", *options, case["text"], " "]) == 0
    out, err = capsys.readouterr()
    first, blank = map(json.loads, out.splitlines())
    assert list(first) == list(blank) == [*KEYS, "hypotheses"]
    (best,) = first["hypotheses"]
    assert (best["text"], best["token_ids"]) == (first["text"], case["greedy"]["ids"][2:])
    assert len(best["token_logprobs"]) == len(best["token_ids"])
    assert first["text"] == case["greedy"]["text"]
    assert first["source_text"] == case["text"]
    assert first["token_ids"] == case["greedy"]["ids"][2:-1]  # without start, language and EOS
    assert -5 < first["score"] < 0
    assert (first["finish_reason"], first["truncated"], first["error"]) == ("eos", False, None)
    assert (blank["text"], blank["source_text"], blank["score"], blank["hypotheses"]) == ("", " ", None, [])
    assert err == ""


def test_truncated_sources_and_cut_translations_are_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    text = "The garage door is open. " * 3
    options = ["--model", str(DEMO), "--to", "fra_Latn", "--max-source-len", "6", "--max-new-tokens", "3"]
    assert main(["translate", *options, "Hello", text]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert "warning: text 2: only its first 4 tokens were translated (--max-source-len)" in err
    assert "warning: text 2: the translation was stopped at 3 tokens (--max-new-tokens)" in err


def test_failed_lines_stay_blank_and_set_the_exit_code(
    feed: Feed, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    feed("\n".join(["a", *["b"] * 8, "fail x", "c", "long", "cut", "late x"]).encode())
    assert main(["translate", "--timeout", "2.5"]) == 1
    out, err = capsys.readouterr()
    assert out.split("\n") == ["A", *["B"] * 8, "", "C", "LONG", "CUT", "LATE X", ""]
    assert fakes[0].closed
    assert "warning: line 10: not translated: logits are not finite" in err
    assert "warning: line 12: the translation was stopped" in err
    assert "warning: line 13: only its first" in err
    assert "warning: line 14: not finished within 2.5 s (--timeout)" in err
    assert err.splitlines()[-1] == "metrale: warning: 2 of 14 lines were not translated"


def test_a_translation_never_breaks_its_line(fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "breaks", "x"]) == 0
    assert capsys.readouterr().out == "one two three\nX\n"
    assert main(["translate", "--json", "breaks", "x\ny"]) == 0
    breaks, x = map(json.loads, capsys.readouterr().out.splitlines())
    assert breaks["text"] == "one\r\ntwo\u2028three"
    assert (x["text"], x["source_text"]) == ("X\nY", "x\ny")


def test_plain_scores_are_a_column(fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--scores", "a\tb", ""]) == 0
    assert capsys.readouterr().out == "-0.2500\tA\tB\n\t\n"


def test_bad_utf8_ends_after_the_lines_before(
    feed: Feed, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    feed(b"good\nb\xe9d\nnever\n")
    assert main(["translate"]) == 2
    out, err = capsys.readouterr()
    assert out == "GOOD\n"
    assert err.splitlines()[-1] == ("metrale: error: standard input, line 2: not valid UTF-8 (byte 0xe9 at position 1)")


def test_output_is_utf8_whatever_the_locale(fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["translate", "żółć"]) == 0
    assert raw.getvalue() == "ŻÓŁĆ\n".encode()


def test_options_reach_the_model(fakes: list[FakeTranslator]) -> None:
    languages = ["--from", "pol_Latn", "--to", "rus_Cyrl", "--scores"]
    device = ["--device", "host", "--dtype", "bfloat16", "--model", str(DEMO)]
    limits = ["--max-batch", "5", "--max-source-len", "20", "--max-new-tokens", "9"]
    assert main(["translate", *languages, *device, *limits, "x"]) == 0
    assert fakes[0].path == DEMO
    assert fakes[0].options == {
        "device": "host",
        "dtype": "bfloat16",
        "source": "pol_Latn",
        "target": "rus_Cyrl",
        "max_batch": 5,
        "max_source_len": 20,
        "max_new_tokens": 9,
        "legacy_order": False,
        "batch_invariant": False,
    }
    assert fakes[0].arguments == [
        {
            "target_prefix": None,
            "adapter": None,
            "first_index": 0,
            "sampling": SamplingParams(),
            "num_beams": 1,
            "num_return_sequences": 1,
            "length_penalty": 1.0,
            "early_stopping": False,
            "bad_words_ids": None,
            "suppress_tokens": None,
            "forced_eos": False,
            "return_scores": True,
            "return_attention": False,
            "timeout": None,
        }
    ]


def test_choices_of_tokens_reach_the_model(fakes: list[FakeTranslator]) -> None:
    drawn = ["--temperature", "0.7", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.05", "--seed", str(2**64 - 1)]
    other = ["--repetition-penalty", "1.2", "--no-repeat-ngram", "3", "--min-new-tokens", "4", "--timeout", "1.5"]
    assert main(["translate", *drawn, *other, "x"]) == 0
    assert fakes[0].arguments[0]["timeout"] == 1.5
    assert fakes[0].arguments[0]["sampling"] == SamplingParams(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        min_new_tokens=4,
        seed=2**64 - 1,
    )


def test_the_same_seed_gives_the_same_draws(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--to", "fra_Latn", "-q", "--temperature", "2", "--max-new-tokens", "8", "--max-batch", "4"]
    drawn = []
    for seed in (1, 1, 2):
        assert main(["translate", *options, "--seed", str(seed), "Good morning!", "Good morning!"]) == 0
        drawn.append(capsys.readouterr().out.splitlines())
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "tiny", 1)
    assert main(["translate", "--model", str(tmp_path / "tiny"), "--to", "fra_Latn", "x"]) == 3
    assert "holds no tokenizer (sentencepiece.bpe.model or tokenizer.json)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--to", "--from", "--model"])
def test_an_empty_value_is_not_the_default(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", option, "", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{option}: " in err


def test_languages_that_the_demo_model_never_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    warning = "warning: the demo model never learnt zul_Latn"
    here = os.path.relpath(DEMO)
    for model in ([], ["--model", str(DEMO)], ["--model", here]):  # named or not, it is the demo model
        assert main(["translate", *model, "--to", "zul_Latn", "--max-new-tokens", "4", "x"]) == 0
        assert warning in capsys.readouterr().err
    assert main(["translate", "--model", here, "--to", "pol_Latn", "--max-new-tokens", "4", "x"]) == 0
    assert "never learnt" not in capsys.readouterr().err


def test_another_model_may_know_more_languages(
    tmp_path: Path, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "model")
    assert main(["translate", "--model", str(folder), "--to", "zul_Latn", "x"]) == 0
    assert capsys.readouterr() == ("X\n", "")


def test_settings_of_the_checkpoint_that_greedy_decoding_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("recipe"))
    (folder / "generation_config.json").write_text('{"num_beams": 5, "no_repeat_ngram_size": 3}')
    with pytest.warns(UserWarning, match="asks for num_beams=5, no_repeat_ngram_size=3"):
        metrale.memory_plan(folder, "host")
    (folder / "adapter_config.json").write_text("{}")
    assert main(["translate", "--model", str(folder), "x"]) == 3
    assert "holds a LoRA adapter" in capsys.readouterr().err


def test_the_model_may_come_from_the_environment(
    fakes: list[FakeTranslator],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("METRALE_MODEL", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    shutil.copy(DEMO / "sentencepiece.bpe.model", tmp_path)
    assert main(["translate", "x"]) == 2  # a folder without tokenizer_config.json names no target language
    assert "error: --to is required" in capsys.readouterr().err
    assert main(["translate", "--to", "deu_Latn", "x"]) == 0
    assert fakes[0].path == tmp_path
    assert (fakes[0].options["source"], fakes[0].options["target"]) == ("eng_Latn", "deu_Latn")
    (tmp_path / "tokenizer_config.json").write_text('{"src_lang": "ita_Latn", "tgt_lang": "nld_Latn"}')
    assert main(["translate", "x"]) == 0
    assert (fakes[1].options["source"], fakes[1].options["target"]) == ("ita_Latn", "nld_Latn")
    (tmp_path / "tokenizer_config.json").write_text('{"src_lang": null, "tgt_lang": null}')
    assert main(["translate", "x"]) == 2
    assert "demo model" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--to", "french"], 2, ["--to: ", "'french'", "fra_Latn", "--list-languages"]),
        (["--from", "eng_latn"], 2, ["--from: ", "eng_Latn"]),
        (["--max-batch", "0"], 2, ["--max-batch: ", "got 0"]),
        (["--max-new-tokens", "1"], 2, ["--max-new-tokens: "]),
        (["--max-source-len", "x"], 2, ["--max-source-len", "metrale translate --help"]),
        (["--temperature", "-1"], 2, ["--temperature: ", "got -1.0"]),
        (["--temperature", "nan"], 2, ["--temperature: "]),
        (["--top-p", "0", "--temperature", "1"], 2, ["--top-p: "]),
        (["--top-k", "-1"], 2, ["--top-k: "]),
        (["--min-p", "2"], 2, ["--min-p: "]),
        (["--repetition-penalty", "0"], 2, ["--repetition-penalty: "]),
        (["--no-repeat-ngram", "-1"], 2, ["--no-repeat-ngram: "]),
        (["--min-new-tokens", "-1"], 2, ["--min-new-tokens: "]),
        (["--seed", "-1"], 2, ["--seed: "]),
        (["--top-k", "5"], 2, ["--top-k has no effect without --temperature"]),
        (["--timeout", "0"], 2, ["--timeout", "above 0", "'0'"]),
        (["--timeout", "inf"], 2, ["--timeout"]),
        (["--timeout", "soon"], 2, ["--timeout", "'soon'"]),
        (["--dtype", "int8"], 2, ["--dtype", "bfloat16"]),
        (["--device", "tpu"], 2, ["--device: ", "cuda:N", "'tpu'"]),
        (["--device", "cuda:99"], 3, ["cuda", "metrale doctor"]),
        (["--model", "no/such/folder"], 3, ["no/such/folder"]),
        (["--unknown"], 2, ["--unknown"]),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(
    arguments: list[str], code: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "text", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("metrale: ") for line in err.splitlines())
    errors = [line for line in err.splitlines() if line.startswith("metrale: error: ")]
    assert errors == err.splitlines()[-1:]
    assert all(part in errors[0] for part in parts), errors


def test_a_checkpoint_that_lacks_much_is_still_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "sentencepiece.bpe.model", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "encoder_layers": 9}), encoding="utf-8")
    assert main(["translate", "--model", str(tmp_path), "x"]) == 3
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith(f"metrale: error: {tmp_path}: missing tensor 'model.encoder.layers.6.")
    assert err[-1].endswith("more (--debug lists all)")
    assert [line for line in err if "error" in line] == err[-1:]


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    # its languages are unknown, so a code is what cannot be served
    assert main(["translate", "--model", str(tmp_path), "--to", "fra_Latn", "x"]) != 0
    assert "tokenizer" in capsys.readouterr().err.splitlines()[-1]


def test_the_environment_s_device_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METRALE_DEVICE", "gpu")
    assert main(["translate", "x"]) == 2
    assert "METRALE_DEVICE: expected auto, host, cuda or cuda:N, got 'gpu'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["translate", "x"], ["inspect"]])
def test_an_environment_s_device_that_cannot_be_opened_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METRALE_DEVICE", "cuda:99")
    for device in ([], ["--device", "auto"]):  # which is no choice of its own
        assert main([*command, *device]) == 3
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("metrale: error: METRALE_DEVICE=cuda:99: cuda")
        assert last.count("metrale doctor") == 1


def test_log_messages_that_warn_are_the_command_s_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(*_: Any, **__: Any) -> Any:
        log = logging.getLogger("gpu_runtime.opening")
        log.info("not shown")
        log.warning("the host, because %s", "of\nthis")
        raise NotSupported("Translator", "this", "that")

    monkeypatch.setattr("metrale.cli.translate.Translator", warn)
    before = list(logging.getLogger().handlers)
    assert main(["translate", "--model", str(DEMO), "--to", "fra_Latn", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "metrale: warning: the host, because of this"
    assert len(lines) == 2
    assert logging.getLogger().handlers == before


def test_languages_are_listed_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--list-languages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == list(FLORES_200)
    assert "fra_Latn  French" in lines
    assert main(["translate", "--list-languages", "--json"]) == 0
    assert {"code": "fra_Latn", "name": "French"} in map(json.loads, capsys.readouterr().out.splitlines())


def test_quiet_leaves_errors_alone(feed: Feed, fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]) -> None:
    feed(b"a\nfail\ncut\n\xff\n")
    assert main(["translate", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "A\n\nCUT\n"
    assert err == "metrale: error: standard input, line 4: not valid UTF-8 (byte 0xff at position 0)\n"


def test_interrupted_is_130_and_closes_the_model(
    fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "interrupt"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "metrale: interrupted"
    assert fakes[0].closed


def test_a_fault_of_metrale_is_one_line_and_a_traceback_on_request(
    fakes: list[FakeTranslator], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "fault"]) == 4
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "metrale: error: a fault in metrale: KeyError: 'inside' (--debug shows where)"
    assert "Traceback" not in err
    for arguments in (["--debug", "translate", "fault"], ["translate", "fault", "--debug"]):
        assert main(arguments) == 4
        assert "Traceback" in capsys.readouterr().err


def test_a_closed_standard_input_is_an_error(
    fakes: list[FakeTranslator], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["translate"]) == 2
    assert "standard input is closed" in capsys.readouterr().err
