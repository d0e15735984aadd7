# SPDX-License-Identifier: MIT OR Apache-2.0
"""The values that pass through the Model interface. None of them holds device memory."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeAlias

from gpu_runtime.pointer import DevicePtr
from metrale.checks import flag, integer, kept, listed
from metrale.errors import InvalidInput, MetraleError

LogitsDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""Element type of a logits row."""

ForwardSelect: TypeAlias = Literal["legacy", "circuit"]
"""The forward that decode runs: the family's own layer loop, or a program compiled from a circuit plan."""


BATCH_LADDER: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes that decode steps are padded to."""


def padded_batch_n(n: int) -> int:
    """Return the number of rows that a decode step of ``n`` sequences is padded to.

    Captured graphs are keyed by this number, so that a few of them serve every batch.

    Returns
    -------
    int
        The smallest rung of :data:`BATCH_LADDER` that is at least ``n``; ``n`` itself above the last rung.

    Raises
    ------
    InvalidInput
        When ``n`` is below 1.
    """
    if n < 1:
        raise InvalidInput("n", "at least 1 sequence", n)
    rung = bisect_left(BATCH_LADDER, n)
    return BATCH_LADDER[rung] if rung < len(BATCH_LADDER) else n


@dataclass(slots=True, eq=False)
class SequenceState:
    """One live sequence, as its caller sees it. The model keeps the KV and finds it by ``slot_idx``.

    Two states are equal only when they are the same object. ``ModelLifecycle.alloc_sequence`` makes them.

    Attributes
    ----------
    slot_idx : int
        Slot that the sequence holds, or :data:`DETACHED` once it has given it up.
    tokens : list[int]
        Ids that the decoder has consumed, in order.
    seq_len : int
        Positions whose KV is written; after a step, ``len(tokens)``.
    prompt_len : int
        Length of ``tokens`` right after prefill.
    src_lang_id, tgt_lang_id : int
        Token ids of the source and target language; 0 is the model's default. Set before prefill.
    prefix_tokens : Sequence[int]
        Ids that the target begins with after its language. Prefill takes them in as well. Set before it.
    adapter_slot : int
        Adapter applied to this sequence's rows, or -1 for the base model. Set before prefill.
    """

    DETACHED: ClassVar[int] = sys.maxsize
    """``slot_idx`` of a sequence that owns no slot; freeing it does nothing."""

    slot_idx: int
    tokens: list[int] = field(default_factory=list)
    seq_len: int = 0
    prompt_len: int = 0
    src_lang_id: int = 0
    tgt_lang_id: int = 0
    adapter_slot: int = -1
    prefix_tokens: Sequence[int] = ()

    @property
    def is_detached(self) -> bool:
        """Whether the sequence has given up its slot."""
        return self.slot_idx == self.DETACHED


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a model can serve at once, for whoever hands out its lanes.

    Attributes
    ----------
    max_sequences : int
        Sequences that may be live.
    max_prompt_tokens : int
        Tokens of a prompt, without those that the model adds.
    max_new_tokens : int
        Generated tokens of a sequence, the language token and EOS included.
    prompt_overhead : int
        KV positions that a prompt takes beside one for each of its tokens. ``alloc_sequence_for`` counts them, and one
        position for each token that the decoder is given.
    kv_positions : int or None
        Positions of the whole KV pool, in which spans must be found in a row; None when it is not known.
    eos_ids : frozenset of int
        Ids that end a sequence.
    needs_src_lang, needs_tgt_lang : bool
        Whether every sequence must name the language, because there is none that 0 could stand for.
    max_beams : int
        Beams of the widest search; 0 without beam search.
    """

    max_sequences: int
    max_prompt_tokens: int
    max_new_tokens: int
    prompt_overhead: int
    kv_positions: int | None = None
    eos_ids: frozenset[int] = frozenset()
    needs_src_lang: bool = False
    needs_tgt_lang: bool = False
    max_beams: int = 0


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """A chunk of one prompt, for the calls that prefill several sequences at once.

    Attributes
    ----------
    prompt_tokens : Sequence[int]
        The whole prompt, of which ``chunk_len`` tokens from ``chunk_start`` are prefilled.
    seq : SequenceState
        The sequence that the prompt belongs to; the call changes it.
    is_last_chunk : bool
        Whether the prompt ends with this chunk. Only then are there logits.
    """

    prompt_tokens: Sequence[int]
    seq: SequenceState
    chunk_start: int
    chunk_len: int
    is_last_chunk: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", kept(self.prompt_tokens))

    @classmethod
    def whole(cls, tokens: Sequence[int], seq: SequenceState) -> PrefillSlice:
        """Return the slice that prefills all of ``tokens`` in one chunk."""
        tokens = listed("tokens", tokens, "a sequence of ids")
        return cls(tokens, seq, 0, len(tokens), True)


