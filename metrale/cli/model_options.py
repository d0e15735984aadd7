# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options that choose a model, its device and its limits, shared by the commands that take a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_runtime.config import Config
from metrale.checkpoint import require_folder
from metrale.cli.failure import USAGE, Failure
from metrale.demo import demo_model_path, is_demo_model
from metrale.errors import InvalidInput
from metrale.factory import device_name
from metrale.hub import resolve
from metrale.nllb.limits import ServingLimits

_LIMITS: Final = ("max_batch", "max_source_len", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A checkpoint folder that exists, and whether it is the demo model's."""

    path: Path
    is_demo: bool


def add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, ``--device`` and ``--dtype``."""
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="checkpoint folder, or an id of the Hugging Face Hub, ORG/NAME or ORG/NAME@REVISION, which is taken from "
        "its cache or downloaded (default: METRALE_MODEL, else the small demo model)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="host, cuda, cuda:N, or auto, the default: what METRALE_DEVICE says, else the first GPU that can be used, "
        "else the host",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="element type to compute in (default: auto, which is float32 on the host and bfloat16 on a GPU)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, ``--device``, ``--dtype`` and the limits."""
    add_choice_arguments(parser)
    default = ServingLimits()
    parser.add_argument(
        "--max-batch",
        type=int,
        default=default.max_batch,
        metavar="N",
        help="texts in one batch (default: %(default)s)",
    )
    parser.add_argument(
        "--max-source-len",
        type=int,
        default=default.max_source_len,
        metavar="N",
        help="source tokens of a text, language and end included; longer texts are cut, with a warning "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=default.max_new_tokens,
        metavar="N",
        help="tokens of a translation, language and end included (default: %(default)s)",
    )


def add_order_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--legacy-order``."""
    parser.add_argument(
        "--legacy-order",
        action="store_true",
        help="give the model a text's language after the text instead of before it, for models that were trained so "
        "(legacy_behaviour of tokenizer_config.json)",
    )


def add_invariance_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--batch-invariant``."""
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="compute each text to the same bits whatever the others are, which takes more time and memory",
    )


def take_folder(args: argparse.Namespace, argument: str) -> None:
    """Make a folder that is given as an argument, called ``argument``, the one of ``--model``.

    Raises
    ------
    Failure
        When both are given.
    """
    if args.folder is not None:
        if args.model is not None:
            raise Failure(USAGE, f"--model: expected none when a {argument} is given")
        args.model = args.folder


def choose_model(args: argparse.Namespace, note: Callable[[str], None]) -> ModelChoice:
    """Return the folder that the options or the environment name, else the demo model's, of which ``note`` is told.

    An id of the Hugging Face Hub is downloaded now, unless its cache has it.
    """
    given = args.model if args.model is not None else Config.from_env().model
    if given == "":
        raise Failure(USAGE, "--model: expected a checkpoint folder or an id of the Hugging Face Hub, got ''")
    if given is not None:
        folder = require_folder(resolve(given, progress=not getattr(args, "quiet", False)))
        return ModelChoice(folder, is_demo=is_demo_model(folder))
    note("neither --model nor METRALE_MODEL is given: taking the demo model (nine languages, interface texts)")
    return ModelChoice(require_folder(demo_model_path()), is_demo=True)


def device_of(args: argparse.Namespace) -> str:
    """Return the device as `metrale.load` takes it, after checking that it is the name of one.

    Raises
    ------
    Failure
        When the option, or ``METRALE_DEVICE``, is not the name of a device.
    """
    try:
        device_name(args.device)
    except InvalidInput as error:
        option = "--device" if error.argument == "device" else error.argument
        raise Failure(USAGE, f"{option}: expected auto, host, cuda or cuda:N, got {error.got}") from None
    return str(args.device)


def limits_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the limits as keyword arguments of `metrale.load`."""
    return {name: getattr(args, name) for name in _LIMITS}
