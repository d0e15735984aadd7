# SPDX-License-Identifier: MIT OR Apache-2.0
"""Imports point downward only, and each outside thing is imported where it belongs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

BELOW: dict[str, set[str]] = {
    "gpu_runtime": set(),
    "gpu_runtime.host": {"gpu_runtime"},
    "gpu_runtime.cuda": {"gpu_runtime"},
    "metrale.errors": {"gpu_runtime"},
    "metrale.checks": {"metrale.errors"},
    "metrale.checkpoint": {"gpu_runtime", "metrale.errors"},
    "metrale.ops": {"gpu_runtime", "metrale.errors"},
    "metrale.model": {"metrale.checks"},
    "metrale.nllb": {"metrale.model", "metrale.checkpoint", "metrale.ops"},
    "metrale.engine": {"metrale.model", "metrale.ops"},
    "metrale.hub": {"metrale.nllb"},
    "metrale.factory": {"metrale.hub"},
    "metrale.translator": {"metrale.factory", "metrale.engine"},
    "metrale.demo": {"metrale.errors"},
    "metrale": {"metrale.translator", "metrale.demo"},
    "metrale.bench": {"metrale"},
    "metrale.cli": {"metrale.bench"},
    "metrale.__main__": {"metrale.cli"},
}
"""For each layer, what lies directly below it; it may import all that lies below those, too."""

LAZY = {
    (module, backend)
    for module in ("gpu_runtime.opening", "metrale.bench.timing")
    for backend in ("gpu_runtime.host", "gpu_runtime.cuda")
}
"""Other imports that are allowed inside a function: `open_backend` imports the backend that is asked for, and so does
the benchmarks' `open_device`, which gives it a kernel of their own."""

HOMES = {
    "cupy": {"gpu_runtime.cuda"},
    "cupy_backends": {"gpu_runtime.cuda"},
    "cuda": {"gpu_runtime.cuda"},
    "cuda.pathfinder": {"gpu_runtime.cuda", "metrale.cli"},  # finds libraries, touches no device
    "nvmath": {"gpu_runtime.cuda"},
    "metrale_kernels": {"gpu_runtime.cuda", "metrale.ops"},  # CUDA sources: files, not code to call
    "sentencepiece": {"metrale.nllb"},
    "tokenizers": {"metrale.nllb"},
    "safetensors": {"metrale.checkpoint"},
    "huggingface_hub": {"metrale.hub"},
    "tqdm": {"metrale.cli"},
    "matplotlib": {"metrale.bench"},
}
"""Third-party packages, or modules of them, that only some layers may import."""

EVERYWHERE = {"numpy", "ml_dtypes"}


@dataclass(frozen=True)
class Import:
    """One import: what it names, whether it runs when the module is imported, or only for a type checker."""

    target: str
    line: int
    at_import: bool
    typing_only: bool = False


