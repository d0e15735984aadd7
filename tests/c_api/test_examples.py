# SPDX-License-Identifier: MIT OR Apache-2.0
"""The examples are built by each compiler and do what they say: the commands that docs/c_api.md gives, and more."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import InvalidPointer
from metrale import BeamReq
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.c_api.examples import EMBED, EXTENSION, documented, run, script
from tests.c_api.toolchain import Compiler
from tests.conftest import MakeModel
from tests.translating import CASES, EXPECTED

SOME = [case for case in CASES if len(case["greedy"]["ids"]) < 24][:6]
EOS = 2
SEED = 5


# the C extension


@pytest.fixture(scope="session")
def built_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Builds an example, once with each compiler."""

    @functools.cache
    def build(folder: Path, compiler: str) -> Path:
        path: Path = script(folder).build(tmp_path_factory.mktemp(folder.name), compiler)
        return path

    return build


@pytest.fixture
def extension(compiler: Compiler, built_example: Callable[[Path, str], Path]) -> ModuleType:
    loaded: ModuleType = script(EXTENSION).load(built_example(EXTENSION, compiler.cc))
    return loaded


@pytest.fixture
def generate(extension: ModuleType) -> Callable[..., list[list[int]]]:
    run_script = script(EXTENSION)

    def call(model: NllbModel, sources: list[tuple[list[int], int, int]], **how: Any) -> list[list[int]]:
        ids: list[list[int]] = run_script.generate(extension, model, sources, **how)
        return ids

    return call


Sources = list[tuple[list[int], int, int]]


def test_greedy_ids_are_those_of_metrale(gpu: GpuBackend, generate: Callable[..., list[list[int]]]) -> None:
    """Of the demo model, in one batch of six sequences that end one after the other."""
    limits: dict[str, Any] = {"max_batch": len(SOME), "max_source_len": 64, "max_new_tokens": 64}
    with metrale.load(metrale.demo_model_path(), gpu, "float32", **limits) as model:
        assert model.tokenizer is not None
        encode, language = model.tokenizer.encode, model.tokenizer.language_id
        sources = [
            (list(encode(case["text"])), language(case["src_lang"]), language(case["tgt_lang"])) for case in SOME
        ]
        got = generate(model, sources)
        requests = [BeamReq(tokens, source, target, -1, 1, 64, 1.0, False) for tokens, source, target in sources]
        assert got == [ids[1:] for ids in model.generate_beam_batch(requests)]
    assert got == [case["greedy"]["ids"][2:] for case in SOME]
    assert len({len(ids) for ids in got}) > 2


class SplitMix:
    """The generator of sampling.c."""

    def __init__(self, seed: int, index: int) -> None:
        self.state = (seed * 0xD1342543DE82EF95 + index) & (1 << 64) - 1

    def uniform(self) -> float:
        mask = (1 << 64) - 1
        self.state = z = (self.state + 0x9E3779B97F4A7C15) & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return ((z ^ z >> 31) >> 11) / 2**53


def drawn(row: np.ndarray[Any, Any], temperature: float, top_k: int, rng: SplitMix) -> int:
    """Choose as sampling.c says that it does, in the same order of the same double operations."""
    if not temperature:
        return int(row.argmax())
    ids = np.argsort(-row, kind="stable")[:top_k] if 0 < top_k < len(row) else np.arange(len(row))
    largest = float(row.max())
    weights = [math.exp((float(row[i]) - largest) / temperature) for i in ids]
    total = 0.0
    for weight in weights:
        total += weight
    left = rng.uniform() * total
    for i, weight in zip(ids[:-1], weights, strict=False):
        left -= weight
        if left < 0:
            return int(i)
    return int(ids[-1])


TINY: Sources = [([5, 6, 7], 80, 81), ([9], 81, 82), ([20, 21, 22, 23, 24, 25], 82, 80)]


