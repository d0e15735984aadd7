# SPDX-License-Identifier: MIT OR Apache-2.0
"""The table in docs/model_interface.md is the interface: every method is in it, and NLLB does what it says.

Method names come from three files: the page, and in tests/data/interface the signatures of the Rust interface that
`metrale.model` is modelled on.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import metrale.model as interface
from metrale.errors import NotSupported
from metrale.model import (
    Model,
    ModelAdapters,
    ModelBeams,
    ModelCircuit,
    ModelDeviceFeed,
    ModelDraft,
    ModelEp,
    ModelForward,
    ModelLifecycle,
    ModelLogits,
    ModelScoring,
    ModelSsmState,
    ModelStreams,
    ModelVerify,
    ModelVision,
)
from metrale.nllb.model import NllbModel
from tests.conftest import MakeModel
from tests.model import nllb_adapters, nllb_answers, nllb_beams, nllb_calls
from tests.model.lab import REFUSES, SOURCE, TARGET, Lab, Row
from tests.model.tables import DEFAULTS
from tests.model.tables import REFUSES as REFUSED_BY_DEFAULT
from tests.model.tables import Row as Default
from tests.reference.nllb_float64 import NllbFloat64

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "model_interface.md").read_text(encoding="utf-8")

ROWS: dict[type, list[Row]] = {
    ModelStreams: nllb_calls.STREAMS,
    ModelLifecycle: nllb_calls.LIFECYCLE + nllb_answers.LIFECYCLE,
    ModelForward: nllb_calls.FORWARD + nllb_beams.FORWARD + nllb_answers.FORWARD,
    ModelLogits: nllb_calls.LOGITS,
    ModelAdapters: nllb_adapters.ADAPTERS + nllb_answers.ADAPTERS,
    ModelSsmState: nllb_answers.SSM_STATE,
    ModelVerify: nllb_answers.VERIFY,
    ModelDraft: nllb_answers.DRAFT,
    ModelVision: nllb_answers.VISION,
    ModelEp: nllb_answers.EP,
    ModelDeviceFeed: nllb_calls.FEED + nllb_answers.FEED,
    ModelBeams: nllb_beams.BEAMS,
    ModelScoring: nllb_calls.SCORING,
    ModelCircuit: nllb_answers.CIRCUIT,
}
CALLS = [(trait, row) for trait, rows in ROWS.items() for row in rows]


class Entry(NamedTuple):
    """One line of the page's tables."""

    trait: str
    method: str
    arguments: str
    added: bool
    default: str
    nllb: str

    @property
    def key(self) -> tuple[str, str]:
        return self.trait, self.method


class Signature(NamedTuple):
    """One line of a file of signatures."""

    trait: str
    method: str
    arguments: list[str]


def entries() -> Iterator[Entry]:
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        trait = section.split("\n", 1)[0]
        for line in re.findall(r"^\| `.*", section, re.MULTILINE) if trait.startswith("Model") else ():
            cells = re.fullmatch(r"\| `(\w+)(\(.*?\))`( \*)? \| (.+) \| (.+) \|", line)
            assert cells, f"not a line of the table: {line}"
            name, arguments, mark, default, nllb = cells.groups()
            yield Entry(trait, name, arguments, mark is not None, default, nllb)


def signatures(name: str) -> list[Signature]:
    lines = (TESTS / "data" / "interface" / name).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")]
    return [Signature(trait, method, re.findall(r"\b_*(\w+): ", args)) for trait, method, args, _ in cells]


ENTRIES = {entry.key: entry for entry in entries()}
TRAIT_SEED = signatures("model_forward.txt")
NLLB_SEED = signatures("nllb_model_impl.txt")
SEED = {(one.trait, one.method) for one in TRAIT_SEED + NLLB_SEED}


