# SPDX-License-Identifier: MIT OR Apache-2.0
"""Record what transformers' NLLB tokenizer makes of many texts, and why it differs from SentencePiece where it does.

Needs transformers, which nothing else here does. From the root of the repository::

    python -m tests.record.record_tokenizer

writes ``tests/data/tokenizer_cases.json`` and refuses to when a difference has no class of ``docs/tokenizer.md``. What
the fields mean is in the file's own ``meta``.
"""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metrale.nllb.languages import FLORES_200
from tests.nllb.their_tokenizers import TheirNllb, transformers

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "metrale" / "demo_model"
OUTPUT = ROOT / "tests" / "data" / "tokenizer_cases.json"
SEED = 20
GENERATED = 900
DECODED = 150

META = {
    "ids": "transformers' input_ids with split_special_tokens=True: language, subwords, </s>",
    "decoded": "transformers' decode of ids with skip_special_tokens=True",
    "difference": "classes of docs/tokenizer.md, where SentencePiece gives other ids; absent where it gives the same",
    "normalized": "the text after transformers' normaliser, where ids differ",
    "default_ids": "transformers' input_ids without split_special_tokens, where they differ from ids",
    "decode": "pairs of ids, some special or padding, and transformers' decode of them with skip_special_tokens=True",
}

SENTENCES: dict[str, list[str]] = {
    "eng_Latn": ["The garage door is still open, isn't it?", "She paid $12.50 (plus tax) at 7:45 p.m. on 03/09/2024."],
    "fra_Latn": ["L'été dernier, nous avons goûté un gâteau à Liège.", "« Où êtes-vous ? », demanda l'hôtesse."],
    "deu_Latn": ["Über die Größe läßt sich streiten.", "Straßenbahnhaltestellenhäuschen"],
    "spa_Latn": ["¿Cuándo llegará el próximo tren? ¡Mañana!"],
    "ita_Latn": ["Perché la città è così tranquilla oggi?"],
    "por_Latn": ["Não há pão, só maçãs e avelãs."],
    "nld_Latn": ["De coördinatie van het ijsfeest verliep zonder problemen."],
    "rus_Cyrl": ["Съешь ещё этих мягких булок, да выпей чаю.", "Погода сегодня хорошая, но завтра будет дождь."],
    "pol_Latn": ["Zażółć gęślą jaźń, proszę bardzo."],
    "ces_Latn": ["Příliš žluťoučký kůň úpěl ďábelské ódy."],
    "tur_Latn": ["İstanbul'da ışıklar söndü, çığlıklar yükseldi."],
    "vie_Latn": ["Tiếng Việt có nhiều dấu thanh.", "Hôm nay trời đẹp quá!"],
    "ell_Grek": ["Η γάτα κοιμάται πάνω στο τραπέζι."],
    "bul_Cyrl": ["Котката спи под масата."],
    "ukr_Cyrl": ["Її ґанок виходить на південь."],
    "hye_Armn": ["Այսօր եղանակը լավ է։"],
    "kat_Geor": ["დღეს კარგი ამინდია."],
    "heb_Hebr": ["שָׁלוֹם, מה שלומך היום?"],
    "arb_Arab": ["الطقسُ جميلٌ اليوم، أليس كذلك؟", "لا إله، ﷺ و ﻼ"],
    "pes_Arab": ["می‌خواهم کتاب‌ها را ببینم."],
    "urd_Arab": ["آج موسم بہت اچھا ہے۔"],
    "hin_Deva": ["आज मौसम बहुत अच्छा है।", "फ़िल्म ज़रूर देखना।"],
    "ben_Beng": ["আজ আবহাওয়া খুব ভালো।"],
    "pan_Guru": ["ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ।"],
    "guj_Gujr": ["આજે હવામાન સારું છે."],
    "tam_Taml": ["இன்று வானிலை நன்றாக உள்ளது."],
    "tel_Telu": ["ఈ రోజు వాతావరణం బాగుంది."],
    "kan_Knda": ["ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ."],
    "mal_Mlym": ["ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്."],
    "sin_Sinh": ["අද කාලගුණය හොඳයි."],
    "tha_Thai": ["วันนี้อากาศดีมาก น้ำใส"],
    "lao_Laoo": ["ມື້ນີ້ອາກາດດີ"],
    "khm_Khmr": ["ថ្ងៃនេះអាកាសធាតុល្អ"],
    "mya_Mymr": ["ဒီနေ့ ရာသီဥတု ကောင်းတယ်။"],
    "bod_Tibt": ["དེ་རིང་གནམ་གཤིས་ཡག་པོ་འདུག"],
    "amh_Ethi": ["ዛሬ አየሩ ጥሩ ነው።"],
    "zho_Hans": ["今天天气很好，我们去公园吧。", "价格：￥１２３．４５"],
    "zho_Hant": ["今天天氣很好，我們去公園吧。"],
    "jpn_Jpan": ["今日は天気がいいですね。", "ﾊﾝｶｸｶﾅ と ガギグゲゴ㌔㍿"],
    "kor_Hang": ["오늘은 날씨가 좋습니다.", "한국어 띄어쓰기"],
    "taq_Tfng": ["ⵜⵉⴼⵉⵏⴰⵖ"],
    "sat_Beng": ["ᱚᱞ ᱪᱤᱠᱤ"],
}

