# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernel sources as text: headers put in, entry points read out, parameters held against an op's spec.

Nothing here compiles or needs a device. The text of `inlined` is all that a kernel is made of, so that its digest is
a key for what a compiler makes of it, and no compiler has to look for a header.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from gpu_runtime.op import ELEMENT, Arg, OpSpec

_LEXEMES: Final = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z))"""
    r"""|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])*'""",  # a quote after a digit separates digits
    re.DOTALL,
)
_DIRECTIVE: Final = re.compile(r"\s*#\s*(\w+)\s*(.*)", re.DOTALL)
_CONDITIONS: Final = ("if", "ifdef", "ifndef")
_QUOTED: Final = re.compile(r'"([^"\n]+)"')


def _without_comments(text: str) -> str:
    """Return ``text`` with a space for each comment; its lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        comment = match["comment"]
        return match[0] if comment is None else " " + "\n" * comment.count("\n")

    return _LEXEMES.sub(blank, text)


def inlined(path: Path, include: Sequence[Path] = ()) -> str:
    """Return a kernel source as one text, each ``#include "..."`` replaced by the file that it names.

    A file is put in where it is first included and nowhere else, as if it began with ``#pragma once``. ``#line``
    directives keep the true file and line in what a compiler and a profiler say. Files are named relative to the
    folder of ``path`` (or of ``include``), so that the text is the same wherever the kernels are installed.

    Parameters
    ----------
    path : Path
        The ``.cu`` file, UTF-8.
    include : sequence of Path
        Folders where an included file is looked for, after the folders of the including file and of ``path``.

    Raises
    ------
    FileNotFoundError
        When a file is not there.
    ValueError
        When files include each other in a circle, an include is not of the form ``#include "relative/name"``, or it
        depends on a condition (the one place where the file is put in might be compiled out).
    """
    folders = tuple(Path(os.path.abspath(folder)) for folder in include)
    main = Path(os.path.abspath(path))
    return "\n".join(_Inliner(main.parent, folders).lines(main, ())) + "\n"


@dataclass(slots=True)
class _Inliner:
    """The files that one text is made of."""

    root: Path
    include: tuple[Path, ...]
    _seen: set[str] = field(default_factory=set)

    def lines(self, file: Path, including: tuple[Path, ...]) -> Iterator[str]:
        """Yield the lines of a file, headers put in; ``including`` are the files that led to it."""
        label = self._label(file)
        self._seen.add(os.path.realpath(file))
        text = file.read_text(encoding="utf-8-sig")
        code = _without_comments(text).split("\n")
        guard = _guarded(code)
        depth = 0
        yield f'#line 1 "{label}"'
        for number, (line, clean) in enumerate(zip(text.removesuffix("\n").split("\n"), code, strict=False), 1):
            continued = number > 1 and code[number - 2].endswith("\\")
            directive = None if continued else _DIRECTIVE.match(clean)
            word, rest = directive.groups() if directive else ("", "")
            if word in _CONDITIONS:
                depth += 1
            elif word == "endif":
                depth -= 1
            if word == "pragma" and rest.strip() == "once":
                yield ""  # every file is put in once as it is, and a compiler would warn: it sees one main file
            elif word.startswith("include") or word == "import":
                where = f"{label}:{number}: {clean.strip()}"
                if depth > guard:
                    raise ValueError(f"{where}: expected an include that no #if decides on")
                yield from self._included(file, (*including, file), where, rest if word == "include" else "")
                yield f'#line {number + 1} "{label}"'
            else:
                yield line

    def _included(self, file: Path, including: tuple[Path, ...], where: str, rest: str) -> Iterator[str]:
        quoted = _QUOTED.fullmatch(rest.strip())
        if quoted is None or Path(quoted[1]).is_absolute():
            raise ValueError(f'{where}: expected #include "relative/name"; there are no system headers here')
        found = self._find(file, quoted[1], where)
        real = os.path.realpath(found)
        chain = [os.path.realpath(one) for one in including]
        if real in chain:
            circle = [*including[chain.index(real) :], found]
            raise ValueError(f"{where}: files include each other: {' -> '.join(map(self._label, circle))}")
        if real not in self._seen:
            yield from self.lines(found, including)

    def _find(self, file: Path, name: str, where: str) -> Path:
        folders = tuple(dict.fromkeys((file.parent, self.root, *self.include)))
        for folder in folders:
            found = Path(os.path.normpath(folder / name))
            if found.is_file():
                return found
        raise FileNotFoundError(f"{where}: no such file in {', '.join(map(str, folders))}")

    def _label(self, file: Path) -> str:
        for folder in (self.root, *self.include):
            if file.is_relative_to(folder):
                return file.relative_to(folder).as_posix()
        return Path(os.path.relpath(file, self.root)).as_posix()


def _guarded(code: list[str]) -> int:
    """Return 1 when an include guard, ``#ifndef X`` and ``#define X``, stands around a whole file, else 0."""
    found = [match.groups() for match in map(_DIRECTIVE.match, code) if match]
    (first, name), (second, defined) = [*found, ("", ""), ("", "")][:2]
    if (first, second) != ("ifndef", "define") or name.strip() != defined.strip():
        return 0
    depth = 0
    for place, (word, _) in enumerate(found, 1):
        depth += word in _CONDITIONS
        depth -= word == "endif"
        if (depth == 0 and place < len(found)) or (depth == 1 and word in ("else", "elif", "elifdef", "elifndef")):
            return 0
    return 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an entry point, in the words of a spec.

    Attributes
    ----------
    name : str
    role : {"in", "out", "scalar"}
        A pointer to const is "in", any other pointer is "out".
    dtype : str
        Short name of the element or scalar type (``"bf16"``, ``"i64"``); a C type without one stays as it is written.
    restrict : bool
        Whether a pointer is declared ``__restrict__``.
    """

    name: str
    role: Literal["in", "out", "scalar"]
    dtype: str
    restrict: bool = False

    def __str__(self) -> str:
        spelled = _C_NAMES.get(self.dtype, self.dtype)
        return f"{'const ' if self.role == 'in' else ''}{spelled}{'' if self.role == 'scalar' else '*'} {self.name}"


_C_NAMES: Final = {
    "f32": "float",
    "i32": "int",
    "i64": "long long",
    "u8": "unsigned char",
    "u32": "unsigned int",
    "u64": "unsigned long long",
}
"""How the short names that are no names of C types are spelled in a kernel. ``long`` has no fixed width, so no name."""

_MACRO: Final = re.compile(r"(\w+)\(([^()]*)\)\s*(.*)", re.DOTALL)
_ATTRIBUTE: Final = re.compile(r"__\w+__\s*(?=\()")
_DECLARATION: Final = re.compile(r"([^*]*?)\s*(\*?)\s*(?:\bconst\b)?\s*(\w+)", re.DOTALL)


def entries(text: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of every entry point in a kernel source.

    An entry point is a definition ``extern "C" __global__ void name(...) {`` with any attributes, or the same in the
    replacement of a function-like macro that is invoked once for each element type. Conditional compilation is not
    looked at: what stands between ``#if`` and ``#endif`` counts.

    Raises
    ------
    ValueError
        When an entry point is defined twice, or a parenthesis is never closed.
    """
    found: dict[str, tuple[Parameter, ...]] = {}
    for name, parameters in _definitions(_expanded(text)):
        if name in found:
            raise ValueError(f"{name}: expected one definition, found another")
        found[name] = parameters
    return found


