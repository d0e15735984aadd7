# SPDX-License-Identifier: MIT OR Apache-2.0
"""Strings that no honest text is made of, by name: what may be in a text all the same, and what is refused."""

from __future__ import annotations

import random
import sys
import unicodedata
from typing import Final

_BLANKS: Final = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Zs", "Zl", "Zp")]
_BIDI: Final = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_INVISIBLE: Final = (
    "\u00ad\u034f\u115f\u1160\u17b4\u180b\u180e\u200b\u200c\u200d\u2060\u2061\u2064\u206a\u206f"
    "\ufe00\ufe0f\ufeff\ufff9\ufffb\U000e0001\U000e0041\U000e007f\U000e0100\U000e01ef"
)
_WORD: Final = "open"
_LOOK_ALIKES: Final = [
    *(
        "<s>",
        "</s>",
        "<pad>",
        "<unk>",
        "<mask>",
        "<S>",
        "< s >",
        "&lt;s&gt;",
        "＜s＞",
        "<s",
        "s>",
        "<<s>>",
        "<extra_id_0>",
    ),
    *(
        "[CLS]",
        "[PAD]",
        "<0x0A>",
        "<|endoftext|>",
        "__en__",
        "__fr__",
        "madeupword0",
        "eng_Latn",
        "fra_Latn",
        "zho_Hans",
    ),
    *(
        "</s><s>",
        "a</s>",
        "</s>a",
        "<s><pad></s><unk><mask>",
        "eng_Latn fra_Latn",
        "\u2581</s>",
        "</s>\u2581",
        "</\u200bs>",
    ),
]


def _around(character: str) -> list[str]:
    """A character by itself, beside and between words, doubled, and at both ends."""
    return [
        character,
        f"{_WORD}{character}{_WORD}",
        f"{_WORD} {character} {_WORD}",
        f"{character}{_WORD}",
        f"{_WORD}{character}",
        character * 2,
        f"{character}{_WORD}{character}",
    ]


def _numbered(name: str, texts: list[str]) -> dict[str, str]:
    return {f"{name} {number}": text for number, text in enumerate(texts)}


def _each(name: str, characters: list[str] | str) -> dict[str, str]:
    return {f"{name} U+{ord(one):04X} {number}": text for one in characters for number, text in enumerate(_around(one))}


def _piles() -> list[str]:
    marks = [chr(code) for code in (*range(0x300, 0x370), 0x591, 0x5B0, 0x64B, 0x651, 0x93C, 0xE38, 0x20E3, 0x3099)]
    rng = random.Random(7)
    return [
        "e" + "\u0301" * 50,
        "e" + "".join(marks),
        "".join(marks) + "e",
        *("".join(letter + "".join(rng.choices(marks, k=9)) for letter in "open the door") for _ in range(6)),
        "a\u0328\u0301 a\u0301\u0328 o\u0323\u0302 o\u0302\u0323 s\u0323\u0307 s\u0307\u0323 \u1e69",
    ]


def _normal_forms() -> list[str]:
    """Where Unicode's normal forms have their special cases."""
    texts = [
        "ſ ﬁ ﬀ ﬃ ﬅ ﬆ",
        "㎏ ㍻ ㋿ ㏂ ㌖ ﷺ ﷻ ﷼",
        "Å Å A\u030a Ω Ω µ μ K K",
        "가 \u1100\u1161 각 \u1100\u1161\u11a8 \uac00\u11a8",
    ]
    texts += ["\u0344 \u0308\u0301 \u0340 \u0341 \u0343", "\u0958 \u0915\u093c \u2adc \u2add\u0338 \ufb1d \u05d9\u05b4"]
    texts += [
        "\u212b\u0301 \u01fa \u00c5\u0301",
        "が ガ ｶﾞ か\u3099 カ\u3099 ｶ\u3099",
        "豈 更 \U0002f800 \U0002fa1d \ufa0e",
    ]
    texts += ["İ i\u0307 ı I\u0307 ß ẞ ǆ ǅ Ǆ ŉ", "１２３ ⅠⅡⅢ ①②③ ⑴⒈ ½ ⅓ ² ₃ ª º ™ ℠ №", "… ‥ ‼ ⁇ ⁈ ＂ ＇ ｀ ´ ¨ ˜ ‾ ￣"]
    texts += ["\ufdfa", "\ufdfa" * 40, "\u1e9b\u0323 \u1e69 \u017f\u0323\u0307", "\u0f73 \u0f75 \u0f81 \u0f71\u0f72"]
    texts += [
        "\u1026 \u1025\u102e \u1b06 \u1b05\u1b35",
        "\U0001109a \U00011099\U000110ba \U0001d15e \U0001d157\U0001d165",
    ]
    texts += [
        "𝐀𝑩𝒞𝔇𝕰𝖋𝗀𝘩𝙞𝚓 𝟎𝟙𝟚",
        "🄰🅱🆎 🈁 ㊗️ ㊙",
        "\u2126\u2127 \u2135 \u210b",
        "\u3131\u314f \uffa1\uffc2 \u1112\u1161\u11ab",
    ]
    return texts


