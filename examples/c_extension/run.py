# SPDX-License-Identifier: MIT OR Apache-2.0
"""Builds the extension module beside this file and translates with it: the ids are chosen by its loop in C.

python examples/c_extension/run.py [--cc CC] [--device DEVICE] [--temperature T --top-k K --seed N] [TEXT ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import metrale
from metrale.cli.config import cflags

HERE = Path(__file__).parent
FLAGS = ("-std=c99", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
TEXTS = ("Where is the train station?", "I have no time.", "The children are sleeping in the car.")


def build(folder: Path, compiler: str) -> Path:
    """Compile the module into a folder and return its file. It serves every Python from 3.11 on (the limited API)."""
    output = folder / "row_sampling.abi3.so"
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    sources = [str(HERE / name) for name in ("row_sampling.c", "sampling.c")]
    command = [*shlex.split(compiler), *FLAGS, "-DPy_LIMITED_API=0x030B0000", *shlex.split(cflags())]
    subprocess.run([*command, *sources, *undefined, "-o", str(output), "-lm"], check=True)
    return output


def load(path: Path) -> ModuleType:
    """Import a module from its file."""
    spec = importlib.util.spec_from_file_location("row_sampling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generate(module: ModuleType, model: Any, sources: list[tuple[list[int], int, int]], **how: Any) -> list[list[int]]:
    """Prefill sources, each of them ids and two languages, and return the ids that the module's loop chooses."""
    seqs = [model.alloc_sequence() for _ in sources]
    try:
        rows = []
        for seq, (tokens, source, target) in zip(seqs, sources, strict=True):
            seq.src_lang_id, seq.tgt_lang_id = source, target
            rows.append(model.prefill(tokens, seq))
        most = model.capacity().max_new_tokens - 1  # the language counts, and is given
        ids: list[list[int]] = module.generate(model, rows, seqs, most, min(model.capacity().eos_ids), **how)
        return ids
    finally:
        for seq in seqs:
            model.free_sequence(seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", default=TEXTS, metavar="TEXT")
    parser.add_argument("--cc", default=os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    how = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    with (
        tempfile.TemporaryDirectory() as folder,
        metrale.load(metrale.demo_model_path(), args.device, max_batch=max(len(args.texts), 1)) as model,
    ):
        module = load(build(Path(folder), args.cc))
        assert model.tokenizer is not None
        source, target = (model.tokenizer.language_id(name) for name in ("eng_Latn", "fra_Latn"))
        sources = [(list(model.tokenizer.encode(text)), source, target) for text in args.texts]
        for ids in generate(module, model, sources, **how):
            print(model.tokenizer.decode(ids))


if __name__ == "__main__":
    main()
