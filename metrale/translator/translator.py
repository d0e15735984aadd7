# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator: a model, an engine of its own, and the texts of any number of callers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Unpack, overload

from metrale.checks import flag, integer
from metrale.engine import Engine, EngineClosed, Generated, RequestHandle
from metrale.errors import InvalidInput, SequenceError, told
from metrale.factory import load
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import VOCABULARIES, Tokenizer
from metrale.translator.jobs import Job, JobMaker, blank, is_visible
from metrale.translator.options import Options, TranslationOptions
from metrale.translator.pairs import score_pairs
from metrale.translator.scoring import Scorer, attended, left
from metrale.translator.stream import Entry, Submitted, TranslationStream
from metrale.translator.terms import OneOrEach, Terms, TermsReader
from metrale.translator.translation import Languages, Scored, Translation

_BATCHES_PER_WINDOW: Final = 4
"""So many texts are with the engine for each of its lanes: enough that none runs empty while a long one holds up the
order."""

_MOST_WINDOW: Final = 1 << 20

_MOST_INDEX: Final = (1 << 63) - 1


class Translator:
    """Translates texts with one model.

    Safe to call from several threads, whose texts share the engine's steps, and beside other users of the same model.
    The engine starts with the first text, and holds lanes only while it has texts.

    Parameters
    ----------
    model : path or NllbModel
        A checkpoint folder or an id of the Hugging Face Hub, as for `metrale.load`, or a model loaded from one that has
        a tokenizer. A model that is given stays the caller's:
        `close` leaves it alone.
    **options
        The keyword arguments of `metrale.load`, when ``model`` is a path. ``source=`` and ``target=`` become the
        default languages; ``adapters=`` names the folders of LoRA adapters.

    Raises
    ------
    CheckpointError, InvalidInput, gpu_runtime.GpuRuntimeError
        As `metrale.load`; InvalidInput also when the model has no tokenizer, or options come with a loaded model.
    """

    def __init__(self, model: str | os.PathLike[str] | NllbModel, **options: Any) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._closed = False
        if isinstance(model, NllbModel):
            if options:
                raise InvalidInput("options", "none together with a loaded model", ", ".join(options))
            self.model = model
        else:
            self.model = load(model, **options)
        self._owns_model = not isinstance(model, NllbModel)
        if self.model.tokenizer is None:
            self.close()
            raise InvalidInput("model", f"a checkpoint with a tokenizer ({VOCABULARIES})", "one that serves ids only")
        self._tokenizer: Tokenizer = self.model.tokenizer
        self._terms = TermsReader(self.model, self._tokenizer)
        self._gate = threading.Lock()
        self._scorer = Scorer(self.model, self._gate, self._check_open)

    def __enter__(self) -> Translator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way, end the engine, and close the model if this translator loaded it.

        Calling it again does nothing.
        """
        with self._lock:
            engine, self._engine, self._closed = self._engine, None, True
        if engine is not None:
            engine.close(drain=False)
        if self._owns_model:
            self.model.close()

    @property
    def languages(self) -> tuple[str, ...]:
        """The language codes that ``source`` and ``target`` may be."""
        return self._tokenizer.languages

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the resident adapters, which ``adapter`` may be."""
        return tuple(self.model.adapters())

    @overload  # a str is a sequence of str as well; the first overload that fits is meant
    def translate(  # type: ignore[overload-overlap]
        self,
        texts: str,
        source: Languages = None,
        target: Languages = None,
        *,
        target_prefix: OneOrEach = None,
        adapter: OneOrEach = None,
        progress: Callable[[int], None] | None = None,
        **options: Unpack[Options],
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Sequence[str],
        source: Languages = None,
        target: Languages = None,
        *,
        target_prefix: OneOrEach = None,
        adapter: OneOrEach = None,
        progress: Callable[[int], None] | None = None,
        **options: Unpack[Options],
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: str | Sequence[str],
        source: Languages = None,
        target: Languages = None,
        *,
        target_prefix: OneOrEach = None,
        adapter: OneOrEach = None,
        progress: Callable[[int], None] | None = None,
        **options: Unpack[Options],
    ) -> Translation | list[Translation]:
        """Translate one text, or any number of them.

        The longest are begun first; results come in the order of ``texts``, and do not depend on it.

        Parameters
        ----------
        texts : str or sequence of str
            A blank text gives a blank translation.
        source, target : str, sequence of str or None
            Language codes: one for all texts, one for each, or None for the model's default.
        target_prefix : str, sequence of str or None, or None
            What the translation begins with, for all texts or for each; it is part of the result. It is tokenised by
            itself, so the model goes on behind its last token: end it where a word ends.
        adapter : str, sequence of str or None, or None
            The name of a resident adapter, for all texts or for each; None is the base model.
        progress : callable or None
            Called with the number of texts finished so far, in the calling thread.
        **options
            How to translate, and what to return: the attributes of `TranslationOptions`, by name. ``max_new_tokens``,
            ``num_beams``, ``sampling``, ``return_scores``, ``timeout`` and more.

        Returns
        -------
        Translation or list of Translation
            One for a single ``str``, a list otherwise. When the wait for it is interrupted, all of its texts are
            cancelled.

        Raises
        ------
        UnknownLanguage, InvalidInput
            When an argument is wrong, before anything is translated.
        SequenceError
            When the translator is closed, or an adapter leaves its slot before its texts are under way. A text that
            waits for a lane then ends with ``error`` in its result.
        """
        listed, single = _listed(texts)
        if progress is not None and not callable(progress):
            raise InvalidInput("progress", "a callable or None", told(progress))
        maker = self._maker(options)
        terms = self._terms.read(len(listed), source, target, target_prefix, adapter)
        results: list[Translation | None] = [None] * len(listed)
        jobs: list[Job] = []
        for index, tokens in enumerate(self._tokenizer.encode_batch(listed)):
            if is_visible(listed[index], tokens):
                jobs.append(maker.job(index, listed[index], tokens, terms[index]))
            else:
                results[index] = blank(terms[index])
        if progress is not None and len(jobs) < len(listed):
            progress(len(listed) - len(jobs))
        if jobs:
            self._run(jobs, results, maker, progress)
        finished = [result for result in results if result is not None]
        assert len(finished) == len(listed)
        if maker.options.return_attention:
            found = attended(self._scorer, jobs, [finished[job.index] for job in jobs])
            for job, result in zip(jobs, found, strict=True):
                finished[job.index] = result
        return finished[0] if single else finished

    def stream(
        self,
        texts: Iterable[str],
        source: str | None = None,
        target: str | None = None,
        *,
        target_prefix: str | None = None,
        adapter: str | None = None,
        window: int | None = None,
        first_index: int = 0,
        **options: Unpack[Options],
    ) -> TranslationStream:
        """Translate texts as they come, in any number, and give each translation as soon as it is the next one.

        Parameters
        ----------
        texts : iterable of str
            Read lazily, on a thread of the stream's own. What it raises is raised in its place in the order.
        source, target, target_prefix, adapter : str or None
            As for `translate`, one for all texts.
        window : int or None
            Most texts that are read and not given out yet; None takes four for each of the model's lanes.
        first_index : int
            What the first text counts as where draws depend on the index: a stream that goes on behind ``n`` texts of
            another draws as that would have.
        **options
            As for `translate`. A text that is refused is so in its place in the order.

        Returns
        -------
        TranslationStream
            An iterator. Closing or dropping it cancels what is under way.

        Raises
        ------
        UnknownLanguage, InvalidInput, SequenceError
            As `translate`, for what is wrong with other arguments than a text.
        """
        if isinstance(texts, str):
            raise InvalidInput("texts", "an iterable of str", "one str")
        _require_iterable(texts)
        lanes = self.model.shape.limits.max_batch
        wide = _BATCHES_PER_WINDOW * lanes if window is None else integer("window", window, 1, _MOST_WINDOW)
        first = integer("first_index", first_index, 0, _MOST_INDEX)
        maker, terms = self._checked(source, target, target_prefix, adapter, options, first)
        self._running()

        def submit(index: int, text: str) -> Entry:
            tokens = self._encode(index, text)
            if not is_visible(text, tokens):
                return blank(terms)
            job = maker.job(index, text, tokens, terms)
            return Submitted(job, self._submit(job))

        def finish(job: Job, generated: Generated) -> Translation:
            result = self._translation(maker, job, generated)
            return attended(self._scorer, [job], [result])[0] if maker.options.return_attention else result

        return TranslationStream(texts, submit, finish, wide)

    def check_options(
        self,
        source: str | None = None,
        target: str | None = None,
        *,
        target_prefix: str | None = None,
        adapter: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Raise what `stream` would raise for these arguments; do nothing else."""
        self._checked(source, target, target_prefix, adapter, options)

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        sources: str,
        targets: str,
        source: Languages = None,
        target: Languages = None,
        *,
        adapter: OneOrEach = None,
        truncate: bool = True,
    ) -> Scored: ...
    @overload
    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        source: Languages = None,
        target: Languages = None,
        *,
        adapter: OneOrEach = None,
        truncate: bool = True,
    ) -> list[Scored]: ...
    def score(
        self,
        sources: str | Sequence[str],
        targets: str | Sequence[str],
        source: Languages = None,
        target: Languages = None,
        *,
        adapter: OneOrEach = None,
        truncate: bool = True,
    ) -> Scored | list[Scored]:
        """Return how likely given translations are: one of a text, or one of each of any number of texts.

        It waits for lanes of the model while translations have all of them.

        Parameters
        ----------
        sources, targets : str or sequence of str
            The texts and their translations.
        source, target, adapter
            As for `translate`.
        truncate : bool
            Whether a source that is too long is cut, and flagged in its result, or refused. A target never is cut.

        Returns
        -------
        Scored or list of Scored
            One for a single pair, a list otherwise.

        Raises
        ------
        UnknownLanguage, InvalidInput
            When an argument is wrong, or a target is longer than the model's limit, before anything is computed.
        SequenceError
            When the translator is closed, or an adapter leaves its slot meanwhile.
        """
        truncate = flag("truncate", truncate)
        (texts, single), (wanted, _) = _listed(sources, "sources"), _listed(targets, "targets")
        if len(wanted) != len(texts) or single != isinstance(targets, str):
            raise InvalidInput("targets", "one target for each source", f"{len(wanted)} for {len(texts)}")
        terms = self._terms.read(len(texts), source, target, adapter=adapter)
        self._check_open()
        pairs = texts, wanted
        results = score_pairs(self.model, self._tokenizer, self._scorer, pairs, terms, truncate=truncate)
        return results[0] if single else results

    def _run(
        self,
        jobs: list[Job],
        results: list[Translation | None],
        maker: JobMaker,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Fill in the results of ``jobs``, the longest first, so that no long one is left at the end."""
        done = len(results) - len(jobs)
        self._running()
        window = _BATCHES_PER_WINDOW * self.model.shape.limits.max_batch
        ended: SimpleQueue[RequestHandle] = SimpleQueue()
        under_way: dict[RequestHandle, Job] = {}
        waiting = iter(sorted(jobs, key=lambda job: len(job.request.prompt_tokens), reverse=True))
        try:
            while done < len(results):
                while len(under_way) < window and (job := next(waiting, None)) is not None:
                    handle = self._submit(job)
                    under_way[handle] = job
                    handle.add_done_callback(ended.put)
                handle = ended.get()
                job = under_way.pop(handle)
                results[job.index] = self._translation(maker, job, handle.result())
                done += 1
                if progress is not None:
                    progress(done)
        except BaseException:  # an interrupt above all: nobody will take the other results
            for handle in under_way:
                handle.cancel()
            for handle in under_way:
                handle.result()
            raise

    def _submit(self, job: Job) -> RequestHandle:
        """Give a job to the engine, with the adapter that it is meant for."""
        engine = self._running()
        with self._gate:
            handle = engine.submit(job.request)
        adapter = job.terms.adapter
        if adapter is not None and handle.adapter_id != adapter.number:
            handle.cancel()
            raise left(adapter)
        return handle

    def _translation(self, maker: JobMaker, job: Job, generated: Generated) -> Translation:
        """Return what a job came to. What no text could do without is raised: the device, and the engine."""
        if generated.finish_reason == "error":
            with self.model.exclusive():
                self.model.bind_gpu_to_thread()
                self.model.gpu.synchronize()
            if self._running().closed:
                raise EngineClosed("the engine has stopped")
        return maker.translation(job, generated)

    def _running(self) -> Engine:
        """Return the engine, which is started at the first use."""
        with self._lock:
            self._check_open()
            if self._engine is None:
                self._engine = Engine(self.model)
            return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise SequenceError("the translator is closed")

    def _checked(
        self,
        source: str | None,
        target: str | None,
        target_prefix: str | None,
        adapter: str | None,
        options: Options,
        first_index: int = 0,
    ) -> tuple[JobMaker, Terms]:
        """Return what makes requests, and the terms of every text; what is wrong with either is said now."""
        maker = self._maker(options, first_index)
        (terms,) = self._terms.read(1, source, target, target_prefix, adapter)
        maker.job(0, "", (), terms)
        return maker, terms

    def _maker(self, options: Options, first_index: int = 0) -> JobMaker:
        """Return what makes requests of texts, after checking what they have in common."""
        checked = TranslationOptions(**options)
        limit = self.model.shape.limits.max_new_tokens
        expected = f"an int from 1 to {limit}, the limit the model was loaded with"
        if checked.max_new_tokens is not None:
            most = integer("max_new_tokens", checked.max_new_tokens, 1, limit, expected)
            checked = replace(checked, max_new_tokens=most)
        checked.check_penalty(checked.max_new_tokens or limit)
        sampling = checked.sampling_params(self.model.config.generation.eos_token_id[0])
        return JobMaker(self.model, self._tokenizer, checked, sampling, first_index)

    def _encode(self, index: int, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except InvalidInput as error:
            raise InvalidInput(f"texts[{index}]", error.expected, error.got) from None


def _listed(texts: str | Sequence[str], argument: str = "texts") -> tuple[list[str], bool]:
    """Return texts as a list, and whether it was a single one."""
    if isinstance(texts, str):
        return [texts], True
    _require_iterable(texts, argument)
    return list(texts), False


def _require_iterable(texts: object, argument: str = "texts") -> None:
    if isinstance(texts, bytes | set | frozenset | dict) or not isinstance(texts, Iterable):
        raise InvalidInput(argument, "a str or a sequence of str", told(texts))
