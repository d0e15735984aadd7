# SPDX-License-Identifier: MIT OR Apache-2.0
"""How each public call is made: with arguments by name, going as far as it goes, and returning what JSON can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cache
from typing import Any, Final

import metrale
from metrale import (
    BeamParams,
    BeamReq,
    Engine,
    FeedSource,
    PrefillSlice,
    Request,
    RowMask,
    SamplingParams,
    ScoreReq,
    SequenceState,
    TranslationOptions,
    Translator,
)
from metrale.nllb.limits import ServingLimits
from metrale.nllb.model import NllbModel
from tests.backends import open_host
from tests.hostile import stage

VOCAB: Final = 97
PROMPT: Final = (5, 6, 7)
ADAPTERS: Final[dict[str, Any]] = {}
"""Stands for an argument that is left out."""


@cache
def tiny() -> NllbModel:
    """A tiny model on the checked host. It is loaded before the forks: each case has its own copy."""
    return stage.tiny_model()


@cache
def demo() -> Translator:
    """A translator of the demo model, whose engine no process has started before the forks."""
    return stage.demo_translator()


def prepare() -> None:
    """Load both, in the process that forks."""
    tiny()
    demo()


@contextmanager
def _sequence() -> Iterator[SequenceState]:
    seq = tiny().alloc_sequence()
    try:
        yield seq
    finally:
        tiny().free_sequence(seq)


def sampled(**fields: Any) -> object:
    """Make sampling parameters and run a request with them."""
    params = SamplingParams(**fields)
    with Engine(tiny()) as engine:
        return engine.submit(Request(PROMPT, sampling=params)).result().raise_for_error().ids


def requested(**fields: Any) -> object:
    request = Request(**fields)
    with Engine(tiny()) as engine:
        done = engine.submit(request).result().raise_for_error()
        return [done.ids, done.finish_reason]


def searched(**fields: Any) -> object:
    fields.setdefault("max_new", 5)
    return tiny().generate_beam_batch([BeamReq(**fields)])


def beams(**fields: Any) -> object:
    return requested(prompt_tokens=PROMPT, beams=BeamParams(**fields))


def scored(**fields: Any) -> object:
    (found,) = tiny().score_targets([ScoreReq(**fields)])
    return found.logprobs


def options(**fields: Any) -> object:
    checked = TranslationOptions(**fields)
    del checked
    found = demo().translate("Good morning.", **fields)
    return [found.text, found.finish_reason, found.score, len(found.hypotheses)]


def engine(**fields: Any) -> object:
    if fields.get("model") is None:
        fields["model"] = tiny()
    if fields.get("clock", 0) is None:
        del fields["clock"]
    with Engine(**fields) as engine:
        return engine.submit(Request(PROMPT)).result().raise_for_error().ids


def submitted(**fields: Any) -> object:
    with Engine(tiny()) as engine:
        return engine.submit(**fields).result().raise_for_error().ids


def loaded(**fields: Any) -> object:
    path = fields.pop("path", stage.folder("tiny"))
    device = fields.pop("device") if "device" in fields else open_host()
    if fields.get("adapters") is ADAPTERS:
        fields.pop("adapters")
    limits = {**stage.LIMITS, "source": 80, "target": 81}
    with closing(metrale.load(path, device, **{**limits, **fields})) as model:
        seq = model.alloc_sequence()
        return model.argmax_on_device(model.prefill(PROMPT, seq))


def planned(**fields: Any) -> object:
    path = fields.pop("path", stage.folder("tiny"))
    device = fields.pop("device") if "device" in fields else open_host()
    return metrale.memory_plan(path, device, **{**stage.LIMITS, **fields}).total


def limited(**fields: Any) -> object:
    return asdict(ServingLimits(**fields))


def state(**fields: Any) -> object:
    """Prefill a sequence whose fields a caller has set."""
    with _sequence() as seq:
        for name, value in fields.items():
            setattr(seq, name, value)
        return tiny().argmax_on_device(tiny().prefill(PROMPT, seq))


def sliced(**fields: Any) -> object:
    with _sequence() as seq:
        if fields.get("seq") is None:
            fields["seq"] = seq
        (ptr,) = tiny().prefill_batch_chunk([PrefillSlice(**fields)])
        return tiny().argmax_on_device(ptr)


def masked(**fields: Any) -> object:
    mask, model = RowMask(**fields), tiny()
    event = model.create_event()
    memory = model.alloc_host_pinned(4)
    dst = memory.array.view("int32")
    with _sequence() as seq:
        model.argmax_batch_to_feed(model.prefill(PROMPT, seq), [mask], dst, event)
    model.event_synchronize(event)
    return int(dst[0])


def fed(**fields: Any) -> object:
    source = FeedSource(**fields)
    model = tiny()
    with _sequence() as seq:
        model.prefill(PROMPT, seq)
        return model.argmax_on_device(model.decode_batch_fed([source], [seq]))


def translated(**fields: Any) -> object:
    found = demo().translate(**{"texts": "Good morning.", **fields})
    return found.text if isinstance(found, metrale.Translation) else [one.text for one in found]


def streamed(**fields: Any) -> object:
    with demo().stream(**{"texts": ["Good morning."], **fields}) as stream:
        return [one.text for one in stream]


def checked(**fields: Any) -> object:
    demo().check_options(**fields)
    return None


def rated(**fields: Any) -> object:
    found = demo().score(**{"sources": "Good morning.", "targets": "Bonjour.", **fields})
    return found.score if isinstance(found, metrale.Scored) else [one.score for one in found]
