# SPDX-License-Identifier: MIT OR Apache-2.0
"""What requests come to alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import metrale
from gpu_runtime.host import HostBackend
from metrale.engine import Request
from tests.engine.alone import products_by_rows
from tests.engine.oracle import Solo, run_solo
from tests.engine.searches import WIDEST, Sought, run_sought
from tests.engine.serving import LIMITS, draw_request

RunSolo = Callable[[Request], Solo]
RunSought = Callable[[Request], Sought]


@pytest.fixture(scope="session")
def solo(tiny_folder: Path) -> Iterator[RunSolo]:
    """A function that says what a request of the tiny model comes to alone."""
    known: dict[object, Solo] = {}
    with HostBackend() as gpu, metrale.load(tiny_folder, gpu, "float32", max_batch=1, **LIMITS) as model:

        def run(request: Request) -> Solo:
            languages = request.src_lang_id, request.tgt_lang_id
            asked = request.prompt_tokens, request.prefix_tokens, request.sampling
            key = asked, languages, request.max_new_tokens, request.eos_ids
            if key not in known:
                known[key] = run_solo(model, request)
            return known[key]

        yield run


@pytest.fixture(scope="session")
def sought(tiny_folder: Path) -> Iterator[RunSought]:
    """A function that says what a search of the tiny model finds alone, whose products are made row by row."""
    known: dict[Request, Sought] = {}
    with HostBackend() as gpu, metrale.load(tiny_folder, gpu, "float32", max_batch=WIDEST, **LIMITS) as model:

        def run(request: Request) -> Sought:
            key = replace(request, on_token=None, priority=0, timeout=None)
            if key not in known:
                with products_by_rows():
                    known[key] = run_sought(model, key)
            return known[key]

        yield run


@pytest.fixture
def by_rows() -> Iterator[None]:
    """Let rows of products not depend on one another, so that near ties do not matter to a search."""
    with products_by_rows():
        yield


@pytest.fixture(scope="session")
def pool(solo: RunSolo) -> list[Solo]:
    """Forty requests, greedy and sampled, that come to the same in any company."""
    rng = random.Random(4)
    drawn = [solo(draw_request(rng)) for _ in range(44)]
    return [one for one in drawn if one.clear][:40]
