# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record what Hugging Face transformers computes: anchors in float64, and its float32 and bfloat16 errors.

Needs torch and transformers, which nothing else here does. From the root of the repository::

    python -m tests.record.record_transformers

writes ``tests/data/transformers_bf16.json`` (about a minute on a CPU) and refuses to when the float64 reference and
transformers disagree. What the fields mean is in the file's own ``meta``.
"""

from __future__ import annotations

import importlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from tests.reference.nllb_float64 import NllbFloat64
from tests.reference.tiny import digest, tiny_config, tiny_tensors, write_tiny

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

Array = npt.NDArray[np.float64]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "metrale" / "demo_model"
OUTPUT = ROOT / "tests" / "data" / "transformers_bf16.json"
COMMAND = "python -m tests.record.record_transformers"

AGREEMENT = 1e-9  # relative to the largest value; float64 sums in another order differ by about 1e-14
TABLE_AGREEMENT = 1e-5  # transformers' own position table is float32; bounds what use_float64_positions() may change

TINY_CASES: list[tuple[int, dict[str, Any], list[int], list[int]]] = [
    (11, {"max_position_embeddings": 8}, [5, 60, 33, 71, 18, 4, 96, 44, 27, 3, 52, 2], [2, 6, 80, 13, 13, 41, 0, 95]),
    (
        12,
        {
            "activation_function": "gelu",
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 8,
            "vocab_size": 101,
        },
        [7, 100, 50, 9, 2],
        [2, 8, 99, 31, 64, 12],
    ),
    (13, {"activation_function": "silu", "scale_embedding": False}, [4, 12, 2], [2, 5, 77, 30, 30, 8, 61]),
    (
        14,
        {
            "activation_function": "gelu_new",
            "d_model": 33,
            "decoder_attention_heads": 11,
            "decoder_layers": 2,
            "encoder_attention_heads": 3,
            "encoder_layers": 4,
            "vocab_size": 89,
        },
        [6, 88, 17, 45, 45, 70, 23, 2],
        [2, 9, 10, 84],
    ),
]

META: dict[str, Any] = {
    "what": "transformers' logits on the demo model and on tiny random models, against the same weights in float64",
    "device": "cpu",
    "command": COMMAND,
    "inputs": "demo: input_ids of golden.json and its greedy ids without the last; batch of one, no padding",
    "rows": "row 0 (after the decoder start alone) is left out of every error: no caller ever reads it",
    "reference": "transformers in float64, stored bf16 weights upcast exactly, position table in float64",
    "float32": "from_pretrained(dtype=float32); its position table as it is",
    "bfloat16": "from_pretrained(dtype=bfloat16); logits as they come, in bfloat16, upcast",
    "teacher_forced": "one pass over all decoder ids, without cache",
    "cached": "one decoder id at a time with the key-value cache, as generate() does; the one to compare decoding with",
    "max_rel": "max|x - reference| / max|reference| over the rows and columns of one case",
    "rms_rel": "root mean square of x - reference over that of the reference, in one case",
    "overall.max_rel": "largest |x - reference| of all cases / largest |reference| of all cases",
    "overall.worst_case": "largest max_rel of a case",
    "flipped": "rows whose largest logit is not the reference's",
    "values": "[row, column, value] of the float64 reference; argmax has one id per row",
    "anchor": "nllb_float64 against transformers: max|difference| / max|reference|; float32_table: with transformers'"
    " own position table, which is float32 in every dtype",
}


def load(folder: Path, dtype: str) -> Any:
    model = transformers.M2M100ForConditionalGeneration.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    return model.eval()


def use_float64_positions(model: Any) -> None:
    """Rebuild the position tables by transformers' own code with its ``.float()`` calls turned into ``.double()``."""
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        for side in (model.model.encoder, model.model.decoder):
            table = side.embed_positions
            table.make_weights(max(len(table.weights), 256), table.embedding_dim, table.padding_idx)
    torch.set_default_dtype(torch.float32)


def encoder_output(model: Any, src: list[int]) -> Array:
    with torch.no_grad():
        hidden = model.get_encoder()(input_ids=torch.tensor([src])).last_hidden_state[0]
    return np.asarray(hidden.double().numpy(), dtype=np.float64)


def teacher_forced(model: Any, src: list[int], dec: list[int]) -> Array:
    with torch.no_grad():
        out = model(input_ids=torch.tensor([src]), decoder_input_ids=torch.tensor([dec]), use_cache=False)
    return np.asarray(out.logits[0].double().numpy(), dtype=np.float64)


def cached(model: Any, src: list[int], dec: list[int]) -> Array:
    rows = []
    with torch.no_grad():
        memory = model.get_encoder()(input_ids=torch.tensor([src]))
        cache = None
        for token in dec:
            out = model(
                encoder_outputs=memory,
                attention_mask=torch.ones(1, len(src), dtype=torch.int64),
                decoder_input_ids=torch.tensor([[token]]),
                cache=cache,
                use_cache=True,
            )
            cache = out.cache
            rows.append(out.logits[0, -1])
    return np.asarray(torch.stack(rows).double().numpy(), dtype=np.float64)


