# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the probes' answers mean: findings with advice, and a verdict on each backend. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from metrale.cli import packages
from metrale.cli.cuda_findings import TRIAL, judge_cuda
from metrale.cli.finding import Finding, package
from metrale.cli.isolate import Answer

READY: Final = "ready"


def judge(answers: Mapping[str, Answer]) -> list[Finding]:
    """Return the findings from the answers of all probes, by their names in `metrale.cli.doctor.PROBES`."""
    return [*_host_packages(answers["packages"]), _host_trial(answers["host"]), *judge_cuda(answers)]


def verdicts(findings: list[Finding]) -> dict[str, str]:
    """Return a sentence on each backend: ``ready`` alone when all is well, and first when it works all the same."""
    host, cuda = ([one for one in findings if one.part == part] for part in ("host", "cuda"))
    troubles = "; ".join(_reasons(cuda))
    works = any(one.name == TRIAL and one.state == "ok" for one in cuda)
    on_cuda = (f"{READY}, but {troubles}" if troubles else READY) if works else f"not available: {troubles}"
    reasons = "; ".join(_reasons(host))
    return {"host": f"not ready: {reasons}" if reasons else READY, "cuda": on_cuda}


def _reasons(findings: list[Finding]) -> list[str]:
    """Return ``"missing: NVRTC, cuBLASLt"`` and the like, for each state but ``ok``."""
    states = {one.state: None for one in findings if one.state != "ok"}
    return [f"{state}: {', '.join(one.name for one in findings if one.state == state)}" for state in states]


def _host_packages(answer: Answer) -> Iterator[Finding]:
    if answer.data is None:
        yield Finding("host", "packages", "unknown", str(answer.error))
        return
    for name, oldest in packages.HOST.items():
        yield package("host", name, answer.data["versions"][name], oldest)


def _host_trial(answer: Answer) -> Finding:
    if answer.data is None:
        return Finding("host", "host backend", "problem", str(answer.error), "pip install -e . (in the clone)")
    return Finding("host", "host backend", "ok", f"{answer.data['name']} translates")
