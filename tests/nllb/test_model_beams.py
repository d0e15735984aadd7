# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole searches at their edges: how they end, what is refused before anything runs, and what comes of neighbours."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import OutOfMemory
from metrale import BeamReq, Hypothesis, load
from metrale.errors import InvalidInput, NoFreeSlot, NonFiniteLogits, SequenceError
from metrale.nllb.device_weights import weight_layout
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, arena, block, prefilled
from tests.nllb.searching import nothing_left
from tests.reference.tiny import write_tiny

REQ = BeamReq([5, 6, 7], 80, 81, num_beams=3, max_new=6, num_return_sequences=3)
GREEDY = replace(REQ, num_beams=1, num_return_sequences=1)
ALL = tuple(range(97))
LIMIT = 8
"""Of `tiny`: its most new tokens."""


def found(model: NllbModel, *reqs: BeamReq) -> list[list[Hypothesis]]:
    """Run requests, and check that nothing is held afterwards."""
    with nothing_left(model):
        return model.generate_beams(reqs)


# how searches end


def test_the_end_may_come_first(tiny: NllbModel) -> None:
    """Every id ends: each hypothesis has the language and one more."""
    [best] = found(tiny, replace(REQ, num_beams=2, num_return_sequences=2, eos_ids=ALL, max_new=8))
    assert [len(one.ids) for one in best] == [2, 2]
    assert best[0].score > best[1].score
    assert [one.score for one in best] == pytest.approx([one.logprobs[1] / 2 for one in best], rel=1e-6)


@pytest.mark.parametrize("early", [False, True, "never"])
def test_all_beams_may_end_together(tiny: NllbModel, early: Any) -> None:
    req = replace(REQ, num_beams=2, num_return_sequences=2, eos_ids=ALL, min_new=5, max_new=8, early_stopping=early)
    hungry = replace(req, eos_ids=(2,), min_new=4, forced_eos_id=2, max_new=5)
    assert {len(one.ids) for one in found(tiny, hungry)[0]} == {5}
    with pytest.raises(InvalidInput, match=r"reqs\[0\]: expected ids that may be chosen"):
        tiny.generate_beams([req])  # every id ends it, and none may come before there are five


@pytest.mark.parametrize("req", [REQ, GREEDY])
def test_one_new_token_is_the_language(tiny: NllbModel, req: BeamReq) -> None:
    with tiny.gpu.launch_trace() as trace:
        [[one]] = found(tiny, replace(req, max_new=1))
    assert (one.ids, one.logprobs) == ([81], [0.0])
    assert math.isnan(one.score) if req is GREEDY else one.score == 0
    assert "kernel" not in {record.kind for record in trace}


def test_two_new_tokens_are_the_best_of_one_row(tiny: NllbModel) -> None:
    three, [one] = found(tiny, replace(REQ, max_new=2), replace(GREEDY, max_new=2))
    seq = prefilled(tiny, Case(list(REQ.prompt_tokens), 80, 81, []))
    row = arena(tiny)[4 + seq.slot_idx, :97]
    best = np.argsort(-row, kind="stable")[:3].tolist()
    assert [hypothesis.ids for hypothesis in three] == [[81, token] for token in best]
    assert one.ids == [81, best[0]]
    tiny.free_sequence(seq)


@pytest.mark.parametrize("req", [REQ, GREEDY])
def test_a_prefix_may_be_as_long_as_the_limit_leaves_room_for(tiny: NllbModel, req: BeamReq) -> None:
    """The language, the prefix and what follows are together at most what a sequence may have."""
    for given in range(1, LIMIT - 1):
        left = LIMIT - 1 - given
        one = replace(req, prefix_tokens=tuple(range(20, 20 + given)), max_new=left, min_new=left)
        [best] = found(tiny, one)
        assert all(hypothesis.ids[: 1 + given] == [81, *one.prefix_tokens] for hypothesis in best)
        assert {len(hypothesis.ids) for hypothesis in best} == {LIMIT}
        with tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
            tiny.generate_beams([replace(one, max_new=LIMIT - given)])
        assert refused.value.argument == "reqs[0].max_new"
        assert not trace


