# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests for the tiny model, and engines that are watched for what they leave behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from gpu_runtime.errors import DeviceError
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from metrale.engine import Engine, Request
from metrale.model import GREEDY, SamplingParams
from metrale.nllb.model import NllbModel
from tests.engine.patience import PATIENCE, Gate

LIMITS: Final[dict[str, Any]] = {"max_source_len": 12, "max_new_tokens": 24}
"""Limits of the tiny models here; the sources that `draw_request` draws and their results fit."""

POSITION_BYTES: Final = 3 * 2 * 32 * 4
"""Of a KV position of the tiny model: layers, keys and values, width, float32."""

EOS: Final = frozenset({2, *range(0, 97, 7)})
"""Ids that end a sequence: so many that some sequences do end."""


def ask(*prompt: int, **options: Any) -> Request:
    """Return a request that runs for 12 tokens, the language included, unless ``options`` say otherwise."""
    return Request(prompt or (5, 6, 7), 80, 81, **{"max_new_tokens": 12, "eos_ids": (), **options})


def draw_request(rng: random.Random, **options: Any) -> Request:
    """Return any request: short or long, greedy or sampled."""
    drawn: dict[str, Any] = {
        "max_new_tokens": rng.choice((2, 3, 5, 8, 12, 16, 24)),
        "eos_ids": EOS if rng.random() < 0.5 else (),
        "sampling": GREEDY if rng.random() < 0.5 else draw_sampling(rng),
    }
    prompt = [rng.randrange(4, 80) for _ in range(rng.randint(0, 10))]
    return Request(prompt, rng.randrange(80, 90), rng.randrange(80, 90), **drawn | options)


def draw_sampling(rng: random.Random) -> SamplingParams:
    """Return parameters that sample."""
    return SamplingParams(
        temperature=rng.choice((0.5, 1.0, 2.0)),
        top_k=rng.choice((0, 10, 40)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.2)),
        no_repeat_ngram_size=rng.choice((0, 2)),
        seed=rng.getrandbits(64),
    )


def held(model: NllbModel) -> tuple[Any, ...]:
    """Return what is taken of a model and its backend, the host's."""
    gpu = model.gpu
    assert isinstance(gpu, HostBackend)
    return (
        gpu.alloc_report(),
        list(gpu._memory.pinned),
        sorted(gpu._streams),
        sorted(gpu._events),
        len(model._table),
        model.kv_usage(),
    )


@contextmanager
def serving(model: NllbModel, *, lag: int = 1, **options: Any) -> Iterator[Engine]:
    """Return an engine; at the end it is closed, and must have given everything back.

    It is a step ahead unless ``lag`` says otherwise, as on a GPU, although a host has nothing from that.
    """
    before = held(model)
    with Engine(model, lag=lag, **options) as engine:
        yield engine
        began = time.monotonic()
        engine.close(timeout=PATIENCE)
        assert time.monotonic() - began < PATIENCE, "its requests did not come to their ends"
    assert held(model) == before
    assert model.gpu.scan_redzones() == []


@contextmanager
def promising(model: NllbModel) -> Iterator[None]:
    """Let a model promise any adapter, so that only a prefill with one that is not resident is refused."""
    with (
        mock.patch.object(model, "acquire_adapter_slot", side_effect=lambda slot: slot),
        mock.patch.object(model, "release_adapter_slot"),
        mock.patch.object(model, "adapter_id_for", return_value=1),
    ):
        yield


class PaddingHost(HostBackend):
    """A host that asks for steps of a few sizes, as a GPU does."""

    def limits(self) -> Limits:
        return replace(super().limits(), pad_batches=True)


class FailOnce:
    """Takes the place of a method, and raises a DeviceError at its call number ``at``."""

    def __init__(self, real: Callable[..., Any], at: int, text: str) -> None:
        self.real, self.at, self.text = real, at, text
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise DeviceError(self.text)
        return self.real(*args, **options)


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """Stop an idle engine's thread: what is submitted in the context is all there when the engine looks again.

    A request of its own does that, which ends when the context does.
    """
    with Gate() as gate:
        engine.submit(ask(max_new_tokens=2, on_token=gate))
        gate.reach()
        yield
