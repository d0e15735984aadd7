# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options that choose a LoRA adapter, which then holds for all texts of a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale.checkpoint import require_folder
from metrale.cli.failure import USAGE, Failure
from metrale.nllb.limits import ServingLimits


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The adapter to apply: its name and its folder, which exists."""

    name: str
    folder: Path
    rank: int

    @property
    def load_options(self) -> dict[str, Any]:
        """Keyword arguments of `metrale.load`."""
        return {"adapters": {self.name: self.folder}, "max_lora_rank": self.rank}


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--adapter``, ``--use-adapter`` and ``--max-lora-rank``."""
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--adapter",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="LoRA adapter in PEFT's format, applied to all texts; may be given several times, for --use-adapter to "
        "choose one",
    )
    group.add_argument("--use-adapter", metavar="NAME", help="which --adapter is applied, of several")
    group.add_argument(
        "--max-lora-rank",
        type=int,
        metavar="N",
        help=f"largest rank of an adapter's module that there is room for (default: {ServingLimits().max_lora_rank})",
    )


def _named(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, got {text!r}")
    return name, folder


def adapter_of(args: argparse.Namespace) -> AdapterChoice | None:
    """Return the adapter that the options choose, or None without any.

    Raises
    ------
    Failure
        When none, or none in particular, is chosen of those that are given.
    CheckpointError
        When its folder is not there.
    """
    folders = dict(args.adapter)
    if len(folders) < len(args.adapter):
        raise Failure(USAGE, "--adapter: expected different names")
    if not folders:
        for option in ("use_adapter", "max_lora_rank"):
            if getattr(args, option) is not None:
                raise Failure(USAGE, f"--{option.replace('_', '-')} has no effect without --adapter NAME=DIR")
        return None
    if args.use_adapter is None and len(folders) > 1:
        raise Failure(USAGE, f"--use-adapter is required to choose one of {', '.join(folders)}")
    name = next(iter(folders)) if args.use_adapter is None else args.use_adapter
    if name not in folders:
        raise Failure(USAGE, f"--use-adapter: expected one of {', '.join(folders)}, got {name!r}")
    rank = ServingLimits().max_lora_rank if args.max_lora_rank is None else args.max_lora_rank
    return AdapterChoice(name, require_folder(folders[name]), rank)
