# SPDX-License-Identifier: MIT OR Apache-2.0
"""Who uses an adapter, who leaves for whom, which one is active; and loads that are refused or fail."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpu_runtime.errors import DeviceError, OutOfMemory
from gpu_runtime.faults import FailCall
from metrale.errors import CheckpointError, InvalidInput, NoFreeSlot, NotSupported, SequenceError
from metrale.model import BeamReq
from metrale.nllb.lora import read_adapter
from metrale.nllb.model import NllbModel
from tests.backends import Device
from tests.nllb.adapters import Load, Logits, Shelf, assert_holds, begin, rows_of
from tests.nllb.decoding import block, next_row

READS = "metrale.nllb.adapter_calls.read_adapter"


# promotion


def test_promotion_takes_free_slots_and_then_the_least_recently_used(
    load_adapted: Load, shelf: Shelf, adapter_rows: Logits
) -> None:
    model = load_adapted("a", max_adapters=3)
    assert model.promote_lora_from_disk(shelf["b"], "b") == (1, None)
    assert model.promote_lora_from_disk(shelf["c"], "c") == (2, None)
    rows_of(model, 0)  # a prefill uses it
    assert model.promote_lora_from_disk(shelf["d"], "d") == (1, "b")
    model.set_active_lora("c")
    assert model.promote_lora_from_disk(shelf["e"], "e") == (0, "a")
    model.release_adapter_slot(model.acquire_adapter_slot(1))
    assert model.promote_lora_from_disk(shelf["a"], "a") == (2, "c")
    assert_holds(model, adapter_rows, "e", "d", "a")


def test_decoding_counts_as_use(load_adapted: Load, shelf: Shelf) -> None:
    model = load_adapted("ab")
    seq = begin(model, 0)
    model.prefill([5], seq)
    rows_of(model, 1)
    model.decode(9, seq)
    model.free_sequence(seq)
    assert model.promote_lora_from_disk(shelf["c"], "c") == (1, "b")


def test_releasing_counts_as_use(load_adapted: Load, shelf: Shelf) -> None:
    """What was in use until now was used later than what was asked for meanwhile."""
    model = load_adapted("ab")
    reference = model.acquire_adapter_slot(0)
    rows_of(model, 1)
    model.release_adapter_slot(reference)
    assert model.promote_lora_from_disk(shelf["c"], "c") == (1, "b")


def test_to_be_asked_for_counts_as_use(load_adapted: Load, shelf: Shelf) -> None:
    """Also by a request that nothing came of, as there was no room."""
    model = load_adapted("ab")
    rows_of(model, 0)
    rows_of(model, 1)
    seqs = [model.alloc_sequence() for _ in range(model.capacity().max_sequences)]
    with pytest.raises(NoFreeSlot):
        model.generate_beams([BeamReq([5], 80, 81, num_beams=2, max_new=3, adapter_slot=0)])
    for seq in seqs:
        model.free_sequence(seq)
    assert model.promote_lora_from_disk(shelf["c"], "c") == (1, "b")


def test_a_name_that_is_resident_is_not_loaded_again(load_adapted: Load, shelf: Shelf, adapter_rows: Logits) -> None:
    model = load_adapted("ab", max_adapters=3)
    with pytest.raises(InvalidInput, match=r"name: expected one that no resident adapter has, got 'b', .* in slot 1"):
        model.promote_lora_from_disk(shelf["c"], "b")
    with pytest.raises(InvalidInput, match="got 'b', which is in slot 1"):
        model.swap_lora_from_disk(shelf["c"], "b", 0)
    assert_holds(model, adapter_rows, "a", "b", "")
    model.swap_lora_from_disk(shelf["b"], "b", 1)  # in its own place it is
    assert_holds(model, adapter_rows, "a", "b", "")


@pytest.mark.parametrize("name", ["", None, 3, b"a"])
def test_wrong_names(load_adapted: Load, shelf: Shelf, name: Any) -> None:
    model = load_adapted("a", max_adapters=2)
    for call in (
        lambda: model.promote_lora_from_disk(shelf["b"], name),
        lambda: model.swap_lora_from_disk(shelf["b"], name, 1),
        lambda: model.set_active_lora(name),
    ):
        with pytest.raises(InvalidInput, match="name: expected"):
            call()
    assert model.adapters() == {"a": 0}


@pytest.mark.parametrize("folder", ["", None, 3, b"a"])
def test_wrong_folders(load_adapted: Load, folder: Any) -> None:
    model = load_adapted(max_adapters=1)
    for call in (
        lambda: model.promote_lora_from_disk(folder, "b"),
        lambda: model.swap_lora_from_disk(folder, "b", 0),
    ):
        with pytest.raises(InvalidInput, match="dir: expected the path"):
            call()


@pytest.mark.parametrize("slot", [2, -1, True, None, 0.0])
def test_wrong_slots(load_adapted: Load, shelf: Shelf, slot: Any) -> None:
    model = load_adapted("a", max_adapters=2)
    with pytest.raises(InvalidInput, match=r"slot: expected an adapter slot in \[0, 2\)"):
        model.swap_lora_from_disk(shelf["b"], "b", slot)
    for call in (model.acquire_adapter_slot, model.release_adapter_slot, model.adapter_id_for):
        if slot != -1:
            with pytest.raises(InvalidInput, match="adapter_slot: expected -1, or the slot of a resident"):
                call(slot)
    with pytest.raises(InvalidInput, match="got 1"):
        model.acquire_adapter_slot(1)


def test_a_peer_is_refused(load_adapted: Load) -> None:
    with pytest.raises(NotSupported, match="promote_lora_from_peer: it loads adapters from folders alone"):
        load_adapted("a").promote_lora_from_peer("host:1", "a", "b", {})


# the active one, and numbers


def test_the_active_adapter(load_adapted: Load, shelf: Shelf) -> None:
    model = load_adapted("ab")
    assert model.acquire_adapter_slot(-1) == -1, "loading makes none active"
    model.set_active_lora("b")
    assert model.acquire_adapter_slot(-1) == 1
    with pytest.raises(SequenceError, match="in use"):
        model.swap_lora_from_disk(shelf["c"], "c", 1)
    model.release_adapter_slot(1)
    model.swap_lora_from_disk(shelf["b"], "b", 1)
    assert model.acquire_adapter_slot(-1) == 1, "it stays active when it is loaded anew"
    model.release_adapter_slot(1)
    model.swap_lora_from_disk(shelf["c"], "c", 1)
    assert model.acquire_adapter_slot(-1) == -1, "its successor is not active"
    model.swap_lora_from_disk(shelf["b"], "b", 1)
    assert model.acquire_adapter_slot(-1) == -1, "nor is it itself, when it comes back"
    model.swap_lora_from_disk(shelf["c"], "c", 1)
    assert model.promote_lora_from_disk(shelf["b"], "b") == (0, "a")
    assert model.acquire_adapter_slot(-1) == 0, "a promotion makes active"
    with pytest.raises(InvalidInput, match=r"the name of a resident adapter \(0: 'b', 1: 'c'\), got 'a'"):
        model.set_active_lora("a")
    assert model.acquire_adapter_slot(-1) == 0


def test_an_adapter_slot_of_minus_one_is_the_base_model_whatever_is_active(
    load_adapted: Load, adapter_rows: Logits
) -> None:
    model = load_adapted("ab")
    model.set_active_lora("a")
    assert_holds(model, adapter_rows, "a", "b")


def test_every_load_has_a_number_of_its_own(load_adapted: Load, shelf: Shelf) -> None:
    model = load_adapted("ab")
    seen = [model.adapter_id_for(slot) for slot in (-1, 0, 1)]
    model.swap_lora_from_disk(shelf["a"], "a", 0)
    seen += [model.adapter_id_for(0)]
    assert seen[0] == 0
    assert len(set(seen)) == 4


# in use


def test_an_adapter_in_use_stays(load_adapted: Load, shelf: Shelf, adapter_rows: Logits) -> None:
    """By references and by sequences; the errors say by whom, and nothing changes."""
    model = load_adapted("ab")
    sequences = [begin(model, 1) for _ in range(2)]
    for seq in sequences:
        model.prefill([5, 6], seq)
    references = [model.acquire_adapter_slot(0) for _ in range(2)]
    kept = block(model.gpu, "adapters")
    holders = "slot 0 ('a'): 2 references; slot 1 ('b'): the sequences in slots 0, 1"
    with pytest.raises(SequenceError) as full:
        model.promote_lora_from_disk(shelf["c"], "c")
    assert str(full.value) == f"promote_lora_from_disk: all 2 adapter slots are in use: {holders}"
    for slot, words in enumerate(holders.split("; ")):
        with pytest.raises(SequenceError) as used:
            model.swap_lora_from_disk(shelf["c"], "c", slot)
        assert str(used.value) == f"swap_lora_from_disk: the adapter that would be replaced is in use by {words}"
    assert block(model.gpu, "adapters") == kept
    model.release_adapter_slot(references[0])
    model.free_sequence(sequences[0])
    with pytest.raises(SequenceError, match=r"1 references; slot 1 .*: the sequences in slots 1"):
        model.promote_lora_from_disk(shelf["c"], "c")
    model.free_sequence(sequences[1])
    assert model.promote_lora_from_disk(shelf["c"], "c") == (1, "b")
    model.release_adapter_slot(references[1])
    assert_holds(model, adapter_rows, "a", "c")


def test_a_sequence_uses_the_adapter_that_made_its_keys_and_values(load_adapted: Load, shelf: Shelf) -> None:
    """Whatever its ``adapter_slot`` says now; and none before its prefill, or after one without."""
    model = load_adapted("a")
    fresh = begin(model, 0)
    model.swap_lora_from_disk(shelf["b"], "b", 0)
    model.prefill([5], fresh)
    fresh.adapter_slot = -1
    with pytest.raises(SequenceError, match="the sequences in slots 0"):
        model.swap_lora_from_disk(shelf["a"], "a", 0)
    model.prefill([5], fresh)
    model.swap_lora_from_disk(shelf["a"], "a", 0)


def test_a_restored_sequence_uses_its_adapter(load_adapted: Load, shelf: Shelf) -> None:
    model = load_adapted("a")
    seq, out = begin(model, 0), io.BytesIO()
    model.prefill([5], seq)
    model.save_sequence_state(seq, out)
    model.free_sequence(seq)
    back = begin(model, 0)
    out.seek(0)
    model.restore_sequence_state(back, 0, out)
    with pytest.raises(SequenceError, match="the sequences in slots 0"):
        model.swap_lora_from_disk(shelf["b"], "b", 0)


def test_a_reference_that_was_not_taken(load_adapted: Load, shelf: Shelf) -> None:
    model = load_adapted("a")
    model.acquire_adapter_slot(0)
    model.release_adapter_slot(0)
    with pytest.raises(SequenceError, match="no reference to adapter 'a' in slot 0 is taken"):
        model.release_adapter_slot(0)
    model.swap_lora_from_disk(shelf["b"], "b", 0)


# loads that fail


def test_a_refused_load_changes_nothing(load_adapted: Load, shelf: Shelf, adapter_rows: Logits, tmp_path: Path) -> None:
    model = load_adapted("ab")
    model.set_active_lora("a")
    kept, numbers = block(model.gpu, "adapters"), [model.adapter_id_for(slot) for slot in (0, 1)]
    for call in (
        lambda folder: model.swap_lora_from_disk(folder, "c", 1),
        lambda folder: model.promote_lora_from_disk(folder, "c"),
    ):
        for folder in (tmp_path / "absent", tmp_path, shelf.base):
            with pytest.raises(CheckpointError):
                call(folder)
    assert block(model.gpu, "adapters") == kept
    assert [model.adapter_id_for(slot) for slot in (0, 1)] == numbers
    assert model.acquire_adapter_slot(-1) == 0
    model.release_adapter_slot(0)
    assert_holds(model, adapter_rows, "a", "b")


def test_a_device_that_fails_while_loading(device: Device, shelf: Shelf) -> None:
    """Each copy of a load fails in turn: the slot is empty then, the others are as they were, and it can be filled."""
    fault = FailCall(nth=None)
    with device.open(faults=(fault,)) as gpu, shelf.load(gpu, "ae") as model:
        kept = {slot: rows_of(model, slot).tobytes() for slot in (0, 1)}
        before, seen = model.gpu.alloc_report(), fault.seen
        model.swap_lora_from_disk(shelf["e"], "e", 1)
        calls = fault.seen - seen
        assert calls > 20
        for number in range(calls):
            fault.arm(number)
            with pytest.raises(DeviceError, match="was to fail"):
                model.swap_lora_from_disk(shelf["e"], "e", 1)
            fault.arm(None)
            assert model.gpu.alloc_report() == before
            assert rows_of(model, 0).tobytes() == kept[0]
            with pytest.raises(InvalidInput, match="adapter_slot"):
                rows_of(model, 1)
            assert model.adapters() == {"a": 0}
            model.swap_lora_from_disk(shelf["e"], "e", 1)
            assert rows_of(model, 1).tobytes() == kept[1]


def test_page_locked_memory_that_cannot_be_had(load_adapted: Load, shelf: Shelf, adapter_rows: Logits) -> None:
    """Nothing has been written then: the slot keeps its adapter."""
    model = load_adapted("ab")
    full = OutOfMemory("page-locked memory", requested=1, live=0, limit=0)
    with mock.patch.object(model.gpu, "alloc_host_pinned", side_effect=full), pytest.raises(OutOfMemory):
        model.swap_lora_from_disk(shelf["c"], "c", 1)
    assert_holds(model, adapter_rows, "a", "b")


@pytest.mark.parametrize("way", ["promote", "swap"])
def test_others_use_the_model_while_a_folder_is_read(
    load_adapted: Load, shelf: Shelf, adapter_rows: Logits, way: str
) -> None:
    """And what they take in use meanwhile stays, although it was free when the load began."""
    model = load_adapted("a")
    reading, go_on = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def slow(*args: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return read_adapter(*args)

    def load() -> None:
        try:
            if way == "promote":
                model.promote_lora_from_disk(shelf["b"], "b")
            else:
                model.swap_lora_from_disk(shelf["b"], "b", 0)
        except SequenceError as error:
            caught.append(error)

    with mock.patch(READS, slow):
        thread = threading.Thread(target=load)
        thread.start()
        assert reading.wait(60)
        seq = begin(model, 0)
        model.prefill([5], seq)
        go_on.set()
        thread.join()
    assert "slot 0 ('a'): the sequences in slots 0" in str(caught[0])
    next_row(model, 9, seq)
    model.free_sequence(seq)
    assert_holds(model, adapter_rows, "a")


def test_a_closed_model(load_adapted: Load, shelf: Shelf) -> None:
    model = load_adapted("a")
    reference = model.acquire_adapter_slot(0)
    model.close()
    calls: list[Callable[[], Any]] = [
        model.adapters,
        lambda: model.set_active_lora("a"),
        lambda: model.adapter_id_for(0),
        lambda: model.acquire_adapter_slot(0),
        lambda: model.swap_lora_from_disk(shelf["b"], "b", 0),
        lambda: model.promote_lora_from_disk(shelf["b"], "b"),
    ]
    for call in calls:
        with pytest.raises(SequenceError, match="the model is closed"):
            call()
    model.release_adapter_slot(reference)  # tidying up afterwards is fine


def test_a_model_that_closes_while_a_folder_is_read(load_adapted: Load, shelf: Shelf) -> None:
    model: NllbModel = load_adapted(max_adapters=1)

    def closing(*args: Any) -> Any:
        model.close()
        return read_adapter(*args)

    with (
        mock.patch(READS, closing),
        pytest.raises(SequenceError, match="the model is closed"),
    ):
        model.promote_lora_from_disk(shelf["a"], "a")
    assert model.gpu.live_alloc_count() == 0
