# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts with translations that are there already: how likely those are."""

from __future__ import annotations

from collections.abc import Sequence

from metrale.errors import InvalidInput
from metrale.model import ScoreReq
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import Tokenizer
from metrale.translator.jobs import fitting
from metrale.translator.scoring import Scorer
from metrale.translator.terms import Terms
from metrale.translator.translation import Scored
from metrale.translator.unknown import unknown_in


def score_pairs(
    model: NllbModel,
    tokenizer: Tokenizer,
    scorer: Scorer,
    pairs: tuple[Sequence[str], Sequence[str]],
    terms: Sequence[Terms],
    *,
    truncate: bool,
) -> list[Scored]:
    """Return what the targets of ``pairs``, sources and targets of the same number, come to.

    Raises
    ------
    InvalidInput
        When a source is too long and not to be cut, or a target is too long, before anything is computed.
    """
    sources, targets = (
        _encoded(tokenizer, argument, texts) for argument, texts in zip(("sources", "targets"), pairs, strict=True)
    )
    fitted = [fitting(model, f"sources[{index}]", tokens, truncate=truncate) for index, tokens in enumerate(sources)]
    most = model.shape.limits.max_new_tokens
    for index, tokens in enumerate(targets):
        if len(tokens) >= most:  # there is EOS as well
            expected = f"a text of at most {most - 1} tokens, as the model was loaded"
            raise InvalidInput(f"targets[{index}]", expected, f"{len(tokens)} tokens")
    language = tokenizer.language_id
    reqs = [
        ScoreReq(tokens, (*target, tokenizer.eos_id), language(term.source), language(term.target), term.adapter_slot)
        for (tokens, _), target, term in zip(fitted, targets, terms, strict=True)
    ]
    unknown = [
        unknown_in(tokenizer, text, ids) + unknown_in(tokenizer, wanted, wanted_ids, "target")
        for text, ids, wanted, wanted_ids in zip(pairs[0], sources, pairs[1], targets, strict=True)
    ]
    found = scorer.run(reqs, [term.adapter for term in terms])
    return [
        Scored(
            score=scored.score,
            token_ids=tuple(req.target_tokens),
            token_logprobs=tuple(scored.logprobs),
            truncated=cut,
            source_lang=term.source,
            target_lang=term.target,
            adapter=term.adapter_name,
            unknown=lost,
        )
        for scored, req, (_, cut), term, lost in zip(found, reqs, fitted, terms, unknown, strict=True)
    ]


def _encoded(tokenizer: Tokenizer, argument: str, texts: Sequence[str]) -> list[list[int]]:
    try:
        return tokenizer.encode_batch(texts)
    except InvalidInput as error:
        raise InvalidInput(error.argument.replace("texts", argument), error.expected, error.got) from None