@dataclass(frozen=True, slots=True)
class MixedForwardResult:
    """What ``mixed_forward`` returns: decode row 0 (NULL without decode tokens) and the prefill's row (NULL unless
    its chunk was the last)."""

    decode_logits: DevicePtr
    prefill_logits: DevicePtr


@dataclass(frozen=True, slots=True)
class MixedBatchResult:
    """What ``mixed_forward_batch`` returns: decode row 0 (NULL without decode tokens) and one pointer per prefill
    slice, in order (NULL unless that chunk was its prompt's last)."""

    decode_logits: DevicePtr
    prefill_logits: list[DevicePtr]


@dataclass(frozen=True, slots=True)
class VerifyBatchedOpts:
    """Options of ``ModelVerify.decode_verify_batched``.

    Attributes
    ----------
    write_on_accept : bool
        Hold back recurrent state until the verdicts are known. The caller then owes a call of ``gdn_fold_accepted``
        with all of them before it commits any accepted prefix.
    """

    write_on_accept: bool = False


@dataclass(frozen=True, slots=True)
class FeedSource:
    """Where one row of a fed decode step takes its input id from: exactly one of three places.

    Attributes
    ----------
    token : int or None
        The id itself, known on the host.
    from_row : int or None
        The feed cell with the id, counted by the rows of the last ``argmax_batch_to_feed``. It is read on the device,
        so the host may enqueue the step before it knows the id.
    sampled : bool
        The id that ``sample_batch_to_feed`` last chose for this very sequence, read on the device as well.

    Raises
    ------
    InvalidInput
        When none or several are given, or the number given is negative.
    """

    token: int | None = None
    from_row: int | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        given = {name: value for name in ("token", "from_row") if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            object.__setattr__(self, name, integer(name, value, 0))
        if len(given) + flag("sampled", self.sampled) != 1:
            got = (self.token, self.from_row, self.sampled)
            raise InvalidInput("FeedSource", "one of token, from_row and sampled", got)


@dataclass(frozen=True, slots=True)
class RowMask:
    """The at most two ids that may not win one row's argmax (``RowMask()`` admits all).

    Raises
    ------
    InvalidInput
        When there are more than two ids, or one is negative.
    """

    MAX_IDS: ClassVar[int] = 2

    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = listed("banned", self.banned, "a sequence of ids")
        if len(given) > self.MAX_IDS:
            raise InvalidInput("banned", f"at most {self.MAX_IDS} ids", self.banned)
        ids = tuple(integer(f"banned[{place}]", token, 0) for place, token in enumerate(given))
        object.__setattr__(self, "banned", ids)


@dataclass(frozen=True, slots=True)
class ForwardDisclosure:
    """Which forward decode runs, for records.

    Attributes
    ----------
    forward : str
        ``"legacy"`` or ``"circuit"``.
    plan_digest : str or None
        Digest of the compiled plan; None for the legacy forward, which has none.
    launches_per_step : int or None
        Kernel launches in one decode step, where the model knows the number.
    """

    forward: ForwardSelect = "legacy"
    plan_digest: str | None = None
    launches_per_step: int | None = None


class EpCommandFailed(MetraleError, RuntimeError):
    """A command of another rank that arrived, ran and failed here.

    ``ModelEp.ep_worker_step`` raises it so that its caller can go on with the next command: the leading rank meets the
    same failure and reports it. Anything else raised there means that the link is lost. ``__cause__`` is the failure.
    """
