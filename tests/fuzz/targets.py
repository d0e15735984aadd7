# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is fuzzed: the inputs that each target begins with, how they are changed, and what must be true of any."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, final

import numpy as np
from safetensors.numpy import save

import metrale
from metrale.checkpoint import open_adapter, open_checkpoint
from metrale.errors import CheckpointError
from metrale.nllb.config import NllbConfig
from metrale.nllb.tokenizer import open_tokenizer
from tests.checkpoint.torch_files import Storage, Tensor, write_archive, write_bin
from tests.fuzz.mutate import changed_bytes, changed_json
from tests.hostile import spm_bytes
from tests.hostile.safetensors_bytes import READ, assembled, contents
from tests.hostile.weight_cases import SOUND, read_everything
from tests.reference.adapters import Recipe
from tests.reference.tiny import TINY_CONFIG, tiny_config

MOST_MESSAGE: Final = 200_000
BETWEEN: Final = b"\n\0\n"
"""Stands between the files of an input that is several."""


class Finding(AssertionError):
    """Something that no input may lead to."""


class Target(ABC):
    """One reader."""

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Return inputs to begin with, sound ones among them."""

    @abstractmethod
    def write(self, data: bytes, folder: Path) -> None:
        """Write an input's files into an empty folder."""

    @abstractmethod
    def read(self, folder: Path, data: bytes) -> None:
        """Read them, and raise `Finding` when what was read cannot be. CheckpointError is a good end."""

    def change(self, data: bytes, draw: random.Random) -> bytes:
        """Return another input that is much like this one."""
        return changed_bytes(data, draw)

    @final
    def check(self, data: bytes, folder: Path) -> bool:
        """Run one input in a folder, which is emptied before. Return whether it was read; raise what is a finding."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.write(data, folder)
        try:
            self.read(folder, data)
        except CheckpointError as error:
            if not error.problems or not all(error.problems) or not error.path.startswith(str(folder)):
                raise Finding(f"a refusal without a reason or a place: {error!r}") from error
            if len(str(error)) > MOST_MESSAGE:
                raise Finding(f"a message of {len(str(error))} characters") from error
            return False
        return True


class Safetensors(Target):
    """``model.safetensors``, held against the description of the format."""

    def seeds(self) -> list[bytes]:
        return [SOUND, assembled({}, b""), assembled({"__metadata__": {"format": "pt"}}, b"")]

    def write(self, data: bytes, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(data)

    def read(self, folder: Path, data: bytes) -> None:
        found, expected = read_everything(folder), contents(data)
        if found != expected:
            raise Finding(f"read as {found}, by the format it is {expected}")

    def change(self, data: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.3 or len(data) < 10:
            return changed_bytes(data, draw)
        length = min(int.from_bytes(data[:8], "little"), len(data) - 8)
        header, rest = data[8 : 8 + length], data[8 + length :]
        if draw.random() < 0.1:
            rest = changed_bytes(rest, draw)
        return assembled(changed_json(header, draw), rest)


def _parts(data: bytes, count: int) -> list[bytes]:
    parts = data.split(BETWEEN, count - 1)
    return parts + [b""] * (count - len(parts))


def _changed_part(data: bytes, count: int, draw: random.Random) -> bytes:
    parts = _parts(data, count)
    at = draw.randrange(count)
    parts[at] = changed_json(parts[at], draw)
    return BETWEEN.join(parts)


class Config(Target):
    """``config.json`` and ``generation_config.json``."""

    def seeds(self) -> list[bytes]:
        folder = metrale.demo_model_path()
        files = [(folder / name).read_bytes() for name in ("config.json", "generation_config.json")]
        generation = b'{"max_length": 200, "num_beams": 4, "length_penalty": 1.5, "early_stopping": "never", '
        generation += b'"eos_token_id": [2, 3], "bad_words_ids": [[1, 2], [3]], "forced_eos_token_id": 2, '
        generation += b'"repetition_penalty": 1.2}'
        tiny = repr(TINY_CONFIG).replace("'", '"').replace("True", "true").encode()
        return [BETWEEN.join(files), BETWEEN.join([tiny, generation]), tiny]

    def write(self, data: bytes, folder: Path) -> None:
        config, generation = _parts(data, 2)
        (folder / "config.json").write_bytes(config)
        if generation:
            (folder / "generation_config.json").write_bytes(generation)

    def read(self, folder: Path, data: bytes) -> None:
        config = NllbConfig.from_dir(folder)
        heads = (config.encoder_attention_heads, config.decoder_attention_heads)
        sizes = (config.vocab_size, config.d_model, config.decoder_layers, *heads)
        counts = (config.encoder_layers, *sizes)  # an encoder may be its last norm alone
        if not all(type(count) is int and 0 <= count <= 1 << 24 for count in counts) or 0 in sizes:
            raise Finding(f"sizes {counts}")
        if any(config.d_model % count for count in heads) or max(config.special_ids) >= config.vocab_size:
            raise Finding(f"a configuration that contradicts itself: {config}")
        config.generation.not_greedy()

    def change(self, data: bytes, draw: random.Random) -> bytes:
        return _changed_part(data, 2, draw)


class Tokenizer(Target):
    """The files of a tokenizer: the first byte says which of them the rest is; the others are the demo model's."""

    NAMES: Final = (
        "sentencepiece.bpe.model",
        "tokenizer_config.json",
        "tokenizer.json",
        "added_tokens.json",
        "special_tokens_map.json",
    )
    TEXTS: Final = ("Good morning!", "ﬁ \u0300 Å", "日本 \U0001f600", "a" * 300)

    def seeds(self) -> list[bytes]:
        folder = metrale.demo_model_path()
        spm, config = (folder / "sentencepiece.bpe.model").read_bytes(), (folder / "tokenizer_config.json").read_bytes()
        small = b'{"added_tokens": [{"id": 0, "content": "<s>"}], "model": {"vocab": {"<s>": 0}}}'
        lists = b'{"additional_special_tokens": ["ace_Arab", {"content": "ace_Latn"}]}'
        return [b"\0" + spm, b"\1" + config, b"\2" + small, b'\3{"<s>": 0, "ace_Arab": 8028}', b"\4" + lists]

    def write(self, data: bytes, folder: Path) -> None:
        name = self.NAMES[data[0] % len(self.NAMES)] if data else self.NAMES[0]
        if name != self.NAMES[0]:
            shutil.copy(metrale.demo_model_path() / self.NAMES[0], folder)
        (folder / name).write_bytes(data[1:])

    def read(self, folder: Path, data: bytes) -> None:
        tokenizer = open_tokenizer(folder)
        assert tokenizer is not None
        for text in self.TEXTS:
            ids = tokenizer.encode(text)
            if not all(0 <= number < len(tokenizer) for number in ids) or len(ids) > 40 * len(text) + 40:
                raise Finding(f"{text!r} is {ids}")
            tokenizer.decode(ids)

    def change(self, data: bytes, draw: random.Random) -> bytes:
        if len(data) < 2 or data[0] % len(self.NAMES):
            return data[:1] + changed_json(data[1:], draw)
        if draw.random() < 0.3:
            return data[:1] + changed_bytes(data[1:], draw)
        try:
            return data[:1] + self._changed_message(data[1:], draw, 0)
        except (IndexError, KeyError):
            return data[:1] + changed_bytes(data[1:], draw)

    def _changed_message(self, data: bytes, draw: random.Random, depth: int) -> bytes:
        fields = list(spm_bytes.fields(data))
        if not fields:
            return changed_bytes(data, draw)
        special = [at for at, one in enumerate(fields) if one[0] != spm_bytes.PIECE]
        at = draw.choice(special) if special and draw.random() < 0.5 else draw.randrange(len(fields))
        number, kind, content = fields[at]
        match draw.randrange(6):
            case 0:
                del fields[at]
            case 1:
                fields.insert(draw.randrange(len(fields) + 1), fields[at])
            case 2 if kind == 5:
                fields[at] = (
                    number,
                    kind,
                    struct.pack("<f", draw.choice((0.0, 1e38, float("nan"), float("inf"), -1.0))),
                )
            case _ if kind == 2 and depth == 0:
                fields[at] = (number, kind, self._changed_message(content, draw, depth + 1))
            case _:
                fields[at] = (number, kind, changed_bytes(content, draw))
        return spm_bytes.message(fields)


