# SPDX-License-Identifier: MIT OR Apache-2.0
"""Text in, text out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, overload

from metrale.engine import FinishReason, Generated, Request, generate_greedy
from metrale.errors import InvalidInput, NotSupported
from metrale.factory import load
from metrale.nllb.admission import FRAME_LEN
from metrale.nllb.checks import integer
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import MODEL_FILE, NllbTokenizer

Languages = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Translation:
    """One translated text.

    Attributes
    ----------
    text : str
    token_ids : tuple of int
        The generated ids, without language, EOS and other special tokens.
    score : float or None
        The sequence's score as transformers defines it: summed log-probability over length, where the length counts
        the language token (whose log-probability is 0) and EOS. None unless it was asked for.
    finish_reason : str
        ``eos``, ``length``, ``cancelled``, ``timeout`` or ``error``.
    truncated : bool
        Whether the source was too long and only its beginning was translated.
    source_lang, target_lang : str
    error : str or None
        What went wrong, when ``finish_reason`` is ``error``.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float | None
    finish_reason: FinishReason
    truncated: bool
    source_lang: str
    target_lang: str
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {**asdict(self), "token_ids": list(self.token_ids)}


@dataclass(frozen=True, slots=True)
class _Job:
    """One text that needs the model: where its result goes, and what is asked."""

    index: int
    tokens: list[int]
    truncated: bool
    source: str
    target: str


