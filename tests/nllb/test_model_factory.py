# SPDX-License-Identifier: MIT OR Apache-2.0
"""load(): devices, dtypes, default languages, and folders without a tokenizer."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metrale
from gpu_runtime.errors import BackendUnavailable, DeviceError
from gpu_runtime.host import HostBackend
from gpu_runtime.limits import Limits
from gpu_runtime.op import REGISTRY
from gpu_runtime.pointer import DevicePtr
from metrale.errors import CheckpointError, InvalidInput, UnknownLanguage
from metrale.model import BeamParams, BeamReq, PrefillSlice, RowMask, SamplingParams, ScoreReq
from metrale.nllb.plan import largest_launches
from tests.nllb.decoding import DEMO
from tests.reference.adapters import Recipe, write_adapter
from tests.reference.tiny import write_tiny

SMALL: dict[str, Any] = {"max_batch": 1, "max_source_len": 8, "max_new_tokens": 4}


class Gpu(HostBackend):
    """Says that it is a GPU of some compute capability."""

    def __init__(self, major: int, minor: int) -> None:
        super().__init__()
        self._capability = (major, minor)

    def kind(self) -> Any:
        return "cuda"

    def limits(self) -> Limits:
        return replace(super().limits(), compute_capability=self._capability)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (HostBackend(), "float32"),
        (Gpu(7, 5), "float16"),
        (Gpu(7, 9), "float16"),
        (Gpu(8, 0), "bfloat16"),
        (Gpu(9, 0), "bfloat16"),
    ],
)
def test_auto_dtype(tiny_folder: Path, device: HostBackend, dtype: str) -> None:
    with metrale.load(tiny_folder, device, **SMALL) as model:
        assert model.logits_dtype() == dtype
        assert model.memory_plan() == metrale.memory_plan(tiny_folder, device, "auto", **SMALL)
        assert model.memory_plan() == metrale.memory_plan(tiny_folder, device, dtype, **SMALL)


@pytest.mark.parametrize("device", ["auto", "host"])
def test_named_devices_belong_to_the_model(tiny_folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_DEVICE", "host")
    with metrale.load(tiny_folder, device, **SMALL) as model:
        assert model.gpu.kind() == "host"
        assert model.logits_dtype() == "float32"


def test_what_load_passes_on(tiny_folder: Path) -> None:
    with metrale.load(
        tiny_folder, "host", max_batch=2, max_source_len=9, max_new_tokens=5, max_encoder_tokens=11, kv_bytes=12345
    ) as model:
        limits = model.shape.limits
        assert (limits.max_batch, limits.max_source_len, limits.max_new_tokens) == (2, 9, 5)
        assert (limits.max_encoder_tokens, limits.kv_bytes, limits.encoder_tokens) == (11, 12345, 11)
    with metrale.load(tiny_folder, "host") as model:
        limits = model.shape.limits
        assert (limits.max_batch, limits.max_source_len, limits.max_new_tokens) == (32, 512, 256)


def test_settings_that_are_not_applied_by_themselves(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    asked = {"num_beams": 5, "early_stopping": True, "forced_eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    with pytest.warns(UserWarning, match="asks for num_beams=5") as seen:
        metrale.load(folder, "host", **SMALL).close()
    (warning,) = seen
    assert str(warning.message) == (
        f"{folder}: the checkpoint asks for num_beams=5, early_stopping=True, forced_eos_token_id=2. This is not "
        "applied by itself: a translation has it when its call asks for it (num_beams=, early_stopping=, forced_eos=)"
    )
    assert warning.filename == __file__, "the warning is at the call"
    (folder / "generation_config.json").write_text('{"length_penalty": 2.0, "early_stopping": true, "max_length": 9}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrale.load(folder, "host", **SMALL).close()


@pytest.mark.parametrize("dtype", ["f32", "fp16", "float64", "int8", "", "Float32"])
def test_unknown_dtypes(tiny_folder: Path, dtype: str) -> None:
    gpu = HostBackend()
    for call in (metrale.load, metrale.memory_plan):
        with pytest.raises(InvalidInput, match="float32, float16, bfloat16") as refused:
            call(tiny_folder, gpu, dtype, **SMALL)
        assert refused.value.argument == "dtype"
    assert gpu.live_alloc_count() == 0


def test_unknown_devices(tiny_folder: Path) -> None:
    for call in (metrale.load, metrale.memory_plan):
        with pytest.raises(ValueError, match="device"):
            call(tiny_folder, "gpu", **SMALL)
        with pytest.raises(BackendUnavailable):
            call(tiny_folder, "cuda:99", **SMALL)


def test_wrong_limits_are_found_before_the_folder_is_read(tmp_path: Path) -> None:
    for call in (metrale.load, metrale.memory_plan):
        with pytest.raises(InvalidInput, match="max_batch"):
            call(tmp_path / "nowhere", "host", max_batch=0)
        with pytest.raises(CheckpointError, match="there is no such folder"):
            call(tmp_path / "nowhere", "host")


def test_the_embeddings_rows_are_the_vocabulary(tmp_path: Path) -> None:
    """Not what config.json says: a checkpoint may have been resized."""
    folder = write_tiny(tmp_path / "model", 5, vocab_size=83)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 83', '"vocab_size": 80'))
    with metrale.load(folder, "host", **SMALL) as model:
        assert model.vocab_size() == 83
        seq = model.alloc_sequence()
        seq.src_lang_id = seq.tgt_lang_id = 82
        assert 0 <= model.argmax_on_device(model.prefill([82], seq)) < 83
        assert model.memory_plan() == metrale.memory_plan(folder, "host", **SMALL)


def test_default_languages_by_code_and_by_id() -> None:
    with metrale.load(DEMO, "host", source="eng_Latn", target=8084, **SMALL) as model:
        assert (model.languages.source, model.languages.target) == (8074, 8084)
        assert model.tokenizer is not None
        assert model.tokenizer.language_id("fra_Latn") == 8084
        seq = model.alloc_sequence()
        model.prefill([117], seq)
        assert seq.tokens == [2, 8084]


@pytest.mark.parametrize("argument", ["source", "target"])
def test_wrong_default_languages(tiny_folder: Path, argument: str) -> None:
    gpu = HostBackend()
    with pytest.raises(UnknownLanguage, match=r"did you mean .*eng_Latn") as unknown:
        metrale.load(DEMO, gpu, **SMALL, **{argument: "eng_Lat"})  # type: ignore[arg-type]
    assert unknown.value.argument == argument
    for wrong in (-1, 97, True, 5.0):
        with pytest.raises(InvalidInput) as refused:
            metrale.load(tiny_folder, gpu, **SMALL, **{argument: wrong})  # type: ignore[arg-type]
        assert refused.value.argument == argument
    with pytest.raises(InvalidInput, match="without a tokenizer") as refused:
        metrale.load(tiny_folder, gpu, **SMALL, **{argument: "eng_Latn"})  # type: ignore[arg-type]
    assert refused.value.argument == argument
    assert gpu.live_alloc_count() == 0


def test_a_folder_without_a_tokenizer_serves_ids(tiny_folder: Path) -> None:
    with metrale.load(tiny_folder, "host", source=80, **SMALL) as model:
        assert model.tokenizer is None
        assert (model.languages.source, model.languages.target) == (80, None)


def test_a_dangling_tokenizer_file_is_an_error_not_an_absent_one(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "sentencepiece.bpe.model").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"sentencepiece\.bpe\.model"):
        metrale.load(tmp_path, "host", **SMALL)


@pytest.mark.parametrize("device", ["", "x", "host:0", "cuda:x", 3, None])
def test_a_device_that_has_no_meaning(tiny_folder: Path, device: Any) -> None:
    with pytest.raises(InvalidInput, match="device: expected 'auto', 'host', 'cuda'"):
        metrale.load(tiny_folder, device)


@pytest.mark.parametrize("path", ["", None, 5])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(InvalidInput, match="path: expected the path of a checkpoint folder, or an id"):
        metrale.load(path, "host")


def test_heads_that_are_too_wide_are_refused_at_load(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "wide", 4, d_model=512, encoder_attention_heads=1, decoder_attention_heads=1)
    gpu = HostBackend()
    with pytest.raises(CheckpointError, match=r"the encoder's packed_attention \(.*head_dim 512.*too large here"):
        metrale.load(folder, gpu, **SMALL)
    assert gpu.live_alloc_count() == 0


class Narrow(HostBackend):
    """A device that takes fewer blocks than others."""

    def limits(self) -> Limits:
        return replace(super().limits(), max_grid=(40, 65535, 65535))


def test_limits_past_what_the_device_can_launch_are_refused_at_load(tiny_folder: Path) -> None:
    """41 tokens of a packed pass are one block each; the largest launches are judged by the device's own limits."""
    with Narrow() as gpu:
        limits: dict[str, Any] = {"max_batch": 1, "max_source_len": 40, "max_new_tokens": 4}
        metrale.load(tiny_folder, gpu, "float32", **limits).close()
        with pytest.raises(CheckpointError, match=r"the encoder's embed \(rows 41, .*too large here: grid: .*40"):
            metrale.load(tiny_folder, gpu, "float32", **limits | {"max_source_len": 41})
        assert gpu.live_alloc_count() == 0


