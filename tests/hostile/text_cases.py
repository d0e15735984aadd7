# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts of every kind through the tokenizer and the translator."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from metrale import Translation
from tests.hostile.calls import demo
from tests.hostile.case import Answer, Case, Refusal
from tests.hostile.subjects import DEMO_ROWS

BLANKS: Final = "".join(
    chr(code)
    for code in (*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
)
"""Every character that is white space in Unicode."""

MOST_IDS: Final = 32
"""Ids of a translation, as the model was loaded."""

ODD: Final[dict[str, str]] = {
    "nul": "\0",
    "nul_inside": "Good\0morning",
    "controls": "".join(map(chr, range(1, 32))),
    "c1_controls": "".join(map(chr, range(0x7F, 0xA0))),
    "zero_width": "\u200b\u200c\u200d\u2060\ufeff",
    "bom": "\ufeffGood morning.",
    "soft_hyphen": "\u00ad" * 10,
    "bidi": "\u202eevil\u202c \u2066x\u2069 \u200f\u200e",
    "right_to_left": "مرحبا بالعالم שלום",
    "combining": "e" + "\u0301" * 500,
    "zalgo": "".join(c + "\u0300\u0316\u0489" * 20 for c in "hello"),
    "combining_alone": "\u0301\u0302\u0303",
    "hangul_jamo": "\u1112\u1161\u11ab" * 20,
    "ligatures": "ﬁﬂﷺ" * 10,
    "emoji": "👨‍👩‍👧‍👦🏳️‍🌈🇫🇷🇩🇪👍🏽",
    "flags_cut": "🇫" * 7,
    "variation": "a\ufe0f\ufe0e" * 10,
    "tags": "🏴" + "".join(chr(0xE0000 + ord(c)) for c in "gbeng") + "\U000e007f",
    "noncharacters": "\ufdd0\ufffe\uffff\U0001fffe\U0010ffff",
    "private_use": "\ue000\U000f0000\U0010fffd",
    "replacement": "\ufffd" * 20,
    "unassigned": "\u0378\u0379\U0003ffff",
    "every_plane": "".join(
        chr(plane << 16 | 0x1234) for plane in range(17) if not 0xD800 <= plane << 16 | 0x1234 < 0xE000
    ),
    "specials": "<s> </s> <pad> <unk> <mask> eng_Latn fra_Latn __en__ ▁ ▁▁",
    "eos_alone": "</s>",
    "language_alone": "fra_Latn",
    "metaspace": "\u2581" * 30,
    "tabs_and_lines": "one\ttwo\r\nthree\u2028four\u2029five\x0bsix\x0cseven\x85eight",
    "digits": "1234567890" * 20,
    "one_letter": "x",
    "no_spaces": "x" * 2000,
    "cjk": "日本語" * 200,
    "markup": "<script>alert('x')</script> {{7*7}} %s %n $(reboot) `id` '; DROP TABLE",
    "format": "{0} {x!r} %d %(a)s",
    "long": "word " * 20_000,
    "long_word": "w" * 100_000,
    "long_emoji": "👍🏽" * 25_000,
    "long_combining": "e" + "\u0301" * 50_000,
    "long_arabic_ligature": "\ufdfa" * 30_000,
}
"""Texts that must be translated, however little sense that makes, by the name of what is odd about them."""


def _judged(found: Translation, text: str) -> dict[str, Any]:
    """Return what must be true of any translation."""
    tokens = len(demo().model.tokenizer.encode(text))  # type: ignore[union-attr]
    return {
        "ended": found.finish_reason in ("eos", "length"),
        "truncated": found.truncated == (tokens > 62),
        "ids": all(3 < one < 8028 or one == 3 for one in found.token_ids) and len(found.token_ids) < MOST_IDS,
        "utf8": found.text.encode("utf-8").decode("utf-8") == found.text,
        "blank": (found.text, found.token_ids) == ("", ()) if not tokens else True,
    }


SOUND: Final = dict.fromkeys(("ended", "truncated", "ids", "utf8", "blank"), True)


def _translate(text: str) -> Callable[[Path], object]:
    return lambda _: _judged(demo().translate(text), text)


def _encode(text: str) -> Callable[[Path], object]:
    """Encode a text alone, in a batch, and decode it; ids must be in the vocabulary, and bounded by the text."""

    def run(_: Path) -> object:
        tokenizer: Any = demo().model.tokenizer
        ids = tokenizer.encode(text)
        again = tokenizer.encode(tokenizer.decode(ids))
        return {
            "range": all(3 <= one < 8028 for one in ids),
            "batch": tokenizer.encode_batch([text, "", text]) == [ids, [], ids],
            "bounded": len(ids) <= 20 * len(text) + 1,
            "decoded": 3 in ids or tokenizer.encode(tokenizer.decode(again)) == again,
        }

    return run


READ: Final = dict.fromkeys(("range", "batch", "bounded", "decoded"), True)


def _blank() -> Iterator[Case]:
    expect = Answer(["", [], "eos", False])
    for label, text in {
        "empty": "",
        "every_blank": BLANKS,
        "many": BLANKS * 1000,
        **{f"u{ord(c):04x}": c * 3 for c in BLANKS},
    }.items():
        assert all(c.isspace() for c in text)

        def run(_: Path, text: str = text) -> object:
            found = demo().translate(text)
            return [found.text, list(found.token_ids), found.finish_reason, found.truncated]

        yield Case(f"texts/blank/{label}", run, expect)


def _whole_of_unicode(_: Path) -> object:
    """Encode every character that there is, a thousand at a time: none may be refused or lead out of the vocabulary."""
    tokenizer: Any = demo().model.tokenizer
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(characters[at : at + 1000]) for at in range(0, len(characters), 1000)]
    found = tokenizer.encode_batch(texts)
    assert unicodedata.category(characters[-1]) == "Cn"
    return [len(found), all(3 <= one < 8028 for ids in found for one in ids)]


