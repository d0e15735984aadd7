# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command with hostile folders, options and texts: an exit code, one line of error, and no traceback."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import metrale
from metrale.cli import main
from tests.hostile import damage, stage
from tests.hostile.case import Answer, Case, nothing
from tests.hostile.config_cases import set_fields

USAGE: Final = 2
UNUSABLE: Final = 3


class _Out(io.TextIOWrapper):
    """A standard stream that keeps what is written."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("utf-8")


def run_command(arguments: Sequence[str], stdin: bytes = b"") -> dict[str, object]:
    """Run the command in this process; return its exit code, its output and the lines of its errors."""
    out, err = _Out(), _Out()
    before = sys.stdin, sys.stdout
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    sys.stdout = out
    try:
        with contextlib.redirect_stderr(err):
            code = main(list(arguments))
    finally:
        sys.stdin, sys.stdout = before
    return {
        "code": code,
        "out": out.text(),
        "err": [line for line in err.text().splitlines() if not line.startswith("metrale: warning:")],
    }


def _told(arguments: Callable[[Path], Sequence[str]], says: str, stdin: bytes = b"") -> Callable[[Path], object]:
    """Return a run of the command: its exit code, and whether its last line is one error that says so, without more."""

    def run(folder: Path) -> object:
        found = run_command(arguments(folder), stdin)
        lines: list[str] = found["err"]  # type: ignore[assignment]
        wrong = [line for line in lines if not line.startswith("metrale: ") or len(line) > 8000]
        fault = any("Traceback" in line or "fault in metrale" in line for line in lines)
        says_so = bool(lines) and says in lines[-1]
        told = "as it should" if says_so and not wrong and not fault else lines
        return [found["code"], told]

    return run


def _case(
    name: str,
    code: int,
    says: str,
    arguments: Callable[[Path], Sequence[str]],
    build: Callable[[Path], object] = nothing,
    stdin: bytes = b"",
) -> Case:
    return Case(f"command/{name}", _told(arguments, says, stdin), Answer([code, "as it should"]), build)


LISTED: Final = {"wrong_config": "2 problems, which the output lists", "other_size": "26598 problems, which the output"}
"""What inspect says last of the folders that have several problems: it has listed them."""


def _folders() -> Iterator[Case]:
    damages: dict[str, tuple[Callable[[Path], object], str]] = {
        "no_config": (lambda folder: (folder / "config.json").unlink(), "config.json: there is no such file"),
        "deep_config": (
            damage.of("config.json", damage.replaced(b'{"a":' * 10**5 + b"1" + b"}" * 10**5)),
            "nested too deeply",
        ),
        "wrong_config": (
            set_fields("config.json", {"d_model": -1, "vocab_size": "x"}),
            "vocab_size: expected an integer",
        ),
        "other_model": (set_fields("config.json", {"model_type": "llama\n\x1b[31m"}), "is not supported"),
        "cut_weights": (damage.of(stage.WEIGHTS, damage.cut(-1)), "is not a complete safetensors file"),
        "no_weights": (lambda folder: (folder / stage.WEIGHTS).unlink(), "holds no weights"),
        "pipe": (damage.of(stage.WEIGHTS, damage.pipe_instead), "is not a regular file"),
        "other_size": (set_fields("config.json", {"decoder_layers": 1024}), "and 26588 more (--debug lists"),
        "cut_tokenizer": (damage.of(stage.SPM, damage.cut(1000)), "is not a whole SentencePiece model"),
        "cut_json": (damage.of("tokenizer.json", damage.cut(1000)), "tokenizer.json: is not valid JSON"),
    }
    for label, (change, says) in damages.items():
        for command in ("translate", "inspect", "score"):

            def arguments(folder: Path, command: str = command) -> list[str]:
                texts = {
                    "translate": ["--to", "fra_Latn", "Good morning."],
                    "score": ["--from", "eng_Latn", "--to", "fra_Latn"],
                    "inspect": [],
                }
                return [command, "--model", str(folder), "--device", "host", *texts[command]]

            build = stage.copied("whole", change)
            last = LISTED.get(label, says) if command == "inspect" else says
            yield _case(f"{command}/{label}", UNUSABLE, last, arguments, build, b"Good morning.\tBonjour.\n")


OPTIONS: Final[dict[str, tuple[list[str], str]]] = {
    "max_batch_zero": (["--max-batch", "0"], "--max-batch"),
    "max_batch_text": (["--max-batch", "many"], "--max-batch"),
    "max_batch_digits": (["--max-batch", "9" * 5000], "--max-batch"),
    "max_source_len_one": (["--max-source-len", "1"], "--max-source-len"),
    "beam_zero": (["--beam", "0"], "--beam"),
    "beam_many": (["--beam", "65"], "--beam"),
    "beam_float": (["--beam", "2.5"], "--beam"),
    "n_best": (["--n-best", "3"], "--n-best"),
    "length_penalty_nan": (["--beam", "2", "--length-penalty", "nan"], "--length-penalty"),
    "length_penalty_huge": (["--beam", "2", "--length-penalty", "1e300"], "--length-penalty"),
    "temperature_minus": (["--temperature", "-1"], "--temperature"),
    "temperature_inf": (["--temperature", "inf"], "--temperature"),
    "top_p": (["--top-p", "2"], "--top-p"),
    "seed": (["--temperature", "1", "--seed", "-1"], "--seed"),
    "repetition_penalty": (["--repetition-penalty", "0"], "--repetition-penalty"),
    "ngram": (["--no-repeat-ngram", "-2"], "--no-repeat-ngram"),
    "language": (["--to", "xyz_Latn"], "--to"),
    "language_empty": (["--to", ""], "--to"),
    "language_surrogate": (["--to", "\udcff"], "--to"),
    "device": (["--device", "cuda:x"], "device"),
    "dtype": (["--dtype", "int8"], "--dtype"),
    "timeout_nan": (["--timeout", "nan"], "--timeout"),
    "unknown": (["--nonsense"], "--nonsense"),
    "adapter": (["--adapter", "/nowhere"], "/nowhere"),
    "output": (["--output", "/nowhere/at/all"], "/nowhere"),
    "input": (["--input", "/nowhere/at/all"], "/nowhere"),
}


def _options() -> Iterator[Case]:
    model = ["--model", str(metrale.demo_model_path()), "--device", "host"]
    for label, (more, says) in OPTIONS.items():
        arguments = lambda _, more=more: ["translate", *model, "--to", "fra_Latn", *more]  # noqa: E731
        yield _case(f"options/{label}", USAGE, says, arguments, stdin=b"Good morning.\n")


TEXTS: Final[dict[str, tuple[bytes, int]]] = {
    "nul": (b"a\0b\n", 1),
    "long": (b"word " * 20_000 + b"\n", 1),
    "many_lines": (b"\n" * 3000, 3000),
    "no_end": (b"Good morning", 1),
    "crlf": (b"a\r\nb\r\n", 2),
    "bom": (b"\xef\xbb\xbfGood\n", 1),
    "controls": (bytes(range(1, 10)) + b"\x1b[31mred\x7f\n", 1),
    "next_line": ("\x85\n".encode(), 1),
}


def _texts() -> Iterator[Case]:
    model = [
        "--model",
        str(metrale.demo_model_path()),
        "--device",
        "host",
        "--max-source-len",
        "32",
        "--max-new-tokens",
        "8",
    ]
    for label, (data, lines) in TEXTS.items():

        def run(_: Path, data: bytes = data) -> object:
            found = run_command(["translate", *model, "--from", "eng_Latn", "--to", "fra_Latn"], data)
            return [found["code"], str(found["out"]).count("\n")]

        yield Case(f"command/texts/{label}", run, Answer([0, lines]))
    for label, data in {
        "latin1": b"caf\xe9\n",
        "utf16": "a\n".encode("utf-16"),
        "surrogate": b"\xed\xa0\x80\n",
    }.items():
        arguments = lambda _: ["translate", *model, "--to", "fra_Latn"]  # noqa: E731
        yield _case(f"texts/{label}", USAGE, "UTF-8", arguments, stdin=data)
    for label, data in {"one_column": b"alone\n", "three": b"a\tb\tc\n", "bad": b"a\xff\tb\n"}.items():
        arguments = lambda _: ["score", *model, "--from", "eng_Latn", "--to", "fra_Latn"]  # noqa: E731
        yield _case(f"pairs/{label}", USAGE, "line 1", arguments, stdin=data)


def cases() -> Iterator[Case]:
    """Every case of the command."""
    yield from _folders()
    yield from _options()
    yield from _texts()
