# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a model is asked to hold at once, and the sizes that follow from it and the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpu_runtime import dtypes
from gpu_runtime.arena import LogitsArena
from metrale.checks import integer
from metrale.model import BATCH_LADDER, MAX_BEAMS, padded_batch_n
from metrale.nllb.config import NllbConfig
from metrale.nllb.embeddings import TIED, Tables
from metrale.ops.head_linear import MOST_K
from metrale.ops.head_linear import SPEC as HEAD

_MOST_ENCODER_TOKENS: Final = 16384

WIDE_STEP: Final = 64
"""What the rows of steps above the last rung of the batch ladder are multiples of."""
WORD_ROOM: Final = 1024
"""Ints of a slot's table of bad words: two, and for each word its ids and one more."""
MOST_COUNT: Final = (1 << 31) - 1
MOST_BYTES: Final = (1 << 63) - 1
"""Above these no device has room, and sizes leave what its calls count with."""
MOST_ADAPTERS: Final = 4096
MOST_RANK: Final = 4096
"""Above these a pool of adapters has no use, and its sizes leave what a kernel counts with."""


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What a model can hold at once.

    Attributes
    ----------
    max_batch : int
        Sequences that may be live: slots, and lanes of a decode step.
    max_source_len : int
        Source tokens of a sequence, its language and EOS included.
    max_new_tokens : int
        Target tokens of a sequence, its language and EOS included.
    max_encoder_tokens : int or None
        Source tokens of one packed encoder pass; a larger batch takes several passes. None: all that ``max_batch``
        sequences can have, but at most 16,384 (or ``max_source_len``, if that is more).
    kv_bytes : int or None
        Bytes of the KV pool. None: what ``max_batch`` sequences at the limits need.
    max_adapters : int
        LoRA adapters that may be resident at once; 0: none, and no memory for them.
    max_lora_rank : int
        The largest rank of an adapter's module that there is room for.

    Raises
    ------
    InvalidInput
        When one of them is not an int, or out of range.
    """

    max_batch: int = 32
    max_source_len: int = 512
    max_new_tokens: int = 256
    max_encoder_tokens: int | None = None
    kv_bytes: int | None = None
    max_adapters: int = 0
    max_lora_rank: int = 64

    def __post_init__(self) -> None:
        least = {"max_batch": 1, "max_source_len": 2, "max_new_tokens": 2, "kv_bytes": 1}  # 2: language and EOS
        for name, low in {**least, "max_encoder_tokens": self.max_source_len}.items():
            value = getattr(self, name)
            if value is not None or name in ("max_batch", "max_source_len", "max_new_tokens"):
                high = MOST_BYTES if name == "kv_bytes" else MOST_COUNT
                object.__setattr__(self, name, integer(name, value, low, high))
        for name, low, high in (("max_adapters", 0, MOST_ADAPTERS), ("max_lora_rank", 1, MOST_RANK)):
            object.__setattr__(self, name, integer(name, getattr(self, name), low, high))

    @property
    def target_positions(self) -> int:
        """Decoder positions of a sequence: the start token, and every token that can follow it."""
        return self.max_new_tokens + 1

    @property
    def positions(self) -> int:
        """KV positions of a sequence at the limits: its source and its target."""
        return self.max_source_len + self.target_positions

    @property
    def encoder_tokens(self) -> int:
        """Source tokens of one packed encoder pass."""
        if self.max_encoder_tokens is not None:
            return self.max_encoder_tokens
        return min(self.max_batch * self.max_source_len, max(_MOST_ENCODER_TOKENS, self.max_source_len))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A configuration, the truth about its vocabulary, and how it is run: what every size follows from.

    Attributes
    ----------
    config : NllbConfig
    vocab : int
        Rows of the embedding.
    dtype : {"f32", "f16", "bf16"}
        Element type of weights, activations, KV and logits.
    limits : ServingLimits
    gemm_workspace_bytes : int
        Workspace with which the device's products run best (`gpu_runtime.limits.Limits`).
    pad_batches : bool
        Whether decode steps are padded: to the rungs of `metrale.model.BATCH_LADDER`, and above them to multiples of
        `WIDE_STEP`, so that there are a few sizes of steps.
    tables : Tables
        The matrices of embedding and head.
    batch_invariant : bool
        Whether a sequence's logits have the same bits whatever is computed beside it.
    fixed_rows : int
        With how many rows the device's products promise that (`gpu_runtime.limits.Limits`).
    """

    config: NllbConfig
    vocab: int
    dtype: str
    limits: ServingLimits
    gemm_workspace_bytes: int = 0
    pad_batches: bool = False
    tables: Tables = TIED
    batch_invariant: bool = False
    fixed_rows: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.itemsize(self.dtype)

    @property
    def kv_width(self) -> int:
        """Elements of one KV position: keys, then values, of one decoder layer after another."""
        return self.config.decoder_layers * 2 * self.config.d_model

    @property
    def position_bytes(self) -> int:
        """Bytes of one KV position."""
        return self.kv_width * self.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        limits = self.limits
        return limits.kv_bytes or limits.max_batch * limits.positions * self.position_bytes

    @property
    def logits_rows(self) -> int:
        """Rows of the logits arena: one for each decode lane, then one for each slot's prefill."""
        return 2 * self.limits.max_batch

    @property
    def logits_stride(self) -> int:
        """Elements from one logits row to the next."""
        return LogitsArena.padded(self.vocab)

    @property
    def head_rows(self) -> int:
        """Rows of the head's matrix: as many as a logits row has elements, because products of such widths are faster.

        Those past the vocabulary are zeros, and their bias is minus infinity, which is what the product then writes to
        a row's padding. Of a hidden state that is not finite it makes NaN there, as zero times infinity is NaN; the
        logits of such a row are not finite either.
        """
        return self.logits_stride

    @property
    def prefix_rows(self) -> int:
        """Rows of the largest decoder pass of a prefill: the two prefix tokens of every sequence."""
        return 2 * self.limits.max_batch

    def step_rows(self, lanes: int) -> int:
        """Return the rows of a decode step of ``lanes`` sequences, at most ``max_batch``."""
        if not self.pad_batches:
            return lanes
        rows = padded_batch_n(lanes) if lanes <= BATCH_LADDER[-1] else -(-lanes // WIDE_STEP) * WIDE_STEP
        return min(rows, self.limits.max_batch)

    @property
    def spare_rows(self) -> int:
        """The most rows that padding adds to a decode step."""
        largest = min(self.limits.max_batch, BATCH_LADDER[-1] + 1)  # nothing above that is padded more
        return max(self.step_rows(lanes) - lanes for lanes in range(1, largest + 1))

    @property
    def own_head(self) -> bool:
        """Whether `metrale.ops.head_linear` can multiply with the output head; else it is the library's product."""
        return self.dtype in HEAD.dtypes and self.config.d_model <= MOST_K

    def product_rows(self, rows: int) -> int:
        """Return how many rows the products of a decoder pass of ``rows`` rows have: there must be room for them."""
        fixed = self.fixed_rows if self.batch_invariant and not self.own_head else 1
        return -(-rows // fixed) * fixed

    @property
    def head_scratch_rows(self) -> int:
        """Logits rows that each side of the decoder has to spare, for those of a product that nobody wants."""
        return self.product_rows(1) if self.product_rows(1) > 1 else 0

    @property
    def always_adapts(self) -> bool:
        """Whether a decoder pass launches what adapters need also when no row has one.

        A row without adapter is rounded elsewhere in a pass with them: before its activation, and after a norm.
        """
        return self.batch_invariant and self.limits.max_adapters > 0

    @property
    def feed_cells(self) -> int:
        """Ids that wait on the device to be fed: one for each logits row, then one for each slot."""
        return self.logits_rows + self.limits.max_batch

    @property
    def most_beams(self) -> int:
        """Beams of the widest search: each takes a slot."""
        return min(MAX_BEAMS, self.limits.max_batch)

    @property
    def ban_words(self) -> int:
        """32-bit words of a set of ids with one bit for each."""
        return -(-self.vocab // 32)

    @property
    def position_count(self) -> int:
        """Rows of the table of positions."""
        return max(self.limits.max_source_len, self.limits.target_positions)
