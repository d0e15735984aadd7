# SPDX-License-Identifier: MIT OR Apache-2.0
"""A request as a model will be asked, or the reason why it cannot be."""

from __future__ import annotations

from dataclasses import replace

from metrale.engine.request import Request
from metrale.errors import InvalidInput
from metrale.model import Capacity


def checked_request(request: Request, capacity: Capacity, vocab: int, lanes: int) -> Request:
    """Return a request with the model's values where it leaves them open.

    Raises
    ------
    InvalidInput
        When the model cannot serve it: too long, too wide, or an id outside the vocabulary.
    """
    if not isinstance(request, Request):
        raise InvalidInput("request", "a Request", request)
    request = _completed(request, capacity)
    _check_languages(request, capacity)
    _check_sizes(request, capacity, lanes)
    _check_ids(request, vocab)
    return request


def _completed(request: Request, capacity: Capacity) -> Request:
    if request.eos_ids is None or request.max_new_tokens is None:
        eos = capacity.eos_ids if request.eos_ids is None else request.eos_ids
        room = capacity.max_new_tokens - request.given_tokens
        request = replace(request, eos_ids=eos, max_new_tokens=request.max_new_tokens or max(room, 1))
    sampling, beams = request.sampling, request.beams
    if beams is not None and beams.num_beams == 1:
        beams = None  # one beam is greedy, as in transformers
    if beams is not None or ((sampling.min_new_tokens or sampling.bad_words) and not sampling.eos_ids):
        ending = tuple(sorted(request.end_ids))
        least = sampling.min_new_tokens if ending else 0  # without any, nothing ends it early
        sampling = replace(sampling, eos_ids=ending, min_new_tokens=least)
    if beams is not None or sampling.forced_eos_id is not None:
        sampling = replace(sampling, max_new_tokens=request.most_tokens)
    if beams is not request.beams or sampling is not request.sampling:
        request = replace(request, beams=beams, sampling=sampling)
    return request


def _check_languages(request: Request, capacity: Capacity) -> None:
    for name, language, needed in (
        ("src_lang_id", request.src_lang_id, capacity.needs_src_lang),
        ("tgt_lang_id", request.tgt_lang_id, capacity.needs_tgt_lang),
    ):
        if needed and not language:
            raise InvalidInput(name, "a language id, as the model was loaded without a default", 0)


def _check_sizes(request: Request, capacity: Capacity, lanes: int) -> None:
    together = request.given_tokens + request.most_tokens
    for name, count, most in (
        ("prompt_tokens", len(request.prompt_tokens), capacity.max_prompt_tokens),
        ("max_new_tokens", request.most_tokens, capacity.max_new_tokens),
        ("max_new_tokens with the language and prefix_tokens", together, capacity.max_new_tokens),
    ):
        if count > most:
            raise InvalidInput(name, f"at most {most} tokens, the model's limit", f"{count}")
    widest = min(max(capacity.max_beams, 1), lanes)
    if request.width > widest:
        raise InvalidInput("beams.num_beams", f"at most {widest}, a lane for each", request.width)


def _check_ids(request: Request, vocab: int) -> None:
    sampling = request.sampling
    for name, ids in (
        ("prompt_tokens", request.prompt_tokens),
        ("prefix_tokens", request.prefix_tokens),
        ("eos_ids", request.end_ids),
        ("src_lang_id", (request.src_lang_id,)),
        ("tgt_lang_id", (request.tgt_lang_id,)),
        ("sampling.suppress_tokens", sampling.suppress_tokens),
        ("sampling.bad_words", tuple(token for word in sampling.bad_words for token in word)),
        ("sampling.eos_ids", sampling.eos_ids),
        ("sampling.forced_eos_id", () if sampling.forced_eos_id is None else (sampling.forced_eos_id,)),
    ):
        if ids and max(ids) >= vocab:
            raise InvalidInput(name, f"ids in [0, {vocab})", f"{max(ids)}")
