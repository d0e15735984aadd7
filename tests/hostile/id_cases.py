# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ids of every kind to every call of the model that takes ids; and weights and adapters that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file

import metrale
from metrale import BeamReq, FeedSource, PrefillSlice, Request, SamplingParams, ScoreReq
from tests.backends import open_host
from tests.hostile import stage
from tests.hostile.calls import PROMPT, VOCAB, tiny
from tests.hostile.case import Answer, Case, Outcome, Refusal
from tests.hostile.child import described
from tests.hostile.kinds import Kind, ids, made, whole
from tests.reference.adapters import Recipe, write_raw
from tests.reference.tiny import tiny_config

Call = Callable[[Any], object]
IDS: Final = ids((5, 6, 7), VOCAB)
ONE: Final = whole(9, 0, VOCAB - 1)


def _with(seqs: int, call: Callable[..., Any]) -> Any:
    """Call with so many prefilled sequences, and free them."""
    model = tiny()
    live = [model.alloc_sequence() for _ in range(seqs)]
    try:
        for seq in live:
            model.prefill(PROMPT, seq)
        return call(model, *live)
    finally:
        for seq in live:
            model.free_sequence(seq)


def _argmax(ptr: Any) -> int:
    return tiny().argmax_on_device(ptr)


def _prefix(given: Any) -> object:
    def call(model: Any, seq: Any) -> int:
        seq.prefix_tokens = given
        return _argmax(model.prefill([5], seq))

    return _with(1, call)


def _sampled(given: Any, name: str) -> object:
    def call(model: Any, seq: Any) -> object:
        params = SamplingParams(**{name: given})
        model.begin_sampling(seq, params)
        return repr(params)

    return _with(1, call)


def _mixed(given: Any) -> object:
    def call(model: Any, one: Any, two: Any, three: Any) -> object:
        found = model.mixed_forward(given, [one, two, three], [5], _fresh(model), 0, 1, True)
        return [_argmax(found.decode_logits), _argmax(found.prefill_logits)]

    return _with(3, call)


def _mixed_prefill(given: Any) -> object:
    def call(model: Any, seq: Any) -> object:
        found = model.mixed_forward([9], [seq], given, _fresh(model), 0, 3, True)
        return [_argmax(found.decode_logits), _argmax(found.prefill_logits)]

    return _with(1, call)


def _fresh(model: Any) -> Any:
    """Return the sequence in slot 3, new each time."""
    held = model._table._live.get(3)
    if held is not None:
        model.free_sequence(held[0])
    return model.alloc_sequence()


SEQUENCES: Final[dict[str, tuple[Call, str]]] = {
    "prefill": (lambda v: _with(1, lambda m, s: _argmax(m.prefill(v, s))), r"tokens"),
    "prefill_chunk": (lambda v: _with(1, lambda m, s: _argmax(m.prefill_chunk(v, s, 0, 3, True))), r"tokens"),
    "prefill_twophase": (lambda v: _with(1, lambda m, s: _argmax(m.prefill_twophase(v, s, 3))), r"tokens"),
    "prefill_batch_chunk": (
        lambda v: _with(1, lambda m, s: _argmax(m.prefill_batch_chunk([PrefillSlice(v, s, 0, 3, True)])[0])),
        r"streams\[0\]",
    ),
    "decode_batch": (lambda v: _with(3, lambda m, *s: _argmax(m.decode_batch(v, s))), r"tokens(, seqs)?"),
    "mixed_forward": (_mixed, r"decode_tokens(, seqs)?"),
    "mixed_forward_prefill": (_mixed_prefill, r"prefill_tokens"),
    "mixed_forward_batch": (
        lambda v: _with(3, lambda m, *s: _argmax(m.mixed_forward_batch(v, s, []).decode_logits)),
        r"decode_tokens(, seqs)?",
    ),
    "prefix_tokens": (_prefix, r"prefix_tokens"),
    "suppress_tokens": (lambda v: _sampled(v, "suppress_tokens"), r"suppress_tokens"),
    "eos_ids": (lambda v: _sampled(v, "eos_ids"), r"eos_ids"),
}
"""Calls that take several ids, and what their errors call these."""

