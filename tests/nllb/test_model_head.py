# SPDX-License-Identifier: MIT OR Apache-2.0
"""The output head: it has a row for each element of a logits row, and nobody chooses one past the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpu_runtime import dtypes
from gpu_runtime.backend import GpuBackend
from gpu_runtime.pointer import DevicePtr
from metrale.checkpoint import open_checkpoint
from metrale.model import BEAM_DONE_FLAG, BeamParams, PrefillSlice, RowMask, SamplingParams, SequenceState
from metrale.nllb.config import NllbConfig
from metrale.nllb.device_weights import load_weights, weight_layout
from metrale.nllb.embeddings import DECODER_EMBEDDING, EMBEDDING, HEAD, TIED, Tables
from metrale.nllb.limits import ModelShape, ServingLimits
from metrale.nllb.model import NllbModel
from metrale.nllb.weights import match_weights
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, arena, begin, next_row, poke, prefilled, read, sampled, to_feed
from tests.nllb.searching import finish, same, search, select, step
from tests.reference.tiny import write_tiny

CASES = [Case([5, 6, 7], 80, 81, []), Case([30], 82, 83, []), Case([40, 41], 84, 85, [])]
VOCAB, ELEMENTS = 97, 128
"""Ids of the tiny model, and elements of its logits rows."""


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("vocab", "tables"),
    [
        (97, TIED),
        (128, TIED),
        (129, Tables(head=HEAD)),
        (97, Tables(EMBEDDING, DECODER_EMBEDDING, HEAD)),
        (97, Tables(decoder=DECODER_EMBEDDING)),
    ],
)
def test_rows_past_the_vocabulary_are_zeros_with_a_bias_of_minus_infinity(
    tmp_path: Path, gpu: GpuBackend, vocab: int, tables: Tables, dtype: str
) -> None:
    """Whichever matrix the head is. One that is only embedded with has no such rows."""
    folder = write_tiny(tmp_path, 5, vocab_size=vocab)
    stored = load_file(folder / "model.safetensors")
    for factor, name in enumerate(tables.names[1:], 2):
        stored[name] = stored[EMBEDDING] * np.float32(factor)
    save_file(stored, folder / "model.safetensors")
    rows, config = -(-vocab // 64) * 64, NllbConfig.from_dir(folder)
    shape = ModelShape(config, vocab, dtype, ServingLimits(1, 4, 4), tables=tables)
    with open_checkpoint(folder) as checkpoint:
        found = match_weights(config, checkpoint)
        assert found.tables == tables
        weights = load_weights(gpu, shape, checkpoint, found)
    expected = np.zeros((rows, config.d_model), dtypes.NUMPY[dtype])
    expected[:vocab] = stored[tables.head]
    assert read(gpu, weights.head.weight, expected.size, dtype).tobytes() == expected.tobytes()
    bias = read(gpu, weights.head.bias, rows, dtype).astype(np.float32)
    assert bias.tolist() == [0.0] * vocab + [-np.inf] * (rows - vocab)
    weights.arena.free()


def spoil(model: NllbModel, value: float) -> None:
    """Write a value to the padding of every logits row."""
    for row in range(len(arena(model))):
        poke(model, row, dict.fromkeys(range(VOCAB, ELEMENTS), value))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_product_writes_minus_infinity_past_the_vocabulary(make_tiny: MakeModel, dtype: str) -> None:
    """To its own rows and no other, whatever stood there."""
    model = make_tiny(dtype=dtype)
    spoil(model, 7.0)
    seqs = [begin(model, case) for case in CASES]
    model.prefill(CASES[2].tokens, seqs[2])
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(CASES[:2], seqs[:2], strict=True)]
    model.prefill_batch_chunk_rows(slices, 0, 2)
    model.decode_batch([9, 10], seqs[:2])
    padding = arena(model)[:, VOCAB:].astype(np.float32)
    written = [0, 1, 2, 3, 4 + seqs[2].slot_idx]
    assert np.all(np.isneginf(padding[written]))
    assert np.all(np.delete(padding, written, axis=0) == 7.0)


SAMPLING = [
    SamplingParams(seed=3),
    SamplingParams(temperature=1e30, top_k=VOCAB, seed=4),  # all ids are as likely
    SamplingParams(temperature=1e30, top_p=1.0, repetition_penalty=0.5, seed=5),
]


def choices(model: NllbModel, base: DevicePtr, seqs: list[SequenceState]) -> list[Any]:
    """Choose from three rows in every way; what is chosen, and the log-probabilities, which sum over a row."""
    found: list[Any] = [model.argmax_batch(base, 3), to_feed(model, base, [RowMask((5,))] * 3)]
    for params in SAMPLING:
        for seq in seqs:
            model.begin_sampling(seq, params)
        choice = sampled(model, base, seqs, logprobs=True)
        assert choice.flags == [0, 0, 0]
        found += [choice.ids, choice.logprobs.tolist()]
    return found


@pytest.mark.parametrize("value", [0.0, 1e4, np.inf, np.nan])
def test_nothing_is_chosen_from_the_padding_whatever_it_holds(make_tiny: MakeModel, value: float) -> None:
    """A reader looks at the vocabulary alone: greedy, forbidden ids, sampling from all ids, log-probabilities."""
    model = make_tiny()
    seqs = [prefilled(model, case) for case in CASES]
    base = model.decode_batch([9, 10, 11], seqs)
    for row in range(3):
        poke(model, row, {column: -1000.0 - column for column in range(VOCAB)})
    expected = choices(model, base, seqs)
    assert expected[0] == [0, 0, 0]
    spoil(model, value)
    assert choices(model, base, seqs) == expected


@pytest.mark.parametrize("value", [0.0, 1e4, np.inf, np.nan])
def test_no_beam_goes_on_with_the_padding_whatever_it_holds(tiny: NllbModel, value: float) -> None:
    """From each of the rows of a search, the prefill's first, before each of its selections."""
    beams = BeamParams(3, num_return_sequences=3)
    seq, row = search(tiny, beams)
    expected = finish(tiny, seq, row)
    tiny.free_sequence(seq)
    seq, row = search(tiny, beams)
    spoil(tiny, value)
    while not select(tiny, [row], [seq])[0] & BEAM_DONE_FLAG:
        row = step(tiny, [seq])
        spoil(tiny, value)
    assert same(tiny.take_beams(seq), expected)
    assert len(expected) == 3


def test_a_hidden_state_that_is_not_finite_spoils_its_row_once(tiny: NllbModel) -> None:
    """Zero times infinity is NaN, in the padding too: the row is told of, and the next step writes it anew."""
    seqs = [prefilled(tiny, case) for case in CASES[:2]]
    [base] = [entry.ptr for entry in tiny.gpu.alloc_report() if entry.tag == "weights"]
    at = DevicePtr(base).offset(weight_layout(tiny.shape).offsets["decoder.norm.bias"])
    good = read(tiny.gpu, at, 32)
    tiny.gpu.copy_h2d(np.full(32, np.inf, np.float32), at)
    ids, bad = tiny.argmax_rows(tiny.decode_batch([9, 10], seqs), 2)
    assert bad == [0, 1]
    assert all(0 <= token < VOCAB for token in ids)
    assert np.isnan(arena(tiny)[:2, VOCAB:]).all()
    assert not np.isfinite(arena(tiny)[:2, :VOCAB]).any()
    tiny.gpu.copy_h2d(good, at)
    assert np.isfinite(np.frombuffer(next_row(tiny, 11, seqs[0]), np.float32)).all()
    assert np.isneginf(arena(tiny)[0, VOCAB:]).all()
