# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ``metrale-config`` command: what a C or C++ host is compiled with."""

from __future__ import annotations

import argparse
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gpu_runtime
import metrale

DESCRIPTION: Final = """\
Flags for compiling C and C++ code against gpu_runtime.h, for the Python that runs this command. What is asked for is
printed one line each, in the order below. For example:

  cc -std=c99 -shared -fPIC $(metrale-config --cflags) module.c -o module.so
  c++ -std=c++17 $(metrale-config --cflags) host.cpp -o host $(metrale-config --ldflags)
"""


class ConfigError(Exception):
    """What this Python lacks, and how to get it."""


def include_dir() -> str:
    """Return the folder of gpu_runtime.h."""
    folder = Path(gpu_runtime.get_include())
    if not (folder / "gpu_runtime.h").is_file():
        raise ConfigError(f"expected gpu_runtime.h in {folder}: the installation of metrale is damaged")
    return str(folder)


def cflags(paths: Mapping[str, str] | None = None) -> str:
    """Return the flags to compile with: both folders of headers; warnings in Python's own are not the host's."""
    folder = Path((paths or sysconfig.get_paths())["include"])
    if not (folder / "Python.h").is_file():
        raise ConfigError(f"expected Python.h in {folder}: install Python's development files (Debian: python3-dev)")
    return shlex.join([f"-I{include_dir()}", "-isystem", str(folder)])


def ldflags(variables: Mapping[str, Any] | None = None) -> str:
    """Return the flags to link a program that embeds Python with. An extension module is linked without any."""
    known = sysconfig.get_config_vars() if variables is None else variables
    name = f"python{known.get('LDVERSION') or known['VERSION']}"
    system = shlex.split(f"{known.get('LIBS') or ''} {known.get('SYSLIBS') or ''}")
    for kind in ("LIBDIR", "LIBPL"):
        folder = Path(known.get(kind) or "")
        if any((folder / f"lib{name}{ending}").is_file() for ending in (".so", ".dylib")):
            return shlex.join([f"-L{folder}", f"-l{name}", f"-Wl,-rpath,{folder}", *system])
    for kind in ("LIBPL", "LIBDIR"):
        archive = Path(known.get(kind) or "", f"lib{name}.a")
        if archive.is_file():  # what extension modules need of the program must be visible to them
            return shlex.join([str(archive), *system, *shlex.split(known.get("LINKFORSHARED") or "")])
    raise ConfigError(
        f"expected lib{name}.so or lib{name}.a in {known.get('LIBDIR')}: install Python's library "
        "(Debian: python3-dev), or build Python with --enable-shared"
    )


ANSWERS: Final[dict[str, tuple[Callable[[], str], str]]] = {
    "cflags": (cflags, "flags to compile with"),
    "includes": (cflags, "the same, under the name that python3-config has for it"),
    "include-dir": (include_dir, "the folder of gpu_runtime.h"),
    "ldflags": (ldflags, "flags to link a program that embeds Python with; an extension module needs none"),
    "version": (lambda: metrale.__version__, "the version of metrale"),
    "abi-version": (lambda: ".".join(map(str, gpu_runtime.ABI_VERSION)), "the ABI version of the header"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 something is missing here, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        "metrale-config", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (_, text) in ANSWERS.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    asked = vars(parser.parse_args(argv))
    wanted = [answer for name, (answer, _) in ANSWERS.items() if asked[name.replace("-", "_")]]
    if not wanted:
        parser.error("expected at least one of " + ", ".join(f"--{name}" for name in ANSWERS))
    try:
        lines = [answer() for answer in wanted]
    except ConfigError as error:
        print(f"metrale-config: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
