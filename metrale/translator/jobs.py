# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a text to a request, and from what that generated to a translation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from metrale.engine import Generated, Request, checked_request
from metrale.errors import InvalidInput
from metrale.model import SamplingParams
from metrale.nllb.admission import FRAME_LEN
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import Tokenizer
from metrale.translator.options import TranslationOptions, renamed
from metrale.translator.repeats import repeats
from metrale.translator.terms import Terms
from metrale.translator.translation import Translation, TranslationHypothesis
from metrale.translator.unknown import UnknownSpan, unknown_in


@dataclass(frozen=True, slots=True)
class Job:
    """One text that needs the model: its place among the call's texts, what is asked, and what is known beforehand."""

    index: int
    request: Request
    truncated: bool
    unknown: tuple[UnknownSpan, ...]
    terms: Terms


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Makes the requests of one call's texts.

    Attributes
    ----------
    model : NllbModel
    tokenizer : Tokenizer
    options : TranslationOptions
    sampling : SamplingParams
        What the options come to.
    first_index : int
        What the first text counts as, where draws depend on the index.
    """

    model: NllbModel
    tokenizer: Tokenizer
    options: TranslationOptions
    sampling: SamplingParams
    first_index: int = 0

    def job(self, index: int, text: str, tokens: Sequence[int], terms: Terms) -> Job:
        """Return the job of the text at ``index``, whose ids are ``tokens``.

        Raises
        ------
        InvalidInput
            When the text is too long, and not to be cut; also when the model cannot serve what is asked.
        """
        options = self.options
        unknown = unknown_in(self.tokenizer, text, tokens) + terms.unknown
        tokens, truncated = fitting(self.model, f"texts[{index}]", tokens, truncate=options.truncate)
        capacity = self.model.capacity()
        with renamed():
            request = Request(
                tokens,
                self.tokenizer.language_id(terms.source),
                self.tokenizer.language_id(terms.target),
                options.max_new_tokens,
                eos_ids=capacity.eos_ids,
                sampling=self._sampling(self.first_index + index),
                beams=options.beam_params,
                prefix_tokens=terms.prefix,
                adapter_slot=terms.adapter_slot,
                timeout=options.timeout,
                logprobs=options.return_scores,
            )
            checked_request(request, capacity, self.model.vocab_size(), capacity.max_sequences)
        return Job(index, request, truncated, unknown, terms)

    def translation(self, job: Job, generated: Generated) -> Translation:
        """Return what a job came to, without attention."""
        failed = generated.finish_reason == "error"
        hypotheses = () if failed else self._hypotheses(job.terms, generated)
        ids = tuple(token for token in (*job.terms.prefix, *generated.ids) if not self.tokenizer.is_special(token))
        return Translation(
            text="" if failed else self.tokenizer.decode(ids),
            token_ids=() if failed else ids,
            score=hypotheses[0].score if hypotheses else None,
            finish_reason=generated.finish_reason,
            truncated=job.truncated,
            source_lang=job.terms.source,
            target_lang=job.terms.target,
            error=generated.error,
            adapter=job.terms.adapter_name,
            hypotheses=hypotheses,
            unknown=job.unknown,
            repeats=not failed and _is_loop(job, generated),
        )

    def _hypotheses(self, terms: Terms, generated: Generated) -> tuple[TranslationHypothesis, ...]:
        if generated.hypotheses is not None:
            return tuple(self._hypothesis(one.ids[1:], one.score, one.logprobs[1:]) for one in generated.hypotheses)
        if self.options.beam_params is not None:  # stopped before its end
            return ()
        chosen = generated.ids if generated.eos_id is None else [*generated.ids, generated.eos_id]
        logprobs = [0.0] * len(terms.prefix) + (generated.logprobs or [])
        return (self._hypothesis([*terms.prefix, *chosen], generated.score, logprobs),)

    def _hypothesis(self, ids: Sequence[int], score: float, logprobs: Sequence[float]) -> TranslationHypothesis:
        text = self.tokenizer.decode(ids)
        if not self.options.return_scores:
            return TranslationHypothesis(text, tuple(ids))
        return TranslationHypothesis(text, tuple(ids), score, tuple(logprobs))

    def _sampling(self, index: int) -> SamplingParams:
        params = self.sampling
        return replace(params, seed=text_seed(params.seed, index)) if params.temperature else params


def _is_loop(job: Job, generated: Generated) -> bool:
    given = job.request.prompt_tokens, job.terms.prefix
    return repeats(generated.ids, *given, whole=generated.finish_reason == "eos")


def is_visible(text: str, tokens: Sequence[int]) -> bool:
    """Return whether there is something to translate. To SentencePiece, one of Unicode's blanks is a character."""
    return bool(tokens) and not text.isspace()


def blank(terms: Terms) -> Translation:
    """Return the translation of a text without anything visible."""
    return Translation("", (), None, "eos", False, terms.source, terms.target, adapter=terms.adapter_name)


def fitting(model: NllbModel, argument: str, tokens: Sequence[int], *, truncate: bool) -> tuple[Sequence[int], bool]:
    """Return a source's tokens, cut if need be to what the model takes, and whether they were.

    Raises
    ------
    InvalidInput
        When they are too many, and not to be cut.
    """
    most = model.shape.limits.max_source_len - FRAME_LEN
    if len(tokens) > most and not truncate:
        raise InvalidInput(argument, f"a text of at most {most} tokens", f"{len(tokens)} tokens")
    return tokens[:most], len(tokens) > most


def text_seed(seed: int, index: int) -> int:
    """Return the seed of one text, of 64 bits: other texts of the same call get unrelated ones."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
