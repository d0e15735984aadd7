# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checkpoint folders as named tensors, read by row chunks. Knows no model."""

from __future__ import annotations

from metrale.checkpoint.convert import convert
from metrale.checkpoint.file_bytes import FileBytes, FilePlace
from metrale.checkpoint.folder import Checkpoint, open_checkpoint
from metrale.checkpoint.forms import WEIGHT_FORMS, shard_names, weight_files
from metrale.checkpoint.json_fields import FieldReader
from metrale.checkpoint.json_file import read_json_object
from metrale.checkpoint.paths import read_file, require_folder, require_path
from metrale.checkpoint.peft import LoraModule, PeftAdapter, open_adapter
from metrale.checkpoint.saving import Shard, plan_shards, save_shards
from metrale.checkpoint.tensor import FLOAT_DTYPES, TensorInfo

__all__ = [
    "FLOAT_DTYPES",
    "WEIGHT_FORMS",
    "Checkpoint",
    "FieldReader",
    "FileBytes",
    "FilePlace",
    "LoraModule",
    "PeftAdapter",
    "Shard",
    "TensorInfo",
    "convert",
    "open_adapter",
    "open_checkpoint",
    "plan_shards",
    "read_file",
    "read_json_object",
    "require_folder",
    "require_path",
    "save_shards",
    "shard_names",
    "weight_files",
]
