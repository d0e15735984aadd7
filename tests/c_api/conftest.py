# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compilers, and the header's functions as one of them compiled them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_runtime.backend import GpuBackend
from tests.backends import Device
from tests.c_api import toolchain
from tests.c_api.library import Library
from tests.c_api.toolchain import ALL, HERE, Compiler


@pytest.fixture(scope="session", params=[compiler.name for compiler in ALL])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """Each compiler that this machine has; with ``--require-compilers`` the session has both, or does not begin."""
    reason = toolchain.why_not(request.param)
    if reason:
        pytest.skip(reason)
    return next(one for one in ALL if one.name == request.param)


@pytest.fixture(scope="session")
def any_compiler() -> Compiler:
    """The first compiler that there is."""
    found = [one for one in ALL if toolchain.why_not(one.name) is None]
    if not found:
        pytest.skip("; ".join(filter(None, (toolchain.why_not(one.name) for one in ALL))))
    return found[0]


@pytest.fixture(scope="session")
def embedding() -> None:
    """Skips where no program can embed this Python."""
    reason = toolchain.why_no_embedding()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Compiler, str], Path]:
    """Builds one of this folder's sources as a library, once for each compiler, against the limited API."""
    folder = tmp_path_factory.mktemp("c_api")

    @functools.cache
    def build(compiler: Compiler, source: str) -> Path:
        return compiler.library(folder / f"{source}-{compiler.name}.so", HERE / source, flags=(toolchain.LIMITED,))

    return build


@pytest.fixture(scope="session")
def exports_path(compiler: Compiler, built: Callable[[Compiler, str], Path]) -> Path:
    """exports.c by each compiler."""
    return built(compiler, "exports.c")


@pytest.fixture(scope="session")
def raii_path(compiler: Compiler, built: Callable[[Compiler, str], Path]) -> Path:
    """raii.cpp by each compiler."""
    return built(compiler, "raii.cpp")


@pytest.fixture(scope="session")
def library(any_compiler: Compiler, built: Callable[[Compiler, str], Path]) -> Library:
    """The header's functions, imported."""
    made = Library(built(any_compiler, "exports.c"))
    made.call("import")
    return made


@pytest.fixture
def backend(library: Library, gpu: GpuBackend) -> Iterator[int]:
    """A handle of the test's backend."""
    handle = library.backend(gpu)
    yield handle
    library.call("backend_release", handle)


@pytest.fixture
def gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend of the test's own."""
    with device.open() as opened:
        yield opened
        opened.sweep_unreleased()
