# SPDX-License-Identifier: MIT OR Apache-2.0
"""One text for a kernel: each header once, in order, with the true file and line, and no path of this machine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from gpu_runtime.kernel_source import inlined


def write(folder: Path, **files: str) -> Path:
    """Write files, ``__`` in a name being a slash and ``_`` before the extension a dot; return the path of ``k.cu``."""
    for name, text in files.items():
        path = folder / re.sub(r"_(cuh?)$", r".\1", name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "k.cu"


def lines_of(text: str) -> dict[str, tuple[str, int]]:
    """Return, for each line of a text, the file and line that ``#line`` directives give it."""
    found, file, number = {}, "", 0
    for line in text.splitlines():
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, file = int(directive[1]), directive[2]
        else:
            found[line] = (file, number)
            number += 1
    return found


def test_headers_are_put_in_where_they_are_first_included(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        k_cu='// main\n#include "common/a.cuh"\nint m1;\n#include "common/b.cuh"\nint m2;\n',
        common__a_cuh='int a1;\n#include "b.cuh"\nint a2;\n',
        common__b_cuh="int b1;",
    )
    text = inlined(path)
    assert [line for line in text.splitlines() if line.startswith("int")] == [
        "int a1;",
        "int b1;",
        "int a2;",
        "int m1;",
        "int m2;",
    ]
    places = lines_of(text)
    assert places["// main"] == ("k.cu", 1)
    assert places["int a1;"] == ("common/a.cuh", 1)
    assert places["int b1;"] == ("common/b.cuh", 1)
    assert places["int a2;"] == ("common/a.cuh", 3)
    assert places["int m1;"] == ("k.cu", 3)
    assert places["int m2;"] == ("k.cu", 5)


def test_the_text_is_the_same_wherever_the_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "one", k_cu='#include "a.cuh"\n#include "s/x.cuh"\n', a_cuh="int a;\n")
    write(tmp_path / "shared", s__x_cuh="int x;\n")
    shutil.copytree(tmp_path, tmp_path / "again")
    texts = {inlined(path, [tmp_path / "shared"]), inlined(tmp_path / "again/one/k.cu", (tmp_path / "again/shared",))}
    monkeypatch.chdir(tmp_path / "one")
    texts.add(inlined(Path("k.cu"), [Path("../shared")]))
    (text,) = texts
    assert str(tmp_path) not in text
    assert lines_of(text)["int x;"] == ("s/x.cuh", 1)


def test_where_files_are_looked_for(tmp_path: Path) -> None:
    path = write(
        tmp_path / "main",
        k_cu='#include "sub/h.cuh"\n#include "x.cuh"\n#include "y.cuh"\n',
        sub__h_cuh='#include "x.cuh"\n#include "z.cuh"\n',
        sub__x_cuh="int from_sub;\n",
        x_cuh="int from_main;\n",
        z_cuh="int from_main_too;\n",
    )
    write(tmp_path / "first", x_cuh="int never;\n", z_cuh="int never;\n", y_cuh="int from_first;\n")
    write(tmp_path / "second", y_cuh="int never;\n")
    text = inlined(path, [tmp_path / "first", tmp_path / "second"])
    assert re.findall(r"int (\w+);", text) == ["from_sub", "from_main_too", "from_main", "from_first"]


@pytest.mark.parametrize("name", ["common/../common/a.cuh", "./common/a.cuh", "common/link.cuh"])
def test_a_file_by_another_name_is_the_same_file(tmp_path: Path, name: str) -> None:
    includes = ['#include "common/a.cuh"\n', f'#include "{name}"\n']
    path = write(tmp_path, k_cu="".join(includes), common__a_cuh="int a;\n")
    (tmp_path / "common/link.cuh").symlink_to("a.cuh")
    assert inlined(path).count("int a;") == 1
    assert inlined(write(tmp_path, k_cu="".join(includes[::-1]))).count("int a;") == 1


def test_a_linked_source_is_looked_at_where_the_link_is(tmp_path: Path) -> None:
    write(tmp_path / "store", k_cu='#include "a.cuh"\n')
    write(tmp_path / "tree", a_cuh="int a;\n")
    (tmp_path / "tree/k.cu").symlink_to(tmp_path / "store/k.cu")
    assert "int a;" in inlined(tmp_path / "tree/k.cu")


