# SPDX-License-Identifier: MIT OR Apache-2.0
"""The methods of ModelAdapters: how each is called on NLLB, and what comes of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.model.lab import PROMPT, Lab, Row
from tests.reference.adapters import Recipe, write_adapter


@contextmanager
def adapter(seed: int) -> Iterator[Path]:
    """Give the folder of an adapter for the lab's model."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_adapter(folder, Recipe(seed))


def adapted(lab: Lab, slot: int) -> bool:
    """Return whether the adapter in a slot changes the logits of `PROMPT`, and -1 does not."""
    base, seq = lab.live(), lab.fresh()
    seq.adapter_slot = slot
    changed = not lab.right(lab.real.copy_logits_to_host(lab.real.prefill(PROMPT, seq)))
    unchanged = lab.right(lab.real.copy_logits_to_host(lab.real.decode(9, base)), [9])
    for one in (base, seq):
        lab.real.free_sequence(one)
    return changed and unchanged


def promoted(model: Any, *names: str) -> list[object]:
    """Promote adapters of these names; return what came of each."""
    found = []
    for seed, name in enumerate(names):
        with adapter(seed) as folder:
            found.append(model.promote_lora_from_disk(folder, name))
    return found


def set_active_lora(lab: Lab) -> object:
    promoted(lab.real, "a", "b")
    lab.model.set_active_lora("a")
    return lab.real.acquire_adapter_slot(-1)


def adapter_id_for(lab: Lab) -> object:
    promoted(lab.real, "a", "b", "c")
    return [lab.model.adapter_id_for(slot) for slot in (-1, 0, 1)]


def acquire_adapter_slot(lab: Lab) -> object:
    none = lab.model.acquire_adapter_slot(-1)
    promoted(lab.real, "a", "b")
    return none, lab.model.acquire_adapter_slot(0), lab.model.acquire_adapter_slot(-1)


def release_adapter_slot(lab: Lab) -> object:
    """Of two slots the one that is given back can be had."""
    promoted(lab.real, "a", "b")
    slots = [lab.real.acquire_adapter_slot(slot) for slot in (0, 1)]
    lab.model.release_adapter_slot(slots[1])
    lab.model.release_adapter_slot(-1)
    return promoted(lab.real, "c")


def swap_lora_from_disk(lab: Lab) -> object:
    with adapter(3) as folder:
        lab.model.swap_lora_from_disk(folder, "a", 1)
    return dict(lab.real.adapters()), adapted(lab, 1)


def promote_lora_from_disk(lab: Lab) -> object:
    found = promoted(lab.model, "a", "b", "c")
    return found, adapted(lab, 0), adapted(lab, 1), lab.real.acquire_adapter_slot(-1)


ADAPTERS = [
    Row("set_active_lora", set_active_lora, 0),
    Row("adapter_id_for", adapter_id_for, [0, 3, 2]),
    Row("acquire_adapter_slot", acquire_adapter_slot, (-1, 0, 1)),
    Row("release_adapter_slot", release_adapter_slot, [(1, "b")]),
    Row("swap_lora_from_disk", swap_lora_from_disk, ({"a": 1}, True)),
    Row("promote_lora_from_disk", promote_lora_from_disk, ([(0, None), (1, None), (0, "a")], True, True, 0)),
]
