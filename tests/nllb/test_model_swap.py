# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sequences as bytes: saved and restored anywhere they go on as if nothing had been; what is damaged is refused."""

from __future__ import annotations

import io
import json
import zlib
from typing import Any

import pytest

from gpu_runtime.errors import OutOfMemory
from metrale.errors import InvalidInput, NotSupported, SequenceError
from metrale.model import SequenceState
from metrale.nllb.model import NllbModel
from tests.backends import host_only
from tests.nllb.backends import OrderedBackend
from tests.nllb.conftest import MakeModel
from tests.nllb.decoding import Case, begin, block, next_row, prefilled, saved, state

ONE = Case([5, 6, 7], 80, 81, [])
TWO = Case([30, 31, 32, 33], 82, 83, [])
TOKENS = [9, 10, 11, 12, 13, 14, 15]
"""As many as the tiny model can decode."""
POSITION = 3 * 2 * 32 * 4


def restored(model: NllbModel, data: bytes) -> SequenceState:
    """Return a new sequence with the saved state, of which nothing is left unread."""
    seq, reader = model.alloc_sequence(), io.BytesIO(data)
    model.restore_sequence_state(seq, 0, reader)
    assert reader.read() == b""
    return seq


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_swap_at_any_position_changes_no_bit(make_tiny: MakeModel, dtype: str) -> None:
    """Each time into another slot and over what others left in the span; the one that was saved goes on as well."""
    model = make_tiny(dtype=dtype)
    seq = prefilled(model, ONE)
    expected = [next_row(model, token, seq) for token in TOKENS]
    model.free_sequence(seq)
    for position in range(len(TOKENS) + 1):
        first, seq = prefilled(model, TWO), prefilled(model, ONE)
        rows = [next_row(model, token, seq) for token in TOKENS[:position]]
        data, said, kv = saved(model, seq), state(seq), block(model.gpu, "KV cache")
        assert data == saved(model, seq)
        assert (state(seq), block(model.gpu, "KV cache")) == (said, kv)
        model.free_sequence(first)
        model.free_sequence(seq)
        others = [prefilled(model, TWO) for _ in range(3)]
        model.decode_batch([40, 41, 42], others)
        model.free_sequence(others[2])
        seq = restored(model, data)
        assert seq.slot_idx == 2
        assert state(seq)[1:] == said[1:]
        rows += [next_row(model, token, seq) for token in TOKENS[position:]]
        assert rows == expected
        for one in (*others, seq):
            model.free_sequence(one)


def test_a_state_fits_every_model_of_the_same_layout(make_tiny: MakeModel) -> None:
    """Other limits, and other lanes, are no other layout."""
    one, other = make_tiny(), make_tiny(max_batch=2, max_source_len=5, max_new_tokens=5, kv_bytes=20 * POSITION)
    seq = prefilled(one, ONE)
    next_row(one, 9, seq)
    data = saved(one, seq)
    copy = other.alloc_sequence_for(10)
    other.restore_sequence_state(copy, 0, io.BytesIO(data))
    assert [next_row(other, token, copy) for token in (10, 11)] == [next_row(one, token, seq) for token in (10, 11)]
    other.prefill([5], copy)  # it is a sequence like any other
    assert copy.tokens == [2, 81]


def test_several_states_in_one_file_are_read_one_by_one(tiny: NllbModel) -> None:
    seqs = [prefilled(tiny, ONE), prefilled(tiny, TWO)]
    tiny.decode_batch([9, 10], seqs)
    file = io.BytesIO()
    for seq in seqs:
        tiny.save_sequence_state(seq, file)
    size = file.tell()
    file.write(b"and more")
    file.seek(0)
    copies = [tiny.alloc_sequence() for _ in seqs]
    for copy in copies:
        tiny.restore_sequence_state(copy, 0, file)
    assert file.tell() == size
    assert [copy.tokens for copy in copies] == [seq.tokens for seq in seqs]
    assert [next_row(tiny, 20, copy) for copy in copies] == [next_row(tiny, 20, seq) for seq in seqs]