def sources() -> dict[str, Path]:
    """Return every module of the two packages by its name. The demo model's recipe is data, not code of the package."""
    found = {}
    for package in ("gpu_runtime", "metrale"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "demo_model" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(source: str, module: str, known: set[str], *, package: bool = False) -> Iterator[Import]:
    """Yield the imports in a module's source, each resolved to a module where one of that name is known."""

    def resolve(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        base = parts[: len(parts) - node.level + (1 if package else 0)]
        return ".".join([*base, *([node.module] if node.module else [])])

    def visit(node: ast.AST, at_import: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield Import(whole if whole in known else base, node.lineno, at_import, typing_only)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield Import(str(argument.value), node.lineno, at_import, typing_only)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                yield from visit(statement, False, True)
            for statement in node.orelse:
                yield from visit(statement, at_import, typing_only)
            return
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside, typing_only)

    yield from visit(ast.parse(source), True, False)


SOURCES = sources()
IMPORTS = {
    module: list(imports_of(path.read_text("utf-8"), module, set(SOURCES), package=path.name == "__init__.py"))
    for module, path in SOURCES.items()
}


def layer_of(module: str) -> str:
    """Return the longest entry of the table that holds the module. The package's own root stands for itself alone."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if name in BELOW and (name != "metrale" or name == module):
            return name
    raise AssertionError(f"{module} is in no layer: add it to the table")


def below(layer: str) -> set[str]:
    """Return all layers under one."""
    reached: set[str] = set()
    todo = [layer]
    while todo:
        for name in BELOW[todo.pop()] - reached:
            reached.add(name)
            todo.append(name)
    return reached


def is_ours(target: str) -> bool:
    return target.split(".")[0] in ("gpu_runtime", "metrale")


def violations(imports: dict[str, list[Import]]) -> list[str]:
    """Return every import that does not point downward."""
    wrong = []
    for module, found in imports.items():
        layer = layer_of(module)
        for one in found:
            if not is_ours(one.target) or layer_of(one.target) in {layer, *below(layer)}:
                continue
            if one.at_import or one.typing_only or (module, layer_of(one.target)) not in LAZY:
                wrong.append(f"{module}:{one.line} imports {one.target}")
    return wrong


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one cycle of a graph, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for after in sorted(graph.get(node, ())):
                found = walk(after, [*path, node])
                if found:
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def foreign(imports: dict[str, list[Import]]) -> list[str]:
    """Return every import of a third-party package in a layer that may not have it."""
    wrong = []
    for module, found in imports.items():
        for one in found:
            root = one.target.split(".")[0]
            if is_ours(root) or root in EVERYWHERE or root in sys.stdlib_module_names:
                continue
            homes = HOMES.get(".".join(one.target.split(".")[:2])) or HOMES.get(root, set())
            if layer_of(module) not in homes:
                wrong.append(f"{module}:{one.line} imports {one.target}")
    return wrong


def environment_reads(source: str) -> list[int]:
    """Return the lines that name the environment in any of its forms."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        imported = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
        if attribute or imported:
            lines.append(getattr(node, "lineno", 0))
    return lines


def test_the_packages_are_found() -> None:
    assert {"gpu_runtime", "gpu_runtime.host.memory", "metrale.ops.linear", "metrale.nllb.model"} <= set(SOURCES)
    assert sum(map(len, IMPORTS.values())) > 200


def test_imports_point_downward() -> None:
    assert violations(IMPORTS) == []


def test_the_table_itself_has_no_cycle() -> None:
    assert cycle(BELOW) == []
    assert {name for names in BELOW.values() for name in names} <= set(BELOW)
    assert not {"gpu_runtime.host", "gpu_runtime.cuda"} & set().union(*map(below, BELOW))
    assert "metrale.nllb" not in below("metrale.engine"), "the engine knows no family of models"
    assert below("gpu_runtime") == set()


def test_modules_have_no_cycles() -> None:
    graph = {module: {one.target for one in found if one.at_import} for module, found in IMPORTS.items()}
    assert cycle(graph) == []


def test_third_party_packages_stay_in_their_places() -> None:
    assert foreign(IMPORTS) == []


def test_one_module_reads_the_environment() -> None:
    readers = {module for module, path in SOURCES.items() if environment_reads(path.read_text("utf-8"))}
    assert readers == {"gpu_runtime.config"}


SAMPLE = """
from __future__ import annotations
import os.path, numpy as np
from typing import TYPE_CHECKING
from metrale import ops
from . import config
from ..engine import scheduler
if TYPE_CHECKING:
    from metrale.nllb import model
else:
    import torch
class Lazy:
    import cupy
    def call(self):
        from gpu_runtime.host import HostBackend
        return __import__("transformers")
"""


def test_the_parser_sees_every_form_of_import() -> None:
    known = {"metrale.ops", "metrale.nllb.config", "metrale.engine.scheduler", "metrale.nllb.model"}
    found = {one.target: (one.at_import, one.typing_only) for one in imports_of(SAMPLE, "metrale.nllb.x", known)}
    assert found == {
        "__future__": (True, False),
        "os.path": (True, False),
        "numpy": (True, False),
        "typing": (True, False),
        "metrale.ops": (True, False),
        "metrale.nllb.config": (True, False),
        "metrale.engine.scheduler": (True, False),
        "metrale.nllb.model": (False, True),
        "torch": (True, False),
        "cupy": (True, False),
        "gpu_runtime.host": (False, False),
        "transformers": (False, False),
    }
    (relative,) = imports_of("from . import config", "metrale.nllb", known, package=True)
    assert relative.target == "metrale.nllb.config"


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("metrale.engine.scheduler", "from metrale.nllb import model"),
        ("metrale.engine.scheduler", "def f():\n    from metrale.nllb import model"),
        ("metrale.ops.linear", "import metrale"),
        ("metrale.model.types", "import metrale.ops.linear"),
        ("metrale.checkpoint.folder", "from metrale.model import Model"),
        ("gpu_runtime.arena", "import metrale.errors"),
        ("gpu_runtime.arena", "def f():\n    import gpu_runtime.host"),
        ("gpu_runtime.backend", "import gpu_runtime.host"),
        ("gpu_runtime.host.backend", "import gpu_runtime.cuda"),
        ("gpu_runtime.cuda.backend", "def f():\n    import gpu_runtime.host.memory"),
    ],
)
def test_an_upward_import_is_found(module: str, statement: str) -> None:
    assert violations({module: list(imports_of(statement, module, set(SOURCES)))})


def test_a_module_outside_the_table_is_found() -> None:
    with pytest.raises(AssertionError, match="add it to the table"):
        violations({"metrale.novelty": []})


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("metrale.nllb.model", "import torch"),
        ("gpu_runtime.cuda.backend", "def f():\n    import transformers.models"),
        ("gpu_runtime.host.backend", "import cupy"),
        ("metrale.cli.main", "from cupy.cuda import runtime"),
        ("metrale.cli.main", "import cuda.bindings.driver"),
        ("metrale.ops.linear", "import sentencepiece"),
    ],
)
def test_a_foreign_import_is_found(module: str, statement: str) -> None:
    assert foreign({module: list(imports_of(statement, module, set()))})


def test_cycles_and_readers_are_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    for source in ("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"):
        assert environment_reads(source)
    assert not environment_reads("import os\nos.path.join('a')\nconfig.environ")
