# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale doctor``: what the probes find, what is made of it, and that nothing they meet stops it."""

from __future__ import annotations

import configparser
import ctypes
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale.cli import doctor, driver, libraries, main, packages
from metrale.cli.findings import NO_CUDA_BACKEND, Finding, judge, verdicts
from metrale.cli.isolate import Answer, ask_all

ROOT = Path(__file__).parents[2]


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
    assert lines[-1].startswith("cuda: not available: ")
    assert lines[-1].endswith(NO_CUDA_BACKEND)
    assert "NVIDIA driver" in out
    assert err == ""


def test_a_host_that_does_not_work_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = dict.fromkeys(doctor.PROBES, "metrale.cli.packages:no_such_function")
    monkeypatch.setattr(doctor, "PROBES", bad)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "host: not ready: unknown: packages; problem: host backend" in out
    assert "unknown  NVIDIA driver: AttributeError" in out


# isolation


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctor_helpers.py").write_text(
        "import ctypes, os, sys, time\n"
        "def good():\n    print('noise')\n    return {'value': 1}\n"
        "def fails():\n    raise OSError('broken\\nlibrary')\n"
        "def crashes():\n    os.abort()\n"
        "def leaves():\n    os._exit(5)\n"
        "def hangs():\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("helpers")
def test_probes_that_fail_crash_or_leave_cost_only_their_answer() -> None:
    names = ("good", "fails", "crashes", "leaves", "absent")
    answers = ask_all({name: f"doctor_helpers:{name}" for name in names}, 60)
    assert answers["good"] == Answer({"value": 1}, None)
    assert answers["fails"] == Answer(None, "OSError: broken\nlibrary")
    assert answers["crashes"] == Answer(None, "crashed with SIGABRT")
    assert answers["leaves"] == Answer(None, "ended with exit code 5 and no answer")
    assert (answers["absent"].error or "").startswith("AttributeError")


@pytest.mark.usefixtures("helpers")
def test_a_probe_that_hangs_is_stopped() -> None:
    start = time.monotonic()
    assert ask_all({"hangs": "doctor_helpers:hangs"}, 0.2)["hangs"].error == "no answer within 0.2 seconds"
    assert time.monotonic() - start < 10


def test_a_python_that_cannot_be_started_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert (ask_all({"x": "m:f"}, 1)["x"].error or "").startswith("cannot be started")


# the driver


class FakeDriver:
    """libcuda with two devices, or one whose cuInit fails."""

    def __init__(self, init: int = 0, version: int = 12080) -> None:
        self.init, self.version = init, version

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
        result._obj.value = {16: 132, 75: 9, 76: 0}[attribute.value]
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
    assert "11.8: too old" in findings[0].detail


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
    assert host | cuda | {">=".join(packages.CUPY)} == {line for line in lines if line and not line.startswith("#")}


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
                "safetensors": "0.4.5",
                "sentencepiece": "0.2.1",
                "ml_dtypes": "0.5.4",
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
}


def with_packages(**changes: Any) -> dict[str, Answer]:
    data = GOOD["packages"].data or {}
    versions = {**data["versions"], **changes.pop("versions", {})}
    return {**GOOD, "packages": Answer({**data, "versions": versions, **changes}, None)}


def test_all_is_well() -> None:
    findings = judge(GOOD)
    assert [one for one in findings if one.state != "ok" or one.advice] == []
    assert verdicts(findings) == {"host": "ready", "cuda": f"not available: {NO_CUDA_BACKEND}"}


@pytest.mark.parametrize(
    ("answers", "name", "state", "advice"),
    [
        (with_packages(cupy=[]), "cupy-cuda12x", "missing", 'pip install "cupy-cuda12x>=13.4"'),
        (with_packages(cupy=[{"name": "cupy-cuda13x", "version": "14.0"}]), "CuPy", "problem", "uninstall"),
        (with_packages(cupy=[{"name": "cupy-cuda12x", "version": "13.3.9"}]), "cupy-cuda12x", "problem", ">=13.4"),
        (with_packages(versions={"cuda-bindings": "13.0.1"}), "cuda-bindings", "problem", "cuda-bindings>=12.9,<13"),
        (with_packages(versions={"nvmath-python": None}), "nvmath-python", "missing", "nvmath-python>=0.5"),
        (with_packages(versions={"numpy": "1.25.2"}), "numpy", "problem", "numpy>=1.26"),
        ({**GOOD, "driver": Answer(None, "crashed with SIGSEGV")}, "NVIDIA driver", "unknown", None),
        ({**GOOD, "libraries": Answer(None, "no answer")}, "NVRTC", "unknown", None),
        ({**GOOD, "host": Answer(None, "ImportError: numpy")}, "host backend", "problem", "reinstall"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    answers: dict[str, Answer], name: str, state: str, advice: str | None
) -> None:
    (finding,) = (one for one in judge(answers) if one.name == name)
    assert finding.state == state
    assert (advice is None and finding.advice is None) or (advice or "") in (finding.advice or "")
    assert f"{state}: {name}" in verdicts(judge(answers))[finding.part]


@pytest.mark.parametrize(("version", "path", "state"), [(None, None, "missing"), ("13.0.0", "x.so.13", "problem")])
def test_a_missing_or_foreign_library(version: str | None, path: str | None, state: str) -> None:
    data = {**(GOOD["libraries"].data or {}), "cublas": {"path": path, "version": version, "error": "not found"}}
    (finding,) = (one for one in judge({**GOOD, "libraries": Answer(data, None)}) if one.name == "cuBLAS")
    assert (finding.state, finding.advice) == (state, 'pip install "metrale[cuda12]"')


def test_an_old_device_and_none() -> None:
    data = GOOD["driver"].data or {}
    old = {**data, "devices": [{**data["devices"][0], "compute_capability": [7, 5]}]}
    (finding,) = (one for one in judge({**GOOD, "driver": Answer(old, None)}) if one.name == "device 0")
    assert finding.state == "problem"
    (finding,) = (
        one for one in judge({**GOOD, "driver": Answer({**data, "devices": []}, None)}) if one.name == "device"
    )
    assert finding.state == "missing"


def test_a_mac_is_not_told_to_install_a_driver() -> None:
    findings = judge({**with_packages(system="Darwin"), "driver": Answer(driver.probe(no_library), None)})
    cuda = [one for one in findings if one.part == "cuda"]
    assert [(one.state, one.advice) for one in cuda] == [("missing", None)]
