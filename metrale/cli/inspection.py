# SPDX-License-Identifier: MIT OR Apache-2.0
"""What can be known of a checkpoint folder, whatever is wrong with it: one part after another, each by itself."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.errors import GpuRuntimeError
from metrale.checkpoint import FLOAT_DTYPES, WEIGHT_FORMS, Checkpoint, open_checkpoint, read_json_object, weight_files
from metrale.cli.value_check import NonFinite, check_values
from metrale.errors import CheckpointError
from metrale.factory import element_type, model_shape, open_device, refuse_adapter
from metrale.nllb.config import CONFIG_FILE, GENERATION_FILE, MAX_CONFIG_BYTES, NllbConfig
from metrale.nllb.languages import FLORES_200
from metrale.nllb.limits import ServingLimits
from metrale.nllb.plan import check_launches, check_memory, plan_memory
from metrale.nllb.tokenizer import TOKENIZER_FILES, Tokenizer, open_tokenizer
from metrale.nllb.weights import WeightMap, match_weights

Part = Literal["config", "weights", "values", "tokenizer", "device", "memory"]

Watch = Callable[[Checkpoint], Callable[[int], None]]
"""Is told the checkpoint whose values are about to be read; returns what is told of the bytes that have been."""

NLLB: Final = "NLLB-200"
M2M: Final = "M2M-100"


@dataclass
class Inspection:
    """What was found so far. ``report`` is ready for JSON; sizes are bytes, and a part that cannot be read is None."""

    folder: Path
    report: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[Part, str]] = field(default_factory=list)

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Note the problems for which a ``with`` block ends early; what comes after it is looked at all the same."""
        try:
            yield
        except CheckpointError as error:
            where = Path(error.path)
            prefix = f"{where.name}: " if where != self.folder else ""
            self.problems += [(name, f"{prefix}{problem}".strip()) for problem in error.problems]
        except GpuRuntimeError as error:
            self.problems.append((name, str(error)))


def inspect_folder(
    folder: Path, device: str, dtype: str, limits: dict[str, int], watch: Watch | None = None
) -> dict[str, Any]:
    """Return all that can be known of a checkpoint folder, as JSON-ready values.

    Parameters
    ----------
    folder : path
        A folder that is there.
    device, dtype : str
    limits : dict
        As for `metrale.load`, for the memory that it would take.
    watch : callable or None
        Given, all values are read and looked through for what is not finite.

    Raises
    ------
    InvalidInput
        When a limit is wrong. What is wrong with the folder or the device is part of what is returned.
    """
    serving = ServingLimits(**limits)
    found = Inspection(folder)
    empty = ("parameters", "weights", "values", "languages", "config", "device", "dtype", "memory")
    found.report |= {"ok": False, "problems": [], "model": str(folder), "family": None, "architecture": None}
    found.report |= dict.fromkeys(empty) | {"stored_dtypes": [], "limits": limits}
    config = _config(found)
    weights = _weights(found, config, watch)
    tokenizer = _tokenizer(found, weights)
    found.report["family"] = family(tokenizer, folder)
    _device(found, config, weights, dtype, serving, device)
    found.report["files"] = _files(folder)
    found.report["problems"] = [{"part": part, "problem": problem} for part, problem in found.problems]
    found.report["ok"] = not found.problems
    return found.report