class Translator:
    """Translates texts with one model.

    Safe to call from several threads, and beside other users of the same model: a batch has the model to itself.

    Parameters
    ----------
    model : path or NllbModel
        A checkpoint folder, or a model loaded from one that has a tokenizer. A model that is given stays the caller's:
        `close` leaves it alone.
    **options
        The keyword arguments of `metrale.load`, when ``model`` is a path. ``source=`` and ``target=`` become the
        default languages.

    Raises
    ------
    CheckpointError, InvalidInput, gpu_runtime.GpuRuntimeError
        As `metrale.load`; InvalidInput also when the model has no tokenizer, or options come with a loaded model.
    """

    def __init__(self, model: str | os.PathLike[str] | NllbModel, **options: Any) -> None:
        if isinstance(model, NllbModel):
            if options:
                raise InvalidInput("options", "none together with a loaded model", ", ".join(options))
            self.model = model
        else:
            self.model = load(model, **options)
        self._owns_model = not isinstance(model, NllbModel)
        if self.model.tokenizer is None:
            self.close()
            raise InvalidInput("model", f"a checkpoint with a tokenizer ({MODEL_FILE})", "one that serves ids only")
        self._tokenizer: NllbTokenizer = self.model.tokenizer

    def __enter__(self) -> Translator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the model, if this translator loaded it. Calling it again does nothing."""
        if self._owns_model:
            self.model.close()

    @property
    def languages(self) -> tuple[str, ...]:
        """The language codes that ``source`` and ``target`` may be."""
        return self._tokenizer.languages

    @overload  # a str is a sequence of str as well; the first overload that fits is meant
    def translate(  # type: ignore[overload-overlap]
        self,
        texts: str,
        source: Languages = None,
        target: Languages = None,
        *,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        return_scores: bool = False,
        truncate: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Sequence[str],
        source: Languages = None,
        target: Languages = None,
        *,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        return_scores: bool = False,
        truncate: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Sequence[str],
        source: Languages = None,
        target: Languages = None,
        *,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        return_scores: bool = False,
        truncate: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> Translation | list[Translation]:
        """Translate one text, or any number of them.

        Texts are sorted by length into batches; results come in the order of ``texts``, and do not depend on it.

        Parameters
        ----------
        texts : str or sequence of str
            A blank text gives a blank translation.
        source, target : str, sequence of str or None
            Language codes: one for all texts, one for each, or None for the model's default.
        max_new_tokens : int or None
            Most tokens to generate, the language token and EOS included; None takes the model's limit.
        num_beams : int
            1, which is greedy, in this version.
        return_scores : bool
            Whether to compute `Translation.score`.
        truncate : bool
            Whether a source that is too long is cut, and flagged in its result, or refused.
        progress : callable or None
            Called with the number of texts finished so far.

        Returns
        -------
        Translation or list of Translation
            One for a single ``str``, a list otherwise.

        Raises
        ------
        UnknownLanguage, InvalidInput
            When an argument is wrong, before anything is translated.
        NotSupported
            When ``num_beams`` is more than 1.
        """
        if isinstance(texts, str):
            texts, single = [texts], True
        elif isinstance(texts, bytes | set | frozenset | dict) or not isinstance(texts, Iterable):
            raise InvalidInput("texts", "a str or a sequence of str", repr(texts)[:80])
        else:
            texts, single = list(texts), False
        most = self._check_options(max_new_tokens, num_beams, progress)
        sources = self._languages("source", source, len(texts), self.model.languages.source)
        targets = self._languages("target", target, len(texts), self.model.languages.target)
        results: list[Translation | None] = [None] * len(texts)
        jobs: list[_Job] = []
        for index, tokens in enumerate(self._tokenizer.encode_batch(texts)):
            if tokens:
                jobs.append(self._job(index, tokens, sources[index], targets[index], truncate))
            else:
                results[index] = Translation("", (), None, "eos", False, sources[index], targets[index])
        self._run(jobs, results, most, return_scores, progress)
        finished = [result for result in results if result is not None]
        assert len(finished) == len(texts)
        return finished[0] if single else finished

    def _run(
        self,
        jobs: list[_Job],
        results: list[Translation | None],
        max_new_tokens: int,
        scores: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Fill in the results of ``jobs``, the longest first: they run longest, so the last batch is a short one."""
        blank = len(results) - len(jobs)
        if progress is not None and blank:
            progress(blank)
        jobs = sorted(jobs, key=lambda job: len(job.tokens), reverse=True)
        eos = frozenset(self.model.config.generation.eos_token_id)
        language = self._tokenizer.language_id
        requests = [
            Request(job.tokens, language(job.source), language(job.target), max_new_tokens, eos) for job in jobs
        ]
        report = None if progress is None else lambda count: progress(blank + count)
        generated = generate_greedy(self.model, requests, scores=scores, progress=report)
        for job, outcome in zip(jobs, generated, strict=True):
            results[job.index] = self._translation(job, outcome, scores)

    def _translation(self, job: _Job, generated: Generated, scores: bool) -> Translation:
        ids = tuple(token for token in generated.ids if not self._tokenizer.is_special(token))
        failed = generated.finish_reason == "error"
        return Translation(
            text="" if failed else self._tokenizer.decode(ids),
            token_ids=ids,
            score=generated.logprob / generated.length if scores and not failed else None,
            finish_reason=generated.finish_reason,
            truncated=job.truncated,
            source_lang=job.source,
            target_lang=job.target,
            error=generated.error,
        )

    def _job(self, index: int, tokens: list[int], source: str, target: str, truncate: bool) -> _Job:
        most = self.model.shape.limits.max_source_len - FRAME_LEN
        if len(tokens) > most and not truncate:
            raise InvalidInput(f"texts[{index}]", f"a text of at most {most} tokens", f"{len(tokens)} tokens")
        return _Job(index, tokens[:most], len(tokens) > most, source, target)

    def _check_options(self, max_new_tokens: int | None, num_beams: int, progress: object) -> int:
        limit = self.model.shape.limits.max_new_tokens
        if integer("num_beams", num_beams, 1) > 1:
            raise NotSupported("Translator", f"num_beams={num_beams}", "this version decodes greedily (num_beams=1)")
        if progress is not None and not callable(progress):
            raise InvalidInput("progress", "a callable or None", repr(progress))
        if max_new_tokens is None:
            return limit
        expected = f"an int from 1 to {limit}, the limit the model was loaded with"
        return integer("max_new_tokens", max_new_tokens, 1, limit, expected)

    def _languages(self, argument: str, given: Languages, count: int, default: int | None) -> list[str]:
        """Return one checked code for each text."""
        if given is None:
            if default is None:
                raise InvalidInput(argument, f"a language code here or as load(..., {argument}=)", None)
            return [self._tokenizer.language_code(default)] * count
        if isinstance(given, str):
            self._tokenizer.language_id(given, argument)
            return [given] * count
        if not isinstance(given, Iterable):
            raise InvalidInput(argument, "a language code, or one for each text", repr(given))
        codes = list(given)
        if len(codes) != count:
            raise InvalidInput(argument, f"one code for each of {count} texts", f"{len(codes)} codes")
        for code in codes:
            self._tokenizer.language_id(code, argument)
        return codes
