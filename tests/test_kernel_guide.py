# SPDX-License-Identifier: MIT OR Apache-2.0
"""docs/adding_a_kernel.md tells the truth: its files make an op that passes every test, by the commands it gives."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import metrale_kernels
import numpy as np
import pytest

from gpu_runtime import GpuBackend, Op, OpRegistry
from gpu_runtime.cuda.nvrtc import CompileError, compile_source
from gpu_runtime.kernel_source import check_spec, entries, inlined
from gpu_runtime.launch import check_geometry
from gpu_runtime.limits import MINIMUM
from gpu_runtime.op import REGISTRY
from tests.backends import Device
from tests.kernels.sources import ARCHITECTURES, entries_of_ptx, passed
from tests.ops import oracles
from tests.ops import test_conformance as conformance
from tests.ops.harness import download, upload

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/adding_a_kernel.md").read_text(encoding="utf-8")
NAME = "scale_rows"
FILES = dict(re.findall(r"^\*\*`([^`]+)`\*\*[^\n]*\n\n```\w+\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = [
    line[2:]
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]

needs_compiler = pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA makes no compiler for macOS")
ADDED_TO = {
    "metrale/ops/__init__.py": [("\n__all__ = [", '{block}\n__all__ = ["scale_rows", ')],
    "tests/ops/oracles.py": [
        ("ORACLES: ", "{block}\n\nORACLES: "),
        ("for function in (", "for function in (scale_rows, "),
    ],
    "tests/mutation/op_mutants.py": [("OP_MUTANTS: list[Mutant] = [\n", "OP_MUTANTS: list[Mutant] = [\n{block}")],
}
"""Where the page says that a block is added to a file: what stands there, and what takes its place."""


@dataclass(frozen=True)
class Guide:
    """The page's op in a copy of the project.

    Attributes
    ----------
    folder : Path
        The copy, with the page's files in their places.
    module : ModuleType
        ``metrale.ops.scale_rows`` of the copy, imported with a registry of its own.
    registry : OpRegistry
    """

    folder: Path
    module: ModuleType
    registry: OpRegistry

    @property
    def op(self) -> Op:
        (op,) = self.registry
        return op


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Guide:
    folder = tmp_path_factory.mktemp("project")
    for name in ("gpu_runtime", "kernels", "metrale", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "site").mkdir()
    (folder / "site/metrale_kernels").symlink_to("../kernels")  # as an installation maps it
    for name, block in FILES.items():
        path = folder / name
        if name not in ADDED_TO:
            assert not path.exists(), f"the page's example is in the project: {name}"
            path.write_text(block, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        for old, new in ADDED_TO[name]:
            assert text.count(old) == 1, f"{name}: expected {old!r} once"
            text = text.replace(old, new.replace("{block}", block))
        path.write_text(text, encoding="utf-8")
    registry = OpRegistry()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_runtime.op.REGISTRY", registry)
        patch.setattr(metrale_kernels, "ROOT", folder / "kernels")
        module = imported(folder / f"metrale/ops/{NAME}.py")
    return Guide(folder, module, registry)


def imported(path: Path) -> ModuleType:
    """Return a file as a module, without a place among the imported ones."""
    spec = importlib.util.spec_from_file_location(f"metrale.ops.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(device: Device, guide: Guide, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuBackend]:
    """A backend with the page's op alone, and the page's oracle beside the others."""
    namespace = dict(vars(oracles))
    exec(FILES["tests/ops/oracles.py"], namespace)
    monkeypatch.setitem(oracles.ORACLES, NAME, namespace[NAME])
    with device.open(ops=guide.registry) as backend:
        yield backend


def test_the_page_has_all_files() -> None:
    assert set(FILES) == {f"kernels/{NAME}.cu", f"metrale/ops/{NAME}.py", *ADDED_TO}
    assert len(COMMANDS) == 5
    assert NAME not in REGISTRY


def test_parts(guide: Guide) -> None:
    op = guide.op
    assert guide.registry.find(NAME, f"{NAME}_bf16") == (op, "bf16")
    assert op is guide.module.OP
    assert op.source == guide.folder / f"kernels/{NAME}.cu"
    assert callable(getattr(guide.module, NAME))
    for case in op.cases:
        for dtype in op.spec.dtypes:
            values = op.make_inputs(np.random.default_rng(0), dtype, **case)
            assert list(values) == [arg.name for arg in op.spec.args]
            assert op.plan is not None
            plan = op.plan(op.spec.dims(list(values.values())), dtype, MINIMUM)
            check_geometry(plan.grid, plan.block, plan.shared_bytes, MINIMUM)


def source_of(op: Op) -> str:
    assert op.source is not None
    return inlined(op.source, op.include)


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernel_compiles_and_agrees_with_the_spec(guide: Guide, arch: str) -> None:
    text = source_of(guide.op)
    check_spec(guide.op.spec, text)
    found = entries_of_ptx(compile_source(text, f"{NAME}.cu", arch, cache=None))
    assert found == {name: passed(parameters) for name, parameters in entries(text).items()}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_results(guide: Guide, gpu: GpuBackend, dtype: str) -> None:
    for case in guide.op.cases:
        conformance.test_result(gpu, guide.op, dtype, case)
    (pair,) = guide.op.spec.aliases
    conformance.test_in_place(gpu, guide.op, pair, dtype)


def test_no_tolerance_passes_an_all_zero_result(guide: Guide, gpu: GpuBackend) -> None:
    conformance.test_no_tolerance_passes_an_all_zero_result(guide.op)


def test_the_launcher(guide: Guide, gpu: GpuBackend) -> None:
    x, factor = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([1, -2, 0.5], dtype=np.float32)
    x_at, factor_at = upload(gpu, x), upload(gpu, factor)
    guide.module.scale_rows(gpu, x_at, factor_at, x_at, rows=3, width=4, dtype="f32")
    gpu.synchronize()
    assert np.array_equal(download(gpu, x_at, x), x * factor[:, None])
    gpu.sweep_unreleased()


def ran(guide: Guide, command: str) -> str:
    """Run a command of the page in the copy, and return what it wrote."""
    words = shlex.split(command)
    start = {"pytest": [sys.executable, "-m", "pytest"], "python": [sys.executable]}[words[0]]
    given = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [*start, *words[1:]],
        cwd=guide.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(guide.folder), str(guide.folder / "site"), *given))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
def test_the_command_for_the_tests(guide: Guide) -> None:
    (command,) = [one for one in COMMANDS if one.startswith("pytest") and "gpu" not in one]
    output = ran(guide, command)
    counts = re.search(r"(\d+) passed", output)
    assert counts is not None
    assert int(counts[1]) >= 30, output
    assert "skipped" not in output


@pytest.mark.more
def test_the_command_for_the_mutants(guide: Guide) -> None:
    (command,) = [one for one in COMMANDS if "mutation" in one]
    output = ran(guide, command)
    count = len(re.findall(r"^        \(", FILES["tests/mutation/op_mutants.py"], re.MULTILINE))
    assert f"{count} mutants, {count} noticed, 0 not" in output


@pytest.mark.gpu
def test_the_command_for_a_gpu(guide: Guide) -> None:
    (command,) = [one for one in COMMANDS if one.startswith("pytest") and "-m gpu" in one]
    assert re.search(r"\d{2,} passed", ran(guide, command))


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="the extra dev brings ruff")
def test_the_linters_have_nothing_to_say(guide: Guide) -> None:
    for arguments in ("check", "format --check"):
        ran(guide, f"python -m ruff {arguments} metrale/ops/{NAME}.py")


def test_a_quoted_disagreement_is_what_is_said(guide: Guide) -> None:
    text = source_of(guide.op)
    entry = text.index("#define ENTRY")
    text = text[:entry] + text[entry:].replace("const float* factor", "const T* factor")
    with pytest.raises(ValueError, match="disagrees") as caught:
        check_spec(guide.op.spec, text.replace("ENTRY(bf16, bf16)\n", ""))
    assert f"```text\n{caught.value}\n```" in PAGE


@needs_compiler
def test_a_quoted_compiler_error_is_what_is_said(guide: Guide) -> None:
    with pytest.raises(CompileError) as caught:
        compile_source(source_of(guide.op).replace("* scale);", "* scael);"), f"{NAME}.cu", "compute_80", cache=None)
    first, second = str(caught.value).splitlines()[:2]
    assert f"CompileError: {first}\n{second}\n" in PAGE


def test_quoted_words_of_other_failures() -> None:
    with pytest.raises(AssertionError) as caught:
        conformance.close([1.0, -77.0], [1.0, 1.5], 1e-6, "out")
    assert re.fullmatch(r"out: error 78\.5, tolerance 1\.5e-06\n?.*", str(caught.value), re.DOTALL)
    assert "`out: error 78.5, tolerance ...`" in PAGE
    source = (ROOT / "tests/ops/test_conformance.py").read_text("utf-8")
    for words in ("not finite", "an input was written"):
        assert words in source
        assert words in PAGE
    assert "survives: " in PAGE
    assert '"survives"' in (ROOT / "tests/mutation/__main__.py").read_text("utf-8")


def test_what_the_page_tells_an_outsider_works(guide: Guide, device: Device, tmp_path: Path) -> None:
    """An op from another folder, with `metrale_kernels.ROOT` as the place of the headers."""
    source = tmp_path / f"{NAME}.cu"
    source.write_text(FILES[f"kernels/{NAME}.cu"], encoding="utf-8")
    module: Any = guide.module
    registry = OpRegistry()
    op = registry.register(
        Op(
            module.SPEC,
            module.reference,
            module.make_inputs,
            module.CASES,
            plan=module.plan,
            source=source,
            include=(metrale_kernels.ROOT,),
        )
    )
    check_spec(op.spec, source_of(op))
    x, factor = np.ones((2, 3), np.float32), np.array([2, 3], np.float32)
    with device.open(ops=registry) as gpu:
        at, factor_at = upload(gpu, x), upload(gpu, factor)
        op.launch(gpu, "f32", (at, factor_at, at, 2, 3))
        gpu.synchronize()
        assert np.array_equal(download(gpu, at, x), [[2, 2, 2], [3, 3, 3]])
        gpu.sweep_unreleased()