def _expanded(text: str) -> str:
    """Return a source without directives, with the macros that define entry points expanded where they are invoked."""
    macros: dict[str, tuple[list[str], str]] = {}
    done: list[str] = []
    since: list[str] = []  # lines since the last directive: an invocation may go over several
    for line in _without_comments(text).replace("\\\n", " ").split("\n"):
        directive = _DIRECTIVE.match(line)
        if directive is None:
            since.append(line)
            continue
        done.append(_invoked("\n".join(since), macros))
        since.clear()
        macro = _MACRO.fullmatch(directive[2])
        if directive[1] == "define" and macro and "__global__" in macro[3]:
            macros[macro[1]] = [one.strip() for one in macro[2].split(",")], macro[3]
        elif directive[1] == "undef":
            macros.pop(directive[2].strip(), None)
    return "\n".join([*done, _invoked("\n".join(since), macros)])


def _invoked(text: str, macros: dict[str, tuple[list[str], str]]) -> str:
    """Return ``text`` with each invocation of a macro replaced by what the macro stands for."""
    if not macros:
        return text
    names = re.compile(rf"\b({'|'.join(map(re.escape, macros))})\s*(?=\()")
    parts, start = [], 0
    while (match := names.search(text, start)) is not None:
        inside, end = _parenthesised(text, match.end())
        parameters, body = macros[match[1]]
        values = dict(zip(parameters, _split(inside), strict=False))
        words = re.sub(r"\w+", lambda word: values.get(word[0], word[0]), body)  # noqa: B023  (used at once)
        parts += [text[start : match.start()], re.sub(r"\s*##\s*", "", words)]
        start = end
    return "".join([*parts, text[start:]])


