# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two thousand sentences through one model: nothing grows. Linux only: it reads /proc."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import metrale
from gpu_runtime.host import HostBackend
from metrale.model import PrefillSlice
from tests.nllb.decoding import DEMO

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from Linux's /proc")

SENTENCES, LANES, STEPS = 2000, 25, 2
LANGUAGES = (8074, 8084, 8069, 8188)


def resident() -> int:
    """Return the process's anonymous memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def test_memory_is_flat_over_two_thousand_sentences() -> None:
    """Alternately freed and detached; sources of 0 to 5 tokens, so that no two batches have the same shape."""
    rng = np.random.default_rng(0)
    gpu = HostBackend()
    model = metrale.load(DEMO, gpu, "float32", max_batch=LANES, max_source_len=8, max_new_tokens=8)
    report = gpu.alloc_report()
    sizes = []
    done = 0
    while done < SENTENCES:
        slices = []
        for index in range(LANES):
            seq = model.alloc_sequence_for(int(rng.integers(12, 17)))
            seq.src_lang_id, seq.tgt_lang_id = LANGUAGES[index % 4], LANGUAGES[(index + done) % 3]
            slices.append(PrefillSlice.whole(rng.integers(4, 8000, rng.integers(0, 6)).tolist(), seq))
        seqs = [one.seq for one in slices]
        tokens = model.argmax_batch(model.prefill_batch_chunk(slices)[0], LANES)
        for _ in range(STEPS):
            base = model.decode_batch(tokens, seqs)
            tokens = model.argmax_batch(base, LANES)
            model.copy_logits_to_host(base)
        for seq in seqs:
            (model.free_sequence if done % 2 else model.detach_slot_for_reuse)(seq)
        done += LANES
        assert gpu.alloc_report() == report
        sizes.append(resident())
    assert len(sizes) == 80
    # A KV position is 6 KiB and a logits row 32 KiB: what leaked once a sentence would be 10 MiB and more.
    assert max(sizes[40:]) - max(sizes[5:40]) < 6 << 20
    model.close()
    assert gpu.live_alloc_count() == 0


@pytest.mark.more
def test_memory_is_flat_over_two_thousand_translations() -> None:
    """Whole translations of the golden texts in ever new company, a hundred a call."""
    rng = np.random.default_rng(1)
    cases = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
    with metrale.Translator(DEMO, device="host", dtype="float32", max_source_len=64, max_new_tokens=64) as translator:
        gpu = translator.model.gpu
        report, sizes = gpu.alloc_report(), []
        for _ in range(20):
            drawn = [cases[int(index)] for index in rng.integers(0, len(cases), 100)]
            results = translator.translate(
                [case["text"] for case in drawn],
                [case["src_lang"] for case in drawn],
                [case["tgt_lang"] for case in drawn],
            )
            assert [result.text for result in results] == [case["greedy"]["text"] for case in drawn]
            assert gpu.alloc_report() == report
            sizes.append(resident())
    # Seen: 5 to 8 MiB, in steps of 2 MiB: huge pages of the pools that a longer batch is the first to touch, and the
    # calls whose arguments are kept. A logits row leaked once a sentence would be 62 MiB.
    assert max(sizes[1:]) - sizes[0] < 16 << 20
    assert max(sizes[10:]) - max(sizes[:10]) < 6 << 20