def test_what_a_search_alone_minds(tiny: NllbModel) -> None:
    """A greedy request has no scores."""
    assert repr(found(tiny, replace(GREEDY, length_penalty=200.0))) == repr(found(tiny, GREEDY))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -2.0])
@pytest.mark.parametrize("most", [2, 3])
def test_only_what_differs_is_returned(tiny: NllbModel, penalty: float, most: int) -> None:
    """Where an id has fewer successors than there are beams, copies of a beam stand in for the missing ones."""
    few = replace(REQ, suppress_tokens=ALL[2:], eos_ids=(96,), max_new=most, length_penalty=penalty)
    [hypotheses] = found(tiny, few)
    ids = {tuple(one.ids) for one in hypotheses}
    assert len(ids) == len(hypotheses) == {2: 2, 3: 3}[most]
    assert all(set(one.ids[1:]) <= {0, 1} for one in hypotheses)
    assert min(one.score for one in hypotheses) > -1e4


def test_the_forced_end_is_the_last_id(tiny: NllbModel) -> None:
    """With a log-probability of 0 in a search; a greedy one has that of the logits."""
    forced: dict[str, Any] = {"forced_eos_id": 50, "max_new": 4}
    searched, [greedy] = found(tiny, replace(REQ, **forced), replace(GREEDY, **forced))
    assert {(len(one.ids), one.ids[-1], one.logprobs[-1]) for one in searched} == {(4, 50, 0.0)}
    assert (len(greedy.ids), greedy.ids[-1]) == (4, 50)
    assert greedy.logprobs[-1] < -1


# what is refused before anything runs

REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 5},
    "max_new": {"max_new": 9},
    "prompt_tokens": {"prompt_tokens": [5] * 11},
    "prompt_tokens[1]": {"prompt_tokens": [5, 97]},
    "prefix_tokens[0]": {"prefix_tokens": (97,)},
    "src_lang_id": {"src_lang_id": 97},
    "tgt_lang_id": {"tgt_lang_id": 0},
    "adapter_slot": {"adapter_slot": 0},
    "suppress_tokens[1]": {"suppress_tokens": (5, 97)},
    "bad_words_ids[0][1]": {"bad_words_ids": ((5, 97),)},
    "bad_words_ids": {"bad_words_ids": tuple((i % 90, 5) for i in range(3000))},
    "forced_eos_id": {"forced_eos_id": 97},
    "eos_ids[1]": {"eos_ids": (2, 97)},
    "eos_ids": {"eos_ids": tuple(range(85))},
    "params.eos_ids": {"eos_ids": (), "min_new": 3},
    "length_penalty": {"length_penalty": 200.0},
    "num_return_sequences": {"num_return_sequences": 4},
    "max_new ": {"max_new": 0},
}


OF_SEARCHES = ("num_beams", "eos_ids", "length_penalty", "num_return_sequences")
"""Refused of a search alone."""


@pytest.mark.parametrize(
    ("req", "argument"),
    [(REQ, argument) for argument in REFUSED]
    + [(GREEDY, argument) for argument in REFUSED if argument not in OF_SEARCHES],
)
def test_a_wrong_request_is_named_before_anything_runs(tiny: NllbModel, req: BeamReq, argument: str) -> None:
    before = arena(tiny).tobytes(), block(tiny.gpu, "KV cache")
    with nothing_left(tiny), tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
        tiny.generate_beams([REQ, GREEDY, replace(req, **REFUSED[argument])])
    assert refused.value.argument == f"reqs[2].{argument.strip()}"
    assert not trace
    assert (arena(tiny).tobytes(), block(tiny.gpu, "KV cache")) == before


@pytest.mark.parametrize("req", [None, [5, 6], 7])
def test_what_is_no_request(tiny: NllbModel, req: Any) -> None:
    with pytest.raises(InvalidInput, match=r"reqs\[1\]: expected a BeamReq"):
        tiny.generate_beams([REQ, req])


