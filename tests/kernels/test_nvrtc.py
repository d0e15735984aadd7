# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compiling: strict, cached by all that matters, with errors that say where and why. Needs NVRTC, no GPU."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from gpu_runtime import BackendUnavailable, Config, GpuRuntimeError
from gpu_runtime.cuda import nvrtc
from gpu_runtime.kernel_source import inlined

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="NVIDIA makes no compiler for macOS")

GOOD = 'extern "C" __global__ void k(float* out, float x) { out[0] = 1.0f / x; }\n'


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by an architecture whenever the compiler is called."""
    calls: list[str] = []
    original = nvrtc._compile

    def compile_and_count(text: str, name: str, arch: str) -> bytes:
        calls.append(arch)
        return original(text, name, arch)

    monkeypatch.setattr(nvrtc, "_compile", compile_and_count)
    return calls


@pytest.mark.parametrize(
    ("arch", "waits"),
    [
        ("compute_80", False),
        ("sm_89", False),
        ("compute_90", True),
        ("sm_90a", True),
        ("sm_100", True),
        ("compute_120", True),
    ],
)
def test_kernels_can_wait_for_the_one_ahead_from_compute_capability_9_on(arch: str, waits: bool) -> None:
    """And what is compiled for it has the instruction, or not."""
    assert nvrtc.waits_for_previous(arch) is waits
    text = GOOD.replace("{ out", '{\n#if __CUDA_ARCH__ >= 900\nasm volatile("griddepcontrol.wait;");\n#endif\nout')
    virtual = re.sub("sm_|a$", lambda part: "compute_" if part[0] == "sm_" else "", arch)
    compiled = nvrtc.compile_source(text, "k.cu", virtual, cache=None)
    assert (b"griddepcontrol.wait" in compiled) is waits


def test_ptx_and_cubin() -> None:
    ptx = nvrtc.compile_source(GOOD, "k.cu", "compute_90", cache=None)
    assert b".visible .entry k(" in ptx
    assert b".target sm_90" in ptx
    cubin = nvrtc.compile_source(GOOD, "k.cu", "sm_90", cache=None)
    assert cubin.startswith(b"\x7fELF")


def test_no_approximation_is_allowed() -> None:
    ptx = nvrtc.compile_source(GOOD, "k.cu", "compute_80", cache=None)
    assert b"rcp.rn.f32" in ptx
    assert b".approx" not in ptx
    assert b".ftz" not in ptx


def test_profilers_find_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("__device__ __noinline__ float half_of(float x) {\n\n    return x / 2;\n}\n")
    (tmp_path / "k.cu").write_text(
        '#include "a.cuh"\nextern "C" __global__ void k(float* out, float x) { out[0] = half_of(x); }\n'
    )
    ptx = nvrtc.compile_source(inlined(tmp_path / "k.cu"), "k.cu", "compute_80", cache=None).decode()
    files = {line.split()[1]: line.split('"')[1] for line in ptx.splitlines() if line.strip().startswith(".file")}
    lines = {(files[parts[1]], parts[2]) for parts in map(str.split, ptx.splitlines()) if parts[:1] == [".loc"]}
    assert ("a.cuh", "3") in {(os.path.basename(file), line) for file, line in lines}
    assert ("k.cu", "2") in {(os.path.basename(file), line) for file, line in lines}


@pytest.mark.parametrize("arch", ["compute_80", "sm_90"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_warning_is_an_error(tmp_path: Path, arch: str, cached: bool) -> None:
    text = f'#line 7 "common/a.cuh"\n__device__ void f() {{ int unused; }}\n{GOOD}'
    for _ in range(2):  # what was refused once is not taken from the cache then
        with pytest.raises(nvrtc.CompileError, match=rf"k\.cu \({arch}\): compiled, but with warnings") as caught:
            nvrtc.compile_source(text, "k.cu", arch, cache=tmp_path if cached else None)
        assert 'common/a.cuh(7): warning #177-D: variable "unused" was declared but never referenced' in str(
            caught.value
        )
        assert caught.value.log in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_an_error_carries_the_log(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("__device__ float f() {\n    return missing;\n}\n")
    (tmp_path / "k.cu").write_text(f'#include "a.cuh"\n{GOOD}int k2 = also_missing;\n')
    with pytest.raises(nvrtc.CompileError, match=r"^k\.cu \(compute_80\): NVRTC_ERROR_COMPILATION") as caught:
        nvrtc.compile_source(inlined(tmp_path / "k.cu"), "k.cu", "compute_80", cache=tmp_path / "cache")
    assert 'a.cuh(2): error: identifier "missing" is undefined' in caught.value.log
    assert 'k.cu(3): error: identifier "also_missing" is undefined' in caught.value.log
    assert caught.value.log in str(caught.value)
    assert not (tmp_path / "cache").exists()
    assert isinstance(caught.value, GpuRuntimeError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.log) == (nvrtc.CompileError, str(caught.value), caught.value.log)


def test_an_architecture_that_this_compiler_does_not_know() -> None:
    with pytest.raises(nvrtc.CompileError, match="invalid value for --gpu-architecture"):
        nvrtc.compile_source(GOOD, "k.cu", "sm_999", cache=None)


@pytest.mark.parametrize("arch", ["", "80", "sm_", "sm_9", "sm90", "compute_90 --use_fast_math", "lto_90", "SM_90"])
def test_what_is_no_architecture(arch: str) -> None:
    with pytest.raises(ValueError, match=r"^arch: expected 'compute_80', 'sm_90' or the like, got"):
        nvrtc.compile_source(GOOD, "k.cu", arch, cache=None)


def test_a_nul_does_not_cut_the_text_short() -> None:
    with pytest.raises(ValueError, match=r"^k\.cu: expected text, got a NUL"):
        nvrtc.compile_source(f"{GOOD}\0 nonsense", "k.cu", "sm_90", cache=None)


def test_text_may_be_any_unicode() -> None:
    assert nvrtc.compile_source(f"// α · β ≤ 𝟙\n{GOOD}", "k.cu", "compute_80", cache=None)


def test_a_source_is_compiled_once(tmp_path: Path, compiled: list[str]) -> None:
    first = nvrtc.compile_source(GOOD, "k.cu", "compute_80", cache=tmp_path)
    assert nvrtc.compile_source(GOOD, "k.cu", "compute_80", cache=tmp_path) == first
    assert compiled == ["compute_80"]
    cubin = nvrtc.compile_source(GOOD, "k.cu", "sm_80", cache=tmp_path)
    assert nvrtc.compile_source(GOOD, "k.cu", "sm_80", cache=tmp_path) == cubin
    assert compiled == ["compute_80", "sm_80"]
    assert sorted(name.split(".")[1] for name in os.listdir(tmp_path)) == ["cubin", "ptx"]
    nvrtc.compile_source(GOOD, "k.cu", "sm_80", cache=None)
    assert len(compiled) == 3


def test_the_key_is_all_that_decides_the_result(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(text: str = GOOD, name: str = "k.cu", arch: str = "compute_80") -> int:
        nvrtc.compile_source(text, name, arch, cache=tmp_path)
        return len(compiled)

    assert compile_() == 1
    assert compile_(text=f"{GOOD}\n") == 2
    assert compile_(name="l.cu") == 3
    assert compile_(arch="compute_90") == 4
    # the same letters, divided in another way
    assert compile_(text=GOOD, name="//k.cu") == 5
    assert compile_(text=f"{GOOD}//", name="k.cu") == 6
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--fmad=false"))
        assert compile_() == 7
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: (99, 0))
        assert compile_() == 8
    assert compile_() == 8


def test_a_changed_header_is_compiled_anew(tmp_path: Path, compiled: list[str]) -> None:
    path, header, cache = tmp_path / "k.cu", tmp_path / "a.cuh", tmp_path / "cache"
    path.write_text(f'#include "a.cuh"\n{GOOD.replace("1.0f", "ONE")}')
    results = []
    for text in ("#define ONE 1.0f\n", "#define ONE 2.0f\n", "#define ONE 1.0f\n"):
        header.write_text(text)
        results.append(nvrtc.compile_source(inlined(path), "k.cu", "compute_80", cache=cache))
    assert len(compiled) == 2
    assert results[0] == results[2] != results[1]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data])
def test_a_damaged_file_is_made_again(tmp_path: Path, compiled: list[str], damage: object) -> None:
    assert callable(damage)
    first = nvrtc.compile_source(GOOD, "k.cu", "compute_80", cache=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert nvrtc.compile_source(GOOD, "k.cu", "compute_80", cache=tmp_path) == first
    assert len(compiled) == 2
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_used_only_costs_time(
    tmp_path: Path, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for _ in range(2):
        assert nvrtc.compile_source(GOOD, "k.cu", "compute_80", cache=tmp_path / "file" / "cache")
    assert len(compiled) == 2
    assert len(caplog.records) == 1


COMPILER = """
import hashlib, sys
from pathlib import Path
from gpu_runtime.cuda import nvrtc
print("ready", flush=True)
sys.stdin.readline()
made = nvrtc.compile_source(sys.argv[1], "k.cu", "sm_90", cache=Path(sys.argv[2]))
print(hashlib.sha256(made).hexdigest())
"""


def test_processes_may_compile_the_same_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILER, GOOD, str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=60) for process in processes]
    assert [errors for _, errors in outcomes] == [""] * 4
    expected = hashlib.sha256(nvrtc.compile_source(GOOD, "k.cu", "sm_90", cache=None)).hexdigest()
    assert {output.strip() for output, _ in outcomes} == {expected}
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".cubin"


def test_default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc.default_cache(Config()) is None
    assert nvrtc.default_cache(Config(cache=Path("/c"))) == Path("/c/kernels")
    monkeypatch.setenv("METRALE_CACHE_DIR", "/d")
    assert nvrtc.default_cache() == Path("/d/kernels")


class Binding(types.ModuleType):
    """CuPy's binding where the library is found only ``after`` something else has loaded it."""

    def __init__(self, after: list[str] | None) -> None:
        super().__init__("nvrtc")
        self._after = after

    def getVersion(self) -> tuple[int, int]:
        if not self._after:
            raise RuntimeError("CuPy failed to load libnvrtc.so.12")
        return 12, 9


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", Binding(None))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)  # not installed
    with pytest.raises(BackendUnavailable, match=r"(?s)pip install nvidia-cuda-nvrtc-cu12 .*so\.12"):
        nvrtc.version()
    finder = types.ModuleType("pathfinder")
    monkeypatch.setattr(finder, "load_nvidia_dynamic_lib", importlib.import_module, raising=False)  # finds no module
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    with pytest.raises(BackendUnavailable, match="no library found"):
        nvrtc.compile_source(GOOD, "k.cu", "sm_90", cache=None)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(BackendUnavailable, match=r'CuPy cannot be imported .*pip install "cupy-cuda12x"'):
        nvrtc.version()


def test_a_library_that_only_nvidia_s_finder_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    finder = types.ModuleType("pathfinder")
    monkeypatch.setattr(finder, "load_nvidia_dynamic_lib", loaded.append, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", finder)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", Binding(loaded))
    assert nvrtc.version() == (12, 9)
    assert loaded == ["nvrtc"]
