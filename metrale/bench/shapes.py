# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checkpoints of the real models' shapes with random weights, written in seconds.

Speed does not depend on what the weights are, as long as every activation is finite. Values are drawn once and used
again and again, from another place for each tensor, so that writing is limited by the disk and not by the generator.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from gpu_runtime import dtypes
from metrale.nllb.config import NllbConfig
from metrale.nllb.weights import canonical_shapes

DEVIATION: Final = 0.02
"""Standard deviation of weights and biases, as transformers initialises weights; LayerNorm weights are 1 plus that."""

LAST_NORM: Final = "model.decoder.layer_norm.weight"
"""The one LayerNorm whose weights have both signs. With weights near 1, the tied head makes the input token the
likeliest output, and greedy decoding repeats itself: equal ids would then prove nothing."""

POOL: Final = 16_777_213
"""Values that are drawn, a prime: rows of a matrix that spans the pool many times still differ."""

SHARD_BYTES: Final = 2 << 30

_SAFETENSORS: Final = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; encoder and decoder have the same."""

    d_model: int
    layers: int
    heads: int
    ffn_dim: int
    vocab: int

    def config(self, dtype: str) -> dict[str, Any]:
        """Return ``config.json`` for weights stored as ``dtype`` (a long name)."""
        sides = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (
                ("layers", self.layers),
                ("attention_heads", self.heads),
                ("ffn_dim", self.ffn_dim),
                ("layerdrop", 0.0),
            )
        }
        return {
            "architectures": ["M2M100ForConditionalGeneration"],
            "model_type": "m2m_100",
            "is_encoder_decoder": True,
            "activation_function": "relu",
            "d_model": self.d_model,
            **sides,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1024,
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "use_cache": True,
            "dtype": dtype,
            **SPECIAL_IDS,
        }


SPECIAL_IDS: Final = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}

SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(64, 2, 4, 128, 1000),
    "600M": Shape(1024, 12, 16, 4096, 256206),
    "1.3B": Shape(1024, 24, 16, 8192, 256206),
    "3.3B": Shape(2048, 24, 16, 8192, 256206),
    "418M": Shape(1024, 12, 16, 4096, 128112),
    "1.2B": Shape(1024, 24, 16, 8192, 128112),
}
"""NLLB-200's models and M2M-100's by their usual names, and one for trying things out."""


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a checkpoint, the tied matrix once."""
    return canonical_shapes(NllbConfig.from_dict(shape.config("float32")))


def parameters(shape: Shape) -> int:
    """Return the number of weights, the tied matrix counted once."""
    return sum(map(math.prod, tensors(shape).values()))


class Pools:
    """The random values: one pool around 0, one around 1, and one of both signs for the last norm."""

    def __init__(self, dtype: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kind = dtypes.NUMPY[dtypes.short_name(dtype)]
        bits = np.dtype(f"u{kind.itemsize}")  # bfloat16 has no buffer of its own
        around_zero = rng.standard_normal(POOL, dtype=np.float32)
        around_zero *= np.float32(DEVIATION)
        few = rng.standard_normal(POOL // 1000, dtype=np.float32)
        self.around_zero: NDArray[Any] = around_zero.astype(kind).view(bits)
        self.around_one: NDArray[Any] = (1 + np.float32(DEVIATION) * few).astype(kind).view(bits)
        self.signed: NDArray[Any] = few.astype(kind).view(bits)

    def of(self, name: str) -> NDArray[Any]:
        """Return the pool that a tensor's values come from."""
        if name == LAST_NORM:
            return self.signed
        return self.around_one if name.endswith("norm.weight") else self.around_zero


def write_checkpoint(folder: Path, shape: Shape, dtype: str = "float16", *, seed: int = 0) -> int:
    """Write ``config.json``, ``generation_config.json`` and safetensors shards, and return the bytes of the tensors.

    Parameters
    ----------
    folder : Path
        Made if it is missing. There is no tokenizer in it.
    shape : Shape
    dtype : str
        "float32", "float16" or "bfloat16".
    seed : int
        Equal seed and arguments give equal bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    itemsize = dtypes.itemsize(dtypes.short_name(dtype))
    for name, content in (("config.json", shape.config(dtype)), ("generation_config.json", SPECIAL_IDS)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    pools = Pools(dtype, seed)
    shards = list(split(tensors(shape), itemsize))
    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    total = sum(map(math.prod, tensors(shape).values())) * itemsize
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    with ThreadPoolExecutor(4) as threads:  # writing gives up the GIL
        jobs = [
            threads.submit(_write_shard, folder / file, shard, dtype, pools)
            for file, shard in zip(files, shards, strict=True)
        ]
    for job in jobs:
        job.result()
    return total


def split(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors in order, as many at a time as fit in a shard; a larger one has a shard of its own."""
    shard: dict[str, tuple[int, ...]] = {}
    room = SHARD_BYTES
    for name, extents in shapes.items():
        size = math.prod(extents) * itemsize
        if shard and size > room:
            yield shard
            shard, room = {}, SHARD_BYTES
        shard[name] = extents
        room -= size
    yield shard


def _write_shard(path: Path, shard: Mapping[str, tuple[int, ...]], dtype: str, pools: Pools) -> None:
    """Write one safetensors file: the length of the header, the header, the tensors one after another."""
    short = dtypes.short_name(dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, extents in shard.items():
        start, end = end, end + math.prod(extents) * dtypes.itemsize(short)
        header[name] = {"dtype": _SAFETENSORS[short], "shape": extents, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, extents in shard.items():
            pool = pools.of(name)
            _write_values(file, pool, math.prod(extents), zlib.crc32(name.encode()) % len(pool))


def _write_values(file: BinaryIO, pool: NDArray[Any], count: int, at: int) -> None:
    """Write ``count`` values of the pool from ``at`` on, round and round."""
    while count:
        part = pool[at : at + count].view(np.uint8)
        written = file.write(part.data)  # a raw file may take less than it is given
        assert written % pool.itemsize == 0
        count -= written // pool.itemsize
        at = (at + written // pool.itemsize) % len(pool)


def work_folder(shapes: Sequence[str], dtype: str, given: Path | None = None) -> Path:
    """Return where to put checkpoints: the folder given, else memory when all of them fit there, else the disk."""
    if given is not None:
        return given
    itemsize = dtypes.itemsize(dtypes.short_name(dtype))
    sizes = [parameters(SHAPES[name]) * itemsize for name in shapes]
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 1.1 * (sum(sizes) + max(sizes)):  # one is converted
        return memory
    return Path(tempfile.gettempdir())
