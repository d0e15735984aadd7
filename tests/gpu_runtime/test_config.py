# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings from the environment and opening a device."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime import BackendUnavailable, Config, GpuBackend, open_backend
from gpu_runtime.host import HostBackend
from tests.backends import why_no_gpu

VARIABLES = ("METRALE_DEVICE", "METRALE_MODEL", "METRALE_CACHE_DIR", "METRALE_NVTX")


def test_defaults() -> None:
    assert Config.from_env({}) == Config() == Config(device="auto", model=None, cache=None, nvtx=False)


def test_variables() -> None:
    assert Config.from_env({"METRALE_DEVICE": "host", "METRALE_MODEL": "/m"}) == Config("host", "/m")
    assert Config.from_env({"METRALE_CACHE_DIR": "/c"}) == Config(cache=Path("/c"))
    assert Config.from_env(dict.fromkeys(VARIABLES, "")) == Config()
    assert [Config.from_env({"METRALE_NVTX": value}).nvtx for value in ("1", "0", "yes")] == [True, False, True]


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/metrale"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/x"}, "/x/metrale"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/metrale"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/x", "METRALE_CACHE_DIR": "/c"}, "/c"),
        ({"HOME": "/home/a", "METRALE_CACHE_DIR": "relative"}, "relative"),
        # an empty variable counts as unset, and the XDG specification has a relative path ignored
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "", "METRALE_CACHE_DIR": ""}, "/home/a/.cache/metrale"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "x"}, "/home/a/.cache/metrale"),
        ({"HOME": "", "XDG_CACHE_HOME": "x"}, None),
    ],
)
def test_cache_folder(environ: dict[str, str], cache: str | None) -> None:
    assert Config.from_env(environ).cache == (None if cache is None else Path(cache))


def test_every_variable_is_documented() -> None:
    root = Path(__file__).parents[2]
    read = re.findall(r"METRALE_\w+", (root / "gpu_runtime/config.py").read_text("utf-8"))
    page = (root / "docs/environment.md").read_text("utf-8")
    assert set(read) == set(VARIABLES)
    assert set(re.findall(r"^\| `(METRALE_\w+)` \|", page, re.MULTILINE)) == set(read)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_DEVICE", "cuda:1")
    monkeypatch.setenv("METRALE_CACHE_DIR", "/c")
    monkeypatch.delenv("METRALE_MODEL", raising=False)
    assert Config.from_env() == Config(device="cuda:1", cache=Path("/c"))


def test_is_frozen() -> None:
    config: Any = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "host"


@pytest.mark.parametrize(("name", "config"), [("host", Config("cuda")), ("auto", Config("host"))])
def test_open_host(name: str, config: Config) -> None:
    with open_backend(name, config=config) as gpu:
        assert isinstance(gpu, HostBackend)
        assert gpu.kind() == "host"


def test_auto_takes_a_gpu_where_there_is_one() -> None:
    with open_backend("auto", config=Config()) as gpu:
        assert gpu.kind() == ("cuda" if why_no_gpu() is None else "host")


@pytest.mark.parametrize(("driver", "level"), [("no_such_driver.so", "INFO"), (None, "WARNING")])
def test_auto_warns_when_there_is_a_driver_but_no_gpu_can_be_used(
    driver: str | None, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: int | None = None, *, config: Config | None = None) -> GpuBackend:
        raise BackendUnavailable("cuda:0: compute capability 7.5")

    monkeypatch.setattr("gpu_runtime.cuda.open_cuda", refuse)
    monkeypatch.setattr("gpu_runtime.cuda.DRIVER", driver)  # None is the process itself, which always loads
    with caplog.at_level("INFO", logger="gpu_runtime"), open_backend("auto", config=Config()) as gpu:
        assert gpu.kind() == "host"
    (record,) = caplog.records
    assert record.levelname == level
    assert "no GPU can be used: cuda:0: compute capability 7.5" in record.getMessage()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_open_cuda(name: str) -> None:
    with open_backend(name) as gpu:
        assert gpu.kind() == "cuda"


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="cuda"):
        open_backend("cuda:99")


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "HOST", " host", "host:0"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(ValueError, match="expected 'auto', 'host', 'cuda' or 'cuda:N'"):
        open_backend(device)


@pytest.mark.parametrize("device", [None, 0, b"host", ["host"]])
def test_device_is_a_string(device: Any) -> None:
    with pytest.raises(TypeError, match="device"):
        open_backend(device)


def test_auto_asks_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable):
        open_backend("auto", config=Config(device="cuda:99"))
    monkeypatch.setenv("METRALE_DEVICE", "cuda:99")
    with pytest.raises(BackendUnavailable):
        open_backend()
    monkeypatch.setenv("METRALE_DEVICE", "gpu")
    with pytest.raises(ValueError, match="got 'gpu'"):
        open_backend()
    open_backend("host").close()  # an argument wins
