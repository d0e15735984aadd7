# SPDX-License-Identifier: MIT OR Apache-2.0
"""The configuration of an NLLB-200 or M2M-100 checkpoint, checked before anything uses it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from metrale.checkpoint import FieldReader, read_json_object, require_folder
from metrale.checkpoint.json_fields import shown
from metrale.errors import CheckpointError

MODEL_TYPE = "m2m_100"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# Far above any real model; what is larger is a damaged file, and would only be found out by running out of memory.
MAX_D_MODEL = 1 << 16
MAX_LAYERS = 1 << 10
MAX_FFN_DIM = 1 << 20
MAX_VOCAB = 1 << 24
MAX_LENGTH = 1 << 24
MAX_BEAMS = 1 << 10
MAX_CONFIG_BYTES = 4 << 20

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "relu": "relu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "silu": "silu",
        "swish": "silu",
        "linear": "none",
    }
)
"""transformers' names of activations, and the function each one is, up to the rounding of float32.

Its ``gelu`` is the exact one, with erf; the five of ``gelu_tanh`` are one formula, written in different ways.
"""

OTHER_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "nllb-moe": "a mixture of experts",
        "mbart": "mBART, whose positions are learned",
        "marian": "Marian",
        "t5": "T5 or MADLAD",
        "umt5": "UMT5",
        "seamless_m4t": "SeamlessM4T",
        "seamless_m4t_v2": "SeamlessM4T",
    }
)
"""Other translation models that one may take for this family, and what they are."""

CHANGING_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "weights that are not quantized",
        "per_layer_config": "layers of one shape",
    }
)
"""Keys that make another model of the same architecture when they are not null, and what is expected instead."""

DTYPES: Mapping[str, str] = MappingProxyType({"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"})

_MODEL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint asks of generation when the caller does not say otherwise.

    Read from ``generation_config.json``. Without that file the same keys of ``config.json`` count, as in transformers;
    with it, only the ids that it leaves out come from ``config.json``. A null is an absent key.

    Attributes
    ----------
    max_length : int or None
        Most decoder tokens, the start token included; None when the checkpoint does not say.
    max_new_tokens, min_new_tokens : int or None
        Most and fewest decoder tokens after the start token.
    num_beams : int
    length_penalty : float
    early_stopping : bool or "never"
    no_repeat_ngram_size : int
        0 for no limit.
    repetition_penalty : float
    bad_words_ids : tuple of tuple of int
    pad_token_id, decoder_start_token_id : int
    eos_token_id : tuple of int
        Every id that ends a sequence.
    bos_token_id, forced_bos_token_id, forced_eos_token_id : int or None
    """

    max_length: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    pad_token_id: int = 1
    bos_token_id: int | None = 0
    eos_token_id: tuple[int, ...] = (2,)
    decoder_start_token_id: int = 2
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None

    def not_greedy(self) -> dict[str, object]:
        """Return the settings that plain greedy decoding leaves out, by their names; of one beam, not what needs more.

        The length limits are left out too: those of a request, or of the model, take their place.
        """
        plain = GenerationDefaults()
        searched = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
        found = {
            "num_beams": self.num_beams,
            **(searched if self.num_beams > 1 else {}),
            "min_new_tokens": self.min_new_tokens or None,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
            "repetition_penalty": self.repetition_penalty,
            "bad_words_ids": self.bad_words_ids,
            "forced_eos_token_id": self.forced_eos_token_id,
        }
        return {name: value for name, value in found.items() if value != getattr(plain, name)}


