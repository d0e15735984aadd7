# SPDX-License-Identifier: MIT OR Apache-2.0
"""CTranslate2: ``Translator.translate_batch``. The checkpoint is converted first, beside its own folder."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.ctranslate2_model import convert, token
from benchmarks.peers.process import arguments, report, reporting_errors, time_cases
from metrale.bench.protocol import (
    CHECK_SOURCES,
    FIRST_WORD,
    SCORE_TOLERANCE,
    STANDARD,
    Lengths,
    forced_ids,
    log_probabilities,
    sources,
)


class Peer:
    """A model, and the calls that are timed and compared."""

    def __init__(self, folder: Path, device: str, dtype: str, vocab: int) -> None:
        import ctranslate2  # type: ignore[import-not-found,import-untyped,unused-ignore]

        self.translator: Any = ctranslate2.Translator(str(folder), device=device, compute_type=dtype)
        self.vocab = vocab

    def sources(self, count: int, lengths: Lengths = STANDARD) -> list[list[str]]:
        """Return sources as the tokens that CTranslate2 takes."""
        return [[token(index) for index in ids] for ids in sources(count, lengths.source, self.vocab)]

    def generate(self, batch: list[list[str]], new_tokens: int, beams: int = 1) -> None:
        """Translate, to exactly ``new_tokens`` tokens each."""
        found = self.translator.translate_batch(
            batch,
            beam_size=beams,
            min_decoding_length=new_tokens,
            max_decoding_length=new_tokens,
            max_batch_size=0,
            max_input_length=0,
            return_scores=False,
        )
        lengths = {len(one.hypotheses[0]) for one in found}
        if len(found) != len(batch) or lengths != {new_tokens}:
            raise RuntimeError(f"expected {len(batch)} results of {new_tokens} tokens, got {len(found)} of {lengths}")

    def scores(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the log-probabilities of the forced tokens of the check, each after those before it."""
        forced = forced_ids(self.vocab)
        targets = [[token(index) for index in (FIRST_WORD, *ids)] for ids in forced]
        found = self.translator.score_batch(self.sources(CHECK_SOURCES), targets, max_input_length=0)
        return np.array([one.log_probs[1 : 1 + len(ids)] for one, ids in zip(found, forced, strict=True)])


def compare(peer: Peer, folder: Path, dtype: str) -> dict[str, Any]:
    """Return how far the log-probabilities under metrale's logits, kept in the folder, are from this system's."""
    ours = log_probabilities(np.load(folder / "logits.npz")["logits"], forced_ids(peer.vocab))
    error = float(np.abs(ours - peer.scores()).max())
    return {
        "largest_log_probability_difference": float(f"{error:.3g}"),
        "tolerance": SCORE_TOLERANCE[dtype],
        "passed": error <= SCORE_TOLERANCE[dtype],
    }


def serve(name: str, folder: Path, options: Any) -> None:
    """Convert, load, compare and time one checkpoint."""
    from metrale.nllb.config import NllbConfig

    output = folder.with_name(f"{folder.name}-ctranslate2")
    try:
        start = time.perf_counter()
        convert(folder, output, options.dtype)
        report(shape=name, convert_s=round(time.perf_counter() - start, 2))
        start = time.perf_counter()
        peer = Peer(output, options.device, options.dtype, NllbConfig.from_dir(folder).vocab_size)
        report(shape=name, load_s=round(time.perf_counter() - start, 2))
    finally:
        shutil.rmtree(output, ignore_errors=True)
    if options.check:
        with reporting_errors(shape=name):
            report(shape=name, check=compare(peer, folder, options.dtype))
    peer.generate(peer.sources(1), 4)
    time_cases(name, peer, options)


def main() -> None:
    options = arguments(__doc__)
    with reporting_errors():
        import ctranslate2

        report(versions={"ctranslate2": ctranslate2.__version__})
        for name, folder in options.models:
            with reporting_errors(shape=name):
                serve(name, folder, options)


if __name__ == "__main__":
    main()
