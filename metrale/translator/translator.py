# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translator: a model, an engine of its own, and the texts of any number of callers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, overload

from metrale.checks import integer
from metrale.engine import Engine, EngineClosed, Generated, RequestHandle
from metrale.errors import InvalidInput, NotSupported, SequenceError
from metrale.factory import load
from metrale.model import GREEDY, SamplingParams
from metrale.nllb.model import NllbModel
from metrale.nllb.tokenizer import MODEL_FILE, NllbTokenizer
from metrale.translator.jobs import Job, JobMaker, blank
from metrale.translator.stream import Entry, Submitted, TranslationStream
from metrale.translator.translation import Languages, Translation

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
            raise InvalidInput("model", f"a checkpoint with a tokenizer ({MODEL_FILE})", "one that serves ids only")
        self._tokenizer: NllbTokenizer = self.model.tokenizer

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
        sampling: SamplingParams = GREEDY,
        timeout: float | None = None,
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
        sampling: SamplingParams = GREEDY,
        timeout: float | None = None,
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
        sampling: SamplingParams = GREEDY,
        timeout: float | None = None,
    ) -> Translation | list[Translation]:
        """Translate one text, or any number of them.

        The longest are begun first; results come in the order of ``texts``, and do not depend on it.

        Parameters
        ----------
        texts : str or sequence of str
            A blank text gives a blank translation.
        source, target : str, sequence of str or None
            Language codes: one for all texts, one for each, or None for the model's default.
        max_new_tokens : int or None
            Most tokens to generate, the language token and EOS included; None takes the model's limit.
        num_beams : int
            1 in this version.
        return_scores : bool
            Whether to compute `Translation.score`.
        truncate : bool
            Whether a source that is too long is cut, and flagged in its result, or refused.
        progress : callable or None
            Called with the number of texts finished so far, in the calling thread.
        sampling : SamplingParams
            How tokens are chosen. Each text draws by a seed of its own, which follows from ``seed`` and the text's
            index alone.
        timeout : float or None
            Most seconds for a text, from when the engine is given it; at most a few batches of texts are ahead of it
            then.

        Returns
        -------
        Translation or list of Translation
            One for a single ``str``, a list otherwise. When the wait for it is interrupted, all of its texts are
            cancelled.

        Raises
        ------
        UnknownLanguage, InvalidInput
            When an argument is wrong, before anything is translated.
        NotSupported
            When ``num_beams`` is more than 1.
        SequenceError
            When the translator is closed.
        """
        if isinstance(texts, str):
            texts, single = [texts], True
        else:
            _require_iterable(texts)
            texts, single = list(texts), False
        if progress is not None and not callable(progress):
            raise InvalidInput("progress", "a callable or None", repr(progress))
        maker = self._maker(max_new_tokens, num_beams, return_scores, truncate, sampling, timeout)
        sources = self._languages("source", source, len(texts), self.model.languages.source)
        targets = self._languages("target", target, len(texts), self.model.languages.target)
        results: list[Translation | None] = [None] * len(texts)
        jobs: list[Job] = []
        for index, tokens in enumerate(self._tokenizer.encode_batch(texts)):
            if tokens:
                jobs.append(maker.job(index, tokens, sources[index], targets[index]))
            else:
                results[index] = blank(sources[index], targets[index])
        if progress is not None and len(jobs) < len(texts):
            progress(len(texts) - len(jobs))
        if jobs:
            self._run(jobs, results, maker, progress)
        finished = [result for result in results if result is not None]
        assert len(finished) == len(texts)
        return finished[0] if single else finished

    def stream(
        self,
        texts: Iterable[str],
        source: str | None = None,
        target: str | None = None,
        *,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        return_scores: bool = False,
        truncate: bool = True,
        sampling: SamplingParams = GREEDY,
        timeout: float | None = None,
        window: int | None = None,
        first_index: int = 0,
    ) -> TranslationStream:
        """Translate texts as they come, in any number, and give each translation as soon as it is the next one.

        Parameters
        ----------
        texts : iterable of str
            Read lazily, on a thread of the stream's own. What it raises is raised in its place in the order.
        source, target : str or None
            One language code for all texts, or None for the model's default.
        max_new_tokens, num_beams, return_scores, truncate, sampling, timeout
            As for `translate`. A text that is refused is so in its place in the order.
        window : int or None
            Most texts that are read and not given out yet; None takes four for each of the model's lanes.
        first_index : int
            What the first text counts as where draws depend on the index: a stream that goes on behind ``n`` texts of
            another draws as that would have.

        Returns
        -------
        TranslationStream
            An iterator. Closing or dropping it cancels what is under way.

        Raises
        ------
        UnknownLanguage, InvalidInput, NotSupported, SequenceError
            As `translate`, for what is wrong with other arguments than a text.
        """
        if isinstance(texts, str):
            raise InvalidInput("texts", "an iterable of str", "one str")
        _require_iterable(texts)
        lanes = self.model.shape.limits.max_batch
        wide = _BATCHES_PER_WINDOW * lanes if window is None else integer("window", window, 1, _MOST_WINDOW)
        first = integer("first_index", first_index, 0, _MOST_INDEX)
        maker = self._maker(max_new_tokens, num_beams, return_scores, truncate, sampling, timeout, first)
        (source_code,) = self._languages("source", source, 1, self.model.languages.source)
        (target_code,) = self._languages("target", target, 1, self.model.languages.target)
        maker.job(0, (), source_code, target_code)  # what is wrong with the options is said now
        engine = self._running()

        def submit(index: int, text: str) -> Entry:
            tokens = self._encode(index, text)
            if not tokens:
                return blank(source_code, target_code)
            job = maker.job(index, tokens, source_code, target_code)
            return Submitted(job, engine.submit(job.request))

        def finish(job: Job, generated: Generated) -> Translation:
            return self._translation(maker, job, generated)

        return TranslationStream(texts, submit, finish, wide)

    def _run(
        self,
        jobs: list[Job],
        results: list[Translation | None],
        maker: JobMaker,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Fill in the results of ``jobs``, the longest first, so that no long one is left at the end."""
        done = len(results) - len(jobs)
        engine = self._running()
        window = _BATCHES_PER_WINDOW * self.model.shape.limits.max_batch
        ended: SimpleQueue[RequestHandle] = SimpleQueue()
        under_way: dict[RequestHandle, Job] = {}
        waiting = iter(sorted(jobs, key=lambda job: len(job.request.prompt_tokens), reverse=True))
        try:
            while done < len(results):
                while len(under_way) < window and (job := next(waiting, None)) is not None:
                    handle = engine.submit(job.request)
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
            if self._closed:
                raise SequenceError("the translator is closed")
            if self._engine is None:
                self._engine = Engine(self.model)
            return self._engine

    def _maker(
        self,
        max_new_tokens: int | None,
        num_beams: int,
        scores: bool,
        truncate: bool,
        sampling: SamplingParams,
        timeout: float | None,
        first_index: int = 0,
    ) -> JobMaker:
        """Return what makes requests of texts, after checking what they have in common."""
        limit = self.model.shape.limits.max_new_tokens
        if integer("num_beams", num_beams, 1) > 1:
            raise NotSupported("Translator", f"num_beams={num_beams}", "this version follows one beam (num_beams=1)")
        expected = f"an int from 1 to {limit}, the limit the model was loaded with"
        most = limit if max_new_tokens is None else integer("max_new_tokens", max_new_tokens, 1, limit, expected)
        if not isinstance(sampling, SamplingParams):
            raise InvalidInput("sampling", "a SamplingParams", repr(sampling))
        return JobMaker(self.model, self._tokenizer, most, bool(scores), bool(truncate), sampling, timeout, first_index)

    def _encode(self, index: int, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except InvalidInput as error:
            raise InvalidInput(f"texts[{index}]", error.expected, error.got) from None

    def _languages(self, argument: str, given: Languages, count: int, default: int | None) -> list[str]:
        """Return one checked code for each text."""
        if given is None:
            if default is None:
                raise InvalidInput(argument, f"a language code here, or as {argument}= where the model is loaded", None)
            return [self._tokenizer.language_code(default)] * count
        if isinstance(given, str):
            self._tokenizer.language_id(given, argument)
            return [given] * count
        if not isinstance(given, Iterable):
            raise InvalidInput(argument, "a language code, or one for each text", repr(given))
        codes = list(given)
        if len(codes) != count:
            texts = "one code" if count == 1 else f"one code for each of {count} texts"
            raise InvalidInput(argument, texts, f"{len(codes)} codes")
        for code in codes:
            self._tokenizer.language_id(code, argument)
        return codes


def _require_iterable(texts: object) -> None:
    if isinstance(texts, bytes | set | frozenset | dict) or not isinstance(texts, Iterable):
        raise InvalidInput("texts", "a str or a sequence of str", repr(texts)[:80])
