# SPDX-License-Identifier: MIT OR Apache-2.0
"""Beam search: how its methods are called on NLLB, and what comes of it.

The judge is the search with lists of ids of `tests.ops.beam_search` over the float64 model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_runtime.pointer import DevicePtr
from metrale.model import BEAM_DONE_FLAG, BeamParams, BeamReq, FeedSource, Hypothesis, SamplingParams, SequenceState
from tests.model.lab import OTHER, PREFIX, PROMPT, SOURCE, VOCAB, Lab, Row
from tests.nllb.decoding import EOS, results
from tests.ops.beam_search import Search, textbook

ENDS = (26, 2)
"""Ids that end a hypothesis: the tiny model seldom chooses its own."""
CLOSE = 1e-5
"""How far a log-probability, or their mean, may be from the float64 one: ten times the rounding of a row's logits."""

Found = list[tuple[list[int], float, list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Search):
    """A search over the float64 model of ``lab``, whose lengths count the language or what follows a longer prefix."""

    lab: Lab
    source: tuple[int, ...]
    never: frozenset[int] = frozenset()

    @property
    def given(self) -> int:
        return 1 if len(self.prompt) == len(PREFIX) else len(self.prompt)

    def row(self, sequence: tuple[int, ...]) -> NDArray[Any]:
        logits = self.lab.judge.logits([SOURCE, *self.source, EOS], sequence)[-1]
        logps = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        logps[list(self.never)] = -np.inf
        return np.asarray(logps, np.float32)

    def norm(self, length: int) -> Any:
        return np.float32((length - self.given) ** self.penalty)


def judged(
    lab: Lab,
    source: Sequence[int],
    beams: BeamParams,
    max_new: int,
    *,
    prefix: tuple[int, ...] = (),
    never: Sequence[int] = (),
) -> list[Any]:
    """Return the ids, score and log-probabilities that a search must find, best first."""
    prompt = (*PREFIX, *prefix)
    search = Judged(
        beams=beams.num_beams,
        vocab=VOCAB,
        eos=ENDS,
        prompt=prompt,
        limit=(len(prompt) if prefix else 1) + max_new,
        early=beams.early_stopping,
        penalty=beams.length_penalty,
        lab=lab,
        source=tuple(source),
        never=frozenset(never),
    )
    pool = textbook(search)[-1].pool[: beams.num_return_sequences]
    return [
        (list(ids[1:]), pytest.approx(score, abs=CLOSE), pytest.approx(list(logps[1:]), abs=CLOSE))
        for ids, logps, score in pool
    ]


def shown(found: Sequence[Hypothesis]) -> Found:
    return [(one.ids, one.score, one.logprobs) for one in found]


# whole searches

WIDE = BeamParams(3, num_return_sequences=3)
LONG = BeamParams(2, length_penalty=2.0, early_stopping=True, num_return_sequences=2)
PREFIXED = BeamParams(4, num_return_sequences=2)


def requests() -> list[BeamReq]:
    """Return three requests of 3, 2 and 4 beams: more than the lanes that there are."""
    asked = ((PROMPT, WIDE, 8, ()), (OTHER, LONG, 8, ()), (PROMPT, PREFIXED, 4, (9, 10)))
    return [
        BeamReq(
            source,
            num_beams=beams.num_beams,
            max_new=most,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            num_return_sequences=beams.num_return_sequences,
            prefix_tokens=prefix,
            eos_ids=ENDS,
        )
        for source, beams, most, prefix in asked
    ]


def all_judged(lab: Lab) -> list[list[Any]]:
    """Return what `requests` must find."""
    return [
        judged(lab, PROMPT, WIDE, 8),
        judged(lab, OTHER, LONG, 8),
        judged(lab, PROMPT, PREFIXED, 4, prefix=(9, 10)),
    ]


FORWARD = [
    Row("supports_beam", lambda lab: lab.model.supports_beam(), True),
    Row(
        "generate_beam_batch",
        lambda lab: lab.model.generate_beam_batch(requests()),
        lambda lab: [found[0][0] for found in all_judged(lab)],
    ),
    Row("generate_beams", lambda lab: [shown(found) for found in lab.model.generate_beams(requests())], all_judged),
]


# step by step


def begun(
    lab: Lab, model: Any, beams: BeamParams, max_new: int, never: Sequence[int] = ()
) -> tuple[SequenceState, DevicePtr]:
    """Return a search for `PROMPT` that has selected nothing yet, and its row."""
    seq = lab.real.alloc_beams(beams.num_beams, len(PROMPT) + 2, max_new)
    row = lab.real.prefill(PROMPT, seq)
    params = SamplingParams(suppress_tokens=tuple(never), eos_ids=ENDS, max_new_tokens=max_new)
    model.begin_beams(seq, beams, params)
    return seq, row


def searched(lab: Lab, model: Any, beams: BeamParams, max_new: int, never: Sequence[int] = ()) -> Found:
    """Search to the end, the next step enqueued before the flags of the last are known."""
    seq, row = begun(lab, model, beams, max_new, never)
    with results(lab.real, 1) as (flags, event):
        for _ in range(max_new):
            model.select_beams_to_feed([row], [seq], flags, event)
            if seq.seq_len < max_new:
                row = lab.real.decode_batch_fed([FeedSource(sampled=True)], [seq])
                seq.seq_len += 1
            lab.real.event_synchronize(event)
            if flags[0] & BEAM_DONE_FLAG:
                break
        assert flags[0] & BEAM_DONE_FLAG
    return shown(model.take_beams(seq))


def alloc_beams(lab: Lab) -> object:
    """Three lanes, positions for one source and three targets; all of it comes back."""
    seq = lab.model.alloc_beams(3, 5, 7)
    positions = lab.real.kv_usage()[0] // lab.real.shape.position_bytes
    other = lab.fresh().slot_idx
    lab.real.free_sequence(seq)
    return positions, other, [lab.real.alloc_sequence_for(4).slot_idx for _ in range(3)]


def begin_beams(lab: Lab) -> Found:
    """The best first id may not be chosen."""
    return searched(lab, lab.model, WIDE, 8, lab.ranked()[:1])


def select_beams_to_feed(lab: Lab) -> object:
    """The first selection leaves the three best ids, one a beam, to a step that the host has not seen them for."""
    (seq, row), other = begun(lab, lab.real, WIDE, 8), lab.live(OTHER)
    with results(lab.real, 1) as (flags, event):
        lab.model.select_beams_to_feed([row], [seq], flags, event)
        ptr = lab.real.decode_batch_fed([FeedSource(token=10), FeedSource(sampled=True)], [other, seq])
        lab.real.event_synchronize(event)
        state = flags.tolist()
    rows = [lab.at(ptr, [10], OTHER)]
    for token in lab.ranked()[:3]:
        ptr = lab.after(ptr)
        rows.append(lab.at(ptr, [token]))
    return rows, state


BEAMS = [
    Row("alloc_beams", alloc_beams, (5 + 3 * 7, 3, [0, 1, 2])),
    Row("begin_beams", begin_beams, lambda lab: judged(lab, PROMPT, WIDE, 8, never=lab.ranked()[:1])),
    Row("select_beams_to_feed", select_beams_to_feed, ([0, 1, 2, 3], [0])),
    Row("take_beams", lambda lab: searched(lab, lab.model, LONG, 6), lambda lab: judged(lab, PROMPT, LONG, 6)),
]