@pytest.mark.parametrize("adapters", [{}, {"a": Recipe(1, settings={"r": 2})}])
def test_the_largest_launches_are_those_of_the_specs(
    tiny_folder: Path, tmp_path: Path, adapters: dict[str, Recipe]
) -> None:
    """Every kernel of the model, each with a value for every integer parameter, and none that is larger in use."""
    folders = {name: write_adapter(tmp_path / name, recipe) for name, recipe in adapters.items()}
    seen: dict[str, dict[str, int]] = {}

    class Watched(HostBackend):
        def launch(self, handle: Any, grid: Any, block: Any, shared_mem: int, stream: Any, args: Any, **o: Any) -> None:
            super().launch(handle, grid, block, shared_mem, stream, args, **o)
            dims = REGISTRY.find(handle.module, handle.name)[0].spec.dims(args)
            for name, value in dims.items():
                most = seen.setdefault(handle.module, {})
                most[name] = max(value, most.get(name, 0))

    limits: dict[str, Any] = {"max_batch": 2, "max_source_len": 8, "max_new_tokens": 4, "adapters": folders}
    with metrale.load(tiny_folder, Watched(), "float32", source=80, target=81, **limits) as model:
        seqs = [model.alloc_sequence() for _ in range(2)]
        seqs[0].adapter_slot = len(folders) - 1
        model.prefill_batch_chunk([PrefillSlice.whole(list(range(40, 46)), seq) for seq in seqs])
        base = model.decode_batch([9, 9], seqs)
        model.argmax_rows(base, 4)
        model.argmax_batch_to_feed(base, [RowMask((3,))] * 4, np.empty(4, np.int32), model.create_event())
        model.begin_sampling(seqs[0], SamplingParams(suppress_tokens=(3,)))
        model.sample_batch_to_feed(base, seqs, np.empty((3, 2), np.int32), model.create_event())
        for seq in seqs:
            model.free_sequence(seq)
        model.generate_beams([BeamReq((40, 41), num_beams=2, max_new=4, suppress_tokens=(3,))])
        seqs = [model.alloc_beams(1, 8, 5) for _ in range(2)]
        rows = model.prefill_batch_chunk([PrefillSlice.whole((40,), seq) for seq in seqs])
        for seq in seqs:
            model.begin_beams(seq, BeamParams(1), SamplingParams(eos_ids=(2,), max_new_tokens=4))
        model.select_beams_to_feed(rows, seqs, np.empty(2, np.int32), model.create_event())
        model.free_sequence(seqs[0])
        model.score_targets([ScoreReq(range(40, 46), (4, 5, 6))], attention=True)
        model.synchronize()
        planned: dict[str, dict[str, int]] = {}
        for _, op, dims in largest_launches(model.shape):
            assert list(dims) == list(op.spec.dims([0] * len(op.spec.args)))
            most = planned.setdefault(op.spec.name, {})
            most |= {name: max(value, most.get(name, 0)) for name, value in dims.items()}
        assert planned == seen