class Slow(io.RawIOBase):
    """A stream that gives some bytes at a time, as a pipe or a socket does."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        return self._data.readinto(memoryview(room)[:7])


def test_a_stream_may_give_less_than_it_is_asked_for(tiny: NllbModel) -> None:
    seq = prefilled(tiny, ONE)
    copy = tiny.alloc_sequence()
    tiny.restore_sequence_state(copy, 0, Slow(saved(tiny, seq)))  # type: ignore[arg-type]
    assert next_row(tiny, 9, copy) == next_row(tiny, 9, seq)


def test_what_is_saved_is_one_line_and_the_keys_and_values(tiny: NllbModel) -> None:
    seq = prefilled(tiny, ONE)
    tiny.decode(9, seq)
    line, _, kv = saved(tiny, seq).partition(b"\n")
    assert json.loads(line) == {
        "format": "metrale sequence 2",
        "dtype": "f32",
        "d_model": 32,
        "decoder_layers": 3,
        "vocab": 97,
        "tokens": [2, 81, 9],
        "prompt_len": 2,
        "src_lang_id": 80,
        "tgt_lang_id": 81,
        "source_len": 5,
        "adapter": None,
    }
    assert len(kv) == (5 + 3) * POSITION + 4
    assert kv[:-4] == block(tiny.gpu, "KV cache")[: len(kv) - 4]
    assert kv[-4:] == zlib.crc32(line + b"\n" + kv[:-4]).to_bytes(4, "little")


def test_the_budget_of_the_new_sequence_must_be_enough(tiny: NllbModel) -> None:
    """Five source positions and three of the target: eight do, and then it is full."""
    seq = prefilled(tiny, ONE)
    tiny.decode(9, seq)
    data = saved(tiny, seq)
    small, exact = tiny.alloc_sequence_for(7), tiny.alloc_sequence_for(8)
    with (
        tiny.gpu.launch_trace() as trace,
        pytest.raises(SequenceError, match="the state has 8 tokens, and the sequence in slot 1 was allocated for 7"),
    ):
        tiny.restore_sequence_state(small, 0, io.BytesIO(data))
    assert not trace
    assert state(small) == (1, [], 0, 0, 0, 0)
    tiny.restore_sequence_state(exact, 0, io.BytesIO(data))
    with pytest.raises(SequenceError, match="slot 2 is full: it has 3 decoder positions"):
        tiny.decode(10, exact)
    assert saved(tiny, exact) == data


def test_a_smaller_model_refuses_what_is_past_its_limits(make_tiny: MakeModel) -> None:
    model = make_tiny()
    long, late = prefilled(model, Case([5] * 8, 80, 81, [])), prefilled(model, ONE)
    for token in TOKENS[:3]:
        model.decode(token, late)
    other = make_tiny(max_source_len=9, max_new_tokens=3)
    for seq, argument in ((long, "reader: source_len"), (late, "reader: tokens")):
        with pytest.raises(InvalidInput) as refused:
            other.restore_sequence_state(other.alloc_sequence(), 0, io.BytesIO(saved(model, seq)))
        assert refused.value.argument == argument


def test_a_sequence_in_use_is_not_overwritten(tiny: NllbModel) -> None:
    seq, other = prefilled(tiny, ONE), prefilled(tiny, TWO)
    data = saved(tiny, seq)
    with pytest.raises(SequenceError, match="the sequence in slot 1 is in use already"):
        tiny.restore_sequence_state(other, 0, io.BytesIO(data))
    assert other.tokens == [2, 83]
    tiny.decode(9, other)


@pytest.mark.parametrize("blocks", [1, -1, True, None, "0", 0.0])
def test_there_are_no_blocks(tiny: NllbModel, blocks: Any) -> None:
    data, fresh = saved(tiny, prefilled(tiny, ONE)), tiny.alloc_sequence()
    reader = io.BytesIO(data)
    with pytest.raises(InvalidInput) as refused:
        tiny.restore_sequence_state(fresh, blocks, reader)
    assert (refused.value.argument, reader.tell(), fresh.seq_len) == ("num_blocks", 0, 0)


def test_sequences_that_cannot_be_saved(tiny: NllbModel) -> None:
    """New, freed, none, or with tokens that only the device knows."""
    writer = io.BytesIO()
    fresh, freed, fed = begin(tiny, ONE), prefilled(tiny, ONE), prefilled(tiny, TWO)
    tiny.free_sequence(freed)
    tiny.decode_batch([9], [fed])
    fed.seq_len += 1
    for seq, error in (
        (fresh, "slot 0 has not been prefilled"),
        (freed, "it was detached"),
        (SequenceState(3, [2], 1), "it does not hold slot 3"),
        (fed, "not all tokens of slot 2's sequence are known"),
    ):
        with pytest.raises(SequenceError, match=error):
            tiny.save_sequence_state(seq, writer)
    with pytest.raises(InvalidInput, match="seq: expected a SequenceState"):
        tiny.save_sequence_state(None, writer)  # type: ignore[arg-type]
    assert writer.getvalue() == b""


def test_only_a_live_sequence_can_be_restored_into(tiny: NllbModel) -> None:
    freed = prefilled(tiny, ONE)
    reader = io.BytesIO(saved(tiny, freed))
    tiny.free_sequence(freed)
    for seq in (freed, SequenceState(0), SequenceState(3)):
        with pytest.raises(SequenceError, match="expected a live sequence of this model"):
            tiny.restore_sequence_state(seq, 0, reader)
    with pytest.raises(InvalidInput, match="seq: expected a SequenceState"):
        tiny.restore_sequence_state(None, 0, reader)  # type: ignore[arg-type]
    assert reader.tell() == 0


def test_no_room_for_another_sequence_is_out_of_memory_and_the_state_is_kept(make_tiny: MakeModel) -> None:
    model = make_tiny(kv_bytes=12 * POSITION)
    seq = model.alloc_sequence_for(12)
    seq.src_lang_id, seq.tgt_lang_id = 80, 81
    model.prefill(ONE.tokens, seq)
    data = saved(model, seq)
    with pytest.raises(OutOfMemory):
        model.alloc_sequence_for(12)
    assert model.kv_usage() == (12 * POSITION, 12 * POSITION)
    model.free_sequence(seq)
    assert model.kv_usage() == (0, 12 * POSITION)
    seq = model.alloc_sequence_for(12)
    model.restore_sequence_state(seq, 0, io.BytesIO(data))
    assert seq.tokens == [2, 81]


def test_restoring_into_a_capture_is_refused(tiny: NllbModel) -> None:
    data, fresh = saved(tiny, prefilled(tiny, ONE)), tiny.alloc_sequence()
    tiny.gpu.begin_capture(0)
    try:
        with pytest.raises(NotSupported, match="capture"):
            tiny.restore_sequence_state(fresh, 0, io.BytesIO(data))
    finally:
        tiny.gpu.abort_capture_if_active(0)
    assert fresh.seq_len == 0
    tiny.restore_sequence_state(fresh, 0, io.BytesIO(data))


@host_only
@pytest.mark.parametrize("steps", [0, 1])
def test_saving_waits_for_what_fills_the_span_and_restoring_for_what_read_it(make_tiny: MakeModel, steps: int) -> None:
    """On a stream of their own: a prefill, a step; and the next forward comes after the copy to the device."""
    gpu = OrderedBackend()
    model = make_tiny(gpu)
    seq, other, streams = begin(model, ONE), prefilled(model, TWO), [model.create_stream() for _ in range(2)]
    with gpu.noted() as filling:
        model.prefill(ONE.tokens, seq, streams[0])
        for _ in range(steps):
            model.decode(9, seq, streams[0])
    with gpu.noted() as copy:
        data = saved(model, seq)
    assert gpu.all_before(filling, copy)
    with gpu.noted() as reading:
        model.decode_batch([9, 9], [seq, other], streams[1])
    model.free_sequence(seq)
    waited = gpu.host
    with gpu.noted() as copy:
        seq = restored(model, data)
    assert gpu.host == waited
    assert gpu.all_before(reading, copy)
    with gpu.noted() as later:
        model.decode(9, seq, streams[0])
    assert gpu.all_before(copy, later)


def test_no_flipped_bit_is_taken_for_a_sequence(tiny: NllbModel) -> None:
    """Every bit of the line that says what it is, and one of every hundredth byte behind it."""
    seq = prefilled(tiny, ONE)
    data = saved(tiny, seq)
    line = data.index(b"\n") + 1
    fresh = tiny.alloc_sequence()
    places = [8 * byte + bit for byte in range(line) for bit in range(8)]
    places += [8 * byte + 3 for byte in (*range(line, len(data), 100), *range(len(data) - 4, len(data)))]
    for place in places:
        damaged = bytearray(data)
        damaged[place >> 3] ^= 1 << (place & 7)
        with pytest.raises(InvalidInput, match="reader"):
            tiny.restore_sequence_state(fresh, 0, io.BytesIO(bytes(damaged)))
    assert fresh.seq_len == 0


class Greedy(io.BytesIO):
    """Gives more than it is asked for."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(-1)


