# SPDX-License-Identifier: MIT OR Apache-2.0
"""Builds the program beside this file and runs it: what comes after the compiler goes to it.

python examples/cpp_embed/run.py [--cxx CXX] [--device DEVICE] [--dtype T] [--to LANGUAGE] [--threads N] [FILE]
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from metrale.cli.config import cflags, ldflags

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def build(folder: Path, compiler: str) -> Path:
    """Compile the program into a folder and return its file."""
    output = folder / "translate"
    command = [*shlex.split(compiler), *FLAGS, *shlex.split(cflags()), str(HERE / "translate.cpp")]
    subprocess.run([*command, "-o", str(output), *shlex.split(ldflags())], check=True)
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cxx", default=os.environ.get("CXX") or "c++")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), args.cxx)
        given = rest if rest and Path(rest[-1]).is_file() else [*rest, str(HERE / "sentences.txt")]
        return subprocess.run([program, "--python", sys.executable, *given], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