class Opened(HostBackend):
    """What `open_backend` opens in the next test: it says when it is closed, and fails where it is asked to."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self.failing, self.closed = failing, 0

    def limits(self) -> Limits:
        if self.failing == "limits":
            raise DeviceError("limits: failed as asked")
        return super().limits()

    def alloc(self, nbytes: int, *, tag: str = "") -> DevicePtr:
        if self.failing == tag:
            raise DeviceError("alloc: failed as asked")
        return super().alloc(nbytes, tag=tag)

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.mark.parametrize("failing", ["limits", "weights", "logits"])
def test_a_device_that_was_opened_for_a_failed_load_is_closed(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    gpu = Opened(failing)
    monkeypatch.setattr("metrale.factory.open_backend", lambda name: gpu)
    with pytest.raises(DeviceError, match="failed as asked"):
        metrale.load(tiny_folder, "host", **SMALL)
    assert gpu.closed > 0


def test_a_device_that_is_given_is_left_open(tiny_folder: Path) -> None:
    for gpu in (Opened("logits"), Opened("")):
        if gpu.failing:
            with pytest.raises(DeviceError, match="failed as asked"):
                metrale.load(tiny_folder, gpu, **SMALL)
        else:
            metrale.load(tiny_folder, gpu, **SMALL).close()
        assert gpu.closed == 0
        gpu.close()


def test_the_choices_are_logged(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="metrale"):
        metrale.load(tiny_folder, "host", **SMALL).close()
    lines = "\n".join(caplog.messages)
    assert "device host: host (" in lines
    assert "dtype auto: float32" in lines
    assert "memory: weights" in lines


@pytest.mark.parametrize("setting", ["gpu", "cuda:", "cuda:x"])
def test_a_setting_that_is_no_device_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("METRALE_DEVICE", setting)
    for call in (metrale.load, metrale.memory_plan):
        with pytest.raises(InvalidInput, match=f"METRALE_DEVICE: expected 'auto', .*, got '{setting}'"):
            call(tiny_folder, **SMALL)
        call(tiny_folder, "host", **SMALL)


def test_the_setting_is_what_auto_stands_for(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_DEVICE", "cuda:99")
    for call in (metrale.load, metrale.memory_plan):
        with pytest.raises(BackendUnavailable, match=r"^METRALE_DEVICE=cuda:99: cuda.*metrale doctor"):
            call(tiny_folder, **SMALL)
        with pytest.raises(BackendUnavailable, match=r"^cuda.*metrale doctor"):
            call(tiny_folder, "cuda:99", **SMALL)
