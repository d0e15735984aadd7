# SPDX-License-Identifier: MIT OR Apache-2.0
"""What can be done to a file, whatever is in it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

Damage = Callable[[Path], None]
"""Changes one file."""


def cut(length: int) -> Damage:
    """Keep the first ``length`` bytes, or, if it is negative, all but so many."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:length])

    return damage


def grown(more: bytes) -> Damage:
    """Put bytes behind the last."""

    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes() + more)

    return damage


def replaced(data: bytes) -> Damage:
    """Put other bytes in the place of all."""

    def damage(path: Path) -> None:
        path.write_bytes(data)

    return damage


def repeated(start: bytes, part: bytes, size: int, end: bytes) -> Damage:
    """Put ``part`` again and again in the place of all, about ``size`` bytes."""

    def damage(path: Path) -> None:
        path.write_bytes(start + part * (size // len(part)) + end)

    return damage


def flipped(seed: int, start: int, stop: int, bits: int = 1) -> Damage:
    """Turn some bits over, among the bytes ``start`` to ``stop`` (counted from the end if negative)."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        low, high = (at if at >= 0 else len(data) + at for at in (start, stop))
        draw = random.Random(seed)
        for _ in range(bits):
            data[draw.randrange(low, min(high, len(data)))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

    return damage


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def socket_instead(path: Path) -> None:
    path.unlink()
    os.mknod(path, 0o140600)


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("blobs/of/a/download/that/broke/off")


def circular_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def link_elsewhere(path: Path) -> None:
    """Move the file out of its folder and leave a link, as caches of downloads do."""
    blobs = path.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    path.rename(blobs / path.name)
    path.symlink_to(Path("blobs") / path.name)


def link_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def link_to_random(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/urandom")


NOT_A_FILE: Final[dict[str, tuple[Damage, str]]] = {
    "folder": (folder_instead, "is not a regular file"),
    "pipe": (pipe_instead, "is not a regular file"),
    "socket": (socket_instead, "is not a regular file"),
    "dangling_link": (dangling_link, "there is no such file"),
    "circular_link": (circular_link, "there is no such file|cannot be read"),
    "link_to_zeros": (link_to_zeros, "is not a regular file"),
    "link_to_random": (link_to_random, "is not a regular file"),
}
"""What a file may be instead of one, and what the refusal says."""


def of(name: str, damage: Damage) -> Damage:
    """Return the damage of one file in a folder."""
    return lambda folder: damage(folder / name)
