# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sequences with LoRA adapters: their logits are PEFT's, whatever is beside them, and they keep their adapter."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.errors import InvalidInput
from metrale.model import FeedSource, PrefillSlice
from metrale.nllb.model import NllbModel
from tests.backends import Device, damaged
from tests.nllb.adapters import NAMES, Shelf, begin, rows_of
from tests.nllb.backends import Padding
from tests.nllb.decoding import company, read, relative, sampled, saved
from tests.reference.adapters import BASE_SEED, BASES, CASES, RECIPES, RECORDED, recorded_key, write_adapter
from tests.reference.tiny import digest, tiny_config, write_tiny

EXACT = 1e-5
"""Of the largest logit. Both sides round in float32, each in an order of its own: 3e-6 at most here."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def crowd(shelf: Shelf, device: Device) -> Iterator[NllbModel]:
    """A model of 16 lanes with five adapters."""
    with device.open() as gpu, shelf.load(gpu, NAMES, max_batch=16) as model:
        yield model


def recorded_digests() -> dict[str, str]:
    with safe_open(RECORDED, "numpy") as file:
        found: dict[str, str] = json.loads(file.metadata()["digests"])
    return found


@pytest.mark.parametrize("base", BASES)
def test_logits_are_those_of_peft(gpu: GpuBackend, tmp_path: Path, base: str) -> None:
    """All adapters are resident at once; each is asked for the rows that were recorded with it."""
    overrides, recorded, digests = BASES[base], load_file(RECORDED), recorded_digests()
    folder = write_tiny(tmp_path / "base", BASE_SEED, **overrides)
    adapters = {name: write_adapter(tmp_path / name, recipe, **overrides) for name, recipe in RECIPES.items()}
    limits: dict[str, Any] = {"max_batch": 2, "max_source_len": 12, "max_new_tokens": 8, "max_lora_rank": 8}
    with metrale.load(folder, gpu, "float32", adapters=adapters, **limits) as model:
        for name, recipe in RECIPES.items():
            assert digest(recipe.tensors(tiny_config(**overrides))) == digests[f"{base}/{name}"]
            for index, (source, decoder) in enumerate(CASES):
                seq = begin(model, model.adapters()[name])
                seq.src_lang_id, seq.tgt_lang_id = source[0], decoder[1]
                rows = [model.copy_logits_to_host(model.prefill(source[1:-1], seq))]
                rows += [model.copy_logits_to_host(model.decode(token, seq)) for token in decoder[2:]]
                model.free_sequence(seq)
                expected = recorded[recorded_key(base, name, index)][1:]
                assert relative(np.stack(rows), expected) < EXACT, (name, index)
        assert damaged(gpu) == []


def test_a_sequence_does_not_depend_on_the_adapters_beside_it(crowd: NllbModel) -> None:
    """Sixteen sequences with five adapters and none, in packed prefills and steps, against each alone.

    On the host a product's bits depend on the number of its rows, and on a GPU the library's choice of an algorithm
    does, so the rows are compared within `company`, and the ids exactly.
    """
    slots = [index % 6 - 1 for index in range(16)]
    prompts = [[3 + index, *range(40, 40 + index % 7)] for index in range(16)]
    fed = [[(7 * index + step) % 97 for step in range(3)] for index in range(16)]
    seqs = [begin(crowd, slot) for slot in slots]
    ptrs = crowd.prefill_batch_chunk([PrefillSlice.whole(p, seq) for p, seq in zip(prompts, seqs, strict=True)])
    got: list[list[NDArray[Any]]] = [[crowd.copy_logits_to_host(ptr)] for ptr in ptrs]
    for step in range(3):
        base = crowd.decode_batch([tokens[step] for tokens in fed], seqs)
        for lane, rows in enumerate(got):
            rows.append(crowd.copy_logits_to_host(base.offset(lane * crowd.logits_row_bytes())))
    for seq in seqs:
        crowd.free_sequence(seq)
    alone = [rows_of(crowd, *one) for one in zip(slots, prompts, fed, strict=True)]
    for index in range(16):
        together = np.stack(got[index])
        assert relative(together, alone[index]) < company(crowd), f"sequence {index}"
        assert together.argmax(axis=1).tolist() == alone[index].argmax(axis=1).tolist()
    for index in range(6):
        others = rows_of(crowd, slots[index], prompts[6], fed[6])
        assert (relative(others, alone[6]) < company(crowd)) == (slots[index] == slots[6]), "adapters are told apart"


def test_without_a_row_that_has_one_the_launches_are_the_base_models(
    crowd: NllbModel, shelf: Shelf, gpu: GpuBackend
) -> None:
    """A model with adapters, none of them asked for, does what one without does, to the bit."""
    with shelf.load(gpu, max_batch=16) as plain:
        names = []
        for model in (plain, crowd):
            with model.gpu.launch_trace() as trace:
                rows = rows_of(model, -1)
            names.append(([record.name for record in trace], rows.tobytes()))
    assert names[0] == names[1]


def test_what_one_row_asks_for_is_launched_for_all_products(crowd: NllbModel) -> None:
    """Two launches for each product of the encoder, the prefix and the step: 2 layers of 4, 1, and 3 of 6 twice."""
    with crowd.gpu.launch_trace() as trace:
        rows_of(crowd, 2)
    for name in ("lora_down", "lora_up"):
        assert sum(record.name.startswith(name) for record in trace) == 2 * 4 + 1 + 2 * 3 * 6


def test_steps_that_feed_themselves_and_mixed_ones(crowd: NllbModel) -> None:
    """What goes through the token feed and beside prefills has the same adapter as what does not."""
    alone = [rows_of(crowd, slot, fed=(9,)) for slot in (1, 3)]
    first, second = begin(crowd, 1), begin(crowd, 3)
    crowd.prefill([5, 6, 7], first)
    mixed = crowd.mixed_forward_batch([9], [first], [PrefillSlice.whole([5, 6, 7], second)])
    rows = [crowd.copy_logits_to_host(mixed.decode_logits), crowd.copy_logits_to_host(mixed.prefill_logits[0])]
    assert relative(rows[0], alone[0][1]) < company(crowd)
    assert relative(rows[1], alone[1][0]) < company(crowd)
    choice = sampled(crowd, mixed.prefill_logits[0], [second])
    base = crowd.decode_batch_fed([FeedSource(sampled=True)], [second])
    fed = crowd.copy_logits_to_host(base)
    crowd.free_sequence(first)
    crowd.free_sequence(second)
    assert relative(fed, rows_of(crowd, 3, fed=choice.ids)[1]) < company(crowd)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_16_bits(gpu: GpuBackend, shelf: Shelf, crowd: NllbModel, dtype: str) -> None:
    """Weights, adapters and activations are rounded, some fifty times on the way: within what the base model shows."""
    bound = {"float16": 0.02, "bfloat16": 0.15}[dtype]
    with shelf.load(gpu, NAMES, dtype) as model:
        for slot in range(-1, 5):
            assert relative(rows_of(model, slot), rows_of(crowd, slot)) < bound, slot


def test_a_long_source_in_chunks_of_cross_attention(
    gpu: GpuBackend, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the second chunk have their own adapters, not those of the first."""
    prompts = [list(range(3, 13)), list(range(20, 26))]
    with shelf.load(gpu, NAMES) as model:
        alone = [rows_of(model, slot, prompt) for slot, prompt in zip((0, 1), prompts, strict=True)]
        monkeypatch.setattr("metrale.nllb.encoder.CROSS_KV_ROWS", 5)
        seqs = [begin(model, slot) for slot in (0, 1)]
        model.prefill_batch_chunk([PrefillSlice.whole(p, seq) for p, seq in zip(prompts, seqs, strict=True)])
        base = model.decode_batch([9, 9], seqs)
        for lane, rows in enumerate(alone):
            row = model.copy_logits_to_host(base.offset(lane * model.logits_row_bytes()))
            assert relative(row, rows[1]) < company(model)