def methods() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the public methods of the supertraits."""
    return {
        (trait.__name__, name): method
        for trait in Model.__bases__
        if trait is not ABC
        for name, method in vars(trait).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


METHODS = methods()


def shown(value: object) -> str:
    return ".".join(value) if isinstance(value, tuple) else str(value)


def test_the_three_files_name_the_methods_of_the_supertraits_and_no_others() -> None:
    assert set(ENTRIES) | SEED == set(METHODS)


def test_the_page_has_every_method_once() -> None:
    keys = [entry.key for entry in entries()]
    assert sorted(keys) == sorted(METHODS)


def test_the_files_of_signatures_are_whole() -> None:
    """The first has the whole trait, but for what the page marks as added; the second has another line a method."""
    added = {key for key, entry in ENTRIES.items() if entry.added}
    assert [(one.trait, one.method) for one in TRAIT_SEED] == [
        key for key in METHODS if key[0] == "ModelForward" and key not in added
    ]
    assert len(NLLB_SEED) == len({(one.trait, one.method) for one in NLLB_SEED}) == 34
    assert not added & SEED


@pytest.mark.parametrize("seed", TRAIT_SEED, ids=lambda seed: seed.method)
def test_the_arguments_are_those_of_the_trait(seed: Signature) -> None:
    assert list(inspect.signature(METHODS[seed.trait, seed.method]).parameters)[1:] == seed.arguments


@pytest.mark.parametrize("seed", NLLB_SEED, ids=lambda seed: seed.method)
def test_the_number_of_arguments_is_that_of_the_implementation(seed: Signature) -> None:
    """Its names are often cut to a letter."""
    assert len(inspect.signature(METHODS[seed.trait, seed.method]).parameters) - 1 == len(seed.arguments)


@pytest.mark.parametrize("key", METHODS, ids=shown)
def test_the_page_says_what_the_code_is(key: tuple[str, str]) -> None:
    """Arguments with their defaults; abstract or not in the interface; kept or overridden in NLLB."""
    entry, method = ENTRIES[key], METHODS[key]
    signature = inspect.signature(method)
    bare = [one.replace(annotation=one.empty) for one in list(signature.parameters.values())[1:]]
    assert entry.arguments == str(signature.replace(parameters=bare, return_annotation=signature.empty))
    assert (entry.default == "abstract") == getattr(method, "__isabstractmethod__", False)
    kept = getattr(NllbModel, entry.method) is method
    assert bool(re.match(r"(refuses \()?default\b", entry.nllb)) == kept


@pytest.mark.parametrize("row", DEFAULTS, ids=lambda row: f"{row.trait.__name__}.{row.method}")
def test_the_page_says_what_the_default_is(row: Default) -> None:
    """The page begins with the value, or with ``refuses``. ``set_forward`` does nothing for what it accepts."""
    stated = ENTRIES[row.trait.__name__, row.method].default
    assert stated.startswith("refuses") == (row.expected is REFUSED_BY_DEFAULT)
    if row.expected is None and not row.calls:
        assert re.match(r"(nothing|None|accepts)\b", stated)
    elif type(row.expected) in (bool, int) and row.expected in (-1, 0, 1):
        assert re.match(rf"{row.expected}\b", stated)


def test_every_name_of_the_interface_is_on_the_page() -> None:
    missing = [name for name in interface.__all__ if not re.search(rf"\b{name}\b", PAGE)]
    assert not missing


@pytest.mark.parametrize("trait", ROWS, ids=lambda trait: trait.__name__)
def test_every_method_is_called(trait: type) -> None:
    """A method without a row in `ROWS` fails here; so does one with two."""
    assert sorted(row.method for row in ROWS[trait]) == sorted(m for name, m in METHODS if name == trait.__name__)


@pytest.fixture
def lab(make_tiny: MakeModel, tiny_judge: NllbFloat64) -> Lab:
    return Lab(make_tiny(source=SOURCE, target=TARGET, max_adapters=2), tiny_judge)


@pytest.mark.parametrize(("trait", "row"), CALLS, ids=[f"{trait.__name__}.{row.method}" for trait, row in CALLS])
def test_nllb_does_as_the_page_says(lab: Lab, trait: type, row: Row) -> None:
    assert ENTRIES[trait.__name__, row.method].nllb.startswith("refuses") == (row.expected is REFUSES)
    if row.expected is REFUSES:
        with pytest.raises(NotSupported) as refused:
            row.call(lab)
        assert (refused.value.model, refused.value.method) == ("NllbModel", row.names or row.method)
    else:
        got = row.call(lab)
        expected = row.expected(lab) if callable(row.expected) else row.expected
        assert got == expected
        assert type(got) is type(expected)
    assert row.method in lab.model.asked, "the call is of another method"
