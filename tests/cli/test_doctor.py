# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale doctor``: what the probes find, what is made of it, and that nothing they meet stops it."""

from __future__ import annotations

import configparser
import ctypes
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale.cli import doctor, driver, libraries, main, packages
from metrale.cli.finding import Finding
from metrale.cli.findings import judge, verdicts
from metrale.cli.isolate import Answer

ROOT = Path(__file__).parents[2]
FAILING = dict.fromkeys(doctor.PROBES, "json:no_such_function")
"""Probes that fail before they import anything of the project, which takes half a second each."""


def distribution(folder: Path, name: str, version: str, top_level: str | None) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if top_level is not None:
        (info / "top_level.txt").write_text(top_level)


# the whole command


def test_two_cupys_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution(tmp_path, "cupy-cuda11x", "13.6.0", "cupy\ncupyx\n")
    distribution(tmp_path, "cupy-cuda13x", "14.2.0", None)
    distribution(tmp_path, "cupy-xarray", "0.1", "cupy_xarray\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = {name: doctor.PROBES[name] for name in ("packages", "host")}
    monkeypatch.setattr(doctor, "PROBES", {**FAILING, **asked})
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    names = {one["name"] for one in report["probes"]["packages"]["data"]["cupy"]}
    assert names - {"cupy-cuda12x", "cupy"} == {"cupy-cuda11x", "cupy-cuda13x"}  # the others may be installed here
    (finding,) = (one for one in report["findings"] if one["name"] == "CuPy")
    assert finding["state"] == "problem"
    assert "overwrite each other: cupy-cuda11x 13.6.0" in finding["detail"]
    assert "pip uninstall cupy-cuda11x" in finding["advice"]
    assert report["verdict"]["host"] == "ready"
    assert report["probes"]["host"]["data"]["translation"] == "La porte du garage est ouverte."


def test_the_report_for_people_ends_with_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-2] == "host: ready"
    assert lines[-1].startswith(("cuda: not available: ", "cuda: ready"))  # as the machine is
    assert "NVIDIA driver" in out
    assert err == ""


def test_the_settings_in_force_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "PROBES", FAILING)
    for name, value in {"DEVICE": "cuda:1", "MODEL": "/models/one", "CACHE_DIR": "/cache", "NVTX": "1"}.items():
        monkeypatch.setenv(f"METRALE_{name}", value)
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["settings"] == {"device": "cuda:1", "model": "/models/one", "cache": "/cache", "nvtx": "on"}
    for name in ("METRALE_DEVICE", "METRALE_MODEL", "METRALE_CACHE_DIR", "METRALE_NVTX", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("settings")
    assert lines[start + 1 : start + 5] == [
        "  device: auto",
        "  model: none: the demo model",
        "  cache: none: compiled kernels are not kept",
        "  nvtx: off",
    ]


@pytest.mark.gpu
def test_a_gpu_that_works_is_found_to_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"]["cuda"].startswith("ready")
    trial = report["probes"]["gpu"]["data"]
    assert trial["name"] in {one["name"] for one in report["probes"]["driver"]["data"]["devices"]}
    assert {one["state"] for one in report["findings"] if one["name"] in ("NVRTC", "cuBLASLt")} == {"ok"}


def test_a_host_that_does_not_work_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROBES", FAILING)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "host: not ready: unknown: packages; problem: host backend" in out
    assert "unknown  NVIDIA driver: AttributeError" in out
    assert "problem  CUDA backend: AttributeError" in out
    unsure = "unknown: NVIDIA driver, packages, NVRTC, cuBLASLt; problem: CUDA backend"
    assert out.splitlines()[-1] == f"cuda: not available: {unsure}"


# the driver


class FakeDriver:
    """libcuda with two devices, or one whose cuInit fails."""

    def __init__(self, init: int = 0, version: int = 12080, capability: tuple[int, int] = (9, 0)) -> None:
        self.init, self.version, self.capability = init, version, capability

    def cuInit(self, flags: Any) -> int:
        return self.init

    def cuDriverGetVersion(self, result: Any) -> int:
        result._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, result: Any) -> int:
        result._obj.value = 2
        return 0

    def cuDeviceGet(self, result: Any, ordinal: Any) -> int:
        result._obj.value = 100 + ordinal.value
        return 0

    def cuDeviceGetName(self, name: Any, size: Any, device: Any) -> int:
        name.value = f"GPU {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, result: Any, device: Any) -> int:
        result._obj.value = 80 << 30
        return 0

    def cuDeviceGetAttribute(self, result: Any, attribute: Any, device: Any) -> int:
        result._obj.value = {16: 132, 75: self.capability[0], 76: self.capability[1]}[attribute.value]
        return 0

    def cuGetErrorName(self, code: Any, result: Any) -> int:
        result._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0

    def cuGetErrorString(self, code: Any, result: Any) -> int:
        result._obj.value = b"no CUDA-capable device is detected"
        return 0


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def probe_driver(load: Callable[[str], Any]) -> list[Finding]:
    answer = Answer(json.loads(json.dumps(driver.probe(load))), None)
    return [one for one in judge({**GOOD, "driver": answer}) if "driver" in one.name or "device" in one.name]


