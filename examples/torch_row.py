# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch takes a logits row by DLPack, without a copy, and samples from it.

    python examples/torch_row.py [--device host|cuda] [--seed N]

It needs PyTorch, which metrale itself does not: ``pip install torch``.
docs/embedding.md says which rule each step keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import metrale
from gpu_runtime import DevicePtr
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
else:
    try:
        import torch
    except ImportError:
        raise SystemExit("torch_row.py needs PyTorch: pip install torch") from None

TEXT: Final = "My sister works in a small school near the river."
TOP: Final = 5


def torch_row(model: NllbModel, ptr: DevicePtr) -> torch.Tensor:
    """Return a row as a tensor over the same memory.

    `from_dlpack` tells us PyTorch's current stream, and that stream comes after the step that writes the row. The
    tensor is an export: while it lives, the model cannot be closed.
    """
    with model.logits_view(ptr) as view:
        row: torch.Tensor = torch.from_dlpack(view)[0]
    assert row.data_ptr() == ptr, "a copy was made"
    return row


def largest(row: torch.Tensor) -> int:
    return int(row.argmax())


def sampled(generator: torch.Generator) -> Callable[[torch.Tensor], int]:
    """Return a function that chooses among a row's `TOP` largest logits by their probabilities."""

    def choose(row: torch.Tensor) -> int:
        logits, ids = torch.topk(row.float(), TOP)
        place = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
        return int(ids[place])

    return choose


def translate(
    model: NllbModel, tokenizer: Tokenizer, text: str, choose: Callable[[torch.Tensor], int], *, greedy: bool
) -> str:
    """Return a translation whose ids ``choose`` takes from rows; a greedy one is held to the model's own choice."""
    seq = model.alloc_sequence()
    try:
        ids: list[int] = []
        ptr = model.prefill(tokenizer.encode(text), seq)
        while True:
            # int() waits for PyTorch, so the next step may write the row again.
            token = choose(torch_row(model, ptr))
            if greedy:
                assert token == model.argmax_on_device(ptr), "PyTorch read other numbers than the model wrote"
            if token == tokenizer.eos_id or len(ids) == 60:
                return tokenizer.decode(ids)
            ids.append(token)
            ptr = model.decode(token, seq)
    finally:
        model.free_sequence(seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="host, cuda, cuda:N or auto (default)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    options: dict[str, Any] = {"source": "eng_Latn", "target": "fra_Latn"}
    with metrale.load(metrale.demo_model_path(), device=given.device, **options) as model:
        tokenizer = model.tokenizer
        assert tokenizer is not None
        where = "cuda" if model.gpu.kind() == "cuda" else "cpu"
        if where == "cuda" and not torch.cuda.is_available():
            raise SystemExit("torch_row.py: this PyTorch has no CUDA: install one that has, or give --device host")
        generator = torch.Generator(where).manual_seed(given.seed)
        print(f"on:      {model.gpu.name()}, rows of {model.logits_dtype()}, PyTorch {torch.__version__}")
        print(f"text:    {TEXT}")
        print(f"greedy:  {translate(model, tokenizer, TEXT, largest, greedy=True)}")
        for _ in range(3):
            print(f"sampled: {translate(model, tokenizer, TEXT, sampled(generator), greedy=False)}")


if __name__ == "__main__":
    main()