def test_a_request_that_the_pool_cannot_hold(make_tiny: MakeModel) -> None:
    """Of 30 positions: five for the source, and three times the limit."""
    model = make_tiny(kv_bytes=30 * 3 * 2 * 32 * 4)
    with nothing_left(model), model.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
        model.generate_beams([GREEDY, replace(REQ, max_new=4), replace(REQ, max_new=8), replace(REQ, max_new=9)])
    assert (refused.value.argument, refused.value.got) == ("reqs[3].max_new", "9")
    with pytest.raises(InvalidInput) as refused:
        model.generate_beams([GREEDY, replace(REQ, num_beams=4, max_new=7)])
    assert (refused.value.argument, refused.value.got) == ("reqs[1]", "33")
    assert not trace
    assert len(found(model, replace(REQ, max_new=8), GREEDY, replace(REQ, max_new=8))) == 3  # one after the other
    assert len(found(model, replace(REQ, prompt_tokens=[5] * 4, max_new=8))[0]) == 3  # all 30


@pytest.mark.parametrize("reqs", [[REQ], []])
def test_a_closed_model(tiny: NllbModel, reqs: list[BeamReq]) -> None:
    tiny.close()
    with pytest.raises(SequenceError, match="closed"):
        tiny.generate_beams(reqs)


@pytest.mark.parametrize("owned", [False, True])
def test_a_model_that_is_closed_meanwhile(tmp_path: Path, device: Device, owned: bool) -> None:
    """Whoever's the backend is: it ends with the model when it is the model's own."""
    with ExitStack() as stack:
        gpu = "host" if owned else stack.enter_context(device.open())
        model = load(write_tiny(tmp_path, 7), gpu, "float32", max_batch=4, max_source_len=12, max_new_tokens=LIMIT)
        stack.enter_context(model)

        def read(event: int) -> None:
            model.close()
            model.gpu.event_synchronize(event)

        model.event_synchronize = read  # type: ignore[method-assign]
        with pytest.raises(SequenceError, match="closed"):
            model.generate_beams([REQ])


@pytest.mark.parametrize("reqs", [None, REQ, 5, "reqs"])
def test_what_are_no_requests(tiny: NllbModel, reqs: Any) -> None:
    with pytest.raises(InvalidInput, match="reqs: expected a sequence of BeamReq"):
        tiny.generate_beams(reqs)


def test_what_gives_its_items_once_is_as_good_as_a_list(tiny: NllbModel) -> None:
    ids: dict[str, Any] = {"prompt_tokens": (5, 6), "prefix_tokens": (9,), "suppress_tokens": (11,), "eos_ids": (2, 70)}
    words = ((12,), (13, 14))
    listed = replace(REQ, **ids, bad_words_ids=words, max_new=5)
    once = replace(REQ, **{name: iter(value) for name, value in ids.items()}, bad_words_ids=iter(words), max_new=5)  # type: ignore[arg-type]
    expected = repr(found(tiny, listed, GREEDY))
    with nothing_left(tiny):
        for _ in range(2):  # a request may be used again
            assert repr(tiny.generate_beams(req for req in (once, GREEDY))) == expected  # type: ignore[arg-type]
        assert len(tiny.generate_beam_batch(req for req in (once, GREEDY))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["prompt_tokens", "prefix_tokens", "suppress_tokens", "bad_words_ids", "eos_ids"])
@pytest.mark.parametrize("value", [5, 5.0, object()])
def test_what_is_no_sequence_of_ids(tiny: NllbModel, argument: str, value: object) -> None:
    with nothing_left(tiny), pytest.raises(InvalidInput) as refused:
        tiny.generate_beams([replace(REQ, **{argument: value})])  # type: ignore[arg-type]
    assert refused.value.argument == f"reqs[0].{argument}"


# neighbours


def test_no_requests_find_nothing(tiny: NllbModel) -> None:
    assert found(tiny) == []


def test_the_best_ids_alone(tiny: NllbModel) -> None:
    assert tiny.supports_beam()
    assert tiny.generate_beam_batch([REQ, GREEDY]) == [one[0].ids for one in found(tiny, REQ, GREEDY)]


@pytest.mark.parametrize("req", [REQ, GREEDY])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_nothing_left_to_choose(tiny: NllbModel, req: BeamReq, after: int) -> None:
    """At once, or because the few ids that are allowed may not repeat; the model goes on as ever."""
    expected = found(tiny, REQ, GREEDY)
    hopeless = replace(req, suppress_tokens=ALL[after:], no_repeat_ngram_size=1, eos_ids=(96,), max_new=8)
    with (
        nothing_left(tiny),
        pytest.raises(InvalidInput, match=r"reqs\[1\], reqs\[2\]: expected ids that may be chosen"),
    ):
        tiny.generate_beams([REQ, hopeless, hopeless, GREEDY])
    assert repr(found(tiny, REQ, GREEDY)) == repr(expected)


