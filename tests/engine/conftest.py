# SPDX-License-Identifier: MIT OR Apache-2.0
"""What requests come to alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import metrale
from gpu_runtime.host import HostBackend
from metrale.engine import Request
from tests.engine.oracle import Solo, run_solo
from tests.engine.serving import LIMITS, draw_request

RunSolo = Callable[[Request], Solo]


@pytest.fixture(scope="session")
def solo(tiny_folder: Path) -> Iterator[RunSolo]:
    """A function that says what a request of the tiny model comes to alone."""
    known: dict[object, Solo] = {}
    with HostBackend() as gpu, metrale.load(tiny_folder, gpu, "float32", max_batch=1, **LIMITS) as model:

        def run(request: Request) -> Solo:
            languages = request.src_lang_id, request.tgt_lang_id
            key = request.prompt_tokens, languages, request.max_new_tokens, request.eos_ids, request.sampling
            if key not in known:
                known[key] = run_solo(model, request)
            return known[key]

        yield run


@pytest.fixture(scope="session")
def pool(solo: RunSolo) -> list[Solo]:
    """Forty requests, greedy and sampled, that come to the same in any company."""
    rng = random.Random(4)
    drawn = [solo(draw_request(rng)) for _ in range(44)]
    return [one for one in drawn if one.clear][:40]
