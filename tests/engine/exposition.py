# SPDX-License-Identifier: MIT OR Apache-2.0
"""The rules of Prometheus' text exposition format 0.0.4, as a parser that refuses what breaks them."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Family:
    """One metric of the text: its type, its help, and samples by name and labels."""

    kind: str
    text: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)


NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def labels_of(text: str) -> tuple[tuple[str, str], ...]:
    """Parse what is between the braces; all of it must be labels."""
    pairs, at = [], 0
    while at < len(text):
        found = LABEL.match(text, at)
        assert found, f"not a label: {text[at:]}"
        value = re.sub(r'\\[\\"n]', lambda one: ESCAPES[one.group()], found[2])
        pairs.append((found[1], value))
        at = found.end()
    assert len({name for name, _ in pairs}) == len(pairs), "a label occurs once"
    return tuple(pairs)


def parse(text: str) -> dict[str, Family]:
    """Parse text of format 0.0.4, and refuse what breaks its rules.

    The rules: the last line ends in a line feed; HELP and TYPE come once each, before the samples; the samples of a
    metric are one group; a sample is there once; a histogram has the suffixes _bucket, _sum, and _count and no others.
    """
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    current, helped = "", ""
    for line in text.splitlines():
        assert line, "no line is empty"
        if line.startswith("# HELP "):
            _, _, helped, description = line.split(" ", 3)
            assert NAME.fullmatch(helped)
            assert not re.search(r"\\(?![\\n])", description), "only backslash and line feed are escaped in a HELP"
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current == helped, "HELP comes before TYPE"
            assert current not in families, "the lines of a metric are one group"
            assert kind in {"counter", "gauge", "histogram", "summary", "untyped"}
            families[current] = Family(kind, description)
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            name, labels, value = found[1], labels_of(found[2] or ""), float(found[3])
            family = families[current]
            suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            assert name in {current + suffix for suffix in suffixes}, f"{name} in the group of {current}"
            assert (name, labels) not in family.samples, "a sample is there once"
            family.samples[name, labels] = value
    return families


def check(families: dict[str, Family]) -> None:
    """Refuse what breaks the conventions of names, counters and histograms."""
    for name, family in families.items():
        assert name.startswith("metrale_")
        assert family.text
        assert family.text[0].isupper()
        assert family.samples
        assert (family.kind == "counter") == name.endswith("_total")
        assert not re.search(r"_(ms|us|milliseconds|minutes|kb|mb|kib|mib)(_|$)", name), "base units alone"
        if family.kind != "gauge":
            assert all(value >= 0 for value in family.samples.values())
        if family.kind == "histogram":
            check_histogram(name, family)


def check_histogram(name: str, family: Family) -> None:
    groups: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
    for (sample, labels), value in family.samples.items():
        if sample.endswith("_bucket"):
            bounds = dict(labels)
            groups[tuple(pair for pair in labels if pair[0] != "le")].append((float(bounds["le"]), value))
    assert groups
    for labels, buckets in groups.items():
        assert buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets), "buckets are cumulative"
        assert buckets[-1][0] == math.inf
        assert buckets[-1][1] == family.samples[f"{name}_count", labels]
        assert (f"{name}_sum", labels) in family.samples