def test_no_driver() -> None:
    (finding,) = probe_driver(no_library)
    assert (finding.state, finding.name) == ("missing", "NVIDIA driver")
    assert "cannot open shared object file" in finding.detail
    assert "install NVIDIA's driver" in (finding.advice or "")


def test_driver_without_a_device() -> None:
    (finding,) = probe_driver(lambda name: FakeDriver(init=100))
    assert finding.state == "problem"
    assert "cuInit failed with CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected" in finding.detail


def test_driver_too_old() -> None:
    findings = probe_driver(lambda name: FakeDriver(version=11080))
    assert findings[0].state == "problem"
    assert "11.8: too old for CUDA 12" in findings[0].detail
    assert "driver 525 or later" in (findings[0].advice or "")


def test_a_driver_for_cuda_12_is_too_old_for_the_cupy_of_cuda_13() -> None:
    answer = Answer(driver.probe(lambda name: FakeDriver()), None)
    newer = with_packages(cupy=[{"name": "cupy-cuda13x", "version": "14.2.0"}])
    (finding,) = (one for one in judge({**newer, "driver": answer}) if one.name == "NVIDIA driver")
    assert finding.state == "problem"
    assert "12.8: too old for CUDA 13" in finding.detail
    assert "driver 580 or later" in (finding.advice or "")


def test_driver_and_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    monkeypatch.setattr(driver, "KERNEL_DRIVER_FILE", version)
    state, first, second = probe_driver(lambda name: FakeDriver())
    assert (state.state, state.detail) == ("ok", "580.65.06, serves CUDA up to 12.8")
    assert first.detail == "GPU 100, compute capability 9.0, 80.0 GiB, 132 multiprocessors"
    assert (second.name, second.state) == ("device 1", "ok")


def test_a_library_that_is_no_driver_is_an_error() -> None:
    (finding,) = probe_driver(lambda name: object())
    assert finding.state == "problem"
    assert "cuDriverGetVersion" in finding.detail


def test_the_real_loader_gives_an_answer_of_the_same_shape() -> None:
    assert set(driver.probe()) == set(driver.probe(no_library))
    assert driver.probe.__defaults__ == (ctypes.CDLL,)


# packages and libraries


def test_requirements_are_those_of_setup_cfg() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = [line.partition(";")[0].strip() for line in setup["options"]["install_requires"].splitlines()]
    cuda = {f"{name}>={old}" + (f",<{new}" if new else "") for name, (old, new) in packages.CUDA.items()}
    host = {f"{name}>={old}" for name, old in packages.HOST.items()}
    ours = f"cupy-cuda{packages.CUDA_MAJOR}x"
    assert host | cuda | {f"{ours}>={packages.CUPY[ours]}"} == {
        line for line in lines if line and not line.startswith("#")
    }


def test_libraries_in_wheels_are_found_ours_first(tmp_path: Path) -> None:
    for version in ("13", "12", "alt.12"):
        path = tmp_path / "nvidia" / f"cuda_{version}" / "lib" / f"libnvrtc.so.{version}"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no library")
    found = libraries.in_wheels("nvrtc", [str(tmp_path), "/no/such/folder"])
    assert [path.name for path in found] == ["libnvrtc.so.12", "libnvrtc.so.13"]


def test_libraries_have_a_version_or_an_error() -> None:
    found = libraries.probe()
    assert list(found) == list(libraries.NAMES)
    for one in found.values():
        assert (one["error"] is None) == bool(one["path"] and re.match(r"\d+\.\d+", one["version"]))


# what is made of it

