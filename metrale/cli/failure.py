# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exit codes, and how an error becomes one line on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Final

from gpu_runtime.errors import GpuRuntimeError
from metrale.errors import CheckpointError, InvalidInput, MetraleError, NotSupported, UnknownLanguage

DONE: Final = 0
SOME_FAILED: Final = 1
USAGE: Final = 2
UNUSABLE: Final = 3
FAULT: Final = 4
SIGNALLED: Final = 128
"""A signal's number is added to it, as shells do."""
INTERRUPTED: Final = SIGNALLED + 2

_MOST_PROBLEMS: Final = 10

_OPTIONS: Final[Mapping[str, str]] = {
    "model": "--model",
    "source": "--from",
    "target": "--to",
    "dtype": "--dtype",
    "max_batch": "--max-batch",
    "max_source_len": "--max-source-len",
    "max_new_tokens": "--max-new-tokens",
    "min_new_tokens": "--min-new-tokens",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "no_repeat_ngram_size": "--no-repeat-ngram",
    "seed": "--seed",
    "num_beams": "--beam",
    "num_return_sequences": "--n-best",
    "length_penalty": "--length-penalty",
    "target_prefix": "--target-prefix",
    "bad_words_ids": "--bad-words",
    "suppress_tokens": "--suppress-tokens",
    "forced_eos": "--forced-eos",
    "max_new_tokens with the language and target_prefix": "--max-new-tokens with the language and --target-prefix",
    "max_lora_rank": "--max-lora-rank",
    "timeout": "--timeout",
}
"""The option that sets an argument of the library."""


class Failure(Exception):
    """An error of the command line itself: ``str()`` is the message, ``code`` the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(message: str) -> None:
    """Write ``metrale: message`` to standard error as one line; a standard error that is gone is ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"metrale: {' '.join(message.split())}", file=sys.stderr, flush=True)


def describe(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error."""
    if isinstance(error, Failure):
        return error.code, str(error)
    if isinstance(error, CheckpointError):
        return UNUSABLE, f"{error.path}: {_listed(error.problems)}"
    if isinstance(error, InvalidInput):
        hint = "; metrale translate --list-languages lists them" if isinstance(error, UnknownLanguage) else ""
        option = _OPTIONS.get(error.argument.partition("[")[0], error.argument)
        code = UNUSABLE if error.argument == "model" else USAGE
        return code, f"{option}: expected {error.expected}, got {error.got}{hint}"
    if isinstance(error, NotSupported):
        return USAGE, str(error)
    if isinstance(error, (MetraleError, GpuRuntimeError)):
        return UNUSABLE, str(error)
    if isinstance(error, MemoryError):
        return UNUSABLE, f"out of memory {error}"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return USAGE, f"{where}{error.strerror or error}"
    return FAULT, f"a fault in metrale: {type(error).__name__}: {error} (--debug shows where)"


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MOST_PROBLEMS
    rest = [f"and {more} more (--debug lists all)"] if more > 0 else []
    return "; ".join(problems[:_MOST_PROBLEMS] + rest)
