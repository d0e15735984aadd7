# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many threads share one tokenizer, of whichever kind."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.nllb.opened import KINDS, opened

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text(encoding="ascii"))["cases"]
TEXTS = [case["text"] + " foo" * (i % 3) for i, case in enumerate(CASES[::3])]
THREADS = 16


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_same_as_alone(kind: str, tmp_path: Path) -> None:
    tokenizer = opened(KINDS[kind](tmp_path))
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> list[object]:
        if number:
            barrier.wait()
        # Each thread begins elsewhere, so that different texts are encoded at the same time.
        order = [(number * 29 + i) % len(TEXTS) for i in range(len(TEXTS))]
        found: dict[int, object] = {}
        for i in order:
            ids = tokenizer.encode(TEXTS[i])
            spans = tokenizer.unknown_spans(TEXTS[i]) if i % 7 == 0 else None
            found[i] = (ids, tokenizer.decode(ids), spans)
        return [*(found[i] for i in range(len(TEXTS))), tokenizer.encode_batch(TEXTS[:50])]

    expected = work(0)
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(result == expected for result in pool.map(work, range(1, THREADS + 1)))
