# SPDX-License-Identifier: MIT OR Apache-2.0
"""The compilers of this machine, and what is built with them."""

from __future__ import annotations

import functools
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metrale.cli.config import ConfigError, cflags, ldflags

HERE: Final = Path(__file__).parent
STRICT: Final = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
LIMITED: Final = "-DPy_LIMITED_API=0x030B0000"


@dataclass(frozen=True)
class Compiler:
    """A C and a C++ compiler of one kind."""

    name: str
    cc: str
    cxx: str

    def command(self, sources: list[Path]) -> list[str]:
        """Return the compiler for the sources' language, with the standard that the header promises."""
        if all(source.suffix == ".c" for source in sources):
            return [self.cc, "-std=c99"]
        return [self.cxx, "-std=c++17"]

    def build(self, output: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
        """Compile sources against the header, and link them. AssertionError, with what was said, when that fails."""
        command = [*self.command([*sources]), *STRICT, "-O1", *shlex.split(cflags()), *map(str, sources)]
        done = subprocess.run([*command, *flags, "-o", str(output)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"{shlex.join(done.args)}\n{done.stderr}"
        return output

    def library(self, output: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
        """Build a shared library that takes Python from the process that loads it."""
        undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
        return self.build(output, *sources, flags=("-shared", "-fPIC", "-pthread", *undefined, *flags))

    def program(self, output: Path, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
        """Build a program that embeds Python."""
        return self.build(output, *sources, flags=("-pthread", *flags, *shlex.split(ldflags())))


ALL: Final = (Compiler("gcc", "gcc", "g++"), Compiler("clang", "clang", "clang++"))


@functools.cache
def why_not(name: str) -> str | None:
    """Return why a compiler cannot be used here, or None when it can."""
    compiler = next(one for one in ALL if one.name == name)
    missing = [program for program in (compiler.cc, compiler.cxx) if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found"
    try:
        cflags()
    except ConfigError as error:
        return str(error)
    return None


@functools.cache
def why_no_embedding() -> str | None:
    """Return why no program can embed this Python, or None when one can."""
    try:
        ldflags()
    except ConfigError as error:
        return str(error)
    return None


def why_no_compilers() -> str | None:
    """Return what is missing for all of these tests to run, or None when nothing is."""
    return "; ".join(filter(None, [*(why_not(one.name) for one in ALL), why_no_embedding()])) or None
