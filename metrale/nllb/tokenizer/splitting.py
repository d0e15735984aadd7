# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokens of text that were added to a vocabulary: they are taken out of a text before SentencePiece sees the rest.

The rules are those of the tokenizers library, which transformers uses: of the tokens that can begin at a place the
longest is taken; a token that is marked as normalised is looked for in the normalised text; special tokens are found
and left alone, so that nothing is found inside them; what is left between tokens is encoded piece by piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sentencepiece import SentencePieceProcessor

from metrale.errors import told
from metrale.nllb.tokenizer.added import AddedToken
from metrale.nllb.tokenizer.spm_subwords import SpmSubwords, source_end
from metrale.nllb.tokenizer.subwords import SPACE, Span

_SENTINEL = "_"  # no normalisation rule joins it to what stands beside it
_BEFORE = SPACE + _SENTINEL


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of a text: one token, or what is between tokens.

    ``origins[i]`` is where in the text the i-th code point of ``text`` began, with one more entry for the end.
    ``spaced`` says that it ends with a space and that a token follows.
    """

    text: str
    origins: Sequence[int]
    number: int | None = None
    spaced: bool = False


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SplitSubwords:
    """Subwords of a vocabulary with added tokens of text. `split_subwords` makes one.

    Attributes
    ----------
    inner : SpmSubwords
        What encodes the text between tokens.
    raw, normalized : re.Pattern or None
        What finds the tokens of either kind, special ones included.
    numbers : dict of str to int
        The ids of the tokens of text.
    space_id : int or None
        The piece for a space between a word and a token behind it; None where the family's tokenizer drops it.
    """

    inner: SpmSubwords
    raw: re.Pattern[str] | None
    normalized: re.Pattern[str] | None
    numbers: dict[str, int]
    contents: dict[int, str]
    space_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        result: list[int] = []
        for part in self._parts(text):
            if part.number is not None:
                result.append(part.number)
                continue
            result += self.inner.encode(part.text)
            if part.spaced and self.space_id is not None:
                result.append(self.space_id)
        return result

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.inner.text_of([self.contents.get(number) or self.inner.piece(number) for number in ids])

    def unknown_spans(self, text: str) -> Iterator[Span]:
        """Yield what of the text became ``<unk>``."""
        for part in self._parts(text):
            if part.number is None:
                for start, stop in self.inner.unknown_spans(part.text):
                    yield part.origins[start], source_end(part.origins, stop)

    def _parts(self, text: str) -> Iterator[_Part]:
        parts = list(self._cut(text))
        for index, part in enumerate(parts):
            # Two stretches of text are never side by side: what follows text is a token.
            if part.number is None and index + 1 < len(parts) and self.space_id is not None:
                spaced = _inside(self.inner.processor, part.text)[0].endswith(SPACE)
                part = replace(part, spaced=spaced)
            yield part

    def _cut(self, text: str) -> Iterator[_Part]:
        for part in self._found(self.raw, text, range(len(text) + 1)):
            if part.number is not None or self.normalized is None:
                yield part
                continue
            normalized, origins = _inside(self.inner.processor, part.text)
            pieces = list(self._found(self.normalized, normalized, [part.origins[at] for at in origins]))
            # Without a token in it, the text itself is encoded: normalising twice is not always the same as once.
            yield from pieces if len(pieces) > 1 or (pieces and pieces[0].number is not None) else [part]

    def _found(self, pattern: re.Pattern[str] | None, text: str, origins: Sequence[int]) -> Iterator[_Part]:
        done = 0
        for match in pattern.finditer(text) if pattern is not None else ():
            number = self.numbers.get(match[0])
            if number is None:
                continue  # a special token: text like any other
            if done < match.start():
                yield _Part(text[done : match.start()], origins[done : match.start() + 1])
            done = match.end()
            yield _Part(match[0], origins[match.start() : done + 1], number)
        if done < len(text):
            yield _Part(text[done:], origins[done:])


def _inside(processor: SentencePieceProcessor, text: str) -> tuple[str, list[int]]:
    """Return a text as it is normalised inside of a larger one, where spaces at its ends count, and the origins."""
    normalized, origins = processor.normalize(f"{_SENTINEL}{text}{_SENTINEL}", with_offsets=True)
    return normalized[len(_BEFORE) : -1], [origin - 1 for origin in origins[len(_BEFORE) : len(normalized)]]


def unsplittable(tokens: Iterable[AddedToken], processor: SentencePieceProcessor) -> Iterator[str]:
    """Yield why a token of text cannot be found as transformers would find it."""
    for token in tokens:
        content = token.content
        if token.options:
            yield f"the added token {told(content)} asks for {', '.join(token.options)}, which is not supported"
        elif SPACE in content or any(character.isspace() for character in content):
            yield f"the added token {told(content)} holds a space, which is not supported"
        elif token.normalized and _inside(processor, content)[0] != content:
            yield f"the added token {told(content)} is another text when it is normalised, which is not supported"


def split_subwords(
    inner: SpmSubwords,
    tokens: Iterable[AddedToken],
    blockers: Iterable[tuple[str, bool]],
    space_id: int | None,
    *,
    always_raw: bool = False,
) -> SplitSubwords:
    """Return subwords that take tokens out of a text.

    Parameters
    ----------
    inner : SpmSubwords
    tokens : iterable of AddedToken
        The tokens of text.
    blockers : iterable of (str, bool)
        Special tokens, and whether each is looked for in the normalised text.
    space_id : int or None
    always_raw : bool
        Whether no token is looked for in the normalised text, whatever it says of itself.
    """
    listed = list(tokens)
    everything = [(token.content, token.normalized) for token in listed] + list(blockers)
    raw = [content for content, normalized in everything if always_raw or not normalized]
    late = [content for content, normalized in everything if normalized and not always_raw]
    numbers = {token.content: token.number for token in listed}
    contents = {number: content for content, number in numbers.items()}
    return SplitSubwords(inner, _longest_first(raw), _longest_first(late), numbers, contents, space_id)


def _longest_first(contents: list[str]) -> re.Pattern[str] | None:
    ordered = sorted(set(contents), key=lambda content: (-len(content), content))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