class Stingy(io.RawIOBase):
    """Takes a hundred bytes at a time."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, part: Any, /) -> int:
        self.data += bytes(part[:100])
        return len(part[:100])


def test_files_that_take_or_give_another_number_of_bytes(tiny: NllbModel) -> None:
    seq, fresh, stingy = prefilled(tiny, ONE), tiny.alloc_sequence(), Stingy()
    tiny.save_sequence_state(seq, stingy)  # type: ignore[arg-type]
    assert bytes(stingy.data) == saved(tiny, seq)
    with pytest.raises(InvalidInput, match=r"reader: expected .* bytes more"):
        tiny.restore_sequence_state(fresh, 0, Greedy(saved(tiny, seq) + b"more"))
    for wrong in (io.StringIO("text"), "a name", None):
        with pytest.raises(InvalidInput, match="reader: expected an open binary file"):
            tiny.restore_sequence_state(fresh, 0, wrong)  # type: ignore[arg-type]


def test_a_reader_that_frees_the_sequence(tiny: NllbModel) -> None:
    seq, fresh = prefilled(tiny, ONE), tiny.alloc_sequence()

    class Rude(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            tiny.free_sequence(fresh)
            return super().readline(size)

    with pytest.raises(SequenceError, match="expected a live sequence"):
        tiny.restore_sequence_state(fresh, 0, Rude(saved(tiny, seq)))
