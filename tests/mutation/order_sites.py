# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every synchronise, event record, event wait and row shift of the model layer and the engine, found in their sources.

A site is found by what it calls, never by a list of places: a new one is a new mutant, which some seeded test must
notice. What is looked for:

- calls of the backend or the model that wait or order: `ORDERING`, also where they are passed on to be called later;
- uses of a `metrale.nllb.turns.Turn`: ``wait`` is one site, ``use`` is two, as it waits and records;
- blocking copies (`BLOCKING`), which become ones that do not wait;
- row shifts: whatever is passed to a parameter that is a row's index (`ROW_PARAMETERS`), assigned to a variable of such
  a name, or returned by a function whose name ends in one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutation.mutant import ROOT

PACKAGES: Final = ("metrale/model", "metrale/nllb", "metrale/engine")
ORDERING: Final = frozenset({"synchronize", "event_synchronize", "record_event", "stream_wait_event", "destroy_stream"})
"""``destroy_stream`` is one because it finishes the stream's work first."""
BLOCKING: Final = {"copy_d2h_on_stream": "copy_d2h_async", "copy_h2d_on_stream": "copy_h2d_async"}
ROW_PARAMETERS: Final = frozenset({"row", "row_base"})
ARENA_ROW: Final = "row"
"""The method of a logits arena that takes a row's index and returns its address."""
HELPERS: Final = "__import__('tests.mutation.order_parts', fromlist=['parts'])"


@dataclass(frozen=True, slots=True)
class Site:
    """One place: ``kind`` of what is there, where it is, and the source of its module without it."""

    kind: str
    module: str
    line: int
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: without its {self.kind}: {self.text}"


def all_sites() -> list[Site]:
    """Return every site of the packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]
    sources = {_module(path): path.read_text(encoding="utf-8") for path in paths}
    parameters = row_parameters(sources.values())
    return [site for module, source in sources.items() for site in sites_of(source, module, parameters)]


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def row_parameters(sources: Iterable[str]) -> dict[str, int]:
    """Return, for every function with a parameter that is a row's index, where that stands in a call."""
    found = {ARENA_ROW: 0}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                names = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
                found.update((node.name, names.index(name)) for name in ROW_PARAMETERS if name in names)
    return found


def sites_of(source: str, module: str, parameters: Mapping[str, int]) -> Iterator[Site]:
    """Yield the sites of one module's source."""
    tree = ast.parse(source)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    in_nllb = module.startswith("metrale.nllb.")
    for node in ast.walk(tree):
        for kind, target, replacement in (
            *_ordering(node, parents, in_nllb=in_nllb),
            *_shifts(node, parameters),
        ):
            text = " ".join((ast.get_source_segment(source, target) or "").split())
            yield Site(kind, module, target.lineno, text, _replaced(source, target, replacement))


Change = tuple[str, ast.expr | ast.stmt, str]


def _ordering(node: ast.AST, parents: Mapping[ast.AST, ast.AST], *, in_nllb: bool) -> Iterator[Change]:
    if not isinstance(node, ast.Attribute):
        return
    call = parents.get(node)
    is_called = isinstance(call, ast.Call) and call.func is node
    if node.attr in ORDERING:
        what = call if is_called else node
        assert isinstance(what, ast.expr)
        yield node.attr, what, "None" if is_called else "(lambda *_: None)"
    elif node.attr in BLOCKING:
        yield "waiting", node, ast.unparse(node.value) + "." + BLOCKING[node.attr]
    elif in_nllb and node.attr in ("wait", "use") and isinstance(call, ast.Call) and is_called:
        turn, stream = ast.unparse(node.value), ast.unparse(call.args[0])
        if node.attr == "wait":
            yield "wait", call, "None"
        else:
            yield "wait", call, f"{HELPERS}.without_wait({turn}, {stream})"
            yield "record", call, f"{HELPERS}.without_record({turn}, {stream})"


def _shifts(node: ast.AST, parameters: Mapping[str, int]) -> Iterator[Change]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in parameters:
        position = parameters[node.func.attr]
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        named = [given[name] for name in ROW_PARAMETERS if name in given]
        for argument in named or node.args[position : position + 1]:
            yield from _unshifted(argument)
    elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in ROW_PARAMETERS for t in node.targets):
        yield from _unshifted(node.value)
    elif isinstance(node, ast.FunctionDef) and node.name.rpartition("_")[2] in ROW_PARAMETERS:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and inner.value is not None:
                yield from _unshifted(inner.value)


def _unshifted(expression: ast.expr) -> Iterator[Change]:
    """Yield the ways to lose a shift: a sum loses either part, anything else becomes 0. A constant is no shift."""
    if isinstance(expression, ast.Constant):
        return
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        yield "row shift", expression, ast.unparse(expression.left)
        yield "row shift", expression, ast.unparse(expression.right)
    else:
        yield "row shift", expression, "0"


def _replaced(source: str, node: ast.expr | ast.stmt, replacement: str) -> str:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    first = starts[node.lineno - 1] + node.col_offset
    last = starts[node.end_lineno - 1] + node.end_col_offset
    return (data[:first] + f"({replacement})".encode() + data[last:]).decode()
