# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a peer in a process of its own, for a limited time, and keeps whatever it reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from benchmarks import ROOT

MODULES: Final = {
    "transformers": "benchmarks.peers.transformers_peer",
    "ctranslate2": "benchmarks.peers.ctranslate2_peer",
}
SHORT_NAMES: Final = {"hf": "transformers", "ct2": "ctranslate2"}

_KEPT_CHARACTERS: Final = 2000


def run(name: str, arguments: Sequence[str], seconds: float, python: str = sys.executable) -> dict[str, Any]:
    """Run a peer and return its report.

    Parameters
    ----------
    name : str
        A key of `MODULES`.
    arguments : sequence of str
        Its command line.
    seconds : float
        After this time the process is killed; what it reported until then counts.
    python : str
        The interpreter of the environment that it is installed in, with metrale's own requirements.

    Returns
    -------
    dict
        As `gathered`, with ``seconds``, and in ``errors`` also how the process ended if not well.
    """
    with cublas_12() as environment:
        return run_module(MODULES[name], arguments, seconds, environment, python)


def problems_of(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a peer's report: its errors, and results that are not ours or were not compared."""
    found = [f"{name}: {error}" for error in result["errors"]]
    for shape, entry in result["shapes"].items():
        if not entry.get("check", {}).get("passed", False):
            check = entry.get("check")
            found.append(f"{name}, {shape}: its logits are not compared with ours, or differ: {check}")
    return found


def run_module(
    module: str,
    arguments: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    python: str = sys.executable,
) -> dict[str, Any]:
    """Run ``python -m module arguments`` in the repository's root; see `run`."""
    lines: list[dict[str, Any]] = []
    start = time.perf_counter()
    expired = threading.Event()
    with tempfile.TemporaryFile() as errors:
        command = [python, "-m", module, *arguments]
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
        with subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:

            def stop() -> None:
                expired.set()
                process.kill()

            timer = threading.Timer(max(seconds, 0.0), stop)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    found = _parsed(line)
                    if found is not None:
                        lines.append(found)
                        print(f"    {line.rstrip()[:240]}", file=sys.stderr, flush=True)
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
        tail = _tail(errors)
    result = gathered(lines)
    if expired.is_set():
        result["errors"].append(f"stopped after its limit of {seconds:.0f} s; later cases were not run")
    elif code:
        result["errors"].append(f"ended with exit status {code}: {tail}")
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


def _tail(file: BinaryIO) -> str:
    """Return the end of what a process wrote."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_CHARACTERS))
    return file.read().decode(errors="replace").strip()


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None  # a library's own output
    return found if isinstance(found, dict) else None


def gathered(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a peer's lines as one object.

    Returns
    -------
    dict
        ``versions``; ``shapes``: for each shape what was said of it, and in ``cases`` the result of each batch size (as
        a string), in ``beams``, if there are any, those of beam search; ``errors``: every error, with what it happened
        to.
    """
    result: dict[str, Any] = {"versions": {}, "shapes": {}, "errors": []}
    for line in lines:
        fields = dict(line)
        shape, batch, beams = (fields.pop(name, None) for name in ("shape", "batch", "beams"))
        if "error" in fields:
            words = (str(shape), f"{beams} beams", f"batch {batch}")
            place = ", ".join(text for text, given in zip(words, (shape, beams, batch), strict=True) if given)
            result["errors"].append(f"{place}: {fields['error']}" if place else fields["error"])
        elif shape is None:
            result["versions"] |= fields.get("versions", {})
        else:
            entry = result["shapes"].setdefault(shape, {"cases": {}})
            if batch is None:
                entry |= fields
            else:
                entry.setdefault("beams" if beams else "cases", {})[str(batch)] = fields["result"]
    return result


@contextmanager
def cublas_12() -> Iterator[dict[str, str]]:
    """Return an environment in which a program that opens libcublas.so.12 finds one, if only version 13 is there.

    CTranslate2's wheel opens version 12. The calls that it makes are the same in 13, so links with the older names
    serve; they live as long as the context.
    """
    folders = list(_cublas_folders())
    old = os.environ.get("LD_LIBRARY_PATH", "")
    with tempfile.TemporaryDirectory() as links:
        for folder in folders:
            if (folder / "libcublas.so.12").exists():
                yield {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), old)))}
                return
        for folder in folders:
            for stem in ("libcublas", "libcublasLt"):
                Path(links, f"{stem}.so.12").symlink_to(folder / f"{stem}.so.13")
            yield {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, (links, str(folder), old)))}
            return
        yield {}


def _cublas_folders() -> Iterator[Path]:
    """Yield the folders that hold cuBLAS: of NVIDIA's wheels, then of an installed toolkit."""
    for place in filter(None, sys.path):
        for pattern in ("nvidia/*/lib", "nvidia/*/*/lib"):
            yield from _with_cublas(Path(place).glob(pattern))
    yield from _with_cublas(Path("/usr/local").glob("cuda*/lib64"))
    yield from _with_cublas(Path("/usr/local").glob("cuda*/targets/*/lib"))
    yield from _with_cublas(Path("/usr/lib").glob("*-linux-gnu"))


def _with_cublas(folders: Iterator[Path]) -> Iterator[Path]:
    for folder in sorted(folders):
        if any((folder / f"libcublas.so.{version}").exists() for version in (12, 13)):
            yield folder