def _definitions(code: str) -> Iterator[tuple[str, tuple[Parameter, ...]]]:
    for linkage in re.finditer(r'\bextern\s*"C"', code):
        words, place = [], linkage.end()
        while (token := re.compile(r"\s*(\w+)").match(code, place)) is not None:
            attribute = _ATTRIBUTE.match(code, token.start(1))
            words += [] if attribute else [token[1]]
            place = _parenthesised(code, attribute.end())[1] if attribute else token.end()
        if "__global__" not in words or not re.compile(r"\s*\(").match(code, place):
            continue
        inside, end = _parenthesised(code, code.index("(", place))
        if code[end:].lstrip().startswith("{"):
            yield words[-1], tuple(map(_parameter, _split(inside)))


def _parenthesised(text: str, start: int) -> tuple[str, int]:
    """Return what stands between the parenthesis at ``start`` and the one that closes it, and the place after that."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place], place + 1
    raise ValueError(f"expected a closing parenthesis after {text[start : start + 40]!r}")


def _split(inside: str) -> list[str]:
    """Return the parts between commas, stripped; nothing for an empty text. No parameter of a kernel has commas."""
    return [part.strip() for part in inside.split(",")] if inside.strip() else []


def _parameter(text: str) -> Parameter:
    plain = re.sub(r"\b__restrict(__)?\b", " ", text).strip()
    match = _DECLARATION.fullmatch(plain)
    if match is None:
        return Parameter(plain, "scalar", plain)
    words = match[1].split()
    constant = "const" in words
    role: Literal["in", "out", "scalar"] = "scalar" if not match[2] else "in" if constant else "out"
    return Parameter(match[3], role, _dtype([word for word in words if word != "const"]), plain != text.strip())


def _dtype(words: list[str]) -> str:
    """Return the short name of a C type; its words may come in any order, and ``int`` may be left out."""
    significant = [word for word in words if word != "int"] or words
    for short, spelled in _C_NAMES.items():
        if sorted(significant) == sorted(word for word in spelled.split() if word != "int" or spelled == "int"):
            return short
    written = " ".join(words)
    return f"type {written}" if written in _C_NAMES else written  # a typedef of that name might be anything


def check_spec(spec: OpSpec, text: str) -> None:
    """Hold a kernel source against an op's spec.

    Every element type of the spec has its entry point, in every variant, and there is no other one; parameters have
    the spec's names in the spec's order; inputs are pointers to const and outputs are not; element and scalar types
    are the spec's; and no parameter that may share memory with another is ``__restrict__``.

    Raises
    ------
    ValueError
        With every disagreement, one a line.
    """
    if spec.library:
        raise ValueError(f"{spec.name}: a library op has no kernel source")
    found = entries(text)
    wanted = spec.entries()
    wrong = [f"{name}: no such entry point in the source" for name in wanted if name not in found]
    wrong += [f"{name}: an entry point for none of {', '.join(spec.dtypes)}" for name in found if name not in wanted]
    for name, dtype in wanted.items():
        if name in found:
            wrong += [f"{name}: {one}" for one in _disagreements(spec, dtype, found[name])]
    if wrong:
        raise ValueError("\n".join([f"{spec.name}: the kernel source disagrees with the spec", *wrong]))


def _disagreements(spec: OpSpec, dtype: str, given: tuple[Parameter, ...]) -> Iterator[str]:
    names, got = [arg.name for arg in spec.args], [parameter.name for parameter in given]
    if names != got:
        yield f"expected the parameters ({', '.join(names)}), got ({', '.join(got)})"
    aliased = {name for pair in spec.aliases for name in pair}
    by_name = {parameter.name: parameter for parameter in given}
    for expected in (_expected(arg, dtype) for arg in spec.args if arg.name in by_name):
        parameter = by_name[expected.name]
        if (parameter.role, parameter.dtype) != (expected.role, expected.dtype):
            yield f"expected {str(expected)!r}, got {str(parameter)!r}"
        if parameter.restrict and parameter.name in aliased:
            yield f"{parameter.name} may share memory with another parameter, so it cannot be __restrict__"


def _expected(arg: Arg, dtype: str) -> Parameter:
    role: Literal["in", "out", "scalar"] = "out" if arg.role == "inout" else arg.role
    return Parameter(arg.name, role, dtype if arg.dtype == ELEMENT else arg.dtype)
