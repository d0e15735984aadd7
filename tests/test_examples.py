# SPDX-License-Identifier: MIT OR Apache-2.0
"""The examples in Python run by the command that they name, on the host and on a GPU, and check what they do."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

import metrale
from gpu_runtime.host import HostBackend
from tests.backends import ON_CUDA

ROOT: Final = Path(__file__).parents[1]
PLAIN, MASKED = "Je n'ai pas de temps.", "Je n'ai aucun temps."


@pytest.fixture(params=["host", ON_CUDA])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(example: str, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run an example as its first lines say, from the root of the project."""
    path = f"examples/{example}"
    start = [path] if not before else ["-c", f"{before}; import runpy; runpy.run_path({path!r}, run_name='__main__')"]
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def imported(example: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(example, ROOT / "examples" / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("example", ["mask_logits", "torch_row"])
def test_the_command_is_the_documented_one(example: str) -> None:
    text = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
    command = f"python examples/{example}.py"
    assert f"    {command} [--device host|cuda]" in text
    assert command in (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")


def test_a_mask_between_decode_and_choice(kind: str) -> None:
    done = run("mask_logits.py", "--device", kind)
    assert done.returncode == 0, done.stderr
    told = dict(re.split(r":\s+", line, maxsplit=1) for line in done.stdout.splitlines())
    assert (told["translation"], told["without 'pas'"]) == (PLAIN, MASKED)
    assert told["on"].startswith("host") == (kind == "host")


@pytest.mark.parametrize("order", ["in_order", "deferred", "adversarial"])
def test_the_mask_keeps_its_order(order: Any) -> None:
    """On a host backend that runs work late and checks every read; the example itself waits for no stream."""
    example = imported("mask_logits")
    options: dict[str, Any] = {"source": "eng_Latn", "target": "fra_Latn", "max_batch": 2, "max_source_len": 32}
    with (
        HostBackend(order=order, seed=3, check=True) as gpu,
        metrale.load(metrale.demo_model_path(), gpu, "float32", **options) as model,
    ):
        tokenizer = model.tokenizer
        assert tokenizer is not None
        mask = example.HostMask(model, tokenizer.encode(example.FORBIDDEN))
        assert example.translate(model, tokenizer, example.TEXT, mask) == MASKED
        assert example.translate(model, tokenizer, example.TEXT) == PLAIN


def test_torch_takes_a_row(kind: str) -> None:
    torch = pytest.importorskip("torch")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    done = run("torch_row.py", "--device", kind)
    assert done.returncode == 0, done.stderr
    first, text, greedy, *sampled = done.stdout.splitlines()
    assert torch.__version__ in first
    assert text.endswith("My sister works in a small school near the river.")
    assert greedy.startswith("greedy:  Ma sœur travaille")
    assert len(sampled) == 3
    assert run("torch_row.py", "--device", kind, "--seed", "2").stdout.splitlines()[3:] != sampled


def test_without_torch_it_says_what_to_install() -> None:
    done = run("torch_row.py", before="import sys; sys.modules['torch'] = None")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "torch_row.py needs PyTorch: pip install torch\n")
