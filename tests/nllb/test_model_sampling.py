# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ids that the device chooses, each sequence in its own way, against a computation on the rows that it chose from."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from metrale.errors import InvalidInput
from metrale.model import GREEDY, FeedSource, PrefillSlice, RowMask, SamplingParams, SequenceState
from metrale.nllb.model import NllbModel
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, poke, prefilled, sampled, saved, to_feed
from tests.ops.oracles import gumbel, kept_scores

CASES = [Case([5, 6, 7], 80, 81, []), Case([30, 31], 82, 83, []), Case([40] * 5, 84, 85, []), Case([], 86, 87, [])]
SAMPLED = FeedSource(sampled=True)
NEW = 20
"""Tokens of a generation, the language included: enough for a greedy one to repeat itself."""

Processed = NDArray[np.float64]


def processed(row: NDArray[np.float32], history: list[int], params: SamplingParams) -> Processed:
    """Return the logits that a choice is made from, as the documentation of `SamplingParams` says it."""
    x = row.copy()
    penalty = np.float32(params.repetition_penalty)
    for token in set(history):
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    size = params.no_repeat_ngram_size
    if size and len(history) >= size:
        seen = {tuple(history[at : at + size]) for at in range(len(history) - size + 1)}
        ending = tuple(history[len(history) - size + 1 :])
        x[[token for token in range(97) if (*ending, token) in seen]] = -np.inf
    x[list(params.suppress_tokens)] = -np.inf
    for *prefix, token in params.bad_words:
        if len(prefix) < len(history) and history[len(history) - len(prefix) :] == prefix:
            x[token] = -np.inf
    if len(history) - 1 < params.min_new_tokens:  # the start token was not generated
        x[list(params.eos_ids)] = -np.inf
    return x.astype(np.float64)


def chosen(row: NDArray[np.float32], history: list[int], params: SamplingParams) -> int:
    """Return the id that is to be chosen after ``history``."""
    x = processed(row, history, params)
    if params.temperature == 0:
        return int(x.argmax())
    scores = kept_scores(x, params.temperature, params.top_k, params.top_p, params.min_p)
    return int((scores + gumbel(params.seed, len(history), np.arange(97))).argmax())