class Adapter(Target):
    """``adapter_config.json`` and ``adapter_model.safetensors``."""

    def seeds(self) -> list[bytes]:
        patterns = {"rank_pattern": {r"layers\.0\.fc2": 2}, "alpha_pattern": {"fc2": 4}}
        recipes = Recipe(31, "fc1", {"lora_alpha": 4}), Recipe(4, "fc2", {"r": 3, **patterns}, {r"layers\.0\.fc2": 2})
        return [json.dumps(one.config).encode() + BETWEEN + save(one.tensors(tiny_config())) for one in recipes]

    def write(self, data: bytes, folder: Path) -> None:
        config, weights = _parts(data, 2)
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(weights)

    def read(self, folder: Path, data: bytes) -> None:
        with open_adapter(folder) as adapter:
            for module in adapter.modules.values():
                if (
                    module.a.shape[0] != module.rank
                    or module.b.shape[1] != module.rank
                    or not np.isfinite(module.scale)
                ):
                    raise Finding(f"{module}")
                for info in (module.a, module.b):
                    if adapter.read(info).shape != info.shape:
                        raise Finding(f"{info}")

    def change(self, data: bytes, draw: random.Random) -> bytes:
        config, weights = _parts(data, 2)
        if draw.random() < 0.6:
            return changed_json(config, draw) + BETWEEN + weights
        return config + BETWEEN + Safetensors().change(weights, draw)


