# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tokens that were added to a vocabulary: which id each has by all files together, and what kind of token it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from metrale.checkpoint.json_fields import shown
from metrale.errors import told
from metrale.nllb.tokenizer.files import FLAGS, Claim, TokenizerFiles
from metrale.nllb.tokenizer.layout import MASK

_MOST_ID: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beyond a family's own.

    Attributes
    ----------
    content : str
    number : int
        Its id.
    special : bool
        Whether it is never found in a text.
    normalized : bool
        Whether a text is normalised before it is looked for.
    options : tuple of str
        What else decides where it is found: ``lstrip``, ``rstrip``, ``single_word``.
    """

    content: str
    number: int
    special: bool
    normalized: bool
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the files come to: the id of ``<mask>`` if there is one, the added tokens, and what contradicts what."""

    mask: int | None
    tokens: tuple[AddedToken, ...]
    problems: tuple[str, ...]


def resolve(
    files: TokenizerFiles, standard: Mapping[str, int], family: str, languages: tuple[str, ...], pieces: Collection[str]
) -> Resolved:
    """Bring the files' words on ids together.

    Parameters
    ----------
    files : TokenizerFiles
    standard : mapping of str to int
        The ids of the family's own tokens: special ones and languages, as the vocabulary has them. ``<mask>``, when it
        is one of them, may be moved by a file, as fine-tunes with further languages do.
    family : str
        The family's name, for messages.
    languages : tuple of str
        Those of ``standard`` that are languages, in the order of their ids.
    pieces : collection of str
        The vocabulary's pieces of text.
    """
    fixed = {content: number for content, number in standard.items() if content != MASK}
    free = max(fixed.values()) + 1
    problems: list[str] = []
    seen: dict[str, list[Claim]] = {}
    owners = {number: content for content, number in fixed.items()}
    for claims in files.claims():
        problems += _read(claims, fixed, free, family, seen, owners)
    mask = standard.get(MASK)
    if mask is not None:
        if MASK in seen:
            mask = _number(seen[MASK][0])
        elif owners.get(mask) is not None:
            source = seen[owners[mask]][0].source
            problems.append(f"{source}: {told(owners[mask])} has id {mask}, the place of {MASK}, which no file moves")
    special = files.named_special()
    tokens = []
    problems += [
        f"{claimed[0].source}: {told(content)} is added, and a piece of the vocabulary: which id it has is left open"
        for content, claimed in seen.items()
        if content in pieces
    ]
    for content, claimed in seen.items():
        if content != MASK or MASK not in standard:
            tokens.append(_token(content, claimed, content in special))
            problems += _disagreements(content, claimed)
    problems += _wrong_lists(files, standard, seen, family, languages)
    return Resolved(mask, tuple(sorted(tokens, key=lambda token: token.number)), tuple(problems))


def _read(
    claims: Iterator[Claim],
    fixed: Mapping[str, int],
    free: int,
    family: str,
    seen: dict[str, list[Claim]],
    owners: dict[int, str],
) -> Iterator[str]:
    for claim in claims:
        content, number = claim.content, claim.number
        said = f"{claim.source}: {shown(content)} has id {shown(number)}"
        if isinstance(content, str) and content in fixed:
            if number == fixed[content] and not isinstance(number, bool):
                continue
            yield f"{said}, expected id {fixed[content]} in the layout of {family}"
            return  # one is enough: behind a token put in between, every further id differs
        if not isinstance(content, str) or not content or "\0" in content:
            yield f"{said}, expected the text of a token"
            return
        if not isinstance(number, int) or isinstance(number, bool) or not free <= number < _MOST_ID:
            yield f"{said}, expected an id from {free} on, behind those of {family}"
            return
        if owners.get(number, content) != content:
            yield f"{said}, which is that of {told(owners[number])}"
            return
        if content in seen and seen[content][0].number != number:
            yield f"{said}, and {seen[content][0].number} in {seen[content][0].source}"
            return
        owners[number] = content
        seen.setdefault(content, []).append(claim)


def _number(claim: Claim) -> int:
    assert isinstance(claim.number, int)
    return claim.number


def _token(content: str, claims: list[Claim], named: bool) -> AddedToken:
    flags = next((claim.flags for claim in claims if claim.flags is not None), None)
    if flags is None:  # added_tokens.json alone: what the other files call special is special
        return AddedToken(content, _number(claims[0]), named, not named, ())
    options = tuple(name for name in ("lstrip", "rstrip", "single_word") if flags[name])
    return AddedToken(content, _number(claims[0]), flags["special"], flags["normalized"], options)


def _disagreements(content: str, claims: list[Claim]) -> Iterator[str]:
    flagged = [claim for claim in claims if claim.flags is not None]
    for other in flagged[1:]:
        first = flagged[0]
        assert first.flags is not None
        assert other.flags is not None
        for name in FLAGS:
            if first.flags[name] != other.flags[name]:
                yield f"{other.source}: {told(content)} has another {name} than in {first.source}"


def _wrong_lists(
    files: TokenizerFiles,
    standard: Mapping[str, int],
    seen: Mapping[str, object],
    family: str,
    languages: tuple[str, ...],
) -> Iterator[str]:
    places = {language: place for place, language in enumerate(languages)}
    for source, key, contents in files.lists():
        unknown = [one for one in contents if not isinstance(one, str) or (one not in standard and one not in seen)]
        listed = [one for one in contents if isinstance(one, str) and one in places]
        if unknown:
            yield f"{source}: {key} has {shown(unknown[0])}, which {family} does not have and no file gives an id"
        elif listed != sorted(listed, key=places.__getitem__):
            pairs = zip(listed, sorted(listed, key=places.__getitem__), strict=True)
            moved = next(one for one, other in pairs if one != other)
            yield f"{source}: {key} lists the languages in another order than {family}, from {told(moved)} on"
