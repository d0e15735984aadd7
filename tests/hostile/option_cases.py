# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every public argument with every value that its kind may not have, and with values that must do what another does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile.case import Answer, Case, Outcome, Refusal
from tests.hostile.child import described
from tests.hostile.kinds import made
from tests.hostile.subjects import SUBJECTS, Subject

REQUIRED = {
    "BeamReq": ("prompt_tokens",),
    "ScoreReq": ("prompt_tokens", "target_tokens"),
    "Request": ("prompt_tokens",),
    "PrefillSlice": ("prompt_tokens", "chunk_start", "chunk_len", "is_last_chunk"),
    "Engine.submit": ("request",),
}


def _runner(name: str, argument: str, value: Any) -> Callable[[Path], object]:
    subject = SUBJECTS[name]

    def run(_: Path) -> object:
        given = {one: subject.kinds[one].valid for one in REQUIRED.get(name, ())}
        return subject.call(**{**given, argument: made(value)})

    return run


def _alike(name: str, argument: str) -> Callable[[Path], object]:
    """Return a run of a valid value, of it once more and of all that must do what it does; it names what does not."""
    kind = SUBJECTS[name].kinds[argument]

    def run(folder: Path) -> list[str]:
        expected = _runner(name, argument, kind.valid)(folder)
        alike = {"itself": kind.valid, **kind.alike}
        return [label for label, value in alike.items() if _runner(name, argument, value)(folder) != expected]

    return run


def _argument(subject: Subject, name: str) -> str:
    if name in subject.named:
        return subject.named[name]
    longer = f"max_new_tokens with the language and {name}"  # where the limit counts more than the argument
    return rf"{longer}|(\w+(\[\d+\])?\.)*{re.escape(name)}(\[\d+\])*(: length)?"


def _refusals(name: str, argument: str) -> Callable[[Path], object]:
    """Return a run of all wrong values of an argument, which gives a complaint for each that is not refused as it must.

    One process for all of them: what one leaves behind, the next must stand as well.
    """
    subject = SUBJECTS[name]

    def run(folder: Path) -> dict[str, str]:
        found = {}
        for label, value in subject.kinds[argument].wrong.items():
            try:
                outcome = Outcome("value", repr(_runner(name, argument, value)(folder)))
            except Exception as error:
                outcome = Outcome(**described(error))
            wrong = Refusal(
                "InvalidInput|UnknownLanguage", "expected .*, got ", argument=_argument(subject, argument)
            ).complaint(outcome)
            if wrong is not None:
                found[label] = f"{wrong}; {outcome.told()}"
        return found

    return run


def cases() -> Iterator[Case]:
    """Every argument of every call; what is alike, of every second one in a run that asks for no more."""
    arguments = [(name, argument) for name, subject in SUBJECTS.items() for argument in subject.kinds]
    for number, (name, argument) in enumerate(arguments):
        at = f"options/{name}/{argument}"
        yield Case(f"{at}/wrong", _refusals(name, argument), Answer({}))
        yield Case(f"{at}/alike", _alike(name, argument), Answer([]), further=number % 2 != 0)
