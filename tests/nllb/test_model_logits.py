# SPDX-License-Identifier: MIT OR Apache-2.0
"""Logits of prefill and decode against float64 mathematics, in all three dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import metrale
from gpu_runtime.backend import GpuBackend
from metrale.model import PrefillSlice
from metrale.nllb.model import NllbModel
from metrale.nllb.positions import sinusoidal
from tests.nllb.decoding import DEMO, GOLDEN, LIMITS, Case, exact, forced, prefilled, read, relative
from tests.reference.nllb_float64 import NllbFloat64, sinusoidal_positions
from tests.reference.tiny import tiny_config, write_tiny

DATA = Path(__file__).parents[1] / "data" / "transformers_bf16.json"
RECORDED: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))

FLOAT32 = 1e-5
"""Of the largest logit. Rounding of a float32 forward gives up to 1e-6; any fault of formula gives over 1e-3."""


@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_demo_model_in_float32(demo: NllbModel, demo_judge: NllbFloat64, index: int) -> None:
    case = GOLDEN[index]
    assert relative(forced(demo, case), exact(demo_judge, case)) <= FLOAT32


VARIANTS: list[tuple[int, dict[str, Any], list[int], list[int]]] = [
    *((r["seed"], r["overrides"], r["input_ids"], r["decoder_ids"]) for r in RECORDED["tiny"]),
    # Every special id somewhere else. The first position is that of the padding id plus one.
    (
        31,
        {"pad_token_id": 4, "eos_token_id": 7, "decoder_start_token_id": 9, "bos_token_id": 3},
        [80, 11, 12, 90, 7],
        [9, 81, 30, 31, 2, 1],
    ),
    (32, {"eos_token_id": [7, 2], "pad_token_id": 0}, [80, 11, 12, 90, 7], [2, 81, 30, 31]),
    (33, {"d_model": 33, "encoder_attention_heads": 1, "decoder_attention_heads": 33}, [9, 2], [2, 8, 40]),
    (34, {"activation_function": "swish", "encoder_layers": 1, "decoder_layers": 1}, [9, 44, 45, 2], [2, 8, 40, 41]),
    (35, {"activation_function": "gelu_pytorch_tanh", "d_model": 4, "vocab_size": 64}, [9, 44, 2], [2, 8, 40, 41]),
    (36, {"max_position_embeddings": 2}, [9, *range(20, 60), 2], [2, 8, *range(30, 70)]),
]


@pytest.mark.parametrize(("seed", "overrides", "src", "dec"), VARIANTS, ids=[f"seed{v[0]}" for v in VARIANTS])
def test_tiny_models_in_float32(
    tmp_path: Path, gpu: GpuBackend, seed: int, overrides: dict[str, Any], src: list[int], dec: list[int]
) -> None:
    """All activations, odd width, unequal heads and layers, unscaled embeddings, positions past the config's."""
    folder = write_tiny(tmp_path / "model", seed, **overrides)
    case = Case(src[1:-1], src[0], dec[1], [*dec, 0])
    limits: dict[str, Any] = {"max_batch": 1, "max_source_len": len(src), "max_new_tokens": len(dec)}
    with metrale.load(folder, gpu, "float32", **limits) as model:
        logits = forced(model, case)
    reference = NllbFloat64.load(folder).logits(src, dec)[1:]
    assert relative(logits, reference) <= FLOAT32


def test_the_variants_cover_what_a_config_can_say() -> None:
    configs = [tiny_config(**overrides) for _, overrides, _, _ in VARIANTS]
    for key in ("activation_function", "scale_embedding", "pad_token_id", "encoder_layers", "decoder_layers"):
        assert len({str(config[key]) for config in configs}) > 1, key
    assert any(c["d_model"] % 2 for c in configs)
    assert any(len(src) > c["max_position_embeddings"] for (_, _, src, _), c in zip(VARIANTS, configs, strict=True))


def test_the_decoder_starts_as_the_generation_config_says(tmp_path: Path, gpu: GpuBackend) -> None:
    """Which is where transformers looks as well."""
    folder = write_tiny(tmp_path / "model", 37)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_start_token_id": 11}))
    with metrale.load(folder, gpu, "float32", max_batch=1, max_source_len=8, max_new_tokens=4) as model:
        seq = model.alloc_sequence()
        seq.src_lang_id, seq.tgt_lang_id = 80, 81
        row = model.copy_logits_to_host(model.prefill([5, 6], seq))
        assert seq.tokens == [11, 81]
    assert relative(row, NllbFloat64.load(folder).logits([80, 5, 6, 2], [11, 81])[1]) <= FLOAT32


@pytest.fixture(scope="module")
def reference(demo_judge: NllbFloat64) -> list[NDArray[np.float64]]:
    return [exact(demo_judge, case) for case in GOLDEN]


