# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the probes' answers mean: findings with advice, and a verdict on each backend. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from metrale.cli import packages
from metrale.cli.isolate import Answer

State = Literal["ok", "missing", "problem", "unknown"]

CUDA_MAJOR: Final = 12
OLDEST_COMPUTE_CAPABILITY: Final = (8, 0)
NO_CUDA_BACKEND: Final = "this version of metrale has no CUDA backend yet"

_TITLES: Final = {"nvrtc": "NVRTC", "cublas": "cuBLAS", "cublasLt": "cuBLASLt"}
_CUDA_EXTRA: Final = 'pip install "metrale[cuda12]"'


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes
    ----------
    part : {"host", "cuda"}
        The backend that needs it.
    name, detail : str
    state : {"ok", "missing", "problem", "unknown"}
        ``unknown`` when the probe gave no answer.
    advice : str or None
        What to do about it.
    """

    part: Literal["host", "cuda"]
    name: str
    state: State
    detail: str
    advice: str | None = None


def judge(answers: Mapping[str, Answer]) -> list[Finding]:
    """Return the findings from the answers of the probes ``packages``, ``host``, ``driver`` and ``libraries``."""
    found = answers["packages"]
    on_mac = (found.data or {}).get("system") == "Darwin"
    findings = [*_host_packages(found), _host_trial(answers["host"])]
    if on_mac:
        return [*findings, Finding("cuda", "CUDA", "missing", "there is none on macOS")]
    return [*findings, *_driver(answers["driver"]), *_cuda_packages(found), *_libraries(answers["libraries"])]


def verdicts(findings: list[Finding]) -> dict[str, str]:
    """Return one sentence on each backend, and ``ready`` for a host that works."""
    host, cuda = ([one for one in findings if one.part == part] for part in ("host", "cuda"))
    reasons = _reasons(host)
    return {
        "host": f"not ready: {'; '.join(reasons)}" if reasons else "ready",
        "cuda": f"not available: {'; '.join([*_reasons(cuda), NO_CUDA_BACKEND])}",
    }


def _reasons(findings: list[Finding]) -> list[str]:
    """Return ``"missing: NVRTC, cuBLAS"`` and the like, for each state but ``ok``."""
    states = {one.state: None for one in findings if one.state != "ok"}
    return [f"{state}: {', '.join(one.name for one in findings if one.state == state)}" for state in states]


def _host_packages(answer: Answer) -> Iterator[Finding]:
    if answer.data is None:
        yield Finding("host", "packages", "unknown", str(answer.error))
        return
    for name, oldest in packages.HOST.items():
        yield _package("host", name, answer.data["versions"][name], oldest, None)


def _host_trial(answer: Answer) -> Finding:
    if answer.data is None:
        return Finding("host", "host backend", "problem", str(answer.error), "pip install --force-reinstall metrale")
    return Finding("host", "host backend", "ok", f"{answer.data['name']} translates")


def _package(
    part: Literal["host", "cuda"], name: str, version: str | None, oldest: str, too_new: str | None
) -> Finding:
    wanted = f"{name}>={oldest}" + (f",<{too_new}" if too_new else "")
    advice = f'pip install "{wanted}"'
    if version is None:
        return Finding(part, name, "missing", "not installed", advice)
    if _numbers(version) < _numbers(oldest) or (too_new and _numbers(version) >= _numbers(too_new)):
        return Finding(part, name, "problem", f"version {version}, expected {wanted}", advice)
    return Finding(part, name, "ok", version)


def _cuda_packages(answer: Answer) -> Iterator[Finding]:
    if answer.data is None:
        yield Finding("cuda", "packages", "unknown", str(answer.error))
        return
    yield _cupy(answer.data["cupy"])
    for name, (oldest, too_new) in packages.CUDA.items():
        yield _package("cuda", name, answer.data["versions"][name], oldest, too_new)


def _cupy(cupys: list[dict[str, str]]) -> Finding:
    name, oldest = packages.CUPY
    if not cupys:
        return _package("cuda", name, None, oldest, None)
    if len(cupys) > 1:
        listed = ", ".join(f"{one['name']} {one['version']}" for one in cupys)
        remove = f"pip uninstall {' '.join(one['name'] for one in cupys)}"
        detail = f"{len(cupys)} distributions own the package cupy and overwrite each other: {listed}"
        return Finding("cuda", "CuPy", "problem", detail, f'{remove}, then pip install "{name}>={oldest}"')
    one = cupys[0]
    if one["name"] in (name, "cupy"):  # "cupy" is built on the machine, for whatever CUDA version that has
        return _package("cuda", one["name"], one["version"], oldest, None)
    detail = f"{one['name']} {one['version']}, expected {name} (CUDA {CUDA_MAJOR})"
    return Finding(
        "cuda", "CuPy", "problem", detail, f'pip uninstall {one["name"]}, then pip install "{name}>={oldest}"'
    )


def _driver(answer: Answer) -> Iterator[Finding]:
    if answer.data is None:
        yield Finding("cuda", "NVIDIA driver", "unknown", str(answer.error))
        return
    data = answer.data
    install = f"install NVIDIA's driver for CUDA {CUDA_MAJOR} or later (in a container: start it with access to GPUs)"
    if data["library"] is None:
        yield Finding("cuda", "NVIDIA driver", "missing", data["error"], install)
        return
    kernel = f"{data['kernel_driver']}, " if data["kernel_driver"] else ""
    cuda = f"{kernel}serves CUDA up to {'.'.join(map(str, data['cuda']))}" if data["cuda"] else f"{kernel}no version"
    if data["cuda"] and data["cuda"][0] < CUDA_MAJOR:
        yield Finding("cuda", "NVIDIA driver", "problem", f"{cuda}: too old", install)
    elif data["error"]:
        yield Finding("cuda", "NVIDIA driver", "problem", f"{cuda}, but {data['error']}", install)
    else:
        yield Finding("cuda", "NVIDIA driver", "ok", cuda)
    if not data["devices"] and not data["error"]:
        yield Finding("cuda", "device", "missing", "the driver lists none", "check that a GPU is visible (nvidia-smi)")
    yield from map(_device, data["devices"])


def _device(device: dict[str, Any]) -> Finding:
    major, minor = device["compute_capability"]
    detail = (
        f"{device['name']}, compute capability {major}.{minor}, {device['memory_bytes'] / 2**30:.1f} GiB, "
        f"{device['multiprocessors']} multiprocessors"
    )
    name = f"device {device['index']}"
    if (major, minor) < OLDEST_COMPUTE_CAPABILITY:
        wanted = ".".join(map(str, OLDEST_COMPUTE_CAPABILITY))
        return Finding("cuda", name, "problem", f"{detail}: expected compute capability {wanted} or later")
    return Finding("cuda", name, "ok", detail)


def _libraries(answer: Answer) -> Iterator[Finding]:
    for name, title in _TITLES.items():
        if answer.data is None:
            yield Finding("cuda", title, "unknown", str(answer.error))
            continue
        one = answer.data[name]
        if one["path"] is None:
            yield Finding("cuda", title, "missing", one["error"], _CUDA_EXTRA)
        elif _numbers(one["version"])[:1] != [CUDA_MAJOR]:
            detail = f"{one['version']} ({one['path']}), expected {CUDA_MAJOR}"
            yield Finding("cuda", title, "problem", detail, _CUDA_EXTRA)
        else:
            yield Finding("cuda", title, "ok", f"{one['version']} ({one['path']})")


def _numbers(version: str) -> list[int]:
    """Return the release numbers at the start of a version: ``"13.4.0rc1"`` gives 13, 4, 0."""
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in match.group().split(".")] if match else []
