# SPDX-License-Identifier: MIT OR Apache-2.0
"""From a text to a request, and from what that generated to a translation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from metrale.engine import Generated, Request
from metrale.errors import InvalidInput
from metrale.model import SamplingParams
from metrale.nllb.admission import FRAME_LEN
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import NllbTokenizer
from metrale.translator.translation import Translation


@dataclass(frozen=True, slots=True)
class Job:
    """One text that needs the model: its place among the call's texts, and what is asked."""

    index: int
    request: Request
    truncated: bool
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class JobMaker:
    """What all texts of one call have in common.

    Attributes
    ----------
    model : NllbModel
    tokenizer : NllbTokenizer
    max_new_tokens : int
    scores, truncate : bool
    sampling : SamplingParams
    timeout : float or None
        Seconds for each text, from its submission.
    first_index : int
        What the first text counts as, where draws depend on the index.
    """

    model: NllbModel
    tokenizer: NllbTokenizer
    max_new_tokens: int
    scores: bool
    truncate: bool
    sampling: SamplingParams
    timeout: float | None
    first_index: int = 0

    def job(self, index: int, tokens: Sequence[int], source: str, target: str) -> Job:
        """Return the job of the text at ``index``.

        Raises
        ------
        InvalidInput
            When the text is too long, and not to be cut.
        """
        most = self.model.shape.limits.max_source_len - FRAME_LEN
        if len(tokens) > most and not self.truncate:
            raise InvalidInput(f"texts[{index}]", f"a text of at most {most} tokens", f"{len(tokens)} tokens")
        request = Request(
            tokens[:most],
            self.tokenizer.language_id(source),
            self.tokenizer.language_id(target),
            self.max_new_tokens,
            eos_ids=frozenset(self.model.config.generation.eos_token_id),
            sampling=self._sampling(self.first_index + index),
            timeout=self.timeout,
            logprobs=self.scores,
        )
        return Job(index, request, len(tokens) > most, source, target)

    def translation(self, job: Job, generated: Generated) -> Translation:
        """Return what a job came to."""
        failed = generated.finish_reason == "error"
        ids = tuple(token for token in generated.ids if not self.tokenizer.is_special(token))
        return Translation(
            text="" if failed else self.tokenizer.decode(ids),
            token_ids=ids,
            score=generated.logprob / generated.length if self.scores and not failed else None,
            finish_reason=generated.finish_reason,
            truncated=job.truncated,
            source_lang=job.source,
            target_lang=job.target,
            error=generated.error,
        )

    def _sampling(self, index: int) -> SamplingParams:
        params = self.sampling
        return replace(params, seed=text_seed(params.seed, index)) if params.temperature else params


def blank(source: str, target: str) -> Translation:
    """Return the translation of a text without anything visible."""
    return Translation("", (), None, "eos", False, source, target)


def text_seed(seed: int, index: int) -> int:
    """Return the seed of one text, of 64 bits: other texts of the same call get unrelated ones."""
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