@dataclass(frozen=True, slots=True)
class NllbConfig:
    """The shape of a model and the ids it treats specially.

    Every default is that of transformers' ``M2M100Config``. In ``config.json`` only ``model_type`` is required; an
    absent key takes the default, as it does in transformers. ``from_dir`` and ``from_dict`` check everything; the
    constructor checks nothing.

    Attributes
    ----------
    vocab_size : int
        As ``config.json`` has it. The rows of the embedding are the truth: ``WeightMap.vocab_size``.
    d_model : int
        Width of the hidden state.
    encoder_layers, decoder_layers, encoder_attention_heads, decoder_attention_heads : int
    encoder_ffn_dim, decoder_ffn_dim : int
        Width inside the feed-forward blocks.
    activation_function : {"relu", "gelu", "gelu_tanh", "silu", "none"}
        ``gelu`` is the exact one, with erf.
    scale_embedding : bool
        Whether embeddings are multiplied by the square root of ``d_model``.
    tie_word_embeddings : bool
        Whether a matrix of embedding or output head that is not stored is another one's (`metrale.nllb.embeddings`).
    max_position_embeddings : int
        Positions the model was made for; the sinusoidal table is not bounded by it.
    pad_token_id : int
        Also sets the first position, ``pad_token_id + 1``.
    bos_token_id, forced_bos_token_id : int or None
    eos_token_id : tuple of int
    decoder_start_token_id : int
    dtype : {"f32", "f16", "bf16", "f64"} or None
        What ``config.json`` says of the weights; None when it says nothing. The stored tensors are the truth.
    generation : GenerationDefaults
    """

    vocab_size: int = 128112
    d_model: int = 1024
    encoder_layers: int = 12
    decoder_layers: int = 12
    encoder_attention_heads: int = 16
    decoder_attention_heads: int = 16
    encoder_ffn_dim: int = 4096
    decoder_ffn_dim: int = 4096
    activation_function: str = "relu"
    scale_embedding: bool = True
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 1024
    pad_token_id: int = 1
    bos_token_id: int | None = 0
    eos_token_id: tuple[int, ...] = (2,)
    decoder_start_token_id: int = 2
    forced_bos_token_id: int | None = None
    dtype: str | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def encoder_head_dim(self) -> int:
        """Width of one attention head of the encoder."""
        return self.d_model // self.encoder_attention_heads

    @property
    def decoder_head_dim(self) -> int:
        """Width of one attention head of the decoder."""
        return self.d_model // self.decoder_attention_heads

    @property
    def embed_scale(self) -> float:
        """Factor on every embedding row: the square root of ``d_model``, or 1."""
        return math.sqrt(self.d_model) if self.scale_embedding else 1.0

    @property
    def special_ids(self) -> frozenset[int]:
        """Every id that the configuration names; the embedding must have a row for each."""
        generation = self.generation
        optional = (
            self.bos_token_id,
            self.forced_bos_token_id,
            generation.bos_token_id,
            generation.forced_bos_token_id,
            generation.forced_eos_token_id,
        )
        always = (
            self.pad_token_id,
            self.decoder_start_token_id,
            generation.pad_token_id,
            generation.decoder_start_token_id,
        )
        named = {*always, *self.eos_token_id, *generation.eos_token_id}
        return frozenset(named.union(value for value in optional if value is not None))

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> NllbConfig:
        """Read ``config.json``, and ``generation_config.json`` if there is one, from a checkpoint folder.

        Raises
        ------
        CheckpointError
            When the folder or ``config.json`` is missing, a file is not a JSON object, the model type is another one,
            or values are wrong: all of them are listed.
        """
        folder = require_folder(path)
        config = read_json_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
        generation = None
        if os.path.lexists(folder / GENERATION_FILE):
            generation = read_json_object(folder / GENERATION_FILE, MAX_CONFIG_BYTES)
        return cls.from_dict(config, generation, path=folder)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, object], generation: Mapping[str, object] | None = None, *, path: object = "config"
    ) -> NllbConfig:
        """Check parsed configuration files.

        Parameters
        ----------
        config, generation : mapping
            The contents of ``config.json`` and of ``generation_config.json`` (None when there is no such file).
        path : object
            What an error names as its place.

        Raises
        ------
        CheckpointError
            When the model type is another one, or values are wrong: all of them are listed.
        """
        if config.get("model_type") != MODEL_TYPE:
            raise CheckpointError(path, _wrong_model_type(config))
        problems: list[str] = []
        config = _with_ids(config, generation or {})
        result = _read_config(FieldReader(config, CONFIG_FILE, problems), config, generation)
        if problems:
            raise CheckpointError(path, problems)
        return result


def _wrong_model_type(config: Mapping[str, object]) -> str:
    if "model_type" not in config:
        return f"{CONFIG_FILE}: model_type is missing, expected {MODEL_TYPE!r}"
    given = config["model_type"]
    other = OTHER_FAMILIES.get(given) if isinstance(given, str) else None
    return (
        f"{CONFIG_FILE}: model_type {shown(given)} {f'({other}) ' if other else ''}is not supported, "
        f"only {MODEL_TYPE!r} is (dense NLLB-200 and M2M-100)"
    )


