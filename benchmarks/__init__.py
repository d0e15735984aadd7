# SPDX-License-Identifier: MIT OR Apache-2.0
"""Benchmarks. What is timed is checked first, and the figures are JSON. What the installed command uses as well lies in
`metrale.bench`.

Five modules are commands, run as ``python -m benchmarks.NAME`` in the root of the repository (``--help`` has the rest):

- ``host_speed``: the host backend beside CTranslate2.
- ``host_accuracy``: how exact the host backend is; about 4 minutes on two cores.
- ``gpu_speed``: a GPU beside its floors, CTranslate2 and transformers.
- ``gpu_report``: the tables of what ``gpu_speed`` wrote.
- ``gpu_evidence``: everything that shows that the CUDA backend is right.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The repository."""
