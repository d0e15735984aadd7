# SPDX-License-Identifier: MIT OR Apache-2.0
"""Options that are right by themselves: too much for the device, and against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import metrale
from metrale import BeamParams, BeamReq, Engine, Request, SamplingParams, TranslationOptions
from tests.backends import open_host
from tests.hostile import stage
from tests.hostile.calls import PROMPT, demo, tiny
from tests.hostile.case import Answer, Case, Refusal

MOST: Final = (1 << 31) - 1

TOO_MUCH: Final[dict[str, dict[str, Any]]] = {
    "max_batch": {"max_batch": MOST},
    "a_million_lanes": {"max_batch": 1 << 20},
    "max_source_len": {"max_source_len": MOST},
    "max_new_tokens": {"max_new_tokens": MOST},
    "max_encoder_tokens": {"max_encoder_tokens": MOST},
    "kv_bytes": {"kv_bytes": (1 << 63) - 1},
    "adapters": {"max_adapters": 4096, "max_lora_rank": 4096},
    "everything": {"max_batch": MOST, "max_source_len": MOST, "max_new_tokens": MOST, "max_encoder_tokens": MOST},
}


def _loaded(options: dict[str, Any]) -> Callable[[Path], object]:
    """Return a run that loads with more than there is room for, on a device that must be as empty afterwards."""

    def run(_: Path) -> object:
        with open_host(memory_limit=256 << 20) as gpu:
            try:
                metrale.load(stage.folder("tiny"), gpu, **{**stage.LIMITS, **options}).close()
            finally:
                assert gpu.live_alloc_count() == 0
        return "loaded"

    return run


def _planned(options: dict[str, Any]) -> Callable[[Path], object]:
    """Return a run that plans with more than there is room for, which is no error."""
    return lambda _: (
        metrale.memory_plan(stage.folder("tiny"), open_host(), **{**stage.LIMITS, **options}).total > 1 << 30
    )


def _requested(**fields: Any) -> Callable[[Path], object]:
    def run(_: Path) -> object:
        with Engine(tiny()) as engine:
            return engine.submit(Request(PROMPT, **fields)).result().raise_for_error().ids

    return run


def _sought(**fields: Any) -> Callable[[Path], object]:
    return lambda _: tiny().generate_beam_batch(
        [BeamReq(PROMPT, max_new=4), BeamReq(**{"prompt_tokens": PROMPT, "max_new": 4, **fields})]
    )


def _translated(**options: Any) -> Callable[[Path], object]:
    return lambda _: demo().translate("Good morning.", **options)


AGAINST: Final[dict[str, tuple[Callable[[Path], object], str, str]]] = {
    "forced_and_forbidden": (
        lambda _: SamplingParams(forced_eos_id=2, suppress_tokens=(2,)),
        "forced_eos_id",
        "not among",
    ),
    "beams_and_temperature": (
        _requested(beams=BeamParams(2), sampling=SamplingParams(temperature=1.0)),
        r"sampling\.temperature",
        "0, as beam",
    ),
    "more_results_than_beams": (lambda _: BeamParams(2, num_return_sequences=3), "num_return_sequences", "1 to 2"),
    "more_beams_than_lanes": (_requested(beams=BeamParams(5)), r"beams\.num_beams", "at most 4"),
    "prefix_and_limit": (_requested(prefix_tokens=(9,) * 6, max_new_tokens=3), "max_new_tokens with .*", "at most 8"),
    "prefix_of_all": (_requested(prefix_tokens=(9,) * 8), "max_new_tokens with .*", "at most 8"),
    "no_room_for_a_prefix": (
        _sought(prefix_tokens=(9,) * 6),
        r"reqs\[1\]\.max_new",
        "at most 8 with the language and prefix_tokens",
    ),
    "every_id_forbidden": (
        lambda _: tiny().generate_beam_batch([BeamReq(PROMPT, num_beams=2, max_new=4, suppress_tokens=range(97))]),
        ".*",
        "forbidden",
    ),
    "here_and_in_sampling": (
        _translated(min_new_tokens=3, sampling=SamplingParams(min_new_tokens=2)),
        "min_new_tokens",
        "it here, or",
    ),
    "results_of_one_beam": (_translated(num_return_sequences=2), "num_return_sequences", "1 to 1"),
    "penalty_without_numbers": (_translated(num_beams=2, length_penalty=1e4), "length_penalty", "power of 32"),
    "options_twice": (
        lambda _: TranslationOptions(suppress_tokens=(2,), sampling=SamplingParams(suppress_tokens=(3,))),
        "suppress_tokens",
        "both",
    ),
    "too_many_bad_words": (_translated(bad_words_ids=[[5] * 2000]), "bad_words_ids", "at most 1022"),
    "options_of_a_loaded_model": (lambda _: metrale.Translator(tiny(), max_batch=3), "options", "none together"),
    "model_without_tokenizer": (lambda _: metrale.Translator(tiny()), "model", "a checkpoint with a tokenizer"),
    "fewer_slots_than_adapters": (
        lambda _: metrale.load(
            stage.folder("tiny"), open_host(), adapters={"a": stage.folder("adapter")}, max_adapters=0
        ),
        "max_adapters",
        "at least 1",
    ),
    "code_without_tokenizer": (
        lambda _: metrale.load(stage.folder("tiny"), open_host(), source="eng_Latn"),
        "source",
        "a token id",
    ),
    "rows_of_encoder": (
        lambda _: metrale.load(stage.folder("tiny"), open_host(), max_source_len=100, max_encoder_tokens=99),
        "max_encoder_tokens",
        "at least 100|100 to",
    ),
}
"""What contradicts: the call, the argument that the error must name, and what it must say."""


def _kept(_: Path) -> object:
    """Give every sequence as an iterator, which can be read once: each must do what the list does."""
    plain = {"suppress_tokens": [5, 6], "bad_words_ids": [[300, 301], [302]]}
    once: dict[str, Any] = {"suppress_tokens": iter([5, 6]), "bad_words_ids": iter([iter([300, 301]), iter([302])])}
    given = TranslationOptions(**once)
    return [
        given.sampling_params(2) == TranslationOptions(**plain).sampling_params(2),  # type: ignore[arg-type]
        given.sampling_params(2).bad_words == ((300, 301), (302,)),
        given.sampling_params(2).suppress_tokens == (5, 6),
    ]


def _closed(_: Path) -> object:
    with closing(stage.tiny_model()) as model:
        pass
    return model.prefill(PROMPT, metrale.SequenceState(0))


def cases() -> Iterator[Case]:
    """Every case of limits and contradictions."""
    for label, options in TOO_MUCH.items():
        expect = Refusal("OutOfMemory", r"the model needs [\d,]+ bytes")
        yield Case(f"limits/load/{label}", _loaded(options), expect)
        yield Case(f"limits/plan/{label}", _planned(options), Answer(True))
    for label, (run, argument, says) in AGAINST.items():
        yield Case(f"limits/against/{label}", run, Refusal("InvalidInput", says, argument=argument))
    yield Case("limits/iterators", _kept, Answer([True, True, True]))
    yield Case("limits/closed", _closed, Refusal("SequenceError", "closed"))
