# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saves small files with whatever PyTorch runs this, as ``tests/checkpoint/test_torch_recorded.py`` reads them.

    python -m tests.record.record_torch

writes ``tests/data/torch/VERSION.bin`` (`torch.save` as it is), ``VERSION-protocol4.bin`` and ``VERSION-legacy.bin``
(the form before version 1.6). Recorded with 1.13 and 2.13. The test saves `everything` anew where PyTorch is installed.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

torch: Any = importlib.import_module("torch")

FOLDER = Path(__file__).parents[1] / "data" / "torch"


def everything() -> OrderedDict[str, Any]:
    """Return a state dict with a tensor of every kind that is read or described, and plain values."""
    state: OrderedDict[str, Any] = torch.nn.Linear(3, 2).state_dict()
    row = torch.arange(24, dtype=torch.float32)
    state["weight"], state["bias"] = row[:6].clone().reshape(2, 3), torch.tensor([0.5, -2.0])
    state["shared"] = row.reshape(4, 6)
    state["rows"] = row.reshape(4, 6)[1:3]
    state["transposed"] = row.reshape(4, 6).t()
    state["columns"] = row.reshape(4, 6)[:, 1::2]
    state["cube"] = row.reshape(2, 3, 4).permute(2, 0, 1)
    state["expanded"] = torch.tensor([[1.0], [2.0]]).expand(2, 5)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(0, 4)
    for name in ("float64", "float16", "bfloat16"):
        state[name] = (row[:6] / 4).to(getattr(torch, name))
    for name in ("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"):
        state[name] = row[:3].to(getattr(torch, name))
    for name in ("float8_e4m3fn", "float8_e5m2", "uint16"):  # in storages without a type, from version 2.1 on
        if hasattr(torch, name):
            state[name] = row[:3].to(getattr(torch, name))
    state["parameter"] = torch.nn.Parameter(row[:2].clone())
    state["parameter_with_state"] = torch.nn.Parameter(row[:2].clone())
    state["parameter_with_state"].note = "kept for later"
    state["tensor_with_state"] = row[:2].clone()
    state["tensor_with_state"].note = ["a", 1]
    state["epoch"] = 3
    state["large"] = 1 << 40
    state["plain"] = {"text": "é", "list": [1, None, True, -2.5], 7: (1, 2), "size": torch.Size([2, 3])}
    state["dtype"] = torch.float16
    return state


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    version = ".".join(torch.__version__.split(".")[:2])
    torch.save(everything(), FOLDER / f"{version}.bin")
    torch.save(everything(), FOLDER / f"{version}-protocol4.bin", pickle_protocol=4)
    torch.save(everything(), FOLDER / f"{version}-legacy.bin", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()