def _with_ids(config: Mapping[str, object], generation: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``config.json`` with the ids that it has as null and generation needs, from where transformers takes them.

    That is ``generation_config.json``, and for the id that starts a target also the one that starts a text.
    """
    found = dict(config)
    for key in ("eos_token_id", "decoder_start_token_id"):
        if key in found and found[key] is None:
            found[key] = generation.get(key)
    if "decoder_start_token_id" in found and found["decoder_start_token_id"] is None:
        first = generation.get("bos_token_id")
        found["decoder_start_token_id"] = config.get("bos_token_id") if first is None else first
    return found


def _read_config(
    reader: FieldReader, config: Mapping[str, object], generation: Mapping[str, object] | None
) -> NllbConfig:
    default = NllbConfig()
    vocab_size = reader.integer("vocab_size", default.vocab_size, 1, MAX_VOCAB)
    # A position is a pair of sine and cosine halves whose frequencies divide by d // 2 - 1: 4 is the least width.
    d_model = reader.integer("d_model", default.d_model, 4, MAX_D_MODEL, alias="hidden_size")
    last = vocab_size - 1
    result = NllbConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        encoder_layers=reader.integer(
            "encoder_layers", default.encoder_layers, 0, MAX_LAYERS, alias="num_hidden_layers"
        ),
        decoder_layers=reader.integer("decoder_layers", default.decoder_layers, 1, MAX_LAYERS),
        encoder_attention_heads=reader.integer(
            "encoder_attention_heads", default.encoder_attention_heads, 1, MAX_D_MODEL, alias="num_attention_heads"
        ),
        decoder_attention_heads=reader.integer(
            "decoder_attention_heads", default.decoder_attention_heads, 1, MAX_D_MODEL
        ),
        encoder_ffn_dim=reader.integer("encoder_ffn_dim", default.encoder_ffn_dim, 1, MAX_FFN_DIM),
        decoder_ffn_dim=reader.integer("decoder_ffn_dim", default.decoder_ffn_dim, 1, MAX_FFN_DIM),
        activation_function=reader.choice("activation_function", default.activation_function, ACTIVATIONS),
        scale_embedding=reader.boolean("scale_embedding", default.scale_embedding),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default.tie_word_embeddings),
        max_position_embeddings=reader.integer(
            "max_position_embeddings", default.max_position_embeddings, 0, MAX_LENGTH
        ),
        pad_token_id=reader.integer("pad_token_id", default.pad_token_id, 0, last),
        bos_token_id=reader.optional_integer("bos_token_id", default.bos_token_id, 0, last),
        eos_token_id=reader.integers("eos_token_id", default.eos_token_id, 0, last),
        decoder_start_token_id=reader.integer("decoder_start_token_id", default.decoder_start_token_id, 0, last),
        forced_bos_token_id=reader.optional_integer("forced_bos_token_id", None, 0, last),
        dtype=_read_dtype(reader, config),
    )
    for side, heads in (("encoder", result.encoder_attention_heads), ("decoder", result.decoder_attention_heads)):
        if d_model % heads:
            reader.problem(f"{side}_attention_heads", f"a divisor of d_model ({d_model})", heads)
    for key, expected in CHANGING_KEYS.items():
        if config.get(key) is not None:
            reader.problem(key, expected, config[key])
    result = replace(result, generation=_read_generation(result, reader.problems, config, generation))
    if not reader.problems and max(result.special_ids) >= vocab_size:
        reader.problem("vocab_size", f"more than {max(result.special_ids)}, the largest special id", vocab_size)
    return result


def _read_dtype(reader: FieldReader, config: Mapping[str, object]) -> str | None:
    # transformers 5 writes "dtype", older versions "torch_dtype".
    for key in ("dtype", "torch_dtype"):
        if config.get(key) is not None:
            return reader.choice(key, "", DTYPES)
    return None


def _read_generation(
    model: NllbConfig,
    problems: list[str],
    config: Mapping[str, object],
    generation: Mapping[str, object] | None,
) -> GenerationDefaults:
    if generation is None:
        # The ids of config.json have been read and reported on: ``model`` holds them.
        fields = {key: value for key, value in config.items() if key not in _MODEL_IDS}
        source = CONFIG_FILE
    else:
        fields, source = dict(generation), GENERATION_FILE
    fields = {key: value for key, value in fields.items() if value is not None}
    reader = FieldReader(fields, source, problems)
    last = model.vocab_size - 1
    default = GenerationDefaults()
    bos = reader.optional_integer("bos_token_id", model.bos_token_id, 0, last)
    # As in transformers: a file that does not say how a target starts, but how a text does, means that.
    said = config if generation is None else generation
    only_text = said.get("decoder_start_token_id") is None and said.get("bos_token_id") is not None
    start = model.decoder_start_token_id if bos is None or not only_text else bos
    early_stopping: bool | str = "never"
    if fields.get("early_stopping") != "never":
        early_stopping = reader.boolean("early_stopping", False, also='"never"')
    return GenerationDefaults(
        max_length=reader.optional_integer("max_length", None, 1, MAX_LENGTH),
        max_new_tokens=reader.optional_integer("max_new_tokens", None, 1, MAX_LENGTH),
        min_new_tokens=reader.optional_integer("min_new_tokens", None, 0, MAX_LENGTH),
        num_beams=reader.integer("num_beams", default.num_beams, 1, MAX_BEAMS),
        length_penalty=reader.number("length_penalty", default.length_penalty),
        early_stopping=early_stopping,
        no_repeat_ngram_size=reader.integer("no_repeat_ngram_size", default.no_repeat_ngram_size, 0, MAX_LENGTH),
        repetition_penalty=reader.number("repetition_penalty", default.repetition_penalty, above=0.0),
        bad_words_ids=reader.integer_lists("bad_words_ids", 0, last),
        pad_token_id=reader.integer("pad_token_id", model.pad_token_id, 0, last),
        bos_token_id=bos,
        eos_token_id=reader.integers("eos_token_id", model.eos_token_id, 0, last),
        decoder_start_token_id=reader.integer("decoder_start_token_id", start, 0, last),
        forced_bos_token_id=reader.optional_integer("forced_bos_token_id", model.forced_bos_token_id, 0, last),
        forced_eos_token_id=reader.optional_integer("forced_eos_token_id", None, 0, last),
    )
