# SPDX-License-Identifier: MIT OR Apache-2.0
"""Patterns of module names: which one counts, and which are not tried at all."""

from __future__ import annotations

import time

import pytest

from metrale.checkpoint.name_patterns import MOST_LENGTH, MOST_NAME, MOST_PATTERNS, NamePatterns

Q = "model.decoder.layers.11.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("q_proj", Q, True),
        ("_proj", Q, False),  # a part of a name begins after a dot
        ("self_attn.q_proj", Q, True),
        ("self.attn.q_proj", Q, True),  # a dot is any character
        (r"self\.attn\.q_proj", Q, False),
        (Q, Q, True),
        (f"^{Q}$", Q, True),
        ("^q_proj", Q, False),
        ("^q_proj", "q_proj", True),
        ("self_attn", Q, False),  # the whole rest of the name
        (r".*decoder.*q_proj", Q, True),
        (r"layers\.\d+\.self_attn\.(q|k)_proj", Q, True),
        (r"layers\.\d\.self_attn\.(q|k)_proj", Q, False),
        (r"layers.[0-9]*.self_attn.q_proj", Q, True),
        ("k_proj|q_proj", Q, True),
        ("q_proj|k", Q, True),
        ("", Q, False),
        ("", "model.", True),
    ],
)
def test_what_a_pattern_matches(pattern: str, name: str, matches: bool) -> None:
    problems: list[str] = []
    assert NamePatterns({pattern: 5}, "source", problems).value(name, 1) == (5 if matches else 1)
    assert problems == []


def test_the_first_one_counts() -> None:
    problems: list[str] = []
    both = NamePatterns({"k_proj": 1, "q_proj": 2, ".*": 3, Q: 4}, "source", problems)
    assert [both.value(name, 0) for name in (Q, "q_proj", "k_proj", "fc1")] == [2, 2, 1, 3]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+", "repeats a group"),
        ("(a|a)*", "repeats a group"),
        ("(ab){9}", "repeats a group"),
        ("(ab)?", "repeats a group"),
        (r"(a)\1", "looks back or around"),
        ("(?=a)", "looks back or around"),
        ("(?i)a", "looks back or around"),
        ("a*b*c*", "more than 2 repeats"),
        ("a?b+c{2}", "more than 2 repeats"),
        ("(a)(b)(c)", "or 2 groups"),
        ("a" * (MOST_LENGTH + 1), f"more than {MOST_LENGTH} characters"),
        ("(", "is no regular expression"),
        ("a**", "is no regular expression"),
        ("[", "is no regular expression"),
        ("*", "is no regular expression"),
        ("a{99999999999}", "is no regular expression"),
        ("a\\", "looks back or around"),
    ],
)
def test_what_is_not_tried(pattern: str, why: str) -> None:
    problems: list[str] = []
    NamePatterns({pattern: 5}, "config.json: rank_pattern", problems)
    assert len(problems) == 1
    assert problems[0].startswith("config.json: rank_pattern: the pattern ")
    assert why in problems[0]


@pytest.mark.parametrize("pattern", [".*.*x", "a*a*x", "(a|a)(a|a)a*a*x", ".*(.*|a)x"])
def test_none_takes_long(pattern: str) -> None:
    """The worst names for patterns that are tried: much less than a second, where a repeated group takes for ever."""
    patterns = NamePatterns({pattern: 5}, "source", [])
    begin = time.process_time()
    for name in ("a" * MOST_NAME, "a." * (MOST_NAME // 2)):
        assert patterns.value(name, 1) == 1
    assert time.process_time() - begin < 5


def test_long_names_are_not_tried() -> None:
    patterns = NamePatterns({".*": 5}, "source", [])
    assert (patterns.value("a" * MOST_NAME, 1), patterns.value("a" * (MOST_NAME + 1), 1)) == (5, 1)


def test_more_patterns_than_any_model_has_modules_are_not_tried() -> None:
    for count in (MOST_PATTERNS, MOST_PATTERNS + 1):
        problems: list[str] = []
        patterns = NamePatterns({f"module{index}": 5 for index in range(count)}, "source", problems)
        fits = count == MOST_PATTERNS
        assert patterns.value("module0", 1) == (5 if fits else 1)
        assert problems == ([] if fits else [f"source: has {count} patterns, and at most {MOST_PATTERNS} are read"])


def test_all_patterns_together_have_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over all names, said once, and then nothing is tried any more."""
    monkeypatch.setattr("metrale.checkpoint.name_patterns.MOST_SECONDS", 0.05)
    problems: list[str] = []
    patterns = NamePatterns({f".*.*{index}x": 5 for index in range(20)} | {"last": 7}, "source", problems)
    begin = time.process_time()
    for index in range(10_000):
        patterns.value(f"{'a.' * 55}{index}", 1)
    assert time.process_time() - begin < 3
    assert problems == ["source: its patterns take too long to be held against all modules"]
    assert patterns.value("last", 1) == 1


def test_a_limit_of_time_is_not_used_up_by_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    patterns = NamePatterns({f"module{index}": index for index in range(500)}, "source", problems)
    assert [patterns.value(f"model.module{index}", -1) for index in range(500)] == list(range(500))
    assert problems == []