def errors(model: NllbModel, cases: list[int], reference: list[NDArray[np.float64]]) -> dict[str, float]:
    """Return the errors of the teacher-forced cases as the recorded file defines them."""
    absolute, worst, rms = [], [], []
    for index in cases:
        x, exact_ = forced(model, GOLDEN[index]).astype(np.float64), reference[index]
        assert np.isfinite(x).all()
        absolute.append(np.abs(x - exact_).max())
        worst.append(np.abs(x - exact_).max() / np.abs(exact_).max())
        rms.append(np.sqrt(((x - exact_) ** 2).mean() / (exact_**2).mean()))
    return {
        "max_rel": max(absolute) / max(np.abs(reference[index]).max() for index in cases),
        "worst_case": max(worst),
        "median_case": float(np.median(worst)),
        "worst_rms_rel": max(rms),
    }


def test_bfloat16_is_no_worse_than_transformers(gpu: GpuBackend, reference: list[NDArray[np.float64]]) -> None:
    """At most 1.2 times its error over all cases, on the same inputs, decoded with the cache as it does.

    Judged over all cases together: the error of one case is one draw of rounding noise, and differs by 1.9 times either
    way between two equally good implementations.
    """
    theirs = RECORDED["overall"]["bfloat16"]["cached"]
    with metrale.load(DEMO, gpu, "bfloat16", max_batch=1, **LIMITS) as model:
        ours = errors(model, list(range(len(GOLDEN))), reference)
    for name, error in ours.items():
        assert error <= 1.2 * theirs[name], (name, error, theirs[name])
        assert error >= 0.1 * theirs[name], f"{name}: too good to be bfloat16"


@pytest.mark.more
def test_float16_is_eight_times_better_than_bfloat16(gpu: GpuBackend, reference: list[NDArray[np.float64]]) -> None:
    """It has three more bits; so 1.2 / 8 of the recorded bfloat16 error, over a quarter of the cases (it is slow)."""
    theirs = RECORDED["overall"]["bfloat16"]["cached"]
    with metrale.load(DEMO, gpu, "float16", max_batch=1, **LIMITS) as model:
        ours = errors(model, list(range(0, len(GOLDEN), 4)), reference)
    for name, error in ours.items():
        assert error <= 1.2 / 8 * theirs[name], (name, error, theirs[name])
        assert error >= 0.1 / 8 * theirs[name], f"{name}: too good to be float16"


def test_hidden_rows_are_what_the_head_multiplies(demo: NllbModel, demo_judge: NllbFloat64) -> None:
    """After prefill two rows a sequence, start and language; after a step one."""
    d = demo.config.d_model
    cases = GOLDEN[3:6]
    seqs = [demo.alloc_sequence() for _ in cases]
    for seq, case in zip(seqs, cases, strict=True):
        seq.src_lang_id, seq.tgt_lang_id = case.source, case.target
    slices = [PrefillSlice.whole(case.tokens, seq) for case, seq in zip(cases, seqs, strict=True)]
    rows = [demo.copy_logits_to_host(ptr) for ptr in demo.prefill_batch_chunk(slices)]
    hidden = read(demo.gpu, demo.hidden_after_norm(), 6 * d).reshape(3, 2, d)
    for case, row, two in zip(cases, rows, hidden, strict=True):
        assert relative(two, demo_judge.decode(demo_judge.encode(case.src), case.ids[:2])) <= FLOAT32
        assert relative(row, two[1] @ demo_judge.embedding.T) <= FLOAT32
    base = demo.decode_batch([case.ids[2] for case in cases], seqs)
    step = read(demo.gpu, demo.hidden_after_norm(), 3 * d).reshape(3, d)
    for lane, case in enumerate(cases):
        assert relative(step[lane], demo_judge.decode(demo_judge.encode(case.src), case.ids[:3])[2]) <= FLOAT32
        row = demo.copy_logits_to_host(base.offset(lane * demo.logits_row_bytes()))
        assert relative(row, step[lane] @ demo_judge.embedding.T) <= FLOAT32
        demo.free_sequence(seqs[lane])


def test_prefilling_a_sequence_again_forgets_the_first_source(tiny: NllbModel, tiny_judge: NllbFloat64) -> None:
    seq = prefilled(tiny, Case([5, 6, 7, 8, 9], 80, 81, []))
    tiny.decode(30, seq)
    seq.src_lang_id, seq.tgt_lang_id = 82, 83
    row = tiny.copy_logits_to_host(tiny.prefill([10, 11], seq))
    assert (seq.tokens, seq.seq_len, seq.prompt_len) == ([2, 83], 2, 2)
    assert relative(row, tiny_judge.logits([82, 10, 11, 2], [2, 83])[1]) <= FLOAT32
    row = tiny.copy_logits_to_host(tiny.decode(31, seq))
    assert relative(row, tiny_judge.logits([82, 10, 11, 2], [2, 83, 31])[2]) <= FLOAT32


@pytest.mark.parametrize(("first", "count", "width"), [(2, 300, 256), (5, 7, 33), (1, 1, 4), (2, 1100, 1024)])
def test_the_position_table_is_exact_but_for_one_rounding(first: int, count: int, width: int) -> None:
    table = sinusoidal(first, count, width)
    assert table.dtype == np.float32
    # Half a unit in the last place of numbers up to 1, and the sine of angles that are off by 1e-13.
    np.testing.assert_allclose(table, sinusoidal_positions(first, count, width), rtol=0, atol=2**-25 + 1e-12)