def _refused() -> Iterator[Case]:
    for at, bad in enumerate(("\ud800", "fine \udfff", "\udc00\ud800", "a" * 1000 + "\udbff")):
        place = next(index for index, char in enumerate(bad) if "\ud800" <= char <= "\udfff")
        says = rf"text that UTF-8 can express, got the lone surrogate U\+{ord(bad[place]):04X} at position {place}"
        for call, argument in {
            "translate": r"texts\[0\]",
            "stream": r"texts\[0\]",
            "score": r"sources\[0\]",
            "encode": "text",
            "prefix": "target_prefix",
        }.items():

            def run(_: Path, bad: str = bad, call: str = call) -> object:
                model: Any = demo()
                calls: dict[str, Callable[[], object]] = {
                    "translate": lambda: model.translate([bad]),
                    "stream": lambda: list(model.stream(iter([bad]))),
                    "score": lambda: model.score([bad], ["x"]),
                    "encode": lambda: model.model.tokenizer.encode(bad),
                    "prefix": lambda: model.translate("x", target_prefix=bad),
                }
                return calls[call]()

            yield Case(f"texts/surrogate/{call}_{at}", run, Refusal("InvalidInput", says, argument=argument))
    expect = Refusal("InvalidInput", "a text of at most 62 tokens, got", argument=r"texts\[0\]")
    for label in ("long", "long_word", "digits"):
        run_long = lambda _, text=ODD[label]: demo().translate(text, truncate=False)  # noqa: E731
        yield Case(f"texts/not_cut/{label}", run_long, expect)
    for label, ids in {
        "past": [DEMO_ROWS],
        "minus": [-1],
        "float": [5.0],
        "str": "5",
        "none": None,
        "huge": [10**5000],
    }.items():
        run_ids = lambda _, ids=ids: demo().model.tokenizer.decode(ids)  # type: ignore[union-attr]  # noqa: E731
        yield Case(f"texts/decode/{label}", run_ids, Refusal("InvalidInput", "expected", argument=r"ids(\[0\])?"))


def cases() -> Iterator[Case]:
    """Every text."""
    yield from _blank()
    for label, text in ODD.items():
        yield Case(f"texts/translate/{label}", _translate(text), Answer(SOUND))
        yield Case(f"texts/encode/{label}", _encode(text), Answer(READ))
    yield Case("texts/whole_of_unicode", _whole_of_unicode, Answer([1113, True]))
    yield from _refused()
