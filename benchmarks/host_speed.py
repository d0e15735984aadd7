# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host backend beside CTranslate2 on the same cores: the demo model, 200 sentences, greedy, float32.

Run it with `python -m benchmarks.host_speed [--output FILE]` where ctranslate2, transformers and torch are installed
(the last two only to convert the model). Each system runs in processes of its own, one at a time, in turns; both
choose their best batch size. Both are timed from text to tokens: ours includes tokenising, which CTranslate2 leaves to
its caller. Before anything is timed, both must give the same tokens for every sentence.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.texts import sentences
from metrale import Translator, demo_model_path
from metrale.bench.machine import describe, usable_cores
from metrale.nllb.tokenizer import open_tokenizer

SOURCE, TARGET = "eng_Latn", "fra_Latn"
COUNT, MAX_NEW_TOKENS = 200, 64
BATCHES = (32, 64, 128, 200)
RUNS = 5
PINS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # either would keep NumPy's BLAS from the kernels this processor has

Run = Callable[[], list[list[int]]]


def metrale_run(batch: int, threads: int) -> Run:
    """Return a function that translates all sentences with metrale; BLAS threads come from the environment."""
    texts = sentences(COUNT)
    translator = Translator(demo_model_path(), device="host", dtype="float32", max_batch=batch)

    def run() -> list[list[int]]:
        results = translator.translate(texts, SOURCE, TARGET, max_new_tokens=MAX_NEW_TOKENS)
        return [list(result.token_ids) for result in results]

    return run


def ctranslate2_run(batch: int, threads: int, folder: str) -> Run:
    """Return a function that translates all sentences with CTranslate2."""
    import ctranslate2  # type: ignore[import-not-found,import-untyped,unused-ignore]

    vocabulary = json.loads(Path(folder, "shared_vocabulary.json").read_text(encoding="utf-8"))
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = open_tokenizer(demo_model_path())
    assert tokenizer is not None
    source = [[vocabulary[i] for i in tokenizer.encode_source(text, SOURCE)] for text in sentences(COUNT)]
    translator = ctranslate2.Translator(folder, device="cpu", compute_type="float32", intra_threads=threads)

    def run() -> list[list[int]]:
        results = translator.translate_batch(
            source,
            target_prefix=[[TARGET]] * COUNT,
            beam_size=1,
            max_batch_size=batch,
            max_decoding_length=MAX_NEW_TOKENS,
        )
        return [[ids[token] for token in result.hypotheses[0][1:]] for result in results]

    return run


def worker(system: str, batch: int, threads: int, folder: str) -> dict[str, Any]:
    """Time one system in this process."""
    run = metrale_run(batch, threads) if system == "metrale" else ctranslate2_run(batch, threads, folder)
    tokens = run()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"tokens": tokens, "seconds": seconds}


def in_process(system: str, batch: int, threads: int, folder: str) -> dict[str, Any]:
    """Run `worker` in a fresh process with the given number of threads."""
    environment = {name: value for name, value in os.environ.items() if name not in PINS}
    environment |= {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    words = ["--worker", system, "--batch", str(batch), "--threads", str(threads), "--folder", folder]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_speed", *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def convert(folder: str) -> None:
    """Write the demo model in CTranslate2's format."""
    from ctranslate2.converters import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        TransformersConverter,
    )

    TransformersConverter(str(demo_model_path())).convert(folder, quantization="float32", force=True)


def compare(threads: int, rounds: int) -> dict[str, Any]:
    """Measure both systems in turns and return the report."""
    seconds: dict[str, dict[int, list[float]]] = {"metrale": {}, "ctranslate2": {}}
    tokens: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        convert(folder)
        for step in range(rounds):
            for batch in BATCHES:
                for system, times in seconds.items():
                    result = in_process(system, batch, threads, folder)
                    if result["tokens"] != tokens.setdefault(system, result["tokens"]):
                        raise SystemExit(f"{system}: the tokens depend on the batch size")
                    times.setdefault(batch, []).extend(result["seconds"])
                    print(
                        f"round {step + 1} {system:12} batch {batch:3}: {min(result['seconds']):.3f} s", file=sys.stderr
                    )
    if tokens["metrale"] != tokens["ctranslate2"]:
        differ = sum(a != b for a, b in zip(tokens["metrale"], tokens["ctranslate2"], strict=True))
        raise SystemExit(f"the systems disagree on {differ} of {COUNT} sentences")
    report: dict[str, Any] = {
        system: {
            str(batch): {"best_s": round(min(values), 4), "median_s": round(statistics.median(values), 4)}
            for batch, values in times.items()
        }
        for system, times in seconds.items()
    }
    for kind in ("best_s", "median_s"):
        ours, theirs = (min(row[kind] for row in report[system].values()) for system in ("metrale", "ctranslate2"))
        report[f"ratio_{kind[:-2]}"] = round(ours / theirs, 3)
    report["sentences"] = COUNT
    report["target_tokens"] = sum(map(len, tokens["metrale"]))
    report["threads"] = threads
    report["runs"] = rounds * RUNS
    report["machine"] = describe("metrale", "numpy", "ctranslate2")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads of either system")
    parser.add_argument("--rounds", type=int, default=2, help=f"processes of each kind; each makes {RUNS} timed runs")
    parser.add_argument("--output", type=Path, help="also write the JSON report here")
    parser.add_argument("--worker", choices=("metrale", "ctranslate2"), help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker, options.batch, options.threads, options.folder)))
        return
    missing = [name for name in ("ctranslate2", "transformers", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}")
    text = json.dumps(compare(options.threads, options.rounds), indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