SINGLE: Final[dict[str, tuple[Call, str]]] = {
    "decode": (lambda v: _with(1, lambda m, s: _argmax(m.decode(v, s))), r"token"),
    "feed": (
        lambda v: _with(1, lambda m, s: _argmax(m.decode_batch_fed([FeedSource(v)], [s]))),
        r"FeedSource|token|sources\[0\](\.token)?",
    ),
    "forced_eos_id": (
        lambda v: _with(
            1, lambda m, s: repr(m.generate_beam_batch([BeamReq([5], num_beams=2, max_new=3, forced_eos_id=v)]))
        ),
        r"reqs\[0\]\.forced_eos_id",
    ),
    "src_lang_id": (
        lambda v: tiny().generate_beam_batch([BeamReq([5], v, 81, num_beams=2, max_new=3)]),
        r"reqs\[0\]\.src_lang_id",
    ),
    "default_language": (lambda v: _default_language(v), r"source"),
}


def _default_language(given: Any) -> object:
    with closing(metrale.load(stage.folder("tiny"), open_host(), source=given, target=81, **stage.LIMITS)) as model:
        return model.argmax_on_device(model.prefill(PROMPT, model.alloc_sequence()))


def _refusals(call: Call, wrong: dict[str, Any], name: str) -> Callable[[Path], object]:
    """Return a run of all wrong ids, which gives a complaint for each that is not refused as it must be."""

    def run(_: Path) -> dict[str, str]:
        found, before = {}, call(made(IDS.valid if wrong is _SEVERAL else ONE.valid))
        for label, value in wrong.items():
            try:
                outcome = Outcome("value", repr(call(value)))
            except Exception as error:
                outcome = Outcome(**described(error))
            complaint = Refusal("InvalidInput", "expected .*, got ", argument=rf"({name})(\[\d+\])?").complaint(outcome)
            if complaint is not None:
                found[label] = f"{complaint}; {outcome.told()}"
        if call(made(IDS.valid if wrong is _SEVERAL else ONE.valid)) != before:
            found["afterwards"] = "what was refused has changed the model"
        return found

    return run


_SEVERAL: Final = dict(IDS.but("none").also(none=None).wrong)
_SINGLE: Final = dict(ONE.but("none").wrong)


def _alike(call: Call, kind: Kind) -> Callable[[Path], object]:
    """Return a run of a valid value and of all that must do what it does, which names those that do not."""

    def run(_: Path) -> list[str]:
        expected = call(made(kind.valid))
        return [label for label, value in kind.alike.items() if call(made(value)) != expected]

    return run


def _ids() -> Iterator[Case]:
    for table, wrong, kind in ((SEQUENCES, _SEVERAL, IDS), (SINGLE, _SINGLE, ONE)):
        for name, (call, argument) in table.items():
            yield Case(f"ids/{name}/wrong", _refusals(call, wrong, argument), Answer({}))
            yield Case(f"ids/{name}/alike", _alike(call, kind), Answer([]))


# not finite

_GOOD_SCORE: Final = ScoreReq((5, 6), (8, 2))


def _spoilt(call: Callable[[Any], object]) -> Callable[[Path], object]:
    def run(folder: Path) -> object:
        with closing(metrale.load(folder, open_host(), source=80, target=81, **stage.LIMITS)) as model:
            return call(model)

    return run


def _spoil(value: float) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / stage.WEIGHTS)
        name = "model.encoder.layer_norm.weight"
        tensors[name] = np.where(np.arange(32) == 3, np.float32(value), tensors[name]).astype(np.float32)
        save_file(tensors, folder / stage.WEIGHTS)

    return stage.copied("tiny", damage)


def _engine_error(model: Any) -> object:
    with metrale.Engine(model) as engine:
        done = engine.submit(Request(PROMPT)).result()
        return [done.finish_reason, done.error]


def _greedy_row(model: Any) -> object:
    return model.argmax_on_device(model.prefill(PROMPT, model.alloc_sequence()))


def _spoilt_adapter(folder: Path) -> Path:
    """Write an adapter whose one value is a NaN."""
    recipe = Recipe(31, "fc1", {"lora_alpha": 4})
    tensors = recipe.tensors(tiny_config())
    for name, matrix in tensors.items():
        if ".encoder.layers.0." in name and "lora_B" in name:
            matrix[0, 0] = np.nan
    return write_raw(folder / "spoilt", recipe.config, tensors)


