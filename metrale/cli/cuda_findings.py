# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the probes' answers mean for the CUDA backend: driver, devices, packages, libraries, and its trial."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from metrale.cli import packages
from metrale.cli.finding import Finding, dotted, numbers, package
from metrale.cli.isolate import Answer

OLDEST_COMPUTE_CAPABILITY: Final = (8, 0)
TRIAL: Final = "CUDA backend"

_OLDEST_DRIVER: Final = {12: "525", 13: "580"}
"""The first driver branch for each major version of CUDA, by NVIDIA's release notes."""

_LIBRARIES: Final = {
    "nvrtc": ("NVRTC", "CuPy", "nvidia-cuda-nvrtc"),
    "cublasLt": ("cuBLASLt", "nvmath", "nvidia-cublas"),
}
"""What a library is called, what loads it, and the wheel that brings it."""


def judge_cuda(answers: Mapping[str, Answer]) -> list[Finding]:
    """Return the findings on everything that the CUDA backend needs."""
    found = answers["packages"].data or {}
    if found.get("system") == "Darwin":
        return [Finding("cuda", "CUDA", "missing", "there is none on macOS")]
    major = _wheel_major(found.get("cupy", []))
    driver = answers["driver"].data or {}
    findings = [
        *_driver(answers["driver"], major),
        *_packages(answers["packages"], major),
        *(_library(name, answers, major, driver) for name in _LIBRARIES),
    ]
    if driver.get("devices") or answers["driver"].data is None:  # otherwise the driver's own finding says it all
        findings.append(_trial(answers["gpu"]))
    return findings


def _wheel_major(cupys: list[dict[str, str]]) -> int:
    """Return the major version of CUDA that the CuPy here is made for; metrale's own when that cannot be told."""
    match = re.fullmatch(r"cupy-cuda(\d+)x", cupys[0]["name"]) if len(cupys) == 1 else None
    return int(match.group(1)) if match else packages.CUDA_MAJOR


def _packages(answer: Answer, major: int) -> Iterator[Finding]:
    if answer.data is None:
        yield Finding("cuda", "packages", "unknown", str(answer.error))
        return
    yield _cupy(answer.data["cupy"])
    for name, (oldest, too_new) in packages.CUDA.items():
        bound = None if major > packages.CUDA_MAJOR else too_new  # it keeps apart what belongs to another CUDA
        yield package("cuda", name, answer.data["versions"][name], oldest, bound)


def _cupy(cupys: list[dict[str, str]]) -> Finding:
    ours = f"cupy-cuda{packages.CUDA_MAJOR}x"
    if not cupys:
        return package("cuda", ours, None, packages.CUPY[ours])
    advice = f'pip uninstall {" ".join(one["name"] for one in cupys)}, then pip install "{ours}>={packages.CUPY[ours]}"'
    if len(cupys) > 1:
        listed = ", ".join(f"{one['name']} {one['version']}" for one in cupys)
        detail = f"{len(cupys)} distributions own the package cupy and overwrite each other: {listed}"
        return Finding("cuda", "CuPy", "problem", detail, advice)
    one = cupys[0]
    # "cupy" is built on the machine, for whatever CUDA version that has
    oldest = packages.CUPY[ours] if one["name"] == "cupy" else packages.CUPY.get(one["name"])
    if oldest is None:
        detail = f"{one['name']} {one['version']}, expected {' or '.join(packages.CUPY)}"
        return Finding("cuda", "CuPy", "problem", detail, advice)
    return package("cuda", one["name"], one["version"], oldest)


def _driver(answer: Answer, major: int) -> Iterator[Finding]:
    if answer.data is None:
        yield Finding("cuda", "NVIDIA driver", "unknown", str(answer.error))
        return
    data = answer.data
    branch = f"{_OLDEST_DRIVER[major]} or later" if major in _OLDEST_DRIVER else f"for CUDA {major} or later"
    install = f"install NVIDIA's driver {branch} (in a container: start it with access to GPUs)"
    if data["library"] is None:
        yield Finding("cuda", "NVIDIA driver", "missing", data["error"], install)
        return
    kernel = f"{data['kernel_driver']}, " if data["kernel_driver"] else ""
    cuda = f"{kernel}serves CUDA up to {dotted(data['cuda'])}" if data["cuda"] else f"{kernel}no version"
    if data["cuda"] and data["cuda"][0] < major:
        yield Finding("cuda", "NVIDIA driver", "problem", f"{cuda}: too old for CUDA {major}", install)
    elif data["error"]:
        yield Finding("cuda", "NVIDIA driver", "problem", f"{cuda}, but {data['error']}", install)
    else:
        yield Finding("cuda", "NVIDIA driver", "ok", cuda)
    if not data["devices"] and not data["error"]:
        yield Finding("cuda", "device", "missing", "the driver lists none", "check that a GPU is visible (nvidia-smi)")
    yield from map(_device, data["devices"])