def generate(model: NllbModel, seqs: Sequence[SequenceState], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Generate to the end with the device's choices, each of which is judged; return each sequence's ids."""
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES, seqs, strict=False)]
    base = model.prefill_batch_chunk_rows(slices)[0]
    for seq, one in zip(seqs, params, strict=True):
        if one is not GREEDY:
            model.begin_sampling(seq, one)
    while True:
        rows = [model.copy_logits_to_host(base.offset(i * model.logits_row_bytes())) for i in range(len(seqs))]
        choice = sampled(model, base, seqs)
        assert choice.flags == [0] * len(seqs)
        assert not choice.logprobs.any()
        expected = [chosen(row, seq.tokens, one) for row, seq, one in zip(rows, seqs, params, strict=True)]
        assert choice.ids == expected, f"after {seqs[0].seq_len} tokens"
        if seqs[0].seq_len == NEW:
            return [[*seq.tokens[2:], token] for seq, token in zip(seqs, choice.ids, strict=True)]
        model.decode_batch_fed([SAMPLED] * len(seqs), seqs)
        for seq, token in zip(seqs, choice.ids, strict=True):
            seq.tokens.append(token)
            seq.seq_len += 1


@pytest.fixture
def model(make_tiny: MakeModel) -> NllbModel:
    return make_tiny(max_new_tokens=NEW)


def words_of(greedy: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return words that what a greedy sequence says has: from each id on, of growing lengths, and another id last."""
    words = [tuple(greedy[at : at + 2 + at % 5]) for at in range(len(greedy) - 1)]
    return (*words, *((*word[:-1], 1 + word[-1] % 96) for word in words[::3]))


def ways(greedy: list[int]) -> dict[str, SamplingParams]:
    """Return ways to choose that change the greedy ids."""
    return {
        "banned": SamplingParams(suppress_tokens=(greedy[0], greedy[2], 96, 0, 31, 32)),
        "words": SamplingParams(bad_words=words_of(greedy)),
        "short": SamplingParams(eos_ids=(greedy[0], greedy[1]), min_new_tokens=4),
        "penalty": SamplingParams(repetition_penalty=1.5),
        "bonus": SamplingParams(repetition_penalty=0.4),
        "1-gram": SamplingParams(no_repeat_ngram_size=1),
        "2-gram": SamplingParams(no_repeat_ngram_size=2, repetition_penalty=0.7),
        "3-gram": SamplingParams(no_repeat_ngram_size=3, repetition_penalty=0.5),
        "warm": SamplingParams(temperature=0.8, seed=1),
        "hot": SamplingParams(temperature=3.0, seed=(1 << 64) - 1),
        "top-k": SamplingParams(temperature=5.0, top_k=3, seed=2),
        "top-p": SamplingParams(temperature=5.0, top_p=0.5, seed=3),
        "min-p": SamplingParams(temperature=5.0, min_p=0.7, seed=1 << 40),
        "everything": SamplingParams(
            temperature=2.0,
            top_k=60,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.2,
            no_repeat_ngram_size=2,
            suppress_tokens=tuple(greedy[:2]),
            bad_words=words_of(greedy[2:]),
            eos_ids=(5, 6),
            min_new_tokens=NEW,
            seed=12345,
        ),
    }


@pytest.mark.parametrize("way", [*ways([0] * 3), "greedy"])
def test_a_generation_is_chosen_as_asked_beside_others(model: NllbModel, way: str) -> None:
    """In the second of four lanes, with a greedy neighbour, a drawing one, and one that has all there is."""
    seqs = [begin(model, case) for case in CASES]
    greedy = generate(model, seqs, [GREEDY] * 4)
    for seq in seqs:
        model.free_sequence(seq)
    others = ways(greedy[3])
    params = [GREEDY, GREEDY if way == "greedy" else ways(greedy[1])[way], others["hot"], others["everything"]]
    ids = generate(model, [begin(model, case) for case in CASES], params)
    assert ids[0] == greedy[0]
    assert (ids[1] == greedy[1]) == (way == "greedy")
    assert ids[2] != greedy[2]
    assert ids[3] != greedy[3]


def test_log_probabilities_are_those_of_the_rows_as_they_are(model: NllbModel) -> None:
    """Also where bans and temperature changed what was chosen; and none where none were asked for.

    A float32 sum of 97 terms and its logarithm: off by less than 1e-6 of the largest logit, which is about 10.
    """
    seqs = [prefilled(model, case) for case in CASES]
    base = model.decode_batch([9, 10, 11, 12], seqs)
    rows = [model.copy_logits_to_host(base.offset(i * model.logits_row_bytes())) for i in range(4)]
    banned = tuple(int(token) for token in np.argsort(-rows[1])[:3])
    model.begin_sampling(seqs[1], SamplingParams(suppress_tokens=banned))
    model.begin_sampling(seqs[2], SamplingParams(temperature=3.0, seed=4))
    choice = sampled(model, base, seqs, logprobs=True)
    for row, token, logprob in zip(rows, choice.ids, choice.logprobs, strict=True):
        x = row.astype(np.float64)
        assert logprob == pytest.approx(x[token] - x.max() - np.log(np.exp(x - x.max()).sum()), abs=1e-5)
    assert choice.logprobs[1] < -1
    assert sampled(model, base, seqs).ids == choice.ids
    assert not sampled(model, base, seqs).logprobs.any()


def test_rows_that_are_not_sound_and_rows_without_a_choice_are_flagged(model: NllbModel) -> None:
    """1 for a NaN or an infinity, 2 when every id is forbidden; the neighbours do not notice."""
    seqs = [prefilled(model, case) for case in CASES]
    base = model.decode_batch([9, 10, 11, 12], seqs)
    model.begin_sampling(seqs[2], SamplingParams(suppress_tokens=tuple(range(97))))
    expected = sampled(model, base, seqs)
    assert (expected.flags, expected.ids[2]) == ([0, 0, 2, 0], 0)
    poke(model, 1, {expected.ids[1]: np.nan})
    choice = sampled(model, base, seqs)
    assert choice.flags == [0, 1, 2, 0]
    assert choice.ids[::2] == expected.ids[::2]
    assert choice.ids[1] != expected.ids[1]
    poke(model, 2, {5: -np.inf})
    poke(model, 3, {7: np.inf})
    choice = sampled(model, base, seqs)
    assert (choice.flags, choice.ids[3]) == ([0, 1, 3, 1], 7)
    model.decode_batch_fed([SAMPLED] * 4, seqs)  # what was chosen is an id all the same


def test_a_requests_ids_do_not_depend_on_who_else_is_there(model: NllbModel) -> None:
    """Alone in slot 0 and lane 0, and in another slot and lane beside others."""
    params = SamplingParams(temperature=2.0, top_p=0.9, repetition_penalty=1.3, no_repeat_ngram_size=2, seed=77)
    seqs = [begin(model, CASES[0])]
    alone = generate(model, seqs, [params])[0]
    model.free_sequence(seqs[0])
    assert len(set(alone)) > NEW // 2
    for lane in (0, 2):
        seqs = [begin(model, case) for case in CASES]
        order = [seqs[(lane + 1 + i) % 4] for i in range(4)]  # the cases' order is the lanes', the slots' another
        for seq, case in zip(order, CASES, strict=True):
            seq.src_lang_id, seq.tgt_lang_id = case.source, case.target
        assert order[0].slot_idx == lane + 1
        ids = generate(model, order, [params, *(SamplingParams(temperature=2.0, seed=77) for _ in range(3))])
        assert ids[0] == alone
        for seq in seqs:
            model.free_sequence(seq)


def test_how_ids_are_chosen_moves_with_the_sequence(model: NllbModel) -> None:
    """History, bans, parameters, and the id that waits to be fed; what is left behind is nobody's."""
    params = SamplingParams(
        temperature=1.5,
        repetition_penalty=1.5,
        no_repeat_ngram_size=1,
        suppress_tokens=(3, 4),
        bad_words=tuple((token, (token * 7 + at) % 97) for token in range(97) for at in range(3)),
        eos_ids=(5,),
        min_new_tokens=9,
    )

    def run(move: int | None) -> list[int]:
        retired, seq = prefilled(model, CASES[1]), begin(model, CASES[0])
        ptr = model.prefill(CASES[0].tokens, seq)
        model.begin_sampling(seq, params)
        for step in range(6):
            token = sampled(model, ptr, [seq]).ids[0]
            if step == move:
                model.free_sequence(retired)
                model.compact_sequence(seq, 0)
                other = prefilled(model, CASES[2])
                assert other.slot_idx == 1
                with pytest.raises(InvalidInput, match="a sequence for which sample_batch_to_feed has chosen an id"):
                    model.decode_batch_fed([SAMPLED], [other])
            ptr = model.decode_batch_fed([SAMPLED], [seq])
            seq.tokens.append(token)
            seq.seq_len += 1
        ids = seq.tokens[2:]
        for one in (retired, seq, *((other,) if move is not None else ())):
            model.free_sequence(one)
        return ids

    plain = run(None)
    assert len(set(plain)) == 6
    for move in range(6):
        assert run(move) == plain


@pytest.mark.parametrize("how", ["prefilled", "restored", "moved"])
def test_a_slots_next_owner_chooses_greedily(model: NllbModel, how: str) -> None:
    """Whatever the one before it had been told; the id that waited is gone as well."""
    first, other = prefilled(model, CASES[0]), prefilled(model, CASES[1])
    model.begin_sampling(
        first, SamplingParams(temperature=9.0, suppress_tokens=tuple(range(96)), repetition_penalty=2.0)
    )
    ptr = model.decode(9, first)
    assert sampled(model, ptr, [first]).ids == [96]
    model.free_sequence(first)
    if how == "moved":
        model.compact_sequence(other, 0)
        second = other
    elif how == "restored":
        second = model.alloc_sequence()
        model.restore_sequence_state(second, 0, io.BytesIO(saved(model, other)))
    else:
        second = prefilled(model, CASES[1])
    assert second.slot_idx == 0
    with pytest.raises(InvalidInput, match="has chosen an id"):
        model.decode_batch_fed([SAMPLED], [second])
    ptr = model.decode(9, second)
    assert sampled(model, ptr, [second]).ids == [model.argmax_on_device(ptr)]
    model.begin_sampling(second, SamplingParams(repetition_penalty=1e6))  # the history is its own
    row = model.copy_logits_to_host(ptr)
    assert sampled(model, ptr, [second]).ids == [chosen(row, [2, 83, 9], SamplingParams(repetition_penalty=1e6))]


def test_beginning_again_replaces_what_was_said(model: NllbModel) -> None:
    """And takes the history anew, so that a sequence may be told of ids that the device did not choose."""
    seq = prefilled(model, CASES[0])
    ptr = model.decode_batch([9], [seq])
    row = model.copy_logits_to_host(ptr)
    best = [int(token) for token in np.argsort(-row)[:3]]
    for params, expected in (
        (SamplingParams(suppress_tokens=(best[0],)), best[1]),
        (SamplingParams(suppress_tokens=(best[1],)), best[0]),
        (SamplingParams(eos_ids=(best[0], best[1]), min_new_tokens=3), best[2]),
        (SamplingParams(eos_ids=(best[0], best[1]), min_new_tokens=2), best[0]),  # the language and 9 are two
        (SamplingParams(bad_words=((9, best[0]), (81, 9, best[1]), (2, 81, 9, best[2]))), best[2]),  # of three ids
        (SamplingParams(bad_words=(*[(1, 2)] * 338, (1, 2, 3), (81, 9, best[0]))), best[1]),  # no more would fit
        (SamplingParams(bad_words=((2, 81, 9, best[0]), (2, 9, best[1]))), best[0]),
        (SamplingParams(suppress_tokens=(best[2],)), best[0]),
        (GREEDY, best[0]),
    ):
        model.begin_sampling(seq, params)
        with pytest.raises(InvalidInput, match="has chosen an id"):  # what was chosen in the old way is not fed
            model.decode_batch_fed([SAMPLED], [seq])
        assert sampled(model, ptr, [seq]).ids == [expected]
    params = SamplingParams(no_repeat_ngram_size=1)
    model.begin_sampling(seq, params)
    assert sampled(model, ptr, [seq]).ids == [chosen(row, [2, 81, 9], params)]
    ptr = model.decode_batch([best[1]], [seq])  # not what was chosen
    model.begin_sampling(seq, params)
    row = model.copy_logits_to_host(ptr)
    poke(model, 0, {best[1]: 1e4})
    row[best[1]] = 1e4
    assert sampled(model, ptr, [seq]).ids == [chosen(row, [2, 81, 9, best[1]], params)] != [best[1]]


def test_a_history_has_what_its_lane_was_given(model: NllbModel) -> None:
    """Ids of the host's, of other rows, and those that were chosen: in the end none of them may be chosen again.

    They are made the largest logits by far, and after them those that were chosen but not given, one of which it is.
    """
    params = SamplingParams(no_repeat_ngram_size=1)
    seqs = [begin(model, case) for case in CASES[:3]]
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES, seqs, strict=False)]
    base = model.prefill_batch_chunk_rows(slices)[0]
    for seq in seqs:
        model.begin_sampling(seq, params)
    passed_over: list[set[int]] = [set(), set(), set()]
    for kinds in (("token", "row", "own"), ("row", "own", "token"), ("own", "token", "row"), ("row", "token", "row")):
        own = sampled(model, base, seqs).ids
        rows = to_feed(model, base, [RowMask((token,)) for token in own])
        sources, tokens = [], []
        for lane, (kind, seq) in enumerate(zip(kinds, seqs, strict=True)):
            other, free = (lane + 1) % 3, next(token for token in range(3, 97) if token not in seq.tokens)
            token, source = {
                "own": (own[lane], SAMPLED),
                "row": (rows[other], FeedSource(from_row=other)),
                "token": (free, FeedSource(token=free)),
            }[kind]
            sources.append(source)
            tokens.append(token)
            passed_over[lane] |= {own[lane]} - {token}
        model.decode_batch_fed(sources, seqs)
        for seq, token in zip(seqs, tokens, strict=True):
            seq.tokens.append(token)
            seq.seq_len += 1
    for lane, seq in enumerate(seqs):
        poke(model, lane, {token: 1000.0 + token for token in passed_over[lane]})
        poke(model, lane, {token: 2000.0 + token for token in seq.tokens})
    assert sampled(model, base, seqs).ids == [
        max(ids - set(seq.tokens)) for ids, seq in zip(passed_over, seqs, strict=True)
    ]


def test_a_restored_sequence_goes_on_drawing_the_same(model: NllbModel) -> None:
    params = SamplingParams(temperature=2.0, repetition_penalty=1.4, seed=5)
    seq = begin(model, CASES[0])
    whole = generate(model, [seq], [params])[0]
    model.free_sequence(seq)
    seq, saved = begin(model, CASES[0]), io.BytesIO()
    ptr = model.prefill(CASES[0].tokens, seq)
    for token in whole[:5]:
        ptr = model.decode(token, seq)
    model.save_sequence_state(seq, saved)
    model.free_sequence(seq)
    prefilled(model, CASES[1])
    seq = model.alloc_sequence()
    model.restore_sequence_state(seq, 0, io.BytesIO(saved.getvalue()))
    ids = list(whole[:5])
    model.begin_sampling(seq, params)
    ids += sampled(model, ptr, [seq]).ids
    while seq.seq_len < NEW:
        ptr = model.decode_batch_fed([SAMPLED], [seq])
        seq.tokens.append(ids[-1])
        seq.seq_len += 1
        ids += sampled(model, ptr, [seq]).ids
    assert ids == whole
