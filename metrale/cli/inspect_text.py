# SPDX-License-Identifier: MIT OR Apache-2.0
"""The report of ``metrale inspect`` for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from metrale.cli.output import one_line
from metrale.nllb.languages import LANGUAGE_NAMES

_UNKNOWN = "unknown"


def to_text(report: Mapping[str, Any], *, languages: bool) -> list[str]:
    """Return the report as lines: what is known, a part a line, then the problems.

    Parameters
    ----------
    report : mapping
        As `metrale.cli.inspection.inspect_folder` returns it.
    languages : bool
        Whether each language code has a line.
    """
    lines = [f"{name + ':':<12} {one_line(str(value))}" for name, value in _rows(report)]
    if languages and report["languages"] is not None:
        lines += [f"  {code}  {LANGUAGE_NAMES.get(code, '')}".rstrip() for code in report["languages"]]
    problems = report["problems"]
    if problems:
        lines += ["", f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}:"]
        lines += [one_line(f"- {problem['part']}: {problem['problem']}") for problem in problems]
    return lines


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each line."""
    yield "model", report["model"]
    architecture = report["architecture"] or _UNKNOWN
    yield "family", f"{report['family'] or _UNKNOWN} ({architecture} architecture)"
    yield "parameters", _parameters(report)
    yield "weights", _weights(report["weights"])
    if report["values"] is not None:
        yield "values", _values(report["values"])
    yield "vocabulary", _vocabulary(report)
    codes = report["languages"]
    yield "languages", _UNKNOWN if codes is None else len(codes)
    yield from _config_rows(report["config"])
    device = report["device"]
    yield "device", f"{device['name']}, {_size(device['memory_bytes'])} of memory" if device else _UNKNOWN
    yield "dtype", report["dtype"] or _UNKNOWN
    yield "limits", ", ".join(f"{name} {value:,}" for name, value in report["limits"].items())
    yield "memory", _memory(report)
    unused = [_unused(file) for file in report["files"] if file["use"] is None]
    yield "not used", ", ".join(unused) or "no file"


def _parameters(report: Mapping[str, Any]) -> str:
    if report["parameters"] is None:
        return f"{_UNKNOWN}: the weights could not be matched with the configuration"
    return f"{report['parameters']:,}, stored as {', '.join(report['stored_dtypes'])}"


def _weights(weights: Mapping[str, Any] | None) -> str:
    if weights is None:
        return _UNKNOWN
    counts = (
        f"{count['tensors']:,} {dtype} ({count['values']:,} values)" for dtype, count in weights["dtypes"].items()
    )
    return f"{_names(weights['files'])}, {_size(weights['bytes'])}; tensors: {', '.join(counts) or 'none'}"


def _names(files: list[str]) -> str:
    return files[0] if len(files) < 2 else f"{files[0]} and {len(files) - 1} files that it names"


def _values(values: Mapping[str, Any]) -> str:
    wrong = len(values["non_finite"])
    found = f"{wrong:,} of them with NaNs or infinities" if wrong else "all of them finite"
    return f"{values['values']:,} in {values['tensors']:,} tensors read, {found}"


def _vocabulary(report: Mapping[str, Any]) -> str:
    rows, entries = report["vocabulary"]["rows"], report["vocabulary"]["tokenizer_entries"]
    known = f"{rows:,} rows" if rows is not None else f"rows {_UNKNOWN}"
    if entries is not None:
        return f"{known}, {entries:,} tokenizer entries"
    broken = any(problem["part"] == "tokenizer" for problem in report["problems"])
    return f"{known}, {'a tokenizer that cannot be used' if broken else 'no tokenizer: token ids only'}"


def _config_rows(config: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if config is None:
        yield "config", _UNKNOWN
        return
    yield "width", f"{config['d_model']:,}, activation {config['activation_function']}"
    for side in ("encoder", "decoder"):
        layers = f"{config[f'{side}_layers']} layers of {config[f'{side}_attention_heads']} heads"
        yield side, f"{layers}, feed-forward {config[f'{side}_ffn_dim']:,}"
    asked = config["generation"]
    search = f"num_beams {asked['num_beams']}, length_penalty {asked['length_penalty']:g}"
    yield "generation", f"{search}, max_length {asked['max_length']}"


def _memory(report: Mapping[str, Any]) -> str:
    memory = report["memory"]
    if memory is None:
        return _UNKNOWN
    parts = (f"{name} {_size(size)}" for name, size in memory.items() if size and name not in ("total", "fits"))
    verdict = "" if memory["fits"] else f"; {_size(report['device']['free_bytes'])} are free"
    return f"{_size(memory['total'])}: {', '.join(parts)}{verdict}"


def _unused(file: Mapping[str, Any]) -> str:
    notes = [_size(file["bytes"])] if file["bytes"] is not None else []
    notes += [file["note"]] if file["note"] else []
    return f"{file['name']} ({'; '.join(notes)})" if notes else str(file["name"])


def _size(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / 2**10:,.1f} KiB"
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / 2**30:,.1f} GiB"
