# SPDX-License-Identifier: MIT OR Apache-2.0
"""What people call, and the kind of each argument. A test fails when a call has an argument that is not here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import metrale
from metrale import (
    BeamParams,
    BeamReq,
    Engine,
    FeedSource,
    PrefillSlice,
    Request,
    RowMask,
    SamplingParams,
    ScoreReq,
    SequenceState,
    TranslationOptions,
    Translator,
)
from metrale.nllb.limits import ServingLimits
from metrale.nllb.model import NllbModel
from tests.hostile import calls, kinds
from tests.hostile.calls import ADAPTERS, PROMPT, VOCAB
from tests.hostile.kinds import Kind, choice, flag, ids, instance, real, text, whole

PAST_INT32: Final = 1 << 31
DEMO_ROWS: Final = 8240
LONGEST: Final = 32


@dataclass(frozen=True)
class Subject:
    """One call.

    Attributes
    ----------
    of : callable
        What has the signature.
    call : callable
        Takes the arguments by name, uses what comes of them as far as it goes, and returns what JSON can hold.
    kinds : mapping
        The kind of each argument.
    free : mapping of str to str
        Arguments that are not among ``kinds``, each with the reason.
    named : mapping of str to str
        Regular expressions for arguments that an error calls otherwise.
    """

    of: Callable[..., object]
    call: Callable[..., object]
    kinds: Mapping[str, Kind]
    free: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> set[str]:
        """Return the arguments that nothing is said about, and those that there are none of."""
        names = {
            name
            for name, one in inspect.signature(self.of).parameters.items()
            if name not in ("self", "options") or one.kind is not inspect.Parameter.VAR_KEYWORD
        } - {"self", "options"}
        return names ^ {*self.kinds, *self.free}


LANGUAGE: Final = text("deu_Latn", unknown="xyz_Latn", empty="", upper="DEU_LATN", long="x" * 100_000, nul="\0").but(
    "none"
)
EACH_LANGUAGE: Final = LANGUAGE.also(too_many=["deu_Latn", "fra_Latn"], none_of=[], ints=[3])
PREFIX: Final = text("Bon").but("none").also(too_many=["a", "b"], ints=[3], long="word " * 200)
ONE_PREFIX: Final = text("Bon").but("none").also(long="word " * 200)
ADAPTER: Final = Kind(
    None, {"int": 3, "unknown": "it", "empty": "", "bytes": b"it", "list": ["it"], "object": object()}
)
TEXTS: Final = Kind(
    "Good morning.",
    {
        "int": 3,
        "none": None,
        "bytes": b"text",
        "set": {"text"},
        "dict": {"text": 1},
        "ints": [1],
        "nones": [None],
        "nested": [["text"]],
        "bytes_list": [b"text"],
        "surrogate": "a\ud800",
        "one_surrogate": ["fine", "\udfff"],
        "object": object(),
    },
)

_SAMPLING: Final[dict[str, Kind]] = {
    "temperature": real(0.5, -0.1, 1e39),
    "top_k": whole(3, 0, PAST_INT32 - 1),
    "top_p": real(0.5, 0.0, 1.5),
    "min_p": real(0.5, -0.1, 1.5),
    "repetition_penalty": real(1.5, 0.0, 1e39),
    "no_repeat_ngram_size": whole(2, 0, PAST_INT32 - 1),
    "suppress_tokens": ids((5, 6), PAST_INT32),
    "bad_words": Kind(
        ((5, 6), (7,)),
        {
            "int": 3,
            "str": "5",
            "flat": [5],
            "empty": [()],
            "floats": [[1.5]],
            "negative": [[-1]],
            "none": None,
            "nones": [None],
            "strings": ["56"],
            "huge": [[kinds.HUGE]],
            "past": [[VOCAB]],
        },
    ),
    "eos_ids": ids((2,), PAST_INT32),
    "min_new_tokens": whole(1, 0, PAST_INT32 - 1),
    "max_new_tokens": whole(5, 1, PAST_INT32 - 1, optional=True),
    "forced_eos_id": whole(2, 0, PAST_INT32 - 1, optional=True),
    "seed": whole(7, 0, (1 << 64) - 1).but("int64").also(uint64=1 << 64),
}

_LIMITS: Final[dict[str, Kind]] = {
    "max_batch": whole(3, 1, PAST_INT32 - 1),
    "max_source_len": whole(9, 2, PAST_INT32 - 1),
    "max_new_tokens": whole(7, 2, PAST_INT32 - 1),
    "max_encoder_tokens": whole(40, 12, PAST_INT32 - 1, optional=True),
    "kv_bytes": whole(100, 1, (1 << 63) - 1, optional=True),
    "max_adapters": whole(1, 0, 4096),
    "max_lora_rank": whole(5, 1, 4096),
}
_LOADING: Final[dict[str, Kind]] = {
    "device": choice(
        "host", cpu="cpu", upper="HOST", cuda_minus="cuda:-1", cuda_text="cuda:x", empty="", nul="host\0", bytes=b"host"
    ).but("none"),
    "dtype": choice("auto", short="f32", numpy="float64", upper="Float32", bytes=b"auto", unhashable={}),
    **_LIMITS,
    "kv_bytes": whole(1 << 20, 1, (1 << 63) - 1, optional=True),
    "batch_invariant": flag(False),
}

SUBJECTS: Final[dict[str, Subject]] = {
    "SamplingParams": Subject(
        SamplingParams, calls.sampled, _SAMPLING, named={"bad_words": r"(sampling\.)?bad_words(\[\d+\])*(: length)?"}
    ),
    "BeamParams": Subject(
        BeamParams,
        calls.beams,
        {
            "num_beams": whole(2, 1, 64).also(past_the_lanes=5),
            "length_penalty": real(1.5, -1e5, 1e5),
            "early_stopping": choice(True, always="always", zero=0, one=1, float=1.0),
            "num_return_sequences": whole(1, 1, 4),
        },
    ),
    "BeamReq": Subject(
        BeamReq,
        calls.searched,
        {
            "prompt_tokens": ids(PROMPT, VOCAB).also(long=[5] * 11),
            "src_lang_id": whole(80, 0, VOCAB - 1),
            "tgt_lang_id": whole(81, 0, VOCAB - 1),
            "adapter_slot": whole(-1, -1, -1),
            "num_beams": whole(2, 1, 4),
            "max_new": whole(5, 1, 8),
            "length_penalty": real(1.5, -1e5, 1e5),
            "early_stopping": choice(True, always="always", zero=0, float=1.0),
            "num_return_sequences": whole(1, 1, 4),
            "min_new": whole(1, 0),
            "no_repeat_ngram_size": _SAMPLING["no_repeat_ngram_size"],
            "repetition_penalty": _SAMPLING["repetition_penalty"],
            "bad_words_ids": _SAMPLING["bad_words"],
            "suppress_tokens": ids((5, 6), VOCAB),
            "forced_eos_id": whole(2, 0, VOCAB - 1, optional=True),
            "prefix_tokens": ids((9,), VOCAB),
            "eos_ids": ids((2,), VOCAB, optional=True),
        },
    ),
    "ScoreReq": Subject(
        ScoreReq,
        calls.scored,
        {
            "prompt_tokens": ids(PROMPT, VOCAB).also(long=[5] * 11),
            "target_tokens": ids((8, 9), VOCAB, empty=False).also(long=[5] * 9),
            "src_lang_id": whole(80, 0, VOCAB - 1),
            "tgt_lang_id": whole(81, 0, VOCAB - 1),
            "adapter_slot": whole(-1, -1, -1),
        },
    ),
    "Request": Subject(
        Request,
        calls.requested,
        {
            "prompt_tokens": ids(PROMPT, VOCAB).also(long=[5] * 11),
            "src_lang_id": whole(80, 0, VOCAB - 1),
            "tgt_lang_id": whole(81, 0, VOCAB - 1),
            "max_new_tokens": whole(5, 1, 8, optional=True),
            "eos_ids": ids((2,), VOCAB, optional=True),
            "sampling": instance(SamplingParams()),
            "beams": instance(BeamParams(2), optional=True),
            "prefix_tokens": ids((9,), VOCAB),
            "adapter_slot": whole(-1, -1, -1),
            "priority": whole(3, 1 - PAST_INT32, PAST_INT32 - 1),
            "timeout": real(100.0, 0.0, None, optional=True),
            "logprobs": flag(True),
            "on_token": Kind(print, {"int": 3, "str": "print", "list": []}),
        },
    ),
    "TranslationOptions": Subject(
        TranslationOptions,
        calls.options,
        {
            "max_new_tokens": whole(9, 1, LONGEST, optional=True),
            "num_beams": whole(2, 1, 4),
            "num_return_sequences": whole(1, 1, 1),
            "length_penalty": real(1.5, -1e5, 1e5),
            "early_stopping": choice(True, always="always", zero=0, float=1.0),
            "min_new_tokens": whole(3, 0, PAST_INT32 - 1, optional=True),
            "no_repeat_ngram_size": whole(2, 0, PAST_INT32 - 1, optional=True),
            "repetition_penalty": real(1.5, 0.0, 1e39, optional=True),
            "bad_words_ids": _SAMPLING["bad_words"].but("none", "past").also(past=[[DEMO_ROWS]]),
            "suppress_tokens": ids((5, 6), DEMO_ROWS, optional=True),
            "forced_eos": whole(2, 0, DEMO_ROWS - 1).but("bool", "np_bool", "none"),
            "sampling": instance(SamplingParams()),
            "return_scores": flag(True),
            "return_attention": flag(True),
            "truncate": flag(True),
            "timeout": real(100.0, 0.0, None, optional=True),
        },
    ),
    "Engine": Subject(
        Engine,
        calls.engine,
        {
            "model": Kind(None, {"int": 3, "str": "model", "class": NllbModel, "object": object()}),
            "max_queue": whole(3, 1),
            "max_lanes": whole(2, 1, 4, optional=True),
            "max_prefill_tokens": whole(100, 1),
            "prefill_interval": whole(2, 1),
            "lag": whole(1, 0, 64, optional=True),
            "aging": real(5.0, 0.0, None).also(none=None),
            "clock": Kind(None, {"int": 3, "str": "time"}),
        },
    ),
    "Engine.submit": Subject(
        Engine.submit,
        calls.submitted,
        {
            "request": instance(Request(PROMPT)).also(dict={"prompt_tokens": PROMPT}),
            "block": flag(True),
            "timeout": real(5.0, -1.0, None, optional=True),
        },
    ),
    "load": Subject(
        metrale.load,
        calls.loaded,
        {
            **_LOADING,
            "max_adapters": whole(1, 0, 4096, optional=True),
            "adapters": Kind(
                ADAPTERS,
                {
                    "int": 3,
                    "list": ["it"],
                    "str": "it",
                    "int_name": {3: "it"},
                    "empty_name": {"": "it"},
                    "no_name": {None: "it"},
                },
            ),
            "source": whole(80, 0, VOCAB - 1, optional=True),
            "target": whole(81, 0, VOCAB - 1, optional=True),
            "legacy_order": flag(False),
            "step_graphs": flag(True).but("none"),
        },
        free={"path": "tests/hostile/place_cases.py"},
    ),
    "memory_plan": Subject(metrale.memory_plan, calls.planned, _LOADING, free={"path": "tests/hostile/place_cases.py"}),
    "ServingLimits": Subject(
        ServingLimits, calls.limited, {**_LIMITS, "max_encoder_tokens": whole(600, 512, PAST_INT32 - 1, optional=True)}
    ),
    "SequenceState": Subject(
        SequenceState,
        calls.state,
        {
            "src_lang_id": whole(80, 0, VOCAB - 1),
            "tgt_lang_id": whole(81, 0, VOCAB - 1),
            "adapter_slot": whole(-1, -1, -1),
            "prefix_tokens": ids((9,), VOCAB).also(long=[9] * 8),
        },
        free=dict.fromkeys(("slot_idx", "tokens", "seq_len", "prompt_len"), "the model's own to write"),
    ),
    "PrefillSlice": Subject(
        PrefillSlice,
        calls.sliced,
        {
            "prompt_tokens": ids(PROMPT, VOCAB).but("generator"),
            "seq": Kind(None, {"int": 3, "str": "seq", "class": SequenceState, "object": object()}),
            "chunk_start": whole(0, 0, 0),
            "chunk_len": whole(3, 3, 3),
            "is_last_chunk": flag(True).but("one"),
        },
        named={
            "chunk_start": r"streams\[0\]: \w+",
            "chunk_len": r"streams\[0\]: \w+",
            "is_last_chunk": r"streams\[0\]: \w+",
            "prompt_tokens": r"streams\[0\](\[\d+\]|: chunk)?",
            "seq": "seq",
        },
    ),
    "RowMask": Subject(
        RowMask,
        calls.masked,
        {"banned": ids((5, 6), VOCAB).also(three=[5, 6, 7])},
        named={"banned": r"(masks\[0\]\.)?banned(\[\d\])?"},
    ),
    "FeedSource": Subject(
        FeedSource,
        calls.fed,
        {"token": whole(9, 0, VOCAB - 1, optional=True).but("none")},
        free={"from_row": "a row of an earlier call", "sampled": "of an earlier call"},
        named={"token": r"FeedSource|sources\[0\](\.token)?|token"},
    ),
    "Translator.translate": Subject(
        Translator.translate,
        calls.translated,
        {
            "texts": TEXTS,
            "source": EACH_LANGUAGE,
            "target": EACH_LANGUAGE,
            "target_prefix": PREFIX,
            "adapter": ADAPTER,
            "progress": Kind(None, {"int": 3, "str": "print"}),
        },
    ),
    "Translator.stream": Subject(
        Translator.stream,
        calls.streamed,
        {
            "texts": dataclasses.replace(TEXTS.also(str="text"), valid=["Good morning."]),
            "source": LANGUAGE,
            "target": LANGUAGE,
            "target_prefix": ONE_PREFIX,
            "adapter": ADAPTER,
            "window": whole(3, 1, 1 << 20, optional=True),
            "first_index": whole(3, 0, (1 << 63) - 1),
        },
    ),
    "Translator.check_options": Subject(
        Translator.check_options,
        calls.checked,
        {"source": LANGUAGE, "target": LANGUAGE, "target_prefix": ONE_PREFIX, "adapter": ADAPTER},
    ),
    "Translator.score": Subject(
        Translator.score,
        calls.rated,
        {
            "sources": TEXTS.but("ints", "nones", "nested", "bytes_list", "one_surrogate").also(too_many=["a", "b"]),
            "targets": TEXTS.also(long="word " * 200, too_many=["a", "b"]),
            "source": EACH_LANGUAGE,
            "target": EACH_LANGUAGE,
            "adapter": ADAPTER,
            "truncate": flag(True),
        },
        named={"sources": r"sources(\[\d+\])?|targets"},
    ),
}
"""The calls by name."""

NO_INPUT: Final = frozenset(
    {
        *("Generated", "Hypothesis", "MixedBatchResult", "MixedForwardResult", "Scored", "ScoredTarget", "Translation"),
        *(
            "TranslationHypothesis",
            "UnknownSpan",
            "TranslationStream",
            "RequestHandle",
            "EngineStats",
        ),  # what calls return
        *(
            "CheckpointError",
            "EngineClosed",
            "EngineError",
            "InvalidInput",
            "MetraleError",
            "NoFreeSlot",
            "NonFiniteLogits",
        ),
        *("NotSupported", "QueueFull", "RequestFailed", "SequenceError", "UnknownLanguage"),  # what they raise
        *("Model", "demo_model_path"),  # an interface, and a call without arguments
        "Translator",  # load's arguments
    }
)
"""Public names that take nothing from outside."""