def test_a_penalty_that_leaves_no_score_is_named(tiny: NllbModel) -> None:
    """Scores below -1e9 do not count, in transformers either; nobody is told of forbidden ids alone."""
    with nothing_left(tiny), pytest.raises(InvalidInput, match=r"reqs\[1\]: .* or a length_penalty of -40 takes every"):
        tiny.generate_beams([REQ, replace(REQ, length_penalty=-40.0)])
    with nothing_left(tiny), pytest.raises(InvalidInput, match=r"every id is forbidden$"):
        tiny.generate_beams([replace(GREEDY, suppress_tokens=ALL, length_penalty=-40.0)])
    assert len(found(tiny, replace(REQ, length_penalty=-5.0))[0]) == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite(tiny: NllbModel, value: float) -> None:
    """A position that only long sources have is spoilt: who has one is named, and the others had been served."""
    expected = found(tiny, REQ, GREEDY)
    at = next(entry.ptr for entry in tiny.gpu.alloc_report() if entry.tag == "weights")
    position = at + weight_layout(tiny.shape).offsets["position_table"] + 9 * 32 * 4
    good = np.empty(32, np.float32)
    tiny.gpu.copy_d2h(position, good)
    tiny.gpu.copy_h2d(np.full(32, value, np.float32), position)
    long, greedy = (replace(req, prompt_tokens=[5] * 9) for req in (REQ, GREEDY))
    with nothing_left(tiny), pytest.raises(NonFiniteLogits) as error:
        tiny.generate_beams([REQ, long, GREEDY, greedy])
    assert error.value.rows == (1, 3)
    assert "requests 1, 3" in str(error.value)
    assert repr(found(tiny, REQ, GREEDY)) == repr(expected)
    tiny.gpu.copy_h2d(good, position)
    assert len(found(tiny, long)[0]) == 3


def test_one_logit_of_every_row_is_not_a_number(tiny: NllbModel) -> None:
    """Others could be chosen, and none is."""
    at = next(entry.ptr for entry in tiny.gpu.alloc_report() if entry.tag == "weights")
    embedding = at + weight_layout(tiny.shape).offsets["embedding"] + 50 * 32 * 4
    tiny.gpu.copy_h2d(np.full(32, np.nan, np.float32), embedding)
    for reqs in ([GREEDY], [REQ], [REQ, GREEDY]):
        with nothing_left(tiny), pytest.raises(NonFiniteLogits) as error:
            tiny.generate_beams(reqs)
        assert error.value.rows == tuple(range(len(reqs)))


# other callers


def test_others_hold_the_slots(tiny: NllbModel) -> None:
    others = [prefilled(tiny, Case([5], 80, 81, [])) for _ in range(2)]
    with nothing_left(tiny), pytest.raises(NoFreeSlot, match="3 beams need as many slots, and 2 of 4 are free"):
        tiny.generate_beams([REQ])
    with nothing_left(tiny), pytest.raises(NoFreeSlot):
        tiny.generate_beams([GREEDY, REQ])  # waits for the first one, and then for nobody
    expected = found(tiny, replace(REQ, num_beams=2, num_return_sequences=1))
    tiny.decode_batch([9, 10], others)
    for seq in others:
        tiny.free_sequence(seq)
    assert repr(found(tiny, replace(REQ, num_beams=2, num_return_sequences=1))) == repr(expected)


def test_others_hold_the_kv(make_tiny: MakeModel) -> None:
    model = make_tiny(kv_bytes=30 * 3 * 2 * 32 * 4)
    other = prefilled(model, Case([5], 80, 81, []))
    with nothing_left(model), pytest.raises(OutOfMemory, match="KV cache"):
        model.generate_beams([replace(REQ, max_new=8)])
    model.free_sequence(other)
    assert len(found(model, replace(REQ, max_new=8))[0]) == 3
