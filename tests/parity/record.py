# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record a part of the draw, and the edge cases, as transformers answers them.

Needs torch and transformers. From the root of the repository::

    python -m tests.parity.record

writes ``tests/data/beam_parity.json`` (about two minutes on a CPU). It refuses to when the cases do not tell right
from wrong, and when transformers in float64 gives other ids.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.parity import hf
from tests.parity.cases import Answer, Case, Draw, as_json
from tests.parity.draw import RECORDED_MODELS, draw, part
from tests.parity.edges import edges
from tests.parity.recorded import FILE
from tests.parity.shares import is_narrow, shares

COMMAND = "python -m tests.parity.record"
NOTHING_DECIDED = 999.0  # JSON has no infinity
REMOVABLE = (
    "min_new",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "bad_words_ids",
    "suppress_tokens",
    "forced_eos_id",
    "prefix_tokens",
    "eos_ids",
)

META = {
    "what": "beam searches by transformers on tiny random models, in float32 on a CPU",
    "command": COMMAND,
    "models": "tests.parity.cases.ModelSpec: made from a seed, no weights are stored",
    "options": "arguments of metrale.BeamReq",
    "ids": "every returned hypothesis from the language id on, best first",
    "scores": "sequences_scores",
    "transitions": "compute_transition_scores(normalize_logits=False) of the best hypothesis; none for one beam",
    "margin": "tests.parity.margins: the narrowest decision of the search, less what float32 may make of it; 999: none",
    "float64": "transformers on the same weights in float64 gives the same ids",
    "shares": "tests.parity.shares of the recorded part of the draw; drawn: of the whole draw",
    "options_that_matter": "[cases whose hypotheses change when the option is left out, cases that have it]",
}


def options_that_matter(kept: Draw, found: Mapping[str, Answer]) -> dict[str, list[int]]:
    """Return for each option in how many cases it changes the hypotheses, and in how many it is set."""
    without = [
        case.replace(f"{case.name}; {option}", **{option: None})
        for case in kept.cases
        for option in REMOVABLE
        if option in case.options
    ]
    others = hf.all_answers(Draw(kept.models, without))
    counts = {option: [0, 0] for option in REMOVABLE}
    for name, other in others.items():
        case, option = name.split("; ")
        counts[option][0] += other.ids != found[case].ids
        counts[option][1] += 1
    return counts


def rounded(answer: Answer) -> Answer:
    """Return the answer with as many digits as float32 has."""

    def short(values: list[float]) -> list[float]:
        return [float(f"{value:.8g}") for value in values]

    return replace(
        answer,
        scores=short(answer.scores),
        transitions=short(answer.transitions),
        margin=float(f"{min(answer.margin, NOTHING_DECIDED):.3g}"),
    )


def agree_in_float64(everything: Draw, found: Mapping[str, Answer]) -> None:
    """Stop when float64 decides otherwise although the margin says that it cannot."""
    exact = hf.all_answers(everything, "float64")
    other = [name for name, answer in found.items() if exact[name].ids != answer.ids and not is_narrow(answer)]
    if other:
        raise SystemExit(f"float64 gives other ids for {other}")


def lines(items: list[dict[str, Any]]) -> str:
    """Return a JSON list with one item a line."""
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "\n]"


def recorded_cases(cases: list[Case], found: Mapping[str, Answer]) -> str:
    """Return the cases with their answers as JSON."""
    return lines([as_json(case) | as_json(rounded(found[case.name])) for case in cases])


def main() -> None:
    """Write the file."""
    hf.torch.set_num_threads(1)
    drawn = draw()
    kept, at_edges = part(drawn), edges(RECORDED_MODELS)
    everything = Draw(kept.models + at_edges.models, kept.cases + at_edges.cases)
    found = hf.all_answers(drawn)
    whole = shares(drawn.models, drawn.cases, found)
    found = {case.name: found[case.name] for case in kept.cases}
    own = shares(kept.models, kept.cases, found)
    matter = options_that_matter(kept, found)
    meta = META | {
        "versions": {
            "transformers": hf.transformers.__version__,
            "torch": hf.torch.__version__,
            "python": platform.python_version(),
        },
        "shares": own.as_json(),
        "drawn": whole.as_json(),
        "options_that_matter": matter,
    }
    print(json.dumps(meta, indent=1))
    everywhere = hf.all_answers(Draw(everything.models, at_edges.cases))
    print({name: answer.margin for name, answer in everywhere.items()})
    agree_in_float64(everything, found | everywhere)
    own.check()
    whole.check()
    text = json.dumps({"meta": meta}, indent=1)[:-2]
    text += f',\n"models": {lines([as_json(spec) for spec in everything.models])}'
    text += f',\n"cases": {recorded_cases(kept.cases, found)}'
    text += f',\n"edges": {recorded_cases(at_edges.cases, everywhere)}\n}}\n'
    json.loads(text)
    FILE.write_text(text, encoding="utf-8")
    print(f"{FILE.name}: {len(text)} bytes")


if __name__ == "__main__":
    main()