GOOD = {
    "packages": Answer(
        {
            "system": "Linux",
            "versions": {
                "numpy": "2.4.0",
                "safetensors": "0.6.2",
                "sentencepiece": "0.2.2",
                "ml_dtypes": "0.5.4",
                "tqdm": "4.67.1",
                "nvmath-python": "0.10.0",
                "cuda-bindings": "12.9.4",
            },
            "cupy": [{"name": "cupy-cuda12x", "version": "13.10.0"}],
        },
        None,
    ),
    "host": Answer({"name": "host", "translation": "x"}, None),
    "driver": Answer(driver.probe(lambda name: FakeDriver()), None),
    "libraries": Answer(
        {name: {"path": f"lib{name}.so.12", "version": "12.9.1", "error": None} for name in libraries.NAMES}, None
    ),
    "nvrtc": Answer({"version": [12, 9], "archs": [75, 80, 86, 89, 90, 100]}, None),
    "cublasLt": Answer({"version": [12, 9, 1]}, None),
    "gpu": Answer({"name": "GPU 100", "layer_norm_error": 1e-7, "product_error": 2e-4}, None),
}
NO_GPU = {
    **GOOD,
    "driver": Answer(driver.probe(no_library), None),
    "cublasLt": Answer(None, "NotSupportedError: CUDA driver is not found"),
    "gpu": Answer(None, "BackendUnavailable: cuda: no NVIDIA driver here"),
}


def with_packages(**changes: Any) -> dict[str, Answer]:
    data = GOOD["packages"].data or {}
    versions = {**data["versions"], **changes.pop("versions", {})}
    return {**GOOD, "packages": Answer({**data, "versions": versions, **changes}, None)}


def cuda_of(answers: dict[str, Answer]) -> dict[str, Finding]:
    return {one.name: one for one in judge(answers) if one.part == "cuda"}


def test_all_is_well() -> None:
    findings = judge(GOOD)
    assert [one for one in findings if one.state != "ok" or one.advice] == []
    assert verdicts(findings) == {"host": "ready", "cuda": "ready"}
    assert findings[-1].detail == "GPU 100 computes (relative errors: kernel 1.0e-07, product 2.0e-04)"


def test_a_machine_without_a_gpu_lacks_a_driver_and_nothing_else() -> None:
    """nvmath loads nothing without a driver; the library's file is there all the same, and no trial is reported."""
    findings = judge(NO_GPU)
    assert [one.name for one in findings if one.state != "ok"] == ["NVIDIA driver"]
    assert verdicts(findings) == {"host": "ready", "cuda": "not available: missing: NVIDIA driver"}
    assert "CUDA backend" not in {one.name for one in findings}