def samples(x: Array, count: int) -> list[list[float]]:
    """``count`` entries of a matrix at places that depend on its shape alone, the last row among them."""
    rows, columns = x.shape
    places = [((rows - 1) * (i + 1) // count, (1031 * i + 17) % columns) for i in range(count)]
    return [[row, column, float(x[row, column])] for row, column in places]


def relative(x: Array, reference: Array) -> float:
    return float(np.abs(x - reference).max() / np.abs(reference).max())


def round3(x: float) -> float:
    return float(f"{x:.3g}")


def errors(x: Array, reference: Array) -> dict[str, float]:
    x, reference = x[1:], reference[1:]
    assert np.isfinite(x).all()
    return {
        "max_abs": round3(float(np.abs(x - reference).max())),
        "max_rel": round3(relative(x, reference)),
        "rms_rel": round3(float(np.sqrt(((x - reference) ** 2).mean() / (reference**2).mean()))),
        "flipped": int((x.argmax(axis=1) != reference.argmax(axis=1)).sum()),
    }


def overall(cases: list[dict[str, Any]], dtype: str, way: str) -> dict[str, float]:
    found = [case[dtype][way] for case in cases]
    largest = max(case["max_abs_reference"] for case in cases)
    return {
        "max_rel": round3(max(e["max_abs"] for e in found) / largest),
        "worst_case": max(e["max_rel"] for e in found),
        "median_case": round3(float(np.median([e["max_rel"] for e in found]))),
        "worst_rms_rel": max(e["rms_rel"] for e in found),
        "flipped": sum(e["flipped"] for e in found),
        "rows": sum(len(case["argmax"]) - 1 for case in cases),
    }


def agree(ours: Array, theirs: Array, tolerance: float, what: str) -> float:
    difference = relative(ours, theirs)
    if not difference <= tolerance:
        raise SystemExit(f"{what}: nllb_float64 and transformers differ by {difference:.3g}, expected {tolerance}")
    return round3(difference)


def anchor(folder: Path, inputs: list[tuple[list[int], list[int]]], count: int) -> tuple[list[Array], dict[str, Any]]:
    """Float64 logits by transformers for ``inputs``, and their recorded form after a check against nllb_float64."""
    judge, model = NllbFloat64.load(folder), load(folder, "float64")
    differences: dict[str, float] = {"float32_table": 0.0, "logits": 0.0, "cached": 0.0, "encoder": 0.0}

    def check(kind: str, ours: Array, theirs: Array, tolerance: float = AGREEMENT) -> None:
        differences[kind] = max(differences[kind], agree(ours, theirs, tolerance, f"{folder.name}, {kind}"))

    for src, dec in inputs:
        check("float32_table", judge.logits(src, dec), teacher_forced(model, src, dec), TABLE_AGREEMENT)
    use_float64_positions(model)
    logits, cases = [], []
    for src, dec in inputs:
        reference, memory = teacher_forced(model, src, dec), encoder_output(model, src)
        check("logits", judge.logits(src, dec), reference)
        check("cached", judge.logits(src, dec), cached(model, src, dec))
        check("encoder", judge.encode(src), memory)
        logits.append(reference)
        cases.append(
            {
                "max_abs_logits": float(np.abs(reference).max()),
                "argmax": reference.argmax(axis=1).tolist(),
                "values": samples(reference, count),
                "max_abs_encoder": float(np.abs(memory).max()),
                "encoder_values": samples(memory, count // 2),
            }
        )
    return logits, {"anchor": differences, "cases": cases}


def record_demo() -> dict[str, Any]:
    golden = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
    inputs = [(case["input_ids"], case["greedy"]["ids"][:-1]) for case in golden]
    logits, recorded = anchor(DEMO, inputs, 8)
    cases: list[dict[str, Any]] = recorded["cases"]
    for case, reference in zip(cases, logits, strict=True):
        case["max_abs_reference"] = float(np.abs(reference[1:]).max())
    result: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        model = load(DEMO, dtype)
        for case, reference, (src, dec) in zip(cases, logits, inputs, strict=True):
            case[dtype] = {
                "teacher_forced": errors(teacher_forced(model, src, dec), reference),
                "cached": errors(cached(model, src, dec), reference),
            }
        result[dtype] = {way: overall(cases, dtype, way) for way in ("teacher_forced", "cached")}
    return {"overall": result, **recorded}


def record_tiny() -> list[dict[str, Any]]:
    result = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed, overrides, src, dec in TINY_CASES:
            folder = write_tiny(Path(scratch) / f"tiny{seed}", seed, **overrides)
            _, recorded = anchor(folder, [(src, dec)], 8)
            sha256 = digest(tiny_tensors(seed, tiny_config(**overrides)))
            made = {"seed": seed, "overrides": overrides, "sha256": sha256, "input_ids": src, "decoder_ids": dec}
            result.append(made | {"anchor": recorded["anchor"]} | recorded["cases"][0])
    return result


def lines(items: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in items) + "\n]"


def main() -> None:
    torch.set_num_threads(2)
    demo, tiny = record_demo(), record_tiny()
    versions = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "threads": torch.get_num_threads(),
        "attention": "sdpa",
    }
    head = {"meta": versions | META, "overall": demo["overall"], "anchor": demo["anchor"]}
    text = json.dumps(head, indent=1)[:-2]
    text += f',\n"cases": {lines(demo["cases"])},\n"tiny": {lines(tiny)}\n}}\n'
    json.loads(text)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(text, encoding="utf-8")
    print(f"{OUTPUT.relative_to(ROOT)}: {len(text)} bytes")
    print(json.dumps({"overall": demo["overall"], "anchor": demo["anchor"]}, indent=1))


if __name__ == "__main__":
    main()