def _neighbours(call: Callable[[Any, Sequence[int]], list[Any]]) -> Callable[[Path], object]:
    """Return a run that asks for four results, of which those with the spoilt adapter must fail, alone and named."""

    def run(folder: Path) -> object:
        adapters = {"spoilt": folder / "spoilt"}
        with closing(
            metrale.load(stage.folder("tiny"), open_host(), source=80, target=81, adapters=adapters, **stage.LIMITS)
        ) as model:
            sound = call(model, (-1, -1, -1, -1))
            try:
                mixed = call(model, (-1, 0, -1, 0))
            except metrale.NonFiniteLogits as error:
                return {"rows": list(error.rows), "usable": call(model, (-1, -1, -1, -1)) == sound, "says": str(error)}
            return {"neighbours": [mixed[at] == sound[at] for at in (0, 2)], "spoilt": [mixed[at] for at in (1, 3)]}

    return run


def _together(model: Any, slots: Sequence[int]) -> list[Any]:
    with metrale.Engine(model) as engine:
        handles = [engine.submit(Request((5 + at, 6), adapter_slot=slot)) for at, slot in enumerate(slots)]
        return [
            [done.finish_reason, done.ids if done.finish_reason != "error" else done.error]
            for done in (one.result() for one in handles)
        ]


def _not_finite() -> Iterator[Case]:
    calls: dict[str, Callable[[Any], object]] = {
        "argmax": _greedy_row,
        "beams": lambda model: model.generate_beam_batch([BeamReq(PROMPT, num_beams=2, max_new=4)] * 3),
        "greedy": lambda model: model.generate_beam_batch([BeamReq(PROMPT, num_beams=1, max_new=4)] * 3),
        "scores": lambda model: [one.logprobs for one in model.score_targets([_GOOD_SCORE] * 3)],
    }
    for label, value in {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38}.items():
        for name, call in calls.items():
            where = "rows 0" if name == "argmax" else "requests 0, 1, 2"
            expect = Refusal("NonFiniteLogits", f"a NaN or an infinity in {where}$")
            yield Case(f"not_finite/{label}/{name}", _spoilt(call), expect, _spoil(value))
        told = ["error", "the model's logits hold a NaN or an infinity"]
        yield Case(f"not_finite/{label}/engine", _spoilt(_engine_error), Answer(told), _spoil(value))
    for half in ("float16",):
        expect = Refusal(
            "CheckpointError", "tensor 'model.encoder.layer_norm.weight': 1 finite values do not fit in f16"
        )
        yield Case(
            f"not_finite/overflow_in_{half}",
            lambda folder: metrale.load(folder, open_host(), "float16", **stage.LIMITS),
            expect,
            _spoil(1e6),
        )
    build = lambda folder: _spoilt_adapter(folder)  # noqa: E731
    for name, width in (("beams", 2), ("greedy", 1)):
        call_ = lambda model, slots, width=width: model.generate_beam_batch(  # noqa: E731
            [BeamReq((5 + at, 6), num_beams=width, max_new=4, adapter_slot=slot) for at, slot in enumerate(slots)]
        )
        says = "logits: expected finite numbers, got a NaN or an infinity in requests 1, 3"
        yield Case(
            f"not_finite/adapter/{name}",
            _neighbours(call_),
            Answer({"rows": [1, 3], "usable": True, "says": says}),
            build,
        )
    scores = lambda model, slots: [  # noqa: E731
        one.logprobs
        for one in model.score_targets(
            [ScoreReq((5 + at, 6), (8, 2), adapter_slot=slot) for at, slot in enumerate(slots)]
        )
    ]
    yield Case(
        "not_finite/adapter/scores", _neighbours(scores), Answer({"rows": [1, 3], "usable": True, "says": says}), build
    )
    failed = ["error", told[1]]
    yield Case(
        "not_finite/adapter/engine",
        _neighbours(_together),
        Answer({"neighbours": [True, True], "spoilt": [failed, failed]}),
        build,
    )


def cases() -> Iterator[Case]:
    """Every case of ids, and of logits that are not finite."""
    yield from _ids()
    yield from _not_finite()
