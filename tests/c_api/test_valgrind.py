# SPDX-License-Identifier: MIT OR Apache-2.0
"""How `tests.c_api.valgrind` tells what is ours from what Python leaves behind."""

from __future__ import annotations

import pytest

from tests.c_api.valgrind import Found, blamed, read

BASE = [("Py_InitializeFromConfig", "libpython3.11.so.1.0"), ("interpreter::interpreter", "translate")]
MAIN = ("main", "translate")
MALLOC = ("malloc", "vgpreload_memcheck-amd64-linux.so")
CALL = ("PyObject_CallObject", "libpython3.11.so.1.0")


def found(*records: tuple[str, list[tuple[str, str]]]) -> Found:
    errors = ""
    for kind, frames in records:
        stack = "".join(f"<frame><fn>{name}</fn><obj>/lib/{place}</obj></frame>" for name, place in frames)
        errors += f"<error><kind>{kind}</kind><stack>{stack}</stack></error>"
    return read(f"<valgrindoutput>{errors}</valgrindoutput>", "translate")


@pytest.mark.parametrize(
    ("kind", "frames", "ours"),
    [
        ("InvalidWrite", [("fill", "translate"), MAIN], True),
        ("InvalidRead", [("memcpy", "vgpreload_memcheck-amd64-linux.so"), ("fill", "translate"), MAIN], True),
        ("Leak_PossiblyLost", [MALLOC, ("operator new", "libstdc++.so.6"), ("make", "translate"), MAIN], True),
        ("Leak_PossiblyLost", [MALLOC, ("PyLong_FromLong", "libpython3.11.so.1.0"), ("make", "translate")], True),
        ("Leak_PossiblyLost", [MALLOC, ("_PyEval_EvalFrameDefault", "libpython3.11.so.1.0"), CALL, MAIN], False),
        ("Leak_PossiblyLost", [MALLOC, ("init", "_multiarray_umath.so"), CALL, ("load", "translate"), MAIN], False),
        ("Leak_DefinitelyLost", [MALLOC, ("_PyEval_EvalFrameDefault", "libpython3.11.so.1.0"), CALL, MAIN], True),
        ("Leak_DefinitelyLost", [MALLOC, ("init", "_multiarray_umath.so"), CALL], False),
        ("UninitValue", [("strncmp", "ld-linux-x86-64.so.2"), ("dlopen", "libc.so.6")], False),
        ("Leak_PossiblyLost", [MALLOC, *BASE, MAIN], False),  # the bare program has it as well
    ],
)
def test_what_is_ours(kind: str, frames: list[tuple[str, str]], ours: bool) -> None:
    bare = found(("Leak_PossiblyLost", [MALLOC, *BASE, MAIN]))
    whole = found((kind, frames), ("Leak_PossiblyLost", [MALLOC, *BASE, MAIN]))
    assert bool(blamed(whole, bare)) is ours
    assert sum(whole.kinds.values()) == 2