def _config(found: Inspection) -> NllbConfig | None:
    """Read both files of the configuration; what is wrong with one does not hide what is wrong with the other."""
    config: dict[str, object] | None = None
    generation: dict[str, object] | None = None
    read: NllbConfig | None = None
    with found.part("config"):
        refuse_adapter(found.folder)
        config = read_json_object(found.folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    if os.path.lexists(found.folder / GENERATION_FILE):
        with found.part("config"):
            generation = read_json_object(found.folder / GENERATION_FILE, MAX_CONFIG_BYTES)
    if config is not None:
        architecture = config.get("model_type")
        found.report["architecture"] = architecture if isinstance(architecture, str) else None
        with found.part("config"):
            read = NllbConfig.from_dict(config, generation, path=found.folder)
            found.report["config"] = asdict(read)
    return read


def _weights(found: Inspection, config: NllbConfig | None, watch: Watch | None) -> WeightMap | None:
    """Describe the tensors, match them with the configuration, and read them if that is asked for."""
    matched: WeightMap | None = None
    with found.part("weights"), open_checkpoint(found.folder) as checkpoint:
        found.report["weights"] = _stored(checkpoint)
        if config is not None:
            with found.part("weights"):
                matched = match_weights(config, checkpoint)
                found.report["parameters"] = sum(math.prod(shape) for shape in matched.shapes.values())
                found.report["stored_dtypes"] = sorted(str(FLOAT_DTYPES[name]) for name in matched.dtypes)
        if watch is not None:
            with found.part("values"):
                _values(found, checkpoint, check_values(checkpoint, watch(checkpoint)))
    return matched


def _stored(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the files, and how many tensors and values of each dtype there are."""
    counts: dict[str, dict[str, int]] = {}
    for info in checkpoint.tensors.values():
        name = FLOAT_DTYPES[info.dtype].name if info.dtype in FLOAT_DTYPES else info.dtype
        count = counts.setdefault(name, {"tensors": 0, "values": 0})
        count["tensors"] += 1
        count["values"] += info.rows * info.row_elements
    files = weight_files(checkpoint.path)
    return {
        "files": files,
        "bytes": sum(_size(checkpoint.path / name) or 0 for name in files),
        "tensors": len(checkpoint.tensors),
        "dtypes": dict(sorted(counts.items())),
    }


def _values(found: Inspection, checkpoint: Checkpoint, wrong: dict[str, NonFinite]) -> None:
    read = [info for info in checkpoint.tensors.values() if info.dtype in FLOAT_DTYPES]
    sizes = {info.name: info.rows * info.row_elements for info in read}
    found.report["values"] = {
        "tensors": len(sizes),
        "values": sum(sizes.values()),
        "non_finite": [{"tensor": name, **counts._asdict()} for name, counts in wrong.items()],
    }
    for name, counts in wrong.items():
        sentence = f"tensor {name!r}: of {sizes[name]:,} values {counts.nan:,} are NaN, and {counts.inf:,} infinite"
        found.problems.append(("values", sentence))


def _tokenizer(found: Inspection, weights: WeightMap | None) -> Tokenizer | None:
    rows = None if weights is None else weights.vocab_size
    tokenizer: Tokenizer | None = None
    with found.part("tokenizer"):
        tokenizer = open_tokenizer(found.folder, vocab_size=rows)
    entries = None if tokenizer is None else len(tokenizer)
    found.report["vocabulary"] = {"rows": rows, "tokenizer_entries": entries}
    found.report["languages"] = None if tokenizer is None else list(tokenizer.languages)
    return tokenizer


def family(tokenizer: Tokenizer | None, folder: Path) -> str | None:
    """Return which of the models of this architecture it is: by its language codes, else by ``vocab.json``, else None.

    The configuration does not tell: both have the same.
    """
    if tokenizer is not None:
        return M2M if set(FLORES_200).isdisjoint(tokenizer.languages) else NLLB
    return M2M if os.path.lexists(folder / "vocab.json") else None


def _device(
    found: Inspection,
    config: NllbConfig | None,
    weights: WeightMap | None,
    dtype: str,
    limits: ServingLimits,
    device: str,
) -> None:
    """Describe the device, and plan its memory when it is known what is to be loaded."""
    with found.part("device"), open_device(device) as gpu:
        sizes = {"memory_bytes": gpu.total_memory(), "free_bytes": gpu.free_memory()}
        found.report["device"] = {"kind": gpu.kind(), "name": gpu.name(), **sizes}
        found.report["dtype"] = dtypes.long_name(element_type(dtype, gpu))
        if config is not None and weights is not None:
            with found.part("memory"):
                _plan(found, gpu, config, weights, dtype, limits)


def _plan(
    found: Inspection, gpu: GpuBackend, config: NllbConfig, weights: WeightMap, dtype: str, limits: ServingLimits
) -> None:
    shape = model_shape(gpu, config, weights, dtype, limits)
    plan = plan_memory(shape)
    fits = plan.total <= gpu.free_memory()
    found.report["memory"] = {**asdict(plan), "total": plan.total, "fits": fits}
    with found.part("memory"):
        check_memory(gpu, plan)
    check_launches(gpu, shape, found.folder)


def _files(folder: Path) -> list[dict[str, Any]]:
    """Return every entry of the folder with its size, what it is used for, and if it is not, why."""
    taken = weight_files(folder)
    uses = {CONFIG_FILE: "config", GENERATION_FILE: "config"}
    uses |= dict.fromkeys(TOKENIZER_FILES, "tokenizer") | dict.fromkeys(taken, "weights")
    entries = []
    for name in sorted(os.listdir(folder)):
        path, use = folder / name, uses.get(name)
        note = f"{taken[0]} is taken" if use is None and taken and _is_weights(name) else None
        size = None if path.is_dir() else _size(path)
        entries.append({"name": f"{name}/" if path.is_dir() else name, "bytes": size, "use": use, "note": note})
    return entries


def _is_weights(name: str) -> bool:
    """Return whether a file has weights by its name, in one of the forms that are read."""
    stems = [(single.partition(".")[0], single.partition(".")[2]) for single, _ in WEIGHT_FORMS]
    return any(name.startswith(stem) and f".{suffix}" in name for stem, suffix in stems)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # a link whose file is gone
        return None
