# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests: what is taken, what it becomes, and what is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest

from metrale.engine.errors import RequestFailed
from metrale.engine.request import FinishReason, Generated, Request
from metrale.errors import InvalidInput
from metrale.model import BeamParams, SamplingParams

EOS = frozenset({2})


def test_a_request_needs_little() -> None:
    request = Request([5, 6])
    assert dataclasses.asdict(request) | {"sampling": None} == {
        "prompt_tokens": (5, 6),
        "src_lang_id": 0,
        "tgt_lang_id": 0,
        "max_new_tokens": None,
        "eos_ids": None,
        "sampling": None,
        "beams": None,
        "prefix_tokens": (),
        "adapter_slot": -1,
        "priority": 0,
        "timeout": None,
        "logprobs": False,
        "on_token": None,
    }
    assert request.sampling == SamplingParams()


def test_numbers_become_plain_ones() -> None:
    """NumPy's integers wrap, and are no JSON; a list could change after it was checked."""
    tokens = [np.int32(5), 6]
    eos: Any = [np.int64(2), 3]
    request = Request(tokens, np.int64(7), np.int16(8), np.int64(9), eos_ids=eos, timeout=np.float32(0.5))  # type: ignore[arg-type]
    tokens.append(1)
    assert request.prompt_tokens == (5, 6)
    assert request.eos_ids == frozenset({2, 3})
    whole = [*request.prompt_tokens, *request.end_ids, request.src_lang_id, request.tgt_lang_id, request.most_tokens]
    assert {type(number) for number in whole} == {int}
    assert (request.timeout, type(request.timeout)) == (0.5, float)
    assert Request(np.arange(3), eos_ids=EOS).prompt_tokens == (0, 1, 2)  # type: ignore[arg-type]


def test_a_request_cannot_change() -> None:
    request = Request([5], eos_ids=EOS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.priority = 1  # type: ignore[misc]
    assert request == Request((5,), eos_ids=EOS)
    assert hash(request) == hash(Request((5,), eos_ids=EOS))


WRONG: list[tuple[str, Any, str]] = [
    ("prompt_tokens", "abc", "prompt_tokens"),
    ("prompt_tokens", b"abc", "prompt_tokens"),
    ("prompt_tokens", 5, "prompt_tokens"),
    ("prompt_tokens", None, "prompt_tokens"),
    ("prompt_tokens", [1, -1], "prompt_tokens[1]"),
    ("prompt_tokens", [1, 2, 3.0], "prompt_tokens[2]"),
    ("prompt_tokens", [True], "prompt_tokens[0]"),
    ("prompt_tokens", [1 << 31], "prompt_tokens[0]"),
    ("prompt_tokens", [None], "prompt_tokens[0]"),
    ("eos_ids", 2, "eos_ids"),
    ("eos_ids", {-2}, "eos_ids[0]"),
    ("src_lang_id", -1, "src_lang_id"),
    ("src_lang_id", "fra_Latn", "src_lang_id"),
    ("src_lang_id", None, "src_lang_id"),
    ("tgt_lang_id", 1.0, "tgt_lang_id"),
    ("max_new_tokens", 0, "max_new_tokens"),
    ("max_new_tokens", 2.5, "max_new_tokens"),
    ("max_new_tokens", True, "max_new_tokens"),
    ("sampling", None, "sampling"),
    ("sampling", {"temperature": 1}, "sampling"),
    ("beams", 4, "beams"),
    ("beams", SamplingParams(), "beams"),
    ("prefix_tokens", "abc", "prefix_tokens"),
    ("prefix_tokens", None, "prefix_tokens"),
    ("prefix_tokens", [1, -1], "prefix_tokens[1]"),
    ("prefix_tokens", [1.0], "prefix_tokens[0]"),
    ("adapter_slot", -2, "adapter_slot"),
    ("adapter_slot", None, "adapter_slot"),
    ("priority", 0.5, "priority"),
    ("priority", 1 << 31, "priority"),
    ("priority", -(1 << 31), "priority"),
    ("timeout", 0, "timeout"),
    ("timeout", -1.0, "timeout"),
    ("timeout", math.nan, "timeout"),
    ("timeout", math.inf, "timeout"),
    ("timeout", "1", "timeout"),
    ("timeout", True, "timeout"),
    ("logprobs", 1, "logprobs"),
    ("logprobs", None, "logprobs"),
    ("on_token", 1, "on_token"),
    ("on_token", asyncio.sleep, "on_token"),  # a coroutine that nobody would await
]


@pytest.mark.parametrize(("name", "value", "argument"), WRONG)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, argument: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Request(**{"prompt_tokens": [5], "eos_ids": EOS, name: value})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens", ()),
        ("prompt_tokens", [(1 << 31) - 1]),
        ("eos_ids", frozenset()),
        ("max_new_tokens", 1),
        ("priority", -(1 << 31) + 1),
        ("timeout", 1e-9),
        ("adapter_slot", 0),
    ],
)
def test_values_at_the_edge_are_taken(name: str, value: Any) -> None:
    Request(**{"prompt_tokens": [5], "eos_ids": EOS, name: value})


def test_a_search_draws_nothing() -> None:
    Request([5], beams=BeamParams(2), sampling=SamplingParams(repetition_penalty=2.0))
    with pytest.raises(InvalidInput) as caught:
        Request([5], beams=BeamParams(2), sampling=SamplingParams(temperature=0.5))
    assert caught.value.argument == "sampling.temperature"


@pytest.mark.parametrize(
    ("beams", "prefix", "width", "counted", "positions"),
    [(None, (), 1, 1, 7), (None, (5,), 1, 0, 9), (BeamParams(3), (), 3, 1, 7), (BeamParams(2), (5, 6), 2, 0, 10)],
)
def test_what_a_request_takes(
    beams: BeamParams | None, prefix: tuple[int, ...], width: int, counted: int, positions: int
) -> None:
    """The language counts among 7 tokens, the last of which is not fed; after a prefix it does not."""
    request = Request([5], max_new_tokens=7, beams=beams, prefix_tokens=prefix)
    assert (request.width, request.counted_from, request.target_positions) == (width, counted, positions)


def test_every_field_has_a_wrong_value_in_the_table() -> None:
    assert {name for name, _, _ in WRONG} == {field.name for field in dataclasses.fields(Request)}


def test_an_empty_result() -> None:
    one, other = Generated(), Generated()
    assert (one.ids, one.length, one.logprobs, one.error) == ([], 1, None, None)
    assert math.isnan(one.logprob)
    assert one.finish_reason in get_args(FinishReason)
    one.ids.append(5)
    assert other.ids == []


def test_a_result_can_raise_its_error() -> None:
    fine, failed = Generated([5], "eos"), Generated([5], "error", error="the reason")
    assert fine.raise_for_error() is fine
    with pytest.raises(RequestFailed, match=r"^the reason$"):
        failed.raise_for_error()
