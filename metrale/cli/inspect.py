# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale inspect``: what a checkpoint is, and the memory it would take, without loading it."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_runtime import dtypes
from metrale.checkpoint import FLOAT_DTYPES, open_checkpoint
from metrale.cli.console import Console
from metrale.cli.failure import DONE
from metrale.cli.model_options import add_model_arguments, choose_model, device_of, limits_of
from metrale.cli.output import to_json, write_lines
from metrale.factory import element_type, memory_plan, open_device
from metrale.nllb.config import NllbConfig
from metrale.nllb.tokenizer import MODEL_FILE, NllbTokenizer
from metrale.nllb.weights import match_weights


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "inspect",
        parents=[common],
        allow_abbrev=False,
        help="show a checkpoint and the memory it takes",
        description="Show a checkpoint's configuration, size and languages, and the device memory that loading it with "
        "these options would take. Nothing is loaded.",
    )
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object (sizes in bytes)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    model = choose_model(args, Console(quiet=False).note)
    report = gather(model.path, device_of(args), args.dtype, limits_of(args))
    write_lines([to_json(report, indent=2)] if args.json else to_text(report))
    return DONE


def gather(path: Path, device: str, dtype: str, limits: dict[str, int]) -> dict[str, Any]:
    """Return what is known of a checkpoint as JSON-ready values; sizes are bytes.

    Raises
    ------
    CheckpointError
        When it cannot be loaded.
    InvalidInput
        When a limit is wrong.
    gpu_runtime.BackendUnavailable
        When the device cannot be opened.
    """
    config = NllbConfig.from_dir(path)
    with open_checkpoint(path) as checkpoint:
        weights = match_weights(config, checkpoint)
    tokenizer = NllbTokenizer.from_dir(path, vocab_size=weights.vocab_size) if (path / MODEL_FILE).exists() else None
    with open_device(device) as gpu:
        plan = memory_plan(path, gpu, dtype, **limits)
        computed = dtypes.long_name(element_type(dtype, gpu))
        opened = {"kind": gpu.kind(), "name": gpu.name(), "memory_bytes": gpu.total_memory()}
    return {
        "model": str(path),
        "parameters": sum(math.prod(shape) for shape in weights.shapes.values()),
        "stored_dtypes": sorted(str(FLOAT_DTYPES[name]) for name in weights.dtypes),
        "vocabulary": {"rows": weights.vocab_size, "tokenizer_entries": None if tokenizer is None else len(tokenizer)},
        "languages": None if tokenizer is None else len(tokenizer.languages),
        "config": asdict(config),
        "device": opened,
        "dtype": computed,
        "limits": limits,
        "memory": {**asdict(plan), "total": plan.total},
    }


def to_text(report: dict[str, Any]) -> list[str]:
    """Return the report as lines for people."""
    config, limits, memory = report["config"], report["limits"], report["memory"]
    generation = config["generation"]
    entries = report["vocabulary"]["tokenizer_entries"]
    tokenizer = "no tokenizer: token ids only" if entries is None else f"{entries:,} tokenizer entries"
    languages = "unknown, for want of a tokenizer" if entries is None else report["languages"]
    encoder, decoder = (
        f"{config[f'{side}_layers']} layers of {config[f'{side}_attention_heads']} heads, "
        f"feed-forward {config[f'{side}_ffn_dim']:,}"
        for side in ("encoder", "decoder")
    )
    rows = {
        "model": report["model"],
        "parameters": f"{report['parameters']:,}, stored as {', '.join(report['stored_dtypes'])}",
        "vocabulary": f"{report['vocabulary']['rows']:,} rows, {tokenizer}",
        "languages": languages,
        "width": f"{config['d_model']:,}, activation {config['activation_function']}",
        "encoder": encoder,
        "decoder": decoder,
        "generation": f"num_beams {generation['num_beams']}, length_penalty {generation['length_penalty']:g}, "
        f"max_length {generation['max_length']}",
        "device": f"{report['device']['name']}, {_size(report['device']['memory_bytes'])} of memory",
        "dtype": report["dtype"],
        "limits": ", ".join(f"{name} {value:,}" for name, value in limits.items()),
        "memory": f"{_size(memory['total'])}: "
        + ", ".join(f"{name} {_size(size)}" for name, size in memory.items() if name != "total"),
    }
    return [f"{name + ':':<12} {value}" for name, value in rows.items()]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.1f} GiB"
