# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hugging Face transformers: ``generate`` of ``M2M100ForConditionalGeneration``, eager, with torch's own attention."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.process import arguments, report, reporting_errors, time_cases
from metrale.bench.protocol import (
    CHECK_SOURCES,
    FIRST_WORD,
    STANDARD,
    Lengths,
    compare_logits,
    forced_ids,
    sources,
)


class Peer:
    """A model, and the calls that are timed and compared."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        import torch  # type: ignore[import-not-found,unused-ignore]
        from transformers import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            M2M100ForConditionalGeneration,
        )

        self.torch: Any = torch
        self.device = device
        model: Any = M2M100ForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model = model.to(device).eval()
        self.vocab = int(model.config.vocab_size)
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def generate(self, batch: list[list[int]], new_tokens: int, beams: int = 1) -> None:
        """Translate, to exactly ``new_tokens`` tokens each."""
        torch = self.torch
        ids = torch.tensor(batch, device=self.device)
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                num_beams=beams,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                use_cache=True,
            )
        self.wait()
        if tuple(found.shape) != (len(batch), new_tokens + 1):  # the decoder start is there as well
            raise RuntimeError(f"expected {len(batch)} x {new_tokens} tokens, got {tuple(found.shape)}")

    def sources(self, count: int, lengths: Lengths = STANDARD) -> list[list[int]]:
        """Return sources as ids."""
        return sources(count, lengths.source, self.vocab)

    def logits(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of the check, after the language and each forced token."""
        torch = self.torch
        ids = torch.tensor(self.sources(CHECK_SOURCES), device=self.device)
        start = int(self.model.config.decoder_start_token_id)
        fed = torch.tensor([[start, FIRST_WORD, *forced] for forced in forced_ids(self.vocab)], device=self.device)
        with torch.inference_mode():
            rows = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=fed).logits
        result: np.ndarray[Any, np.dtype[np.float32]] = rows[:, 1:].float().cpu().numpy()
        return result


def compare(peer: Peer, folder: Path, dtype: str) -> dict[str, Any]:
    """Return how far metrale's logits, kept in the folder, are from this system's."""
    return compare_logits(np.load(folder / "logits.npz")["logits"], peer.logits(), dtype)


def serve(name: str, folder: Path, options: Any) -> None:
    """Load, compare and time one checkpoint."""
    start = time.perf_counter()
    peer = Peer(folder, options.device, options.dtype)
    report(shape=name, load_s=round(time.perf_counter() - start, 2))
    if options.check:
        with reporting_errors(shape=name):
            report(shape=name, check=compare(peer, folder, options.dtype))
    peer.generate(peer.sources(1), 8)
    time_cases(name, peer, options)


def main() -> None:
    options = arguments(__doc__)
    with reporting_errors():
        import torch
        import transformers

        report(versions={"transformers": transformers.__version__, "torch": torch.__version__})
        for name, folder in options.models:
            with reporting_errors(shape=name):
                serve(name, folder, options)
            if options.device == "cuda":
                torch.cuda.empty_cache()  # the last model's memory, which the next one may need


if __name__ == "__main__":
    main()