@pytest.mark.parametrize(
    "text",
    [
        '// #include "no.cuh"\n',
        '/* text\n#include "no.cuh"\n*/ int a;\n',
        '// continued \\\n#include "no.cuh"\n',
        '#define TEXT "/*"\n// */ #include "no.cuh"\n',
        '#define M(x) \\\n#include "no.cuh"\n',
        "int n = 1'000; /* it's\n#include <no>\n*/\n",
    ],
)
def test_what_is_no_include_stays(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, k_cu=text)
    assert inlined(path) == f'#line 1 "k.cu"\n{text}'


@pytest.mark.parametrize("text", ['  #  include   "a.cuh" // why\n', '/* x */ #include "a.cuh" /* y */\n'])
def test_an_include_may_have_spaces_and_comments(tmp_path: Path, text: str) -> None:
    assert "int a;" in inlined(write(tmp_path, k_cu=text, a_cuh="int a;\n"))


def test_headers_may_say_that_they_are_included_once(tmp_path: Path) -> None:
    guarded = '#ifndef A_CUH\n#define A_CUH\n#include "b.cuh"\nint a;\n#endif  // A_CUH\n'
    path = write(tmp_path, k_cu='#include "a.cuh"\n', a_cuh=guarded, b_cuh="#pragma once\nint b;\n#pragma unroll\n")
    text = inlined(path)
    assert "#pragma once" not in text, "a compiler warns of it: the text is one main file"
    assert "#pragma unroll" in text
    assert lines_of(text)["int b;"] == ("b.cuh", 2)
    assert lines_of(text)["int a;"] == ("a.cuh", 4)


def test_line_endings_and_byte_order_marks_do_not_change_the_text(tmp_path: Path) -> None:
    path = write(tmp_path, k_cu='#include "a.cuh"\nint k;\n', a_cuh="int a;\n")
    plain = inlined(path)
    path.write_bytes(b'\xef\xbb\xbf#include "a.cuh"\r\nint k;\r\n')
    assert inlined(path) == plain


def test_a_changed_header_changes_the_text(tmp_path: Path) -> None:
    path = write(tmp_path, k_cu='#include "a.cuh"\n', a_cuh='#include "b.cuh"\n', b_cuh="int b = 1;\n")
    before = inlined(path)
    write(tmp_path, b_cuh="int b = 2;\n")
    assert inlined(path) != before


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    path = write(tmp_path, k_cu='#include "a.cuh"\n', a_cuh='\n#include "no.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r'^a\.cuh:2: #include "no\.cuh": no such file in .*, .*more$'):
        inlined(path, [tmp_path / "more"])
    with pytest.raises(FileNotFoundError):
        inlined(tmp_path / "none.cu")
    (tmp_path / "folder.cuh").mkdir()
    with pytest.raises(FileNotFoundError, match="no such file"):
        inlined(write(tmp_path, k_cu='#include "folder.cuh"\n'))


def test_a_circle_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path, k_cu='#include "a.cuh"\n', a_cuh='#include "c/b.cuh"\n', c__b_cuh='int b;\n#include "../a.cuh"\n'
    )
    with pytest.raises(ValueError, match=r"^c/b\.cuh:2: .* files include each other: a\.cuh -> c/b\.cuh -> a\.cuh$"):
        inlined(path)
    with pytest.raises(ValueError, match=r"k\.cu -> k\.cu$"):
        inlined(write(tmp_path, k_cu='#include "k.cu"\n'))


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda_fp16.h>",
        "#include HEADER",
        '#include "/abs.cuh"',
        '#include_next "a.cuh"',
        '#import "a.cuh"',
        "#include",
        '#include "a.cuh" "a.cuh"',
        '#include \\\n"a.cuh"',
    ],
)
def test_no_other_form_of_include(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, k_cu=f"int k;\n{line}\n", a_cuh="int a;\n")
    with pytest.raises(ValueError, match=r'^k\.cu:2: .*expected #include "relative/name"'):
        inlined(path)


@pytest.mark.parametrize(
    "text",
    [
        '#if X\n#include "a.cuh"\n#endif\n',
        '#if X\nint k;\n#else\n#include "a.cuh"\n#endif\n',
        '#ifndef G\n#define G\n#if X\n#include "a.cuh"\n#endif\n#endif\n',
        '#ifndef G\n#define G\n#endif\n#ifdef X\n#include "a.cuh"\n#endif\n',
        '#ifndef G\n#define G\nint k;\n#else\n#include "a.cuh"\n#endif\n',
        '#ifndef G\n#define H\n#include "a.cuh"\n#endif\n',
    ],
)
def test_an_include_that_a_condition_decides_on_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="expected an include that no #if decides on"):
        inlined(write(tmp_path, k_cu=text, a_cuh="int a;\n"))