SPACES = ["\t", "\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u00a0", "\u1680", "\u2002", "\u2009", "\u200a"]
SPACES += ["\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u2581"]
INVISIBLE = ["\0", "\x01", "\x08", "\x1b", "\x7f", "\x9f", "\u00ad", "\u200b", "\u200c", "\u200d", "\u200e", "\u200f"]
INVISIBLE += ["\u202a", "\u202e", "\u2060", "\u2066", "\u2069", "\ufeff", "\ufe0f", "\U000e0041", "\ufffc", "\ufffd"]
COMPATIBLE = list("ﬁﬀ½¼①⑳Ⅳⅷ²₂ªº№℡™㎏㍻Ａａ１！～ﾊﾞㄱﬄǅŉſẞ…‥⁇‼´¨¯¸῾ΐ")
SYMBOLS = [*"#$<>@\\^{|}~`€£¥₹§¶©®°±×÷≠≤∞√∑→⇒★☎♥♞〒「」【】«»“”‘’„–—―‐・،؛؟।։՞", "٣٤", "४५", "๕"]
EMOJI = ["😀", "❤️", "👍🏽", "👨‍👩‍👧", "🏳️‍🌈", "🇫🇷", "1️⃣", "😀😀😀", "a😀b"]
MARKED = [
    "e\u0301",
    "a\u030a",
    "n\u0303",
    "ê\u0301",
    "e\u0302\u0301",
    "c\u0327\u0301",
    "a\u0300\u0301",
    "o\u0308\u0304",
]
MARKED += [
    "\u0301",
    "x\u0301\u0302\u0303\u0304",
    "z\u0338\u0331\u0310a",
    "\u00a0\u0301",
    "ﬁ\u0301",
    "½\u0338",
    "№\u0301",
]
MARKED += ["e\u0301\ufe0f", "o\u0308\u200d", "u\u0308\u20dd", "i\u0307\u0301", "A\u030a\u0301", "か\u3099", "न\u093c"]
MARKED += ["\u1112\u1161\u11ab", "\u0438\u0306", "\u0435\u0308\u0301", "Z\u0307\u20e3", "\u2002\u0301word", "ª\u0301"]
SPECIAL = ["</s>", "<s>", "<pad>", "<unk>", "<mask>", "eng_Latn", "fra_Latn", "a <mask> b", "x</s>y", "to zho_Hans now"]
SPECIAL += ["<mask>.", " <mask>", "<MASK>", "< / s >", "</s></s>", "__en__", "deu_Latn eng_Latn", "<unk>\u2581<pad>"]
LAYOUTS = ["", " ", "  ", " a", "a ", "  a", "a  ", " a ", "a b", "a  b", "a \t b", "a\n\nb\n", "\n\n", "\u2581\u2581"]
LAYOUTS += [
    "\u2581a",
    "a\u2581",
    " \u2581 a",
    "a\u2581\u2581b",
    ".",
    "...",
    "?!",
    "- a",
    "(a)",
    "a,b;c:d",
    "-1",
    "3.14",
]
LAYOUTS += [
    "0",
    "007",
    "1234567890",
    "1,000,000",
    "12:30",
    "v2.0.1",
    "50%",
    "1 2 3",
    "10-20",
    "a1b2c3",
    "CamelCaseWord",
]
LAYOUTS += [
    "ALL CAPS",
    "under_score",
    "user@example.org",
    "https://example.org/a?b=c&d=%20#e",
    "C:\\dir\\file.txt",
    "x" * 60,
]
LAYOUTS += [
    "aB" * 40,
    "er" * 60,
    "日" * 50,
    "😀" * 30,
    "." * 80,
    "-" * 33,
    "9" * 45,
    "a " * 40 + "a",
    "ab\u200b" * 20 + "c",
]
LAYOUTS += ["{name} has {count} items", "%s of %d", "<b>bold</b>", "&amp;", '{"key": [1, null]}', "if (a<b) { c = d; }"]