def _emoji() -> list[str]:
    families = [
        "😀",
        "👍🏽",
        "👨‍👩‍👧‍👦",
        "🏳️‍🌈",
        "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
        "🇫🇷🇩🇪",
        "🇫",
        "1️⃣",
        "❤️‍🔥",
    ]
    return [
        *families,
        *(f"open{one}door" for one in families),
        "".join(families),
        " ".join(families),
        "\u200d",
        "\u200d" * 9,
    ]


def _right_to_left() -> list[str]:
    return [
        "שלום עולם",
        "abc שלום def",
        "\u202eabc\u202c def",
        "\u2067مرحبا\u2069 (1)",
        "لا إله إلا",
        "\u064b\u064c",
        "مـــد",
        "א\u05b7\u05bc",
    ]


def _planes() -> list[str]:
    astral = ["𐌰𐌱𐌲 𐎠𐎡", "𠀀𠀁 𪛖", "𞤀𞤣𞤤𞤢𞤥", "𓀀𓂀", "𝄞𝄢", "𒀀𒁀"]
    private = ["\ue000", "\uf8ff", "\U000f0000", "\U0010fffd"]
    unassigned = ["\u0378", "\u05ff", "\u2fe0", "\U00012fff", "\U0003fffd", "\U000dfffd"]
    none = [chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)] + [
        chr(c) for c in range(0xFDD0, 0xFDF0)
    ]
    return [
        *astral,
        *private,
        *unassigned,
        *(f"{_WORD}{one}{_WORD}" for one in private + unassigned + none),
        "".join(none),
    ]


def _chunks() -> list[str]:
    """All of the basic plane but surrogates."""
    size = 0x800
    return ["".join(map(chr, range(start, start + size))) for start in range(0, 0x10000, size) if start >> 11 != 0x1B]


def _long() -> dict[str, str]:
    return {
        "long: one letter": "a" * 100_000,
        "long: words": "open the door " * 7_200 + ".",
        "long: one unknown character": "\U0003fffd" * 100_000,
        "long: spaces": " " * 100_000 + "open",
        "long: marks on one letter": "e" + "\u0316" * 100_000,
        "long: emoji": "👍🏽" * 50_000,
        "long: no space": "thedooris" * 11_111,
        "long: NUL": "\0" * 100_000,
    }


HOSTILE: Final[dict[str, str]] = {
    "empty": "",
    **_each("blank", _BLANKS),
    **_each("control", [chr(code) for code in range(0xA0)]),
    **_each("bidi", _BIDI),
    **_each("invisible", _INVISIBLE),
    **_each("space mark", "\u2581\u2580\u2582"),
    **_each("replacement", "\ufffc\ufffd"),
    **_numbered("look-alike", [*_LOOK_ALIKES, *(f"say {one} twice {one}." for one in _LOOK_ALIKES)]),
    **_numbered("pile", _piles()),
    **_numbered("normal form", [text for one in _normal_forms() for text in (one, unicodedata.normalize("NFD", one))]),
    **_numbered("emoji", _emoji()),
    **_numbered("right to left", _right_to_left()),
    **_numbered("plane", _planes()),
    "all blanks": "".join(_BLANKS),
    "all blanks between words": _WORD.join(["", *_BLANKS, ""]),
    "all controls": "".join(map(chr, range(0xA0))),
    "byte order mark": "\ufeff" + _WORD,
    "byte order mark, swapped": "\ufffe" + _WORD,
    **_numbered("basic plane", _chunks()),
    **_long(),
}
"""Texts that every tokenizer takes. Names are unique, and stay: records are by name."""

REFUSED: Final[dict[str, str]] = {
    "lone high surrogate": "\ud800",
    "lone low surrogate": "\udc00",
    "last surrogates": "\udbff \udfff",
    "pair in the wrong order": "\udc00\ud800",
    "pair of surrogates": "\ud83d\ude00",
    "surrogate between words": f"{_WORD}\ud812{_WORD}",
    "surrogate behind the basic plane": f"👍{_WORD}\udfff",
    "undecodable byte of a file name": b"caf\xe9".decode("utf-8", "surrogateescape"),
}
"""Strings that UTF-8 cannot express."""

assert sys.maxunicode == 0x10FFFF
