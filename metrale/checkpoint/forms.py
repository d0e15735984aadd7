# SPDX-License-Identifier: MIT OR Apache-2.0
"""The forms that weights come in, by the names of their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from metrale.checkpoint.folder import FORMS
from metrale.checkpoint.json_file import read_json_object
from metrale.errors import CheckpointError

WEIGHT_FORMS: Final = tuple((form.single, form.index) for form in FORMS)
"""A file, or the index of several, in the order in which they are looked for; the first that is there is taken."""


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index names, in order. What else is wrong with it shows when it is opened.

    Raises
    ------
    CheckpointError
        When it is no JSON object.
    """
    placed = read_json_object(index).get("weight_map")
    names = placed.values() if isinstance(placed, dict) else ()
    return sorted({name for name in names if isinstance(name, str) and not set(name) & set("/\\:\0")})


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that weights are read from, an index first; none when there are no weights."""
    for single, index in WEIGHT_FORMS:
        if os.path.lexists(folder / single):
            return [single]
        if os.path.lexists(folder / index):
            try:
                return [index, *shard_names(folder / index)]
            except CheckpointError:
                return [index]
    return []
