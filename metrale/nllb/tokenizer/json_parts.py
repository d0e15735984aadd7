# SPDX-License-Identifier: MIT OR Apache-2.0
"""The parts of a ``tokenizer.json`` that are handed to the tokenizers library: those that the family's files have.

The library builds whatever a file describes, regular expressions included. Only what is known to be sound and needed is
let through; the rest is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from metrale.checkpoint.json_fields import shown

_PARTS: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "normalizer": ("normalizers", frozenset({"Precompiled", "Replace", "Strip", "NFC", "NFKC", "Nmt"})),
    "pre_tokenizer": ("pretokenizers", frozenset({"Metaspace", "WhitespaceSplit"})),
    "decoder": ("decoders", frozenset({"Metaspace"})),
}
_SPACES: Final = " {2,}"
"""The one regular expression that the family's normalisers have."""


def unfit_parts(whole: Mapping[str, object]) -> Iterator[str]:
    """Yield what a ``tokenizer.json`` has that is not served, one phrase each."""
    for part, (members, allowed) in _PARTS.items():
        for one in _flat(whole.get(part), members):
            kind = one.get("type") if isinstance(one, dict) else one
            if not isinstance(kind, str) or kind not in allowed:
                yield f"{part}: expected one of {', '.join(sorted(allowed))}, got {shown(kind)}"
            elif kind == "Replace" and isinstance(one, dict) and not _is_plain(one.get("pattern")):
                yield f"{part}: Replace has the pattern {shown(one.get('pattern'))}, expected a text or {_SPACES!r}"
    model = whole.get("model")
    if not isinstance(model, dict):
        yield f"model: expected an object, got {shown(model)}"
        return
    expected: dict[str, tuple[object, ...]] = {
        "type": ("BPE",),
        "unk_token": ("<unk>",),
        "dropout": (None, 0),
        "byte_fallback": (None, False),
        "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""),
    }
    for key, values in expected.items():
        if model.get(key) not in values:
            yield f"model: {key} is {shown(model.get(key))}, expected {shown(values[0])}"
    if not isinstance(model.get("vocab"), dict):
        yield f"model: vocab: expected an object, got {shown(model.get('vocab'))}"


def served_parts(whole: Mapping[str, object], is_language: Callable[[str], bool]) -> dict[str, object]:
    """Return the parts that make ids and text; the language, ``</s>``, padding and cutting are no concern of them.

    A language is a special token here, whatever the file says: in a text it is text.
    """
    kept = ("version", "normalizer", "pre_tokenizer", "decoder", "model")
    empty = dict.fromkeys(("truncation", "padding", "post_processor"))
    added = whole.get("added_tokens")
    tokens = [_guarded(entry, is_language) for entry in added] if isinstance(added, list) else added
    return {**{name: whole.get(name) for name in kept}, **empty, "added_tokens": tokens}


def _guarded(entry: object, is_language: Callable[[str], bool]) -> object:
    content = entry.get("content") if isinstance(entry, dict) else None
    if isinstance(entry, dict) and isinstance(content, str) and is_language(content):
        return {**entry, "special": True}
    return entry


def _flat(part: object, members: str) -> list[object]:
    """Return a part's members; a sequence within a sequence stays one, and is refused like anything unknown."""
    if part is None:
        return []
    if isinstance(part, dict) and part.get("type") == "Sequence":
        inner = part.get(members)
        return list(inner) if isinstance(inner, list) else [inner]
    return [part]


def _is_plain(pattern: object) -> bool:
    if not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    return isinstance(pattern.get("String"), str) or pattern.get("Regex") == _SPACES