def handwritten() -> Iterator[tuple[str, str]]:
    """Pairs of text and language: the sentences and their decomposed forms, then everything else, language by turns."""
    for language, sentences in SENTENCES.items():
        for sentence in sentences:
            yield sentence, language
            decomposed = unicodedata.normalize("NFD", sentence)
            if decomposed != sentence:
                yield decomposed, language
    others = [*LAYOUTS, *SPECIAL, *EMOJI, *MARKED, *SYMBOLS, *COMPATIBLE]
    for odd in [*SPACES, *INVISIBLE]:
        others += [odd, f"a{odd}b", f"some{odd} more", f"{odd}start", f"end{odd}"]
    for i, text in enumerate(others):
        yield text, FLORES_200[i % len(FLORES_200)]


def generated(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Words of the sentences in any order, joined and disturbed by everything that is odd."""
    words = [word for sentences in SENTENCES.values() for sentence in sentences for word in sentence.split()]
    european = [word for word in words if word[0] < "\u0500"]
    marks = [chr(code) for code in range(0x300, 0x370)]
    odd = [SPACES, INVISIBLE, COMPATIBLE, SYMBOLS, EMOJI, MARKED, SPECIAL, marks, list("0123456789.,!?'")]
    for i in range(GENERATED):
        parts = []
        for _ in range(rng.randint(1, 5)):
            parts.append(rng.choice(european if rng.random() < 0.8 else words))
            parts.append(rng.choice(["", " ", " ", " ", "  "]) if rng.random() < 0.7 else rng.choice(rng.choice(odd)))
        yield "".join(parts).rstrip(" ") if rng.random() < 0.9 else "".join(parts), FLORES_200[i % len(FLORES_200)]


class Recorder(TheirNllb):
    """transformers' tokenizer and SentencePiece's, side by side, and what is recorded of texts."""

    def __init__(self) -> None:
        super().__init__(DEMO)

    def case(self, text: str, language: str, decoded: bool) -> dict[str, Any]:
        """Everything recorded about one text."""
        self.tokenizer.src_lang = language
        ids = self.tokenizer(text, split_special_tokens=True)["input_ids"]
        case: dict[str, Any] = {"text": text, "language": language, "ids": ids}
        if classes := self.differences(text, ids[1:-1]):
            case |= {"difference": classes, "normalized": self.normalized(text)}
        default_ids = self.tokenizer(text)["input_ids"]
        if default_ids != ids:
            case["default_ids"] = default_ids
        if decoded:
            case["decoded"] = self.tokenizer.decode(ids, skip_special_tokens=True)
        return case

    def decode_pairs(self, rng: random.Random) -> Iterator[tuple[list[int], str]]:
        """Random ids, also of special tokens, languages and the embedding's padding rows, and their text."""
        size = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        for _ in range(DECODED):
            pools = [range(4), range(4, 400), range(4, 8028), range(4, 8028), range(8028, size), [self.space]]
            ids = [rng.choice(rng.choice(pools)) for _ in range(rng.randint(0, 12))]
            yield ids, self.tokenizer.decode(ids, skip_special_tokens=True)


def main() -> None:
    """Write the file and say what is in it."""
    recorder, rng = Recorder(), random.Random(SEED)
    golden = json.loads((DEMO / "golden.json").read_text(encoding="utf-8"))["cases"]
    firsts = [(case["text"], case["src_lang"]) for case in golden] + list(handwritten())
    cases = {text: recorder.case(text, language, decoded=True) for text, language in firsts}
    for text, language in generated(rng):
        cases.setdefault(text, recorder.case(text, language, decoded=False))
    model = hashlib.sha256((DEMO / "sentencepiece.bpe.model").read_bytes()).hexdigest()
    meta = {"transformers": transformers.__version__, "model_sha256": model, "seed": SEED, **META}
    pairs = list(recorder.decode_pairs(rng))
    with OUTPUT.open("w", encoding="ascii", newline="\n") as file:
        file.write(f'{{"meta": {json.dumps(meta, indent=1)},\n"cases": [\n')
        file.write(",\n".join(json.dumps(case, separators=(",", ":")) for case in cases.values()))
        file.write('\n],\n"decode": [\n')
        file.write(",\n".join(json.dumps(pair, separators=(",", ":")) for pair in pairs))
        file.write("\n]}\n")
    counts = Counter(" + ".join(case.get("difference", ["equal"])) for case in cases.values())
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes, {len(cases)} texts, {dict(counts)}")


if __name__ == "__main__":
    main()
