# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random requests of one `generate_beams` call, and that each gets what it gets alone.

The device computes row by row (`tests.nllb.by_rows`), so ids, log-probabilities and scores are equal to the bit, and no
tolerance is needed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from metrale import BeamReq
from metrale.nllb.model import NllbModel
from tests.nllb.adapters import Shelf
from tests.nllb.by_rows import device_by_rows
from tests.nllb.searching import alone, nothing_left, same

ADAPTERS: Final = "abd"
LANES: Final = 20
MOST_SOURCE: Final = 8
MOST_NEW: Final = 16
_POSITIONS: Final = MOST_SOURCE + 2 + 16 * MOST_NEW
"""KV of the smaller pool: the widest request at its largest."""
_POSITION_BYTES: Final = 2 * 32 * 4


@contextmanager
def opened(path: Path) -> Iterator[list[NllbModel]]:
    """Give models for any mix, made in the folder ``path``.

    The first one runs all in order. The others differ in what a device may: the host is a step ahead of it, it runs
    things in any order, it replays steps, it pads them. Two have less KV than lanes, so that requests wait for either.
    """
    shelf = Shelf(path, encoder_layers=1, decoder_layers=1)
    limits: dict[str, Any] = {"max_batch": LANES, "max_source_len": MOST_SOURCE + 2, "max_new_tokens": MOST_NEW}
    small = {"kv_bytes": _POSITIONS * _POSITION_BYTES}
    ahead = {"runs_ahead": True, "prefers_graphs": True}
    with ExitStack() as stack:
        models: list[NllbModel] = []
        kinds: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
            ({}, {}, "in_order"),
            (small, {}, "in_order"),
            ({}, ahead, "adversarial"),
            (small, {**ahead, "pad_batches": True}, "deferred"),
        )
        for pool, changes, order in kinds:
            gpu = stack.enter_context(device_by_rows(changes, order=order, seed=len(models)))
            models.append(stack.enter_context(shelf.load(gpu, ADAPTERS, **limits, **pool)))
        yield models


def draw(seed: int) -> list[BeamReq]:
    """Return the requests of a seed: of widths 1 to 8, one in three mixes with one of 16."""
    rng = random.Random(seed)
    widths = [rng.randint(1, 8) for _ in range(rng.randint(2, 7))]
    if rng.random() < 1 / 3:
        widths[rng.randrange(len(widths))] = 16
    return [_request(rng, width) for width in widths]


def _request(rng: random.Random, width: int) -> BeamReq:
    def some(most: int, chance: float, low: int = 3) -> tuple[int, ...]:
        return tuple(rng.randrange(low, 97) for _ in range(rng.randint(1, most))) if rng.random() < chance else ()

    ends = tuple(sorted({2, *(rng.randrange(3, 97) for _ in range(rng.randint(0, 8)))}))
    most = rng.randint(1, 12)
    return BeamReq(
        prompt_tokens=[rng.randrange(3, 97) for _ in range(rng.randint(0, MOST_SOURCE))],
        src_lang_id=rng.randrange(60, 97),
        tgt_lang_id=rng.randrange(60, 97),
        adapter_slot=rng.choice((-1, -1, *range(len(ADAPTERS)))),
        num_beams=width,
        max_new=most,
        length_penalty=rng.choice((1.0, 1.0, 0.0, 0.4, 2.0, -0.7)),
        early_stopping=rng.choice((False, False, True, "never")),
        num_return_sequences=rng.randint(1, width),
        min_new=rng.choice((0, 0, 2, 5)),
        no_repeat_ngram_size=rng.choice((0, 0, 1, 2)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.4, 0.8)),
        bad_words_ids=tuple(some(3, 1) for _ in range(rng.choice((0, 0, 1, 4)))),
        suppress_tokens=some(30, 0.3),
        forced_eos_id=rng.choice((None, None, 2)),
        prefix_tokens=some(3, 0.3),
        eos_ids=ends[: 256 // width - 1],
    )


def check(models: list[NllbModel], seed: int) -> Counter[str]:
    """Run a seed's requests in one call, and each by itself on the first model; return how often what came of one."""
    reqs, model = draw(seed), models[seed % len(models)]
    with nothing_left(model):
        together = model.generate_beams(reqs)
        for place, (req, found) in enumerate(zip(reqs, together, strict=True)):
            expected = alone(models[0], req)
            assert same(found, expected), f"seed {seed}, request {place}: {found}, expected {expected}; {req}"
    both = list(zip(reqs, together, strict=True))
    return Counter(
        {
            "requests": len(reqs),
            "at their limit": sum(found[0].ids[-1] not in (req.eos_ids or ()) for req, found in both),
            "with fewer results than asked for": sum(len(found) < req.num_return_sequences for req, found in both),
        }
    )