@pytest.mark.parametrize(
    ("answers", "name", "state", "advice"),
    [
        (with_packages(cupy=[]), "cupy-cuda12x", "missing", 'pip install "cupy-cuda12x>=13.4"'),
        (
            with_packages(cupy=[{"name": "cupy-cuda11x", "version": "13.6"}]),
            "CuPy",
            "problem",
            "uninstall cupy-cuda11x",
        ),
        (with_packages(cupy=[{"name": "cupy-rocm-5-0", "version": "13.6"}]), "CuPy", "problem", "uninstall"),
        (with_packages(cupy=[{"name": "cupy-cuda12x", "version": "13.3.9"}]), "cupy-cuda12x", "problem", ">=13.4"),
        (with_packages(cupy=[{"name": "cupy-cuda13x", "version": "13.5"}]), "cupy-cuda13x", "problem", ">=13.6"),
        (with_packages(cupy=[{"name": "cupy", "version": "13.3"}]), "cupy", "problem", ">=13.4"),
        (with_packages(versions={"cuda-bindings": "13.0.1"}), "cuda-bindings", "problem", "cuda-bindings>=12.9,<13"),
        (with_packages(versions={"nvmath-python": None}), "nvmath-python", "missing", "nvmath-python>=0.5"),
        (with_packages(versions={"numpy": "2.0.2"}), "numpy", "problem", "numpy>=2.1"),
        ({**GOOD, "driver": Answer(None, "crashed with SIGSEGV")}, "NVIDIA driver", "unknown", None),
        ({**GOOD, "host": Answer(None, "ImportError: numpy")}, "host backend", "problem", "pip install -e ."),
        ({**GOOD, "gpu": Answer(None, "crashed with SIGSEGV")}, "CUDA backend", "problem", None),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    answers: dict[str, Answer], name: str, state: str, advice: str | None
) -> None:
    (finding,) = (one for one in judge(answers) if one.name == name)
    assert finding.state == state
    assert (advice is None and finding.advice is None) or (advice or "") in (finding.advice or "")
    assert re.search(f"{state}: [^;]*{name}", verdicts(judge(answers))[finding.part])


def test_what_works_all_the_same_is_ready_with_a_reservation() -> None:
    two = [{"name": f"cupy-cuda{major}x", "version": "14.2"} for major in (12, 13)]
    assert verdicts(judge(with_packages(cupy=two)))["cuda"] == "ready, but problem: CuPy"
    broken = {**with_packages(cupy=two), "gpu": Answer(None, "ImportError: cupy")}
    assert verdicts(judge(broken))["cuda"] == "not available: problem: CuPy, CUDA backend"


def test_the_cupy_of_cuda_13_goes_with_the_bindings_and_the_compiler_of_cuda_13() -> None:
    newer = with_packages(cupy=[{"name": "cupy-cuda13x", "version": "14.2.0"}], versions={"cuda-bindings": "13.0.3"})
    newer["driver"] = Answer(driver.probe(lambda name: FakeDriver(version=13000)), None)
    newer["nvrtc"] = Answer({"version": [13, 0], "archs": [90]}, None)
    assert verdicts(judge(newer))["cuda"] == "ready"
    assert cuda_of(newer)["NVRTC"].detail == "13.0"  # the file that was found is another one's
    mixed = cuda_of({**newer, "nvrtc": GOOD["nvrtc"]})["NVRTC"]
    assert (mixed.state, mixed.advice) == ("problem", "pip install nvidia-cuda-nvrtc")
    assert mixed.detail == "12.9 (libnvrtc.so.12): expected 13, which CuPy is made for"


@pytest.mark.parametrize("name", ["nvrtc", "cublasLt"])
def test_a_library_that_is_missing_or_does_not_load(name: str) -> None:
    title = {"nvrtc": "NVRTC", "cublasLt": "cuBLASLt"}[name]
    absent = Answer(
        {**(GOOD["libraries"].data or {}), name: {"path": None, "version": None, "error": "not found"}}, None
    )
    failed = {**GOOD, name: Answer(None, "OSError: undefined symbol")}
    finding = cuda_of(failed)[title]
    assert finding.state == "problem"
    assert re.search(r"12\.9\.1 \(lib.*, but (CuPy|nvmath) cannot load it: OSError: undefined symbol", finding.detail)
    finding = cuda_of({**failed, "libraries": absent})[title]
    assert (finding.state, finding.detail) == ("missing", "not found")
    assert finding.advice == "pip install -e '.[cuda12]' (in the clone)"
    finding = cuda_of({**failed, "libraries": Answer(None, "no answer")})[title]
    assert (finding.state, finding.detail) == ("unknown", "OSError: undefined symbol; no answer")


def test_a_library_newer_than_the_driver_serves() -> None:
    answers = {**GOOD, "cublasLt": Answer({"version": [13, 1, 0]}, None)}
    finding = cuda_of(answers)["cuBLASLt"]
    assert (finding.state, finding.detail) == ("problem", "13.1.0: the driver serves CUDA up to 12.8")
    answers["driver"] = Answer(driver.probe(lambda name: FakeDriver(version=13000)), None)
    assert cuda_of(answers)["cuBLASLt"].state == "ok"
    answers["cublasLt"] = Answer({"version": [11, 8, 0]}, None)
    assert "expected 12 or later" in cuda_of(answers)["cuBLASLt"].detail


def test_an_old_library_is_a_problem_without_a_driver_too() -> None:
    files = {**(GOOD["libraries"].data or {}), "cublasLt": {"path": "x.so.11", "version": "11.5.1", "error": None}}
    finding = cuda_of({**NO_GPU, "libraries": Answer(files, None)})["cuBLASLt"]
    assert (finding.state, finding.detail) == ("problem", "11.5.1 (x.so.11): expected 12 or later")


def test_a_compiler_that_does_not_know_the_device() -> None:
    newest = {**GOOD, "driver": Answer(driver.probe(lambda name: FakeDriver(capability=(12, 1))), None)}
    finding = cuda_of(newest)["NVRTC"]
    assert finding.state == "problem"
    assert finding.detail.endswith("too old for device 0, which has compute capability 12.1")


def test_an_old_device_and_none() -> None:
    data = GOOD["driver"].data or {}
    old = {**data, "devices": [{**data["devices"][0], "compute_capability": [7, 5]}]}
    finding = cuda_of({**GOOD, "driver": Answer(old, None)})["device 0"]
    assert finding.state == "problem"
    assert finding.detail.endswith("expected compute capability 8.0 or later")
    assert cuda_of({**GOOD, "driver": Answer(old, None)})["NVRTC"].state == "ok"  # it is not the compiler's fault
    none = cuda_of({**GOOD, "driver": Answer({**data, "devices": []}, None)})
    assert none["device"].state == "missing"
    assert "CUDA backend" not in none


def test_a_mac_is_not_told_to_install_a_driver() -> None:
    findings = judge({**with_packages(system="Darwin"), "driver": Answer(driver.probe(no_library), None)})
    cuda = [one for one in findings if one.part == "cuda"]
    assert [(one.state, one.advice) for one in cuda] == [("missing", None)]
