# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading a larger checkpoint takes little memory beside the model itself. Linux only: it reads /proc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny import tensor_shapes, tiny_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from Linux's /proc")

CONFIG = tiny_config(
    d_model=1024,
    encoder_layers=3,
    decoder_layers=3,
    encoder_ffn_dim=4096,
    decoder_ffn_dim=4096,
    encoder_attention_heads=16,
    decoder_attention_heads=16,
    vocab_size=65536,
)
MIB = 1 << 20

CHILD = """
import sys, threading, time
import metrale
from gpu_runtime.host import HostBackend

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))

peak, stop = 0, threading.Event()

def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, anonymous())

class Touched(HostBackend):
    "Uses each block at once, so that the peak is the whole model and what the loader holds beside it."

    def alloc(self, nbytes, *, tag=""):
        ptr = super().alloc(nbytes, tag=tag)
        self.memset(ptr, 1, nbytes)
        return ptr

gpu = Touched()
before = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter()
model = metrale.load(sys.argv[1], gpu, sys.argv[2], max_batch=1, max_source_len=16, max_new_tokens=16)
took = time.perf_counter() - began
stop.set()
watcher.join()
print(peak - before, anonymous() - before, model.memory_plan().weights, model.memory_plan().total, took)
"""


def write_sparse(folder: Path) -> int:
    """Write a float32 checkpoint of zeros that takes no room on the disk; return the size of its tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensor_shapes(CONFIG):
        start = end
        end += 4 * int(shape[0]) * (int(shape[1]) if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return end


@pytest.mark.parametrize(("dtype", "itemsize", "buffers"), [("bfloat16", 2, 3 * MIB), ("float32", 4, -MIB)])
def test_loading_takes_the_model_and_a_few_buffers(tmp_path: Path, dtype: str, itemsize: int, buffers: int) -> None:
    """At most 120 MiB beside the model: a slot of 8 MiB for each of at most 10 threads, and what they convert.

    A copy of the whole checkpoint, or of its embedding alone (256 MiB as stored), would be found. The buffers of a
    conversion are seen, else nothing was measured; they are gone afterwards. What is stored as it is wanted needs none:
    the file is read into its place.
    """
    stored = write_sparse(tmp_path)
    assert stored > 600e6
    command = [sys.executable, "-c", CHILD, str(tmp_path), dtype]
    began = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert result.returncode == 0, result.stderr
    peak, after, weights, total, took = map(float, result.stdout.split())
    assert 0 <= weights - stored / 4 * itemsize < MIB
    assert total - MIB <= after < total + 24 * MIB
    assert total + buffers < peak < total + 120 * MIB
    assert took < 10
    assert time.perf_counter() - began < 20
