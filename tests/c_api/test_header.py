# SPDX-License-Identifier: MIT OR Apache-2.0
"""The header compiles without a warning in both languages, and says what Python says: version, codes, layout."""

from __future__ import annotations

import ctypes
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_runtime
from gpu_runtime import errors
from gpu_runtime.capi import codes
from gpu_runtime.capi.entries import DTYPES, ENTRIES, KINDS, Block, Logits
from gpu_runtime.capi.table import NAME, Table
from gpu_runtime.streams import DEFAULT_STREAM, LEGACY_STREAM, PER_THREAD_STREAM
from tests.c_api.library import SIGNATURES
from tests.c_api.toolchain import LIMITED, Compiler

INCLUDE = Path(gpu_runtime.get_include())
ABI = (INCLUDE / "gpu_runtime" / "abi.h").read_text("utf-8")
CALLS = (INCLUDE / "gpu_runtime" / "calls.h").read_text("utf-8")

LAYOUT = """
#include <gpu_runtime.h>
#include <stddef.h>
#define SIZE(type) printf(#type " - %zu\\n", sizeof(type));
#define FIELD(type, name) printf(#type " " #name " %zu\\n", offsetof(type, name));
int main(void) {{ {body} return 0; }}
"""

STRUCTS: dict[str, Any] = {"gpurt_table": Table, "gpurt_block": Block, "gpurt_logits": Logits}


def test_no_warning(exports_path: Path, raii_path: Path) -> None:
    """In C99 and C++17, against the limited API: every compilation of these tests takes warnings for errors."""
    assert exports_path.is_file()
    assert raii_path.is_file()


def test_no_warning_with_the_whole_api(compiler: Compiler, tmp_path: Path) -> None:
    source = tmp_path / "whole.c"
    source.write_text("#include <gpu_runtime.h>\nint main(void) { return gpurt_import(); }\n")
    compiler.build(tmp_path / "whole.o", source, flags=("-c",))


def test_it_may_be_included_in_many_files(compiler: Compiler, tmp_path: Path) -> None:
    """Whose last error is then one, whichever of them made the call; and in C and C++ together."""
    first = tmp_path / "first.c"
    first.write_text('#include <gpu_runtime.h>\nint fail(void);\nint fail(void) { return gpurt_fail(7, "seen"); }\n')
    second = tmp_path / "second.cpp"
    second.write_text(
        '#include <gpu_runtime/calls.h>\n#include <gpu_runtime/objects.h>\nextern "C" int fail(void);\n'
        'extern "C" const char *said(void) { fail(); return gpurt_last_error(); }\n'
    )
    objects = [compiler.build(one.with_suffix(".o"), one, flags=("-c", "-fPIC", LIMITED)) for one in (first, second)]
    output = tmp_path / "both.so"
    subprocess.run([compiler.cxx, "-shared", *map(str, objects), "-o", str(output)], check=True)
    said = ctypes.CDLL(str(output)).said
    said.restype = ctypes.c_char_p
    assert said() == b"seen"


def test_structs_have_the_layout_that_python_writes(any_compiler: Compiler, embedding: None, tmp_path: Path) -> None:
    expected, body = {}, ""
    for name, kind in STRUCTS.items():
        expected[name, "-"] = ctypes.sizeof(kind)
        body += f"SIZE({name})"
        for field in kind._fields_:
            expected[name, field[0]] = getattr(kind, field[0]).offset
            body += f"FIELD({name}, {field[0]})"
    expected["gpurt_status", "-"] = codes.STATUS_BYTES
    source = tmp_path / "layout.c"
    source.write_text(LAYOUT.format(body=body + "SIZE(gpurt_status)"))
    output = subprocess.check_output([any_compiler.program(tmp_path / "layout", source)], text=True)
    found = {(struct, field): int(offset) for struct, field, offset in map(str.split, output.splitlines())}
    assert found == expected


