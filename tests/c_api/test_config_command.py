# SPDX-License-Identifier: MIT OR Apache-2.0
"""The metrale-config command."""

from __future__ import annotations

import shlex
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import gpu_runtime
import metrale
from metrale.cli import config


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert config.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == [metrale.__version__]
    assert said(capsys, "--abi-version") == ["1.0"]
    assert said(capsys, "--include-dir") == [gpu_runtime.get_include()]
    assert said(capsys, "--includes") == said(capsys, "--cflags")
    (flags,) = said(capsys, "--cflags")
    own, kind, theirs = shlex.split(flags)
    assert Path(own.removeprefix("-I"), "gpu_runtime.h").is_file()
    assert kind == "-isystem"
    assert Path(theirs, "Python.h").is_file()


def test_several_answers_have_a_fixed_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--abi-version", "--version") == [metrale.__version__, "1.0"]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in config.ANSWERS)


@pytest.mark.parametrize("arguments", [[], ["--libs"], ["module.c"]])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config.main(arguments)
    assert ended.value.code == 2
    assert "metrale-config: error:" in capsys.readouterr().err


def test_missing_headers(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"expected Python\.h in .*python3-dev"):
        config.cflags({"include": str(tmp_path)})


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runtime, "get_include", lambda: "/nowhere")
    assert config.main(["--cflags"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "metrale-config: error: expected gpu_runtime.h in /nowhere: the installation of metrale is damaged\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["lib/libpython3.11d.so"], "-L{0}/lib -lpython3.11d -Wl,-rpath,{0}/lib -ldl -lm"),
        (["pl/libpython3.11d.so"], "-L{0}/pl -lpython3.11d -Wl,-rpath,{0}/pl -ldl -lm"),
        (["pl/libpython3.11d.a"], "{0}/pl/libpython3.11d.a -ldl -lm -Xlinker -export-dynamic"),
        (["lib/libpython3.11d.a", "lib/libpython3.11d.so"], "-L{0}/lib -lpython3.11d -Wl,-rpath,{0}/lib -ldl -lm"),
        ([], None),
    ],
    ids=str,
)
def test_flags_of_libraries(tmp_path: Path, files: list[str], expected: str | None) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    variables: dict[str, Any] = {
        "LDVERSION": "3.11d",
        "LIBDIR": str(tmp_path / "lib"),
        "LIBPL": str(tmp_path / "pl"),
        "LIBS": "-ldl ",
        "SYSLIBS": "-lm",
        "LINKFORSHARED": "-Xlinker -export-dynamic",
    }
    if expected is None:
        with pytest.raises(config.ConfigError, match=r"expected libpython3\.11d\.so or libpython3\.11d\.a"):
            config.ldflags(variables)
    else:
        assert config.ldflags(variables) == expected.format(tmp_path)


def test_this_python_is_known(embedding: None) -> None:
    assert sysconfig.get_config_vars()["VERSION"] in config.ldflags()
