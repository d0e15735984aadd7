# SPDX-License-Identifier: MIT OR Apache-2.0
"""No public call, and no argument of one, is left out of the cases."""

from __future__ import annotations

import inspect

import pytest

import metrale
from metrale.nllb.model import NllbModel
from tests.hostile.catalogue import cases
from tests.hostile.subjects import NO_INPUT, SUBJECTS

TAKE_IDS = {
    *("prefill", "prefill_chunk", "prefill_twophase", "prefill_batch_chunk", "prefill_batch_chunk_rows", "decode"),
    *("decode_batch", "mixed_forward", "mixed_forward_batch"),
}
"""Calls of a model that take ids in their own arguments; those that take requests are subjects by their requests."""


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_argument_has_a_kind(name: str) -> None:
    assert SUBJECTS[name].missing() == set()


def test_every_public_name_is_a_subject_or_takes_nothing() -> None:
    assert {name.partition(".")[0] for name in SUBJECTS} | NO_INPUT >= set(metrale.__all__)
    assert not NO_INPUT - set(metrale.__all__)


def test_every_call_that_takes_ids_is_called_with_wrong_ones() -> None:
    """By the names that such arguments have."""
    found = set()
    for name, method in inspect.getmembers(NllbModel, inspect.isfunction):
        if not name.startswith("_") and {"token", "tokens", "decode_tokens"} & set(
            inspect.signature(method).parameters
        ):
            found.add(name)
    refused = {"prefill_tail_split", "decode_verify", "decode_verify_batched", "mtp_verify", "prefill_with_embeds"}
    assert TAKE_IDS - {"prefill_batch_chunk", "prefill_batch_chunk_rows"} <= found
    named = {case.name.split("/")[1] for case in cases() if case.name.startswith("ids/")}
    assert TAKE_IDS - named <= {"prefill_batch_chunk_rows"}
    assert found - TAKE_IDS <= refused | _not_supported(found - TAKE_IDS)


def _not_supported(names: set[str]) -> set[str]:
    """Return the calls that NLLB refuses altogether, or leaves to the interface's default, which does nothing."""
    return {name for name in names if getattr(NllbModel, name) is getattr(metrale.Model, name, None)} | {
        name for name in names if "unsupported" in (inspect.getsourcefile(getattr(NllbModel, name)) or "")
    }


def test_there_are_hundreds_of_cases_of_each_kind() -> None:
    kinds: dict[str, int] = {}
    for case in cases():
        kind = case.name.split("/")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    least = {"config": 250, "json": 200, "places": 100, "safetensors": 150, "tensors": 30, "spm": 70, "tokenizer": 20}
    least |= {
        "adapter": 100,
        "torch": 150,
        "options": 250,
        "ids": 30,
        "not_finite": 15,
        "texts": 100,
        "command": 50,
        "limits": 30,
    }
    assert {kind: kinds.get(kind, 0) >= count for kind, count in least.items()} == dict.fromkeys(least, True)
    assert set(kinds) == set(least)