def test_versions_and_numbers_are_equal() -> None:
    numbers = dict(re.findall(r"#define GPURT_(\w+) (\d+)$", ABI, re.MULTILINE))
    assert numbers == {
        "ABI_MAJOR": str(gpu_runtime.ABI_VERSION[0]),
        "ABI_MINOR": str(gpu_runtime.ABI_VERSION[1]),
        "STATUS_BYTES": str(codes.STATUS_BYTES),
    }
    assert re.findall(r'#define GPURT_CAPSULE "(.*)"', ABI) == [NAME]
    named = {name: int(number) for name, number in re.findall(r"GPURT_(\w+) = (-?\d+)", ABI)}
    assert named == {
        "OK": codes.OK,
        **{f"ERROR_{name}": code for name, (code, _) in {**codes.CODES, **codes.ONE_WAY}.items()},
        **{f"KIND_{kind.upper()}": number for kind, number in KINDS.items()},
        "FLOAT32": DTYPES["f32"],
        "FLOAT16": DTYPES["f16"],
        "BFLOAT16": DTYPES["bf16"],
        "STREAM_DEFAULT": DEFAULT_STREAM,
        "STREAM_LEGACY": LEGACY_STREAM,
        "STREAM_PER_THREAD": PER_THREAD_STREAM,
    }


def test_every_entry_is_declared_called_and_documented() -> None:
    assert re.findall(r"void \(\*(\w+)\)\(", ABI) == [*ENTRIES]
    assert re.findall(r"^GPURT_CALL_\((\w+),", CALLS, re.MULTILINE) == [*ENTRIES]
    assert set(ENTRIES) <= set(SIGNATURES)


def test_every_error_of_ours_has_a_code() -> None:
    """A new exception must get one: hosts would else take it for its base class."""
    ours = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert ours <= {kind for _, kind in codes.CODES.values()}
    numbers = [code for code, _ in [*codes.CODES.values(), *codes.ONE_WAY.values()]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(("code", "kind"), codes.CODES.values(), ids=codes.CODES)
def test_codes_and_exceptions_go_both_ways(code: int, kind: type[BaseException]) -> None:
    error = codes.exception_of(code, "told")
    assert type(error) is kind
    assert codes.described(error) == (code, "told")
    assert type(codes.exception_of(codes.code_of(error), "")) is kind


class Silent(errors.DeviceError):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("a"), (6, "KeyError: 'a'")),
        (ValueError(), (2, "ValueError")),
        (AttributeError("no"), (1, "AttributeError: no")),
        (SystemExit(3), (1, "SystemExit: 3")),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "bad"), (2, "UnicodeDecodeError: ")),
        (Silent(), (22, "Silent: an exception that cannot be shown")),
        (ValueError("\ud800\0"), (2, "\\ud800\\0")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_has_a_code_and_a_text(error: BaseException, expected: tuple[int, str]) -> None:
    code, text = codes.described(error)
    assert code == expected[0]
    assert text.startswith(expected[1])


def test_no_code_no_exception() -> None:
    with pytest.raises(ValueError, match="expected that of an error, got 99"):
        codes.exception_of(99, "x")


def test_long_messages_are_cut_between_characters() -> None:
    status = codes.status_bytes(ValueError("é" * 2000))
    assert len(status) <= codes.STATUS_BYTES
    assert status[4:].rstrip(b"\0").decode() == "é" * 509
    assert status.endswith(b"\0")


def test_the_table_is_made_when_it_is_asked_for() -> None:
    code = "import sys, gpu_runtime; a = 'gpu_runtime.capi.table' in sys.modules; gpu_runtime._C_API; print(a)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    assert gpu_runtime._C_API is gpu_runtime._C_API
    with pytest.raises(AttributeError, match="no attribute '_C_APIS'"):
        gpu_runtime._C_APIS  # type: ignore[attr-defined]  # noqa: B018


def test_get_include() -> None:
    assert (INCLUDE / "gpu_runtime.h").is_file()