def _device(device: dict[str, Any]) -> Finding:
    capability = device["compute_capability"]
    detail = (
        f"{device['name']}, compute capability {dotted(capability)}, {device['memory_bytes'] / 2**30:.1f} GiB, "
        f"{device['multiprocessors']} multiprocessors"
    )
    name = f"device {device['index']}"
    if tuple(capability) < OLDEST_COMPUTE_CAPABILITY:
        wanted = dotted(list(OLDEST_COMPUTE_CAPABILITY))
        return Finding("cuda", name, "problem", f"{detail}: expected compute capability {wanted} or later")
    return Finding("cuda", name, "ok", detail)


def _library(name: str, answers: Mapping[str, Answer], major: int, driver: Mapping[str, Any]) -> Finding:
    """Judge a library by what loads it, and where that gives no answer, by the file alone."""
    title, loader, wheel = _LIBRARIES[name]
    extra = major == packages.CUDA_MAJOR
    advice = f"pip install -e '.[cuda{major}]' (in the clone)" if extra else f"pip install {wheel}"
    loaded, files = answers[name], answers["libraries"]
    file: dict[str, Any] = {"path": None, "version": "", "error": None} if files.data is None else files.data[name]
    if loaded.data is not None:
        version = loaded.data["version"]
        same = file["path"] is not None and numbers(file["version"])[:2] == version[:2]
        detail = f"{dotted(version)} ({file['path']})" if same else dotted(version)
        misfit = _misfit(name, loaded.data, major, driver)
        if misfit:
            return Finding("cuda", title, "problem", f"{detail}: {misfit}", advice)
        return Finding("cuda", title, "ok", detail)
    if files.data is None:
        return Finding("cuda", title, "unknown", f"{loaded.error}; {files.error}")
    if file["path"] is None:
        return Finding("cuda", title, "missing", str(file["error"]), advice)
    detail = f"{file['version']} ({file['path']})"
    if name != "cublasLt" or driver.get("library") is not None:
        return Finding("cuda", title, "problem", f"{detail}, but {loader} cannot load it: {loaded.error}", advice)
    if numbers(file["version"])[0] < packages.CUDA_MAJOR:  # without a driver, nvmath loads nothing
        return Finding("cuda", title, "problem", f"{detail}: expected {packages.CUDA_MAJOR} or later", advice)
    return Finding("cuda", title, "ok", detail)


def _misfit(name: str, data: Mapping[str, Any], major: int, driver: Mapping[str, Any]) -> str | None:
    """Return why a library that loads does not serve here, or None when it does."""
    version, newest = data["version"], driver.get("cuda")
    if newest and version[0] > newest[0]:
        return f"the driver serves CUDA up to {dotted(newest)}"
    if name != "nvrtc":
        return None if version[0] >= packages.CUDA_MAJOR else f"expected {packages.CUDA_MAJOR} or later"
    if version[0] != major:
        return f"expected {major}, which CuPy is made for"
    for device in driver.get("devices", ()):
        first, second = device["compute_capability"]
        if (first, second) >= OLDEST_COMPUTE_CAPABILITY and 10 * first + second not in data["archs"]:
            return f"too old for device {device['index']}, which has compute capability {first}.{second}"
    return None


def _trial(answer: Answer) -> Finding:
    if answer.data is None:
        return Finding("cuda", TRIAL, "problem", str(answer.error))
    errors = f"kernel {answer.data['layer_norm_error']:.1e}, product {answer.data['product_error']:.1e}"
    return Finding("cuda", TRIAL, "ok", f"{answer.data['name']} computes (relative errors: {errors})")
