# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `score_targets` refuses, and that nothing is scored before all requests are known to be right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metrale import ScoreReq
from metrale.errors import InvalidInput, SequenceError
from metrale.nllb.model import NllbModel
from tests.nllb.searching import nothing_left

REQ = ScoreReq([5, 6, 7], [9, 2], 80, 81)

REFUSED: dict[str, dict[str, Any]] = {
    "prompt_tokens": {"prompt_tokens": [5] * 11},
    "prompt_tokens[1]": {"prompt_tokens": [5, 97]},
    "prompt_tokens ": {"prompt_tokens": None},
    "target_tokens": {"target_tokens": []},
    "target_tokens ": {"target_tokens": [5] * 9},
    "target_tokens  ": {"target_tokens": "ids"},
    "target_tokens[0]": {"target_tokens": [-1]},
    "src_lang_id": {"src_lang_id": 97},
    "tgt_lang_id": {"tgt_lang_id": 0},
    "tgt_lang_id ": {"tgt_lang_id": None},
    "adapter_slot": {"adapter_slot": 0},
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_wrong_request_is_named_before_anything_runs(tiny: NllbModel, argument: str) -> None:
    """Also when it is far behind those that would be scored first."""
    with nothing_left(tiny), tiny.gpu.launch_trace() as trace, pytest.raises(InvalidInput) as refused:
        tiny.score_targets([REQ] * 6 + [replace(REQ, **REFUSED[argument])])
    assert refused.value.argument == f"reqs[6].{argument.strip()}"
    assert not trace


@pytest.mark.parametrize("reqs", [None, REQ, 5, "reqs"])
def test_what_are_no_requests(tiny: NllbModel, reqs: Any) -> None:
    with pytest.raises(InvalidInput, match="reqs: expected a sequence of ScoreReq"):
        tiny.score_targets(reqs)


@pytest.mark.parametrize("reqs", [[REQ], []])
def test_a_closed_model(tiny: NllbModel, reqs: list[ScoreReq]) -> None:
    tiny.close()
    with pytest.raises(SequenceError, match="closed"):
        tiny.score_targets(reqs)


def test_what_gives_its_items_once_is_as_good_as_a_list(tiny: NllbModel) -> None:
    once = replace(REQ, prompt_tokens=iter([5, 6, 7]), target_tokens=iter([9, 2]))  # type: ignore[arg-type]
    [expected] = tiny.score_targets([REQ])
    for _ in range(2):  # a request may be used again
        assert [one.logprobs for one in tiny.score_targets(iter([once]))] == [expected.logprobs]  # type: ignore[arg-type]
