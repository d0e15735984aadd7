# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record the logits of tiny checkpoints with LoRA adapters, as PEFT computes them without merging the two.

Needs torch, transformers and peft, which nothing else here does: the tests make the same checkpoints and adapters from
their seeds. From the root of the repository::

    python -m tests.record.record_peft

writes ``tests/data/peft_logits.safetensors`` (half a minute on a CPU), and refuses to when PEFT leaves out a matrix.
"""

from __future__ import annotations

import importlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.reference.adapters import (
    BASE_SEED,
    BASES,
    CASES,
    RECIPES,
    RECORDED,
    Recipe,
    recorded_key,
    write_adapter,
)
from tests.reference.tiny import digest, tiny_config, write_tiny

peft: Any = importlib.import_module("peft")
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

LEAST_CHANGE = 0.05
"""Of the largest logit: an adapter that changes less would not be noticed by a test."""


def logits(model: Any, src: list[int], dec: list[int]) -> NDArray[np.float32]:
    with torch.no_grad():
        out = model(input_ids=torch.tensor([src]), decoder_input_ids=torch.tensor([dec]), use_cache=False)
    return np.asarray(out.logits[0].numpy(), dtype=np.float32)


def load(folder: Path) -> Any:
    return transformers.M2M100ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def adapted(base: Path, folder: Path, recipe: Recipe) -> Any:
    """Return the model with an adapter, after a check that PEFT applies all of it and nothing else."""
    model = peft.PeftModel.from_pretrained(load(base), folder).eval()
    theirs = {name: tuple(value.shape) for name, value in peft.get_peft_model_state_dict(model).items()}
    ours = {name: value.shape for name, value in load_file(folder / "adapter_model.safetensors").items()}
    if theirs != ours:
        raise SystemExit(f"{folder}: PEFT has other matrices: {set(theirs.items()) ^ set(ours.items())}")
    return model


def record(scratch: Path) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    """Return the logits of every base, recipe and case, and the digests of the matrices that they were made with."""
    found, digests = {}, {}
    for base, overrides in BASES.items():
        checkpoint = write_tiny(scratch / base, BASE_SEED, **overrides)
        plain = [logits(load(checkpoint), *case) for case in CASES]
        for name, recipe in RECIPES.items():
            folder = write_adapter(scratch / base / name, recipe, **overrides)
            digests[f"{base}/{name}"] = digest(recipe.tensors(tiny_config(**overrides)))
            model = adapted(checkpoint, folder, recipe)
            for index, case in enumerate(CASES):
                rows = logits(model, *case)
                change = float(np.abs(rows - plain[index]).max() / np.abs(rows).max())
                print(f"{base}, {name}, case {index}: changed by {change:.3f} of the largest logit")
                if not change > LEAST_CHANGE:
                    raise SystemExit("too little")
                found[recorded_key(base, name, index)] = rows
    return found, digests


def main() -> None:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as scratch:
        found, digests = record(Path(scratch))
    meta = {
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "digests": json.dumps(digests),
    }
    save_file(found, RECORDED, metadata=meta)
    print(f"{RECORDED.name}: {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