def test_rows_that_nobody_owns_have_no_adapter(shelf: Shelf) -> None:
    """Steps of three, padded to four: a spare row is computed as the base model's, and the others are theirs."""
    with Padding() as gpu, shelf.load(gpu, NAMES) as model:
        assert model.step_rows(3) == 4
        alone = [rows_of(model, slot)[1] for slot in (0, 3, -1)]
        seqs = [begin(model, slot) for slot in (0, 3, -1)]
        model.prefill_batch_chunk([PrefillSlice.whole([5, 6, 7], seq) for seq in seqs])
        base = model.decode_batch([9, 9, 9], seqs)
        for lane, row in enumerate(alone):
            got = model.copy_logits_to_host(base.offset(lane * model.logits_row_bytes()))
            assert relative(got, row) < company(model)
        column = model._passes._decoder._workspace.tables["decoder"].places["adapters"]
        assert read(gpu, column, 4, "i32").tolist() == [0, 3, -1, -1]


# a sequence and its adapter


@pytest.mark.parametrize("slot", [5, -2, 1 << 40, True, None, 0.0])
def test_a_prefill_with_an_adapter_that_is_not_there(gpu: GpuBackend, shelf: Shelf, slot: Any) -> None:
    with shelf.load(gpu, "ab", max_adapters=3) as model:
        seq = begin(model, slot)
        those = r" \(0: 'a', 1: 'b'\)" if slot in (5, 1 << 40) else ""  # which there are is no matter to other values
        expected = f"adapter_slot: expected -1, or the slot of a resident adapter{those}, got"
        with pytest.raises(InvalidInput, match=expected) as refused:
            model.prefill([5], seq)
        assert refused.value.argument == "adapter_slot"
        seq.adapter_slot = 2
        with pytest.raises(InvalidInput, match="got 2"):
            model.prefill([5], seq)
        assert seq.seq_len == 0


