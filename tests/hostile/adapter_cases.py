# SPDX-License-Identifier: MIT OR Apache-2.0
"""Adapters: every field with values that it may not have, patterns that take for ever, and tensors that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.hostile import damage, stage
from tests.hostile.case import Answer, Case, Refusal
from tests.hostile.config_cases import NOT_BOOLEANS, NOT_INTEGERS, NOT_NUMBERS, set_fields

CONFIG: Final = "adapter_config.json"
FILE: Final = "adapter_model.safetensors"
FC1: Final = "base_model.model.model.encoder.layers.0.fc1"

WRONG: Final[dict[str, dict[str, Any]]] = {
    "peft_type": {"absent": None, "other": "IA3", "lower": "lora", "list": ["LORA"], "object": {}, "number": 1},
    "bias": {"all": "all", "lora_only": "lora_only", "null": None, "list": [], "number": 3},
    "init_lora_weights": {
        "pissa": "pissa",
        "olora": "olora",
        "number": 3,
        "list": [],
        "object": {"a": 1},
        "long": "x" * 10**6,
    },
    "r": {**NOT_INTEGERS, "zero": 0, "minus": -1, "null": None},
    "lora_alpha": {**NOT_NUMBERS, "null": None},
    "use_rslora": NOT_BOOLEANS,
    "rank_pattern": {"list": ["fc1"], "string": "fc1", "number": 3},
    "alpha_pattern": {"list": ["fc1"], "string": "fc1", "number": 3},
    "use_dora": {"true": True, "string": "no", "number": 1},
    "modules_to_save": {"list": ["lm_head"], "deep": [[[["x"]]]]},
    "layer_replication": {"pairs": [[0, 1]]},
    "unheard_of": {"true": True, "long": "x" * 10**6, "huge": 10**4000},
}
"""Fields, and values that are refused by name."""

REGULAR: Final[dict[str, str]] = {
    "unbalanced": "fc1(",
    "group_repeated": "(a+)+b",
    "nested": "((a*)*)*",
    "alternation": "(a|a)*b",
    "many_stars": ".*.*.*.*.*.*fc1",
    "lookahead": "(?=fc)fc1",
    "lookbehind": "(?<=x)fc1",
    "back_reference": r"(fc)\1",
    "named_reference": "(?P<a>f)(?P=a)",
    "flags": "(?i)FC1",
    "huge_repeat": "a{1,99999999999}",
    "large_repeat": "(f{1,60000}){1,60000}",
    "long": "f" * 513,
    "bad_range": "[z-a]",
    "bad_escape": r"\q",
    "open_class": "[fc",
}
"""Patterns that are refused, all of them before they are tried."""


def _refused(label: str, changes: dict[str, Any], *says: str, problems: int | None = 1) -> Case:
    expect = Refusal("CheckpointError", says, path="/input", problems=problems)
    build = stage.copied("adapter", set_fields(CONFIG, changes))
    return Case(f"adapter/{label}", stage.judged_adapter, expect, build)


def _fields() -> Iterator[Case]:
    for field, values in WRONG.items():
        for label, value in values.items():
            yield _refused(f"{field}/{label}", {field: value}, rf"{CONFIG}: {field}: expected ")
    for place, pattern in enumerate(("rank_pattern", "alpha_pattern")):
        for number, (label, expression) in enumerate(REGULAR.items()):
            says = rf"{CONFIG}: {pattern}: the pattern .* (is no regular|looks back|repeats a group|has more than)"
            case = _refused(f"{pattern}/{label}", {pattern: {expression: 4}}, says)
            yield replace(case, further=(place + number) % 2 != 0)  # else each expression in one of the two
        for label, value in {**NOT_NUMBERS, "null": None}.items():
            yield _refused(
                f"{pattern}/value_{label}", {pattern: {"fc1": value}}, rf"{CONFIG}: {pattern}: fc1: expected "
            )
        many = {f"layer{index}": 4 for index in range(4097)}
        yield _refused(f"{pattern}/many", {pattern: many}, "has 4097 patterns, and at most 4096 are read")
    slow = {f".*.*{'q' * (index % 300)}{index}": 4 for index in range(1024)}  # a quarter of what may take the limit
    build = stage.copied("adapter", set_fields(CONFIG, {"rank_pattern": slow}))
    yield Case("adapter/rank_pattern/slow", stage.judged_adapter, Answer(stage.SAME), build)
    yield Case(
        "adapter/rank_pattern/slow_names", stage.judged_adapter, _SLOW_NAMES, stage.copied("adapter", _slow_names)
    )
    for label, alpha in {"zero": 0, "tiny": 1e-300}.items():
        build = stage.copied("adapter", set_fields(CONFIG, {"lora_alpha": alpha}))
        run = lambda folder: stage.logits_digest(stage.folder("whole"), folder) == stage._models["pristine"]  # noqa: E731
        yield Case(f"adapter/alpha_{label}", run, Answer(True), build)
    yield _refused("alpha_overflows", {"lora_alpha": 1e300}, "its scale of .* is not finite in float32", problems=16)


_SLOW_NAMES: Final = Refusal("CheckpointError", "rank_pattern: its patterns take too long", path="/input", problems=1)


def _slow_names(folder: Path) -> None:
    """Write as many modules as a header holds, with names that patterns take long over."""
    tensors = {}
    for index in range(2000):
        for half, shape in (("A", (4, 1)), ("B", (1, 4))):
            tensors[f"base_model.model.{'a.' * 55}{index}.lora_{half}.weight"] = np.zeros(shape, np.float32)
    save_file(tensors, folder / FILE)
    patterns = {f".*.*{index}x": 4 for index in range(4096)}
    set_fields(CONFIG, {"rank_pattern": patterns})(folder)


def _tensors() -> Iterator[Case]:
    """Matrices that are missing, too many, or of another shape or kind."""

    def case(label: str, change: Callable[[dict[str, Any]], object], *says: str, problems: int = 1) -> Case:
        def damaged(folder: Path) -> None:
            tensors = load_file(folder / FILE)
            change(tensors)
            save_file(tensors, folder / FILE)

        expect = Refusal("CheckpointError", says, path="/input", problems=problems)
        return Case(f"adapter/tensors/{label}", stage.judged_adapter, expect, stage.copied("adapter", damaged))

    def put(name: str, array: Any) -> Callable[[dict[str, Any]], object]:
        return lambda tensors: tensors.update({name: np.ascontiguousarray(array)})

    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    module = FC1.removeprefix("base_model.model.")
    yield case("no_b", lambda t: t.pop(f"{FC1}.lora_B.weight"), f"module '{module}': has lora_A alone")
    yield case("none", lambda t: t.clear(), f"{FILE} holds no tensors")
    for label, name in {
        "embedding": f"{FC1}.lora_embedding_A",
        "dora": f"{FC1}.lora_magnitude_vector.weight",
        "bias": f"{FC1}.lora_B.bias",
        "whole": "base_model.model.lm_head.modules_to_save.weight",
        "other": "weight",
        "prefix": f"x{FC1}.lora_A.weight",
        "long": "x" * 10**6,
        "control": "\x1b[31m",
    }.items():
        yield case(f"name_{label}", put(name, zeros(4, 4)), "which is not applied")
    for label, shape in {
        "rank": (3, 16),
        "columns": (4, 15),
        "vector": (4,),
        "cube": (4, 16, 1),
        "empty": (4, 0),
    }.items():
        yield case(f"shape_{label}", put(f"{FC1}.lora_A.weight", zeros(*shape)), f"module '{module}': ")
    for dtype in ("int8", "int32", "bool"):
        yield case(f"dtype_{dtype}", put(f"{FC1}.lora_A.weight", np.ones((4, 16), dtype)), "dtype .*, expected one of")
    twin = {
        f"base_model.model.{module.removeprefix('model.')}.lora_{h}.weight": s
        for h, s in (("A", zeros(4, 16)), ("B", zeros(24, 4)))
    }
    yield case("twice", lambda t: t.update(twin), "is there twice, also as")
    unknown = {
        f"base_model.model.model.encoder.layers.9.fc1.lora_{h}.weight": s
        for h, s in (("A", zeros(4, 16)), ("B", zeros(24, 4)))
    }
    yield case("no_such_module", lambda t: t.update(unknown), "the model has no such module")
    huge = stage.copied("adapter", damage.of(FILE, damage.cut(-1)))
    yield Case(
        "adapter/tensors/cut", stage.judged_adapter, Refusal("CheckpointError", "is not a complete", path=FILE), huge
    )

    def pickled(folder: Path) -> None:
        (folder / FILE).rename(folder / "adapter_model.bin")

    expect = Refusal("CheckpointError", "adapter_model.bin, a pickle, which is not read", path="/input")
    yield Case("adapter/pickle", stage.judged_adapter, expect, stage.copied("adapter", pickled))
    as_model = Refusal("CheckpointError", r"holds a LoRA adapter \(adapter_config.json\), not a model", path="/input")
    yield Case("adapter/as_model", stage.judged, as_model, stage.copied("adapter"))
    as_adapter = Refusal("CheckpointError", "there is no such file", path=f"input/{CONFIG}")
    yield Case("adapter/of_a_model", stage.judged_adapter, as_adapter, stage.copied("whole"))


def cases() -> Iterator[Case]:
    """Every case of adapters."""
    yield Case("adapter/pristine", stage.judged_adapter, Answer(stage.SAME), stage.copied("adapter"))
    yield from _fields()
    yield from _tensors()