class Torch(Target):
    """``pytorch_model.bin``."""

    def seeds(self) -> list[bytes]:
        storage = Storage(np.arange(40, dtype=np.float32))
        values = np.arange(6, dtype=np.float16)
        tensors = {
            "a": Tensor(storage, (5, 8), (8, 1)),
            "b": Tensor(storage, (8, 5), (1, 8)),
            "c": values,
            "n": 5,
            "s": "x",
        }
        return [
            _file(lambda path: write_bin(path, tensors)),
            _file(lambda path: write_bin(path, {"c": values}, metadata=False, zip64=True)),
        ]

    def write(self, data: bytes, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(data)

    def read(self, folder: Path, data: bytes) -> None:
        with open_checkpoint(folder) as checkpoint:
            for name, info in checkpoint.tensors.items():
                if info.dtype.upper() in READ:
                    rows = sum(len(part) if info.shape else 1 for _, part in checkpoint.iter_chunks(name, 1 << 16))
                    if rows != info.rows:
                        raise Finding(f"{rows} rows of {info}")

    def change(self, data: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return changed_bytes(data, draw)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
        except Exception:
            return changed_bytes(data, draw)
        entries["data.pkl"] = _spliced(entries.get("data.pkl", b""), draw)
        return _file(lambda path: write_archive(path, entries.items()))


OPCODES: Final = (
    *(
        b"N",
        b"\x88",
        b"\x89",
        b"(",
        b")",
        b"]",
        b"}",
        b"a",
        b"e",
        b"s",
        b"u",
        b"t",
        b"R",
        b"b",
        b"Q",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x93",
        b"\x94",
    ),
    *(
        b"K\x01",
        b"K\x00",
        b"M\xff\xff",
        b"J\xff\xff\xff\x7f",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"G" + b"\x7f" * 8,
        b"X\x01\x00\x00\x00w",
    ),
    *(
        b"h\x00",
        b"h\x01",
        b"h\x05",
        b"q\x00",
        b"q\x05",
        b"j\x00\x00\x00\x00",
        b"r\xff\xff\xff\xff",
        b"\x8c\x02os",
        b"\x8c\x06system",
    ),
    *(
        b"cos\nsystem\n",
        b"ctorch\nfloat32\n",
        b"ctorch\nSize\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
    ),
    *(
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch\nFloatStorage\n",
        b"\x80\x02",
        b"\x95" + b"\xff" * 8,
        b".",
        b"0",
        b"2",
        b"\x81",
    ),
)
"""What is put between a pickle's own opcodes."""


def _spliced(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[at:at] = draw.choice(OPCODES)
            case 1:
                new = draw.choice(OPCODES)
                found[at : at + len(new)] = new
            case 2:
                start = draw.randrange(len(found) + 1)
                found[at:at] = found[start : start + draw.choice((1, 5, 20, 60))]
            case _:
                found = bytearray(changed_bytes(bytes(found), draw))
    return bytes(found)


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp())


def _file(write: Callable[[Path], None]) -> bytes:
    """Return the bytes of a file that can only be written with a name."""
    path = _scratch() / "seed"
    write(path)
    return path.read_bytes()


TARGETS: Final[Mapping[str, Target]] = {
    "safetensors": Safetensors(),
    "config": Config(),
    "tokenizer": Tokenizer(),
    "adapter": Adapter(),
    "torch": Torch(),
}
"""The targets by name."""