def test_decoding_with_another_adapter_than_at_prefill(crowd: NllbModel) -> None:
    seq, base = begin(crowd, 1), begin(crowd)
    crowd.prefill([5, 6], seq)
    crowd.prefill([5, 6], base)
    for one, wrong in ((seq, 0), (seq, -1), (base, 0)):
        own, one.adapter_slot = one.adapter_slot, wrong
        with pytest.raises(InvalidInput, match=f"adapter_slot: expected {own}, with which .* slot {one.slot_idx}"):
            crowd.decode_batch([9, 9], [seq, base])
        one.adapter_slot = own
    crowd.decode_batch([9, 9], [seq, base])
    seq.adapter_slot = -1
    crowd.prefill([5, 6], seq)  # anew, without it
    crowd.decode(9, seq)
    crowd.free_sequence(seq)
    crowd.free_sequence(base)


def test_a_sequence_that_moves_keeps_its_adapter(crowd: NllbModel) -> None:
    retired, seq = begin(crowd), begin(crowd, 2)
    crowd.prefill([5, 6, 7], seq)
    crowd.free_sequence(retired)
    crowd.compact_sequence(seq, retired.slot_idx if not retired.is_detached else 0)
    assert relative(crowd.copy_logits_to_host(crowd.decode(9, seq)), rows_of(crowd, 2)[1]) < company(crowd)
    crowd.free_sequence(seq)


def test_a_saved_sequence_goes_on_with_its_adapter_wherever_that_is(
    crowd: NllbModel, shelf: Shelf, gpu: GpuBackend
) -> None:
    """In another model, with other room and other adapters: the state says which adapter it is, not where it was."""
    seq = begin(crowd, 1)
    crowd.prefill([5, 6, 7], seq)
    data = saved(crowd, seq)
    crowd.free_sequence(seq)
    with shelf.load(gpu, "cab", max_lora_rank=11) as other:
        for wrong in (-1, 0, 1):
            back = begin(other, wrong)
            with pytest.raises(
                InvalidInput, match="adapter_slot: expected the slot of the adapter that made the state"
            ):
                other.restore_sequence_state(back, 0, io.BytesIO(data))
            assert (back.seq_len, back.adapter_slot) == (0, wrong)
            other.free_sequence(back)
        back = begin(other, 3)
        with pytest.raises(InvalidInput, match="adapter_slot: expected -1, or the slot"):
            other.restore_sequence_state(back, 0, io.BytesIO(data))
        back.adapter_slot = 2
        other.restore_sequence_state(back, 0, io.BytesIO(data))
        row = other.copy_logits_to_host(other.decode(9, back))
        back.adapter_slot = 0
        with pytest.raises(InvalidInput, match="expected 2, with which"):
            other.decode(9, back)
    assert relative(row, rows_of(crowd, 1)[1]) < company(crowd)


def test_a_state_of_the_base_model_is_not_restored_with_an_adapter(crowd: NllbModel) -> None:
    seq, back = begin(crowd), begin(crowd, 0)
    crowd.prefill([5, 6, 7], seq)
    with pytest.raises(InvalidInput, match="adapter_slot: expected -1, as no adapter made it"):
        crowd.restore_sequence_state(back, 0, io.BytesIO(saved(crowd, seq)))
    crowd.free_sequence(seq)
    crowd.free_sequence(back)


@pytest.mark.parametrize("value", [7, ["x"], True])
def test_a_saved_adapter_that_is_no_digest(crowd: NllbModel, value: Any) -> None:
    seq, back = begin(crowd), begin(crowd)
    crowd.prefill([5], seq)
    line, _, rest = saved(crowd, seq).partition(b"\n")
    header = json.loads(line)
    assert header["adapter"] is None
    bent = json.dumps({**header, "adapter": value}).encode() + b"\n" + rest
    with pytest.raises(InvalidInput, match="reader: adapter: expected the digest"):
        crowd.restore_sequence_state(back, 0, io.BytesIO(bent))
    crowd.free_sequence(seq)
    crowd.free_sequence(back)
