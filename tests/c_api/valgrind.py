# SPDX-License-Identifier: MIT OR Apache-2.0
"""examples/cpp_embed under valgrind, beside the same program that only starts Python and NumPy.

    python -m tests.c_api.valgrind [--cxx CXX]

Python and NumPy leave a few thousand blocks behind, and every stack ends in `main`. What is ours is what our code did
itself: walking outward from where it happened, one passes the C library, C++'s and Python's own C code, and comes to a
frame of the program before any bytecode or other module. Such a record counts unless the bare program has it too, as
it has what Python keeps from its start. Definite leaks count with any frame of the program that is not the bare one's.
It takes about three minutes of processor time, which is why it is not among the tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from tests.c_api.examples import EMBED, script

VALGRIND: Final = (
    "valgrind",
    "--leak-check=full",
    "--show-leak-kinds=definite,indirect,possible",
    "--num-callers=40",
    "--xml=yes",
)
BELOW: Final = ("vgpreload", "libc.so", "libc-", "libstdc++", "libc++", "libpthread", "ld-linux", "libpython")
LOST: Final = ("Leak_DefinitelyLost", "Leak_IndirectlyLost")


class Found(NamedTuple):
    """What valgrind reports: how many records of each kind, and those that are of the program, by its function."""

    kinds: Counter[str]
    ours: Counter[tuple[str, str]]
    lost: Counter[tuple[str, str]]


def read(xml: str, program: str) -> Found:
    """Sort the records of a report of the program with this file name."""
    found = Found(Counter(), Counter(), Counter())
    for record in ElementTree.fromstring(xml).iter("error"):
        kind = record.findtext("kind", "")
        found.kinds[kind] += 1
        stack = record.find("stack")
        frames = [] if stack is None else [*stack.iter("frame")]
        places = [(frame.findtext("fn", ""), Path(frame.findtext("obj", "")).name) for frame in frames]
        mine = [function for function, name in places if name == program]
        if mine and kind in LOST:
            found.lost[kind, mine[0]] += 1
        for function, name in places:
            if name == program:
                found.ours[kind, function] += 1
            if function.startswith("_PyEval") or not name.startswith(BELOW):
                break
    return found


def blamed(whole: Found, bare: Found) -> list[str]:
    """Return what is ours in the whole program, and not in the bare one."""
    wrong = []
    for title, records, known in (("direct", whole.ours, bare.ours), ("lost", whole.lost, bare.lost)):
        wrong += [f"{title}: {count} x {kind} in {where}" for (kind, where), count in records.items()
                  if (kind, where) not in known]  # fmt: skip
    return sorted(wrong)


def report(program: Path, arguments: list[str], folder: Path) -> tuple[Found, str]:
    """Run a program under valgrind; return what was found and what it printed."""
    xml = folder / "report.xml"
    environment = {**os.environ, "PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"}
    command = [*VALGRIND, f"--xml-file={xml}", str(program), "--python", sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return read(xml.read_text("utf-8", "replace"), program.name), done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cxx", default="g++")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = script(EMBED).build(folder, args.cxx)
        bare, _ = report(program, ["--bare"], folder)
        whole, printed = report(program, ["--device", "host", str(EMBED / "sentences.txt")], folder)
    for title, found in (("bare", bare), ("translating", whole)):
        print(f"{title}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items())))
    print(f"{len(printed.splitlines())} lines translated")
    wrong = blamed(whole, bare)
    print("\n".join(wrong) or "no error or leak with a frame of ours")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
