# SPDX-License-Identifier: MIT OR Apache-2.0
"""Asserts what the wheel must and must not hold. Usage: check_wheel.py WHEEL"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

names = set(zipfile.ZipFile(sys.argv[1]).namelist())
tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
assert tops == {"gpu_runtime", "metrale", "metrale_kernels"}, tops
for wanted in (
    "gpu_runtime/py.typed",
    "metrale/py.typed",
    "metrale/demo_model/model.safetensors",
    "metrale/demo_model/NOTICE.md",
    "metrale/demo_model/golden.json",
    "metrale/demo_model/recipe/train.py",
    "metrale_kernels/__init__.py",
):
    assert wanted in names, f"the wheel lacks {wanted}"
for folder, installed in (("kernels", "metrale_kernels"), ("gpu_runtime", "gpu_runtime"), ("metrale", "metrale")):
    sources = [path for kind in ("*.py", "*.cu", "*.cuh", "*.h", "*.hpp") for path in (ROOT / folder).rglob(kind)]
    assert len(sources) > 3, f"{folder}: {len(sources)} sources"
    for path in sources:
        wanted = f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        assert wanted in names, f"the wheel lacks {wanted}"
licences = {name.rsplit("/", 1)[1] for name in names if ".dist-info/licenses/" in name}
assert {"LICENSE-MIT", "LICENSE-APACHE"} <= licences, licences
print(f"wheel: {len(names)} files, as expected")
