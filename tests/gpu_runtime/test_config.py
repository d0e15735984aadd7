# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings from the environment and opening a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpu_runtime import BackendUnavailable, Config, open_backend
from gpu_runtime.host import HostBackend


def test_defaults() -> None:
    assert Config.from_env({}) == Config() == Config(device="auto", model=None)


def test_variables() -> None:
    assert Config.from_env({"METRALE_DEVICE": "host", "METRALE_MODEL": "/m"}) == Config("host", "/m")
    assert Config.from_env({"METRALE_DEVICE": "", "METRALE_MODEL": ""}) == Config()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_DEVICE", "cuda:1")
    monkeypatch.delenv("METRALE_MODEL", raising=False)
    assert Config.from_env() == Config(device="cuda:1")


def test_is_frozen() -> None:
    config: Any = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "host"


@pytest.mark.parametrize("device", ["host", "auto"])
def test_open_host(device: str) -> None:
    with open_backend(device, config=Config()) as gpu:
        assert isinstance(gpu, HostBackend)
        assert gpu.kind() == "host"


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:12"])
def test_cuda_is_refused_by_name(device: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"device '{device}'"):
        open_backend(device)


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
        open_backend("auto", config=Config(device="cuda"))
    monkeypatch.setenv("METRALE_DEVICE", "cuda")
    with pytest.raises(BackendUnavailable):
        open_backend()
    monkeypatch.setenv("METRALE_DEVICE", "gpu")
    with pytest.raises(ValueError, match="got 'gpu'"):
        open_backend()
    open_backend("host").close()  # an argument wins
