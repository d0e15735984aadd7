# SPDX-License-Identifier: MIT OR Apache-2.0
"""Standard output in UTF-8, whatever the locale."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Final

from metrale.cli.failure import USAGE, Failure

_BREAKS: Final = re.compile("[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+")


def one_line(text: str) -> str:
    """Return ``text`` with a space for every run of characters that end a line."""
    return _BREAKS.sub(" ", text)


def to_json(value: Mapping[str, object], indent: int | None = None) -> str:
    """Return JSON with text as it is (UTF-8), on one line unless ``indent`` is given."""
    written = json.dumps(value, ensure_ascii=False, indent=indent)
    # JSON allows U+2028 and the like in strings, but readers that split lines as Unicode does would split there.
    return written if indent is not None else _BREAKS.sub(_escaped, written)


def _escaped(breaks: re.Match[str]) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in breaks.group())


def write_lines(lines: list[str]) -> None:
    """Write and flush lines, each with its newline, as UTF-8."""
    if sys.stdout is None:
        raise Failure(USAGE, "standard output is closed")
    sys.stdout.flush()
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()


def discard_stdout() -> None:
    """Send what is still to be written to nowhere, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        target = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)
