# SPDX-License-Identifier: MIT OR Apache-2.0
"""The models as transformers computes them, from the same folders. Needs torch and transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.family.specs import Family

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

Rows = npt.NDArray[np.float32]


def load(one: Family, folder: Path, dtype: str = "float32") -> Any:
    """Return the model of a folder that `Family.write` wrote.

    transformers refuses other rows than ``vocab_size`` says: there, and nowhere else, the folder is set right first.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    file = folder / "config.json"
    file.write_text(json.dumps(one.stated | {"vocab_size": one.config["vocab_size"]}), encoding="utf-8")
    auto = transformers.AutoModelForSeq2SeqLM
    model, report = auto.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)
    file.write_text(json.dumps(one.stated), encoding="utf-8")
    missing = set(report["missing_keys"]) - {"model.shared.weight"}  # which no forward pass uses
    assert not missing, missing
    assert not report["mismatched_keys"]
    return model.eval()


def logits(one: Family, model: Any) -> Rows:
    """Return what `tests.family.ours.logits` does: all sequences in a padded batch, each step with the cache."""
    sources = [one.source(feed) for feed in one.feeds]
    width = max(map(len, sources))
    pad = one.config["pad_token_id"]
    ids = torch.tensor([source + [pad] * (width - len(source)) for source in sources])
    mask = torch.tensor([[1] * len(source) + [0] * (width - len(source)) for source in sources])
    targets = torch.tensor([one.target(feed) for feed in one.feeds])
    rows, cache = [], None
    with torch.no_grad():
        encoded = model.model.encoder(input_ids=ids, attention_mask=mask)
        for step in range(targets.shape[1]):
            out = model(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=targets[:, step : step + 1],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            rows.append(out.logits[:, -1].float().numpy())
    return np.stack(rows[1:], axis=1)


def start(model: Any, one: Family) -> int | None:
    """Return the id with which transformers starts a target; None where it refuses to, for want of one."""
    generation = model.generation_config
    if generation.decoder_start_token_id is None and generation.bos_token_id is None:
        return None
    ids = torch.tensor([one.source(one.feeds[0])])
    return int(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, num_beams=1)[0, 0])


def contents(config: Mapping[str, Any]) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return how many parameters transformers' model of a configuration has, and the shapes of what it would store."""
    with torch.device("meta"):
        model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config.from_dict(dict(config)))
    tied = set(model.all_tied_weights_keys)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items() if name not in tied}
    return int(model.num_parameters()), shapes
