# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings of every test run, made before NumPy is imported; options for tests on a GPU; the device and the small model
that tests of several folders run on."""

from __future__ import annotations

import os

# The products are small, and BLAS threads wait by spinning: on a machine that is busy with something else, two of them
# can take many times as long as one. An explicit setting wins.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A test that names no device runs on the host, also where there is a GPU.
os.environ.setdefault("METRALE_DEVICE", "host")
# No test asks the network, or finds what a user's cache has: those of tests/hub have a server and a cache of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "no cache of huggingface_hub")
# These have been read by now: a test that starts pytest means its own options, not those of the run it is part of.
os.environ.pop("PYTEST_ADDOPTS", None)

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.nllb.model import NllbModel
from tests.backends import ON_CUDA, Device, why_gpu_is_lost, why_no_gpu
from tests.c_api.toolchain import why_no_compilers
from tests.reference.nllb_float64 import NllbFloat64
from tests.reference.tiny import write_tiny

MakeModel = Callable[..., NllbModel]

LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests on a GPU (-m gpu selects them alone)")
    group.addoption("--require-gpu", action="store_true", help="fail at once when there is no usable GPU")
    group.addoption("--gpu-arch", metavar="ARCH", help="compile kernels for this, for example compute_80")
    group.addoption(
        "--no-pool",
        action="store_true",
        help="an exact cudaMalloc for each block, without redzones: for memory checkers",
    )

    parser.addoption("--more", action="store_true", help="make every draw of tests that draw, not only the first")
    parser.addoption(
        "--require-compilers",
        action="store_true",
        help="fail at once when gcc, clang or what they need of Python is missing: tests/c_api needs all of it",
    )


def pytest_configure(config: pytest.Config) -> None:
    reason = why_no_gpu() if config.getoption("require_gpu") else None
    if reason:
        raise pytest.UsageError(f"--require-gpu: {reason}")
    reason = why_no_compilers() if config.getoption("require_compilers") else None
    if reason:
        raise pytest.UsageError(f"--require-compilers: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none, and further draws; `pytest_terminal_summary` says so."""
    said: list[str] = []

    def leave_out(mark: str, why: str) -> None:
        some = [item for item in items if item.get_closest_marker(mark)]
        if some:
            said.append(f"{len(some)} {why}")
            config.hook.pytest_deselected(items=some)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]

    gpu = any(item.get_closest_marker("gpu") for item in items)
    reason = why_no_gpu() if gpu else None
    if reason is not None:
        leave_out("gpu", f"tests need a GPU and were left out: {reason}")
    if not config.getoption("more"):
        leave_out("more", "further draws were left out: --more makes them too")
    config.stash[LEFT_OUT] = said
    if hasattr(config, "workeroutput"):  # one of several processes, each of which collects all of the tests
        config.workeroutput["left out"] = said


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist left out: it has no terminal to say so."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for text in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(text, yellow=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the run when a test lost the device: every later one would fail, and say nothing."""
    report = yield
    if report.failed and item.get_closest_marker("gpu"):
        lost = why_gpu_is_lost()
        if lost is not None:
            item.session.shouldstop = f"the device is lost since {item.nodeid}: {lost}"
    return report


@pytest.fixture(scope="session", params=["host", ON_CUDA])
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Device:
    """The kind of backend that the test runs on. On a GPU, kernels are compiled once for all tests.

    Tests in `tests/gpu` run on a GPU alone: `tests.backends.cuda_only` is what marks them.
    """
    if request.param == "host":
        return Device("host")
    options: dict[str, Any] = {
        "cache": tmp_path_factory.mktemp("kernels"),
        "arch": request.config.getoption("gpu_arch"),
    }
    if request.config.getoption("no_pool"):
        options |= {"pool": False, "redzones": False}
    return Device("cuda", options)


@pytest.fixture(scope="session")
def shared_gpu(device: Device) -> Iterator[GpuBackend]:
    """A backend that no test closes."""
    with device.open() as gpu:
        yield gpu


@pytest.fixture
def gpu(device: Device, shared_gpu: GpuBackend) -> Iterator[GpuBackend]:
    """A backend without live blocks. On a GPU always the same one: another would load every kernel again."""
    backend = device.open() if device.is_host else shared_gpu
    yield backend
    backend.sweep_unreleased()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint: 97 ids, width 32, 2 and 3 layers."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model", 21)


@pytest.fixture(scope="session")
def tiny_judge(tiny_folder: Path) -> NllbFloat64:
    return NllbFloat64.load(tiny_folder)


@pytest.fixture
def make_tiny(tiny_folder: Path, gpu: GpuBackend) -> Iterator[MakeModel]:
    """A function that loads the tiny checkpoint with small limits, on the test's backend unless another is given."""
    models: list[NllbModel] = []

    def make(on: GpuBackend | None = None, dtype: str = "float32", **options: Any) -> NllbModel:
        limits: dict[str, Any] = {"max_batch": 4, "max_source_len": 12, "max_new_tokens": 8}
        model = metrale.load(tiny_folder, on or gpu, dtype, **limits | options)
        models.append(model)
        return model

    yield make
    for model in models:
        model.close()
    for model in models:
        assert model.gpu.live_alloc_count() == 0


@pytest.fixture
def tiny(make_tiny: MakeModel) -> NllbModel:
    """A tiny model with 4 lanes, sources of up to 12 tokens and targets of up to 8, without default languages."""
    return make_tiny()
