# SPDX-License-Identifier: MIT OR Apache-2.0
"""The cases as transformers answers them. Needs torch and transformers, which nothing else here does."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.cases import EOS, PAD, START, Answer, Case, Draw, ModelSpec
from tests.parity.margins import Margins, watched

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

NAMES = {
    "num_beams": "num_beams",
    "max_new": "max_new_tokens",
    "min_new": "min_new_tokens",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "num_return_sequences": "num_return_sequences",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words_ids",
    "suppress_tokens": "suppress_tokens",
    "forced_eos_id": "forced_eos_token_id",
}
"""Options of ``BeamReq`` and what transformers calls them. The prefix and the ends are passed in other ways."""


def load(folder: Path, dtype: str = "float32") -> Any:
    """Return the model of a folder, without limits of its own."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.M2M100ForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.max_length = None
    return model


def generation_config(case: Case, ends: list[int]) -> Any:
    """Return the case's options as transformers takes them."""
    given = {NAMES[name]: value for name, value in case.options.items() if name in NAMES}
    fixed = {
        "eos_token_id": ends,
        "pad_token_id": PAD,
        "bos_token_id": 0,
        "decoder_start_token_id": START,
        "forced_bos_token_id": case.tgt,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    return transformers.GenerationConfig(**fixed, **given)


def answer(model: Any, case: Case, ends: list[int]) -> Answer:
    """Return what transformers gives for a case, and how narrowly it came to that."""
    options = case.options
    decoder = [START, case.tgt, *options["prefix_tokens"]] if options.get("prefix_tokens") else [START]
    margins = Margins(
        set(ends),
        options.get("length_penalty", 1.0),
        options.get("early_stopping", False),
        options["max_new"],
        case.num_beams,
    )
    inputs = {"input_ids": torch.tensor([[case.src, *case.prompt, EOS]])}
    if len(decoder) > 1:
        inputs["decoder_input_ids"] = torch.tensor([decoder])
    with torch.no_grad(), watched(model, margins):
        out = model.generate(**inputs, generation_config=generation_config(case, ends))
    if case.num_beams == 1:
        margins.greedy([row[0].double().numpy() for row in out.scores])
        return Answer([out.sequences[0].tolist()[1:]], [], [], margins.smallest)
    margins.returned(len(out.sequences))
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    ids = [row[1 : len(decoder) + n] for row, n in zip(out.sequences.tolist(), lengths, strict=True)]
    added = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices, normalize_logits=False)
    return Answer(ids, out.sequences_scores.tolist(), added[0, : lengths[0]].tolist(), margins.smallest)


def answers(spec: ModelSpec, cases: Sequence[Case], dtype: str = "float32") -> list[Answer]:
    """Return the answers to the cases of one model."""
    with tempfile.TemporaryDirectory() as scratch:
        model = load(spec.write(Path(scratch) / "model"), dtype)
    return [answer(model, case, case.eos_ids(spec)) for case in cases]


def all_answers(drawn: Draw, dtype: str = "float32") -> dict[str, Answer]:
    """Return the answers to all cases by their names."""
    found: dict[str, Answer] = {}
    for index, spec in enumerate(drawn.models):
        cases = drawn.of(index)
        found |= {case.name: reply for case, reply in zip(cases, answers(spec, cases, dtype), strict=True)}
    assert all(np.isfinite(reply.scores).all() for reply in found.values())
    return found
