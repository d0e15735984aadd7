# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ids of the Hugging Face Hub in the place of a checkpoint folder.

The package ``huggingface_hub`` does all of it: the cache, the network, tokens, progress bars, and the environment that
these follow. It is optional, and imported when an id is met.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from metrale.checkpoint import WEIGHT_FORMS, require_path, shard_names
from metrale.errors import CheckpointError
from metrale.nllb.config import CONFIG_FILE, GENERATION_FILE
from metrale.nllb.tokenizer import TOKENIZER_FILES

log = logging.getLogger(__name__)

EXTRA: Final = "pip install 'metrale[hub]'"

_ID: Final = re.compile(r"(?P<name>[^/@:]+/[^/@:]+)(?:@(?P<revision>.*))?", re.DOTALL)
_REVISION: Final = re.compile(r"[^\s~^:?*\[/\x00-\x1f\x7f]+(/[^\s~^:?*\[/\x00-\x1f\x7f]+)*")
"""What git takes for the name of a branch, a tag or a commit."""

_Get = Callable[[str], Path | None]
"""Returns a file of a repository by its name, or None when the repository has none of it."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the Hub, and which of its revisions: a branch, a tag or a commit."""

    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


class _NotCached(Exception):
    """A file of which the cache does not know."""


def resolve(path: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Return the folder that a path or an id of the Hugging Face Hub stands for; files that are missing are fetched.

    What the cache has whole is taken without asking the network. Otherwise the files that a checkpoint needs are
    fetched into the cache: configuration, tokenizer, and weights in one form, safetensors if the repository has them.

    Parameters
    ----------
    path : str or path
        A folder, or a str ``"org/name"`` or ``"org/name@revision"``. A folder of that very name comes first. A str that
        looks like a path (``./x``, ``/x``, ``x/y/z``, ``x/``, with a backslash, a colon or ``..``) and a ``Path`` are
        never taken for an id; whether there is such a folder is then for the caller to find out.
    progress : bool
        Whether ``huggingface_hub`` may show its progress bars on a terminal.

    Raises
    ------
    InvalidInput
        When ``path`` is no path.
    CheckpointError
        When an id cannot be had. It says what to do: install the package, name a repository or a revision that is
        there, get access, or download the files by hand.
    """
    require_path("path", path, "the path of a checkpoint folder, or an id of the Hugging Face Hub")
    wanted = hub_id(path)
    if wanted is None or os.path.lexists(path):
        return Path(path)
    if not _REVISION.fullmatch(wanted.revision):
        raise _error(path, f"expected a branch, a tag or a commit behind the @, got {wanted.revision!r}")
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise _error(path, f"huggingface_hub cannot be imported: {error}") from error
        raise _error(path, f"an id of the Hugging Face Hub needs the package huggingface_hub: {EXTRA}") from None
    except ImportError as error:
        raise _error(path, f"huggingface_hub cannot be imported: {error}") from error
    try:
        return _cached(huggingface_hub, wanted) or _fetched(huggingface_hub, wanted, progress=progress)
    except CheckpointError as error:
        raise CheckpointError(path, error.problems) from error
    except Exception as error:  # of the package, of what it stands on, or of the system
        raise _error(path, _reason(wanted, error)) from error


def hub_id(path: str | os.PathLike[str]) -> HubId | None:
    """Return the id that a str may be by its looks, or None. Whether the Hub allows such a name is for it to say."""
    if not isinstance(path, str) or path.startswith((".", "~")) or path.endswith("/") or "\\" in path or ".." in path:
        return None
    found = _ID.fullmatch(path)
    if found is None:
        return None
    return HubId(found["name"], "main" if found["revision"] is None else found["revision"])


def _cached(hub: Any, wanted: HubId) -> Path | None:
    """Return the folder in the cache, when that has all that a checkpoint needs and the repository has."""
    try:
        return _gather(_look_up(hub, wanted))
    except _NotCached:
        return None


def _look_up(hub: Any, wanted: HubId) -> _Get:
    """Return a function that finds files in the cache, all of one commit, also when another process moves the branch.

    It raises _NotCached for a file that may be one of the repository's.
    """
    revision = wanted.revision

    def get(name: str) -> Path | None:
        nonlocal revision
        found = hub.try_to_load_from_cache(wanted.name, name, revision=revision)
        if found is None:
            raise _NotCached(name)
        if not isinstance(found, str):
            return None  # it is known that the repository has no such file
        revision = Path(found).parent.name
        return Path(found)

    return get


def _fetched(hub: Any, wanted: HubId, *, progress: bool) -> Path:
    """Return the folder in the cache, after fetching what it lacks.

    Files come one after another, in this thread, which an interrupt therefore ends at once.
    """
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import tqdm

    class NoBars(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    try:  # one request that is not repeated: what is wrong with the network or the name shows here, and quickly
        hub.HfApi().model_info(wanted.name, revision=wanted.revision)
    except Exception as error:
        found = _usable(hub, wanted) if _unreachable(error) else None
        if found is None:
            raise
        return found
    commit = ""

    def get(name: str) -> Path | None:
        nonlocal commit
        options = {} if progress else {"tqdm_class": NoBars}
        try:
            path = Path(hub.hf_hub_download(wanted.name, name, revision=commit or wanted.revision, **options))
        except LocalEntryNotFoundError:  # a kind of the next one, which says something else
            raise
        except EntryNotFoundError:
            return None
        commit = commit or path.parent.name  # all other files of the same commit, also when the branch moves meanwhile
        return path

    return _gather(get)


def _usable(hub: Any, wanted: HubId) -> Path | None:
    """Return the folder in the cache when it has a configuration and weights, whatever else the repository has."""
    unknown: list[str] = []
    look_up = _look_up(hub, wanted)

    def get(name: str) -> Path | None:
        try:
            return look_up(name)
        except _NotCached:
            unknown.append(name)
            return None

    try:
        folder = _gather(get)
    except CheckpointError:
        return None
    log.warning(
        "%s: taken from the cache; the Hugging Face Hub cannot be asked whether it also has %s",
        wanted,
        ", ".join(unknown),
    )
    return folder


def _gather(get: _Get) -> Path:
    """Get every file that a checkpoint needs and the repository has; return their folder.

    Raises
    ------
    CheckpointError
        When the repository holds no checkpoint.
    """
    config = get(CONFIG_FILE)
    if config is None:
        raise CheckpointError("", f"the repository holds no {CONFIG_FILE}, so no checkpoint in transformers' format")
    for name in (GENERATION_FILE, *TOKENIZER_FILES):
        get(name)
    for single, index in WEIGHT_FORMS:
        if get(single) is not None:
            return config.parent
        listed = get(index)
        if listed is not None:
            for shard in shard_names(listed):
                if get(shard) is None:
                    raise CheckpointError("", f"the repository lacks {shard!r}, which its {index} names")
            return config.parent
    expected = ", ".join(name for form in WEIGHT_FORMS for name in form)
    raise CheckpointError("", f"the repository holds no weights: expected one of {expected}")


def _unreachable(error: Exception) -> bool:
    """Return whether the Hub could not be asked, rather than giving an answer about the repository."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return _status(error) >= 500 or _status(error) in (408, 429)
    return not isinstance(error, ValueError)


def _status(error: Exception) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _reason(wanted: HubId, error: Exception) -> str:
    """Return why an id cannot be had, and what to do."""
    from huggingface_hub import errors

    page = f"its page on the Hub, {wanted.name}"
    chosen = "" if wanted.revision == "main" else f" --revision {wanted.revision}"
    by_hand = f"download it by hand (`hf download {wanted.name}{chosen}`) and name the folder"
    if isinstance(error, errors.HFValidationError):
        return f"it can be no id of the Hugging Face Hub either: {_first_line(error)}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            "the cache of huggingface_hub does not have all of it, and HF_HUB_OFFLINE forbids to ask the Hugging Face "
            f"Hub: unset that, or {by_hand}"
        )
    if isinstance(error, errors.GatedRepoError):
        return f"the repository is gated: ask for access on {page}, then log in (`hf auth login`, or HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hugging Face Hub has no such repository either, or it is private: check the name, or log in "
            "(`hf auth login`, or HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision {wanted.revision!r}: expected a branch, a tag or a commit"
    status = _status(error)
    if status in (401, 403):
        return f"the Hugging Face Hub refuses access ({status}): log in with a token that may read it (`hf auth login`)"
    if status:
        return f"the Hugging Face Hub answered with status {status}: try again later, or {by_hand}"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError | TimeoutError):
        return f"the cache of huggingface_hub cannot take it ({cause}): mend that, or choose another place (HF_HOME)"
    return f"it cannot be downloaded ({type(cause).__name__}: {_first_line(cause)}): check the network, or {by_hand}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "").strip().rstrip(".")


def _error(path: object, problem: str) -> CheckpointError:
    return CheckpointError(path, f"there is no such folder, and {problem}")
