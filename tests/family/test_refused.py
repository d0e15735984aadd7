# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is no model of the family, or another than its configuration says: one sentence, before any device memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import metrale
from gpu_runtime.errors import OutOfMemory
from gpu_runtime.host import HostBackend
from metrale.errors import CheckpointError
from tests.family.refusals import REFUSALS, Refusal
from tests.reference.tiny import tiny_config, tiny_tensors

NOTHING = 1
"""Bytes that the device has: whatever is allocated is an OutOfMemory."""


def load(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    with HostBackend(memory_limit=NOTHING) as gpu:
        metrale.load(folder, gpu, "float32", max_batch=2, max_source_len=8, max_new_tokens=4).close()


@pytest.mark.parametrize("one", REFUSALS, ids=lambda one: one.name)
def test_one_sentence_and_no_memory(one: Refusal, tmp_path: Path) -> None:
    tensors = tiny_tensors(5, tiny_config())
    one.tensors(tensors)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, tiny_config() | one.config, tensors)
    (problem,) = caught.value.problems
    assert all(part in problem for part in one.says), problem
    assert "\n" not in problem


@pytest.mark.parametrize("d_model", [1, 2, 3])
def test_no_positions_for_so_narrow_a_model(d_model: int, tmp_path: Path) -> None:
    config = tiny_config(d_model=d_model, encoder_attention_heads=1, decoder_attention_heads=1)
    with pytest.raises(CheckpointError, match=rf"d_model: expected an integer from 4 to 65536, got {d_model}"):
        load(tmp_path, config, tiny_tensors(5, config))


def test_heads_too_wide_for_the_kernels(tmp_path: Path) -> None:
    config = tiny_config(d_model=512, encoder_attention_heads=2, decoder_attention_heads=1)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tiny_tensors(5, config), tmp_path / "model.safetensors")
    with HostBackend() as gpu:
        with pytest.raises(CheckpointError, match="head_dim: expected at most 256, got 512"):
            metrale.load(tmp_path, gpu, "float32", max_batch=2, max_source_len=8, max_new_tokens=4)
        assert gpu.live_bytes() == 0


def test_the_checkpoint_that_they_all_change_is_a_good_one(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="1 are free"):
        load(tmp_path, tiny_config(), tiny_tensors(5, tiny_config()))
