# SPDX-License-Identifier: MIT OR Apache-2.0
"""``metrale doctor``: what metrale finds on this machine, and what to install for what is missing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import metrale
from gpu_runtime.config import Config
from metrale.cli.failure import DONE, UNUSABLE
from metrale.cli.finding import Finding
from metrale.cli.findings import READY, judge, verdicts
from metrale.cli.isolate import Answer, ask_all
from metrale.cli.output import one_line, to_json, write_lines

PROBES: Final = {
    "packages": "metrale.cli.packages:probe",
    "host": "metrale.cli.host_check:probe",
    "driver": "metrale.cli.driver:probe",
    "libraries": "metrale.cli.libraries:probe",
    "nvrtc": "gpu_runtime.cuda.installed:nvrtc",
    "cublasLt": "gpu_runtime.cuda.installed:cublaslt",
    "gpu": "metrale.cli.gpu_check:probe",
}
SECONDS: Final = 60.0
"""The most that all probes together may take: a driver that initialises many devices needs some."""


def add_parser(commands: argparse._SubParsersAction[Any], common: argparse.ArgumentParser) -> None:
    """Add this command to the parser."""
    parser = commands.add_parser(
        "doctor",
        parents=[common],
        allow_abbrev=False,
        help="show what is installed, and what is missing",
        description="Show what metrale finds on this machine, what to install for what is missing, and the settings in "
        "force. The exit code is 0 when the host backend works, else 3.",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    answers = ask_all(PROBES, SECONDS)
    findings = judge(answers)
    verdict = verdicts(findings)
    if args.json:
        write_lines([to_json(to_dict(answers, findings, verdict), indent=2)])
    else:
        write_lines(to_text(answers, findings, verdict))
    return DONE if verdict["host"] == READY else UNUSABLE


def settings() -> dict[str, str | None]:
    """Return what the environment's settings come to: device, the model's and the cache's folder, NVTX ranges."""
    config = Config.from_env()
    return {
        "device": config.device,
        "model": config.model,
        "cache": None if config.cache is None else str(config.cache),
        "nvtx": "on" if config.nvtx else "off",
    }


def to_dict(answers: Mapping[str, Answer], findings: list[Finding], verdict: Mapping[str, str]) -> dict[str, Any]:
    """Return everything as JSON-ready values: settings, findings, verdicts, and what each probe answered."""
    return {
        "metrale": metrale.__version__,
        "settings": settings(),
        "findings": [asdict(one) for one in findings],
        "verdict": dict(verdict),
        "probes": {name: asdict(answer) for name, answer in answers.items()},
    }


def to_text(answers: Mapping[str, Answer], findings: list[Finding], verdict: Mapping[str, str]) -> list[str]:
    """Return the report as lines for people; the last ones are the verdicts."""
    about = answers["packages"].data
    lines = [f"metrale {metrale.__version__}"]
    if about is not None:
        lines += [about["python"], f"{about['platform']}, {about['processors']} processors"]
    lines += ["", "settings"]
    absent = {"model": "none: the demo model", "cache": "none: compiled kernels are not kept"}
    lines += [one_line(f"  {name}: {value or absent[name]}") for name, value in settings().items()]
    for part in ("host", "cuda"):
        lines += ["", part]
        for one in findings:
            if one.part == part:
                lines.append(one_line(f"  {one.state:<8} {one.name}: {one.detail}"))
                lines += [f"           -> {one.advice}"] if one.advice else []
    return [*lines, "", *(one_line(f"{part}: {sentence}") for part, sentence in verdict.items())]