@pytest.mark.parametrize(
    ("dtype", "temperature", "top_k"),
    [
        *(
            ("float32", temperature, top_k)
            for temperature, top_k in ((0.0, 0), (0.7, 0), (1.3, 10), (1.0, 1), (2.0, 1000))
        ),
        *((dtype, temperature, 0) for dtype in ("float16", "bfloat16") for temperature in (0.0, 0.7)),
    ],
)
def test_ids_are_those_of_the_formula(
    make_tiny: MakeModel, generate: Callable[..., list[list[int]]], dtype: str, temperature: float, top_k: int
) -> None:
    """A loop in Python over the same calls; its rows come from `copy_logits_to_host`, so their addresses count too."""
    model = make_tiny(dtype=dtype)
    eos, most = min(model.capacity().eos_ids), model.capacity().max_new_tokens - 1
    got = generate(model, TINY, temperature=temperature, top_k=top_k, seed=SEED)
    seqs = [model.alloc_sequence() for _ in TINY]
    rngs = [SplitMix(SEED, i) for i in range(len(TINY))]
    expected: list[list[int]] = [[] for _ in TINY]
    rows = []
    for seq, (tokens, source, target) in zip(seqs, TINY, strict=True):
        seq.src_lang_id, seq.tgt_lang_id = source, target
        rows.append(model.prefill(tokens, seq))
    lanes = list(range(len(TINY)))
    while lanes:
        for lane, ptr in zip(lanes, rows, strict=True):
            expected[lane].append(drawn(model.copy_logits_to_host(ptr), temperature, top_k, rngs[lane]))
        lanes = [lane for lane in lanes if expected[lane][-1] != eos and len(expected[lane]) < most]
        if lanes:
            first = model.decode_batch([expected[lane][-1] for lane in lanes], [seqs[lane] for lane in lanes])
            rows = [first.offset(i * model.logits_row_bytes()) for i in range(len(lanes))]
    for seq in seqs:
        model.free_sequence(seq)
    assert got == expected


def test_the_extension_refuses_in_words(tiny: NllbModel, extension: ModuleType) -> None:
    with pytest.raises(TypeError, match="expected a GpuBackend"):
        extension.generate("model", [], [], 5, EOS)
    with pytest.raises(ValueError, match="as many rows as seqs"):
        extension.generate(tiny, [1], [], 5, EOS)
    seq = tiny.alloc_sequence()
    with pytest.raises(InvalidPointer, match="expected the address of one"):
        extension.generate(tiny, [tiny.logits_buffer_ptr() + 4], [seq], 5, EOS)
    with pytest.raises(TypeError, match="pointer: expected an integer"):
        extension.generate(tiny, ["row"], [seq], 5, EOS)
    row = tiny.logits_buffer_ptr()
    for value in (np.nan, np.inf):
        tiny.gpu.copy_h2d(np.full(4, value, np.float32), row)
        with pytest.raises(ValueError, match="a row holds a NaN"):
            extension.generate(tiny, [row], [seq], 5, EOS)
    tiny.free_sequence(seq)


def test_the_documented_command_of_the_extension() -> None:
    assert run([*documented(EXTENSION), "--device", "host"]) == [
        "Où est la gare du train ?",
        "Je n'ai pas de temps.",
        "Les enfants dorment dans la voiture.",
    ]


# the C++ program


@pytest.fixture
def program(compiler: Compiler, embedding: None, built_example: Callable[[Path, str], Path]) -> list[str]:
    return [str(built_example(EMBED, compiler.cxx)), "--python", sys.executable]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of golden cases from English to French, a blank line, and all of them again."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join([*ENGLISH, "", *ENGLISH]) + "\n", encoding="utf-8")
    return path


FRENCH = [
    (case["text"], expected)
    for case, expected in zip(CASES, EXPECTED, strict=True)
    if (case["src_lang"], case["tgt_lang"]) == ("eng_Latn", "fra_Latn") and case["text"].strip()
][:4]
ENGLISH = [text for text, _ in FRENCH]


@pytest.mark.parametrize("how", [[], ["--leave-open", "--threads", "9"]], ids=["closed", "left open"])
def test_the_program_translates_in_order(program: list[str], device: Device, texts: Path, how: list[str]) -> None:
    """And exits with 0, without a word on stderr, whatever was left open."""
    expected = [text for _, text in FRENCH]
    assert len(expected) == 4
    got = run([*program, "--device", device.kind, "--dtype", "float32", *how, str(texts)])
    assert got == [*expected, "", *expected]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "usage: translate"),
        (["--threads", "0", "x"], 2, "usage: translate"),
        (["--threads"], 2, "expected a value after --threads"),
        (["--what", "x"], 2, "unexpected argument --what"),
        (["--device", "host", "no such file"], 2, "cannot read no such file"),
        (["--device", "tpu", str(EMBED / "sentences.txt")], 1, "device: expected 'auto', 'host'"),
    ],
    ids=str,
)
def test_the_program_says_what_is_wrong(program: list[str], arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("translate: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_documented_command_of_the_program(embedding: None) -> None:
    got = run([*documented(EMBED), "--device", "host"])
    assert len(got) == len((EMBED / "sentences.txt").read_text("utf-8").splitlines())
    assert got[:2] == ["Où est la gare du train ?", "Je n'ai pas de temps."]
