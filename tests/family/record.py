# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record the logits of the drawn models as transformers computes them, and what the published models consist of.

Needs torch and transformers. From the root of the repository::

    python -m tests.family.record

writes ``tests/data/family_logits.safetensors`` and ``tests/data/family_official.json`` (half a minute on a CPU).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from safetensors.numpy import save_file

from tests.family import hf
from tests.family.draw import draw
from tests.family.official import OFFICIAL, grouped
from tests.family.recorded import FILE, OFFICIAL_FILE, digest, worst

WELL_POSED = 3e-6
"""Most that transformers' own rounding errors may make of a model: a narrow one now and then divides by next to nothing
in a LayerNorm, and no tolerance would tell right from wrong there."""

META = {
    "what": "logits by transformers in float32 on a CPU: tests.family.recorded.digest of each model of the draw",
    "command": "python -m tests.family.record",
    "transformers": hf.transformers.__version__,
    "torch": hf.torch.__version__,
}


def main() -> None:
    """Write the files."""
    hf.torch.set_num_threads(1)
    found, off_most = {}, 0.0
    for one in draw():
        with tempfile.TemporaryDirectory() as scratch:
            model = hf.load(one, one.write(Path(scratch)))
            logits = hf.logits(one, model)
            off = worst(logits, hf.logits(one, model.double()))
        off_most = max(off_most, off)
        if off > WELL_POSED:
            raise SystemExit(
                f"{one.name}: float32 is off by {off:.1e} from float64: another seed of its weights is due"
            )
        found[one.name] = digest(logits)
    print(f"float32 is off by {off_most:.1e} from float64 at most")
    save_file(found, FILE, metadata=META)
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")
    official = {name: hf.contents(config) for name, config in OFFICIAL.items()}
    for name, (parameters, shapes) in official.items():
        print(name, parameters, len(shapes))
    models = {name: {"parameters": count, "shapes": grouped(shapes)} for name, (count, shapes) in official.items()}
    OFFICIAL_FILE.write_text(json.dumps({"meta": META, "models": models}, indent=1) + "\n", encoding="utf-8")
    print(f"{OFFICIAL_FILE.name}: {OFFICIAL_FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
