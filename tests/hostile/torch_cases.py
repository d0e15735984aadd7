# SPDX-License-Identifier: MIT OR Apache-2.0
"""pytorch_model.bin: the files of `tests.checkpoint.test_torch_hostile`, each in a process with limits and a watch over
what it does; and whole checkpoints in this form, sound and damaged."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from safetensors.numpy import load_file

from tests.checkpoint import test_torch_archives as archives
from tests.checkpoint import test_torch_hostile as made
from tests.checkpoint.torch_files import write_bin, write_bin_shards
from tests.hostile import damage, stage
from tests.hostile.case import Answer, Case, Refusal
from tests.hostile.weight_cases import read_everything

BIN: Final = "pytorch_model.bin"
BIN_SHARD: Final = "pytorch_model-00001-of-00002.bin"
PICKLE: Final = r"data\.pkl "


def _slug(name: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in name)


def _refused(name: str, says: str, build: Callable[[Path], object]) -> Case:
    expect = Refusal("CheckpointError", says, path=f"input/{BIN}")
    return Case(f"torch/{_slug(name)}", read_everything, expect, lambda folder: build(folder))


def _pickle(data: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda folder: write_bin(folder / BIN, {}, more={"data.pkl": data()})


class Harm:
    """Calls something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _harms() -> dict[str, Harm]:
    import os
    import shutil
    import subprocess

    return {
        "os.system": Harm(os.system, "touch harm"),
        "eval": Harm(eval, "open('harm', 'w')"),
        "exec": Harm(exec, "open('harm', 'w')"),
        "open": Harm(open, "harm", "w"),
        "popen": Harm(subprocess.Popen, ["touch", "harm"]),
        "rmtree": Harm(shutil.rmtree, "."),
        "import": Harm(__import__, "antigravity"),
    }


def _files() -> Iterator[Case]:
    for name, harm in _harms().items():
        for protocol in range(6):
            data = pickle.dumps({"w": harm}, protocol)
            yield _refused(f"harm {name} {protocol}", PICKLE, _pickle(lambda data=data: data))  # type: ignore[misc]
    by_hand = {
        "memo": b"\x80\x02cos\nsystem\nq\x00}X\x01\x00\x00\x00wh\x00X\x04\x00\x00\x00true\x85Rs.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "stack global of memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93\x8c\x04true\x85R.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x0b_utils.os.x\x93\x8c\x04true\x85R.",
        "inst": b"(S'true'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'true'\no.",
        "extension": b"\x80\x02\x82\x01.",
        "newobj": b"\x80\x02cos\nsystem\n)\x81.",
        "nested pickle": b"\x80\x02cpickle\nloads\nX\x02\x00\x00\x00N.\x85R.",
        "torch load": b"\x80\x02ctorch\nload\nX\x02\x00\x00\x00N.\x85R.",
        "torch hub": b"\x80\x02ctorch.hub\nload\nX\x02\x00\x00\x00N.\x85R.",
    }
    for name, data in by_hand.items():
        yield _refused(f"harm {name}", PICKLE, _pickle(lambda data=data: data))  # type: ignore[misc]
    for name, data in made.DAMAGED.items():
        yield _refused(f"damaged {name}", PICKLE, _pickle(lambda data=data: data))  # type: ignore[misc]
    for name, bomb in made.BOMBS.items():
        if name not in made.HARMLESS:
            yield _refused(f"bomb {name}", r"data\.pkl", _pickle(bomb))
    for name, tensors in made.CALLS.items():
        more = {"data/0": made.ONE.tobytes()}
        build = lambda folder, tensors=tensors, more=more: write_bin(folder / BIN, tensors, metadata=False, more=more)  # noqa: E731
        yield _refused(f"call {name}", PICKLE, build)
    for name, (view, _) in made.VIEWS.items():
        build_view = lambda folder, view=view: write_bin(folder / BIN, {"w": view, "fine": made.ONE})  # noqa: E731
        yield _refused(f"view {name}", "tensor 'w'|not integers", build_view)
    for name, (change, _) in archives.ARCHIVES.items():

        def lying(folder: Path, change: Callable[[Any], object] = change) -> None:
            archive = archives.Archive(folder / BIN)
            change(archive)
            (folder / BIN).write_bytes(archive.data)

        yield _refused(f"archive {name}", "is not a complete archive|entry ", lying)


def _as_bin(folder: Path) -> None:
    tensors = load_file(folder / stage.WEIGHTS)
    (folder / stage.WEIGHTS).unlink()
    write_bin(folder / BIN, tensors)


def _as_shards(folder: Path) -> None:
    tensors = load_file(folder / stage.WEIGHTS)
    (folder / stage.WEIGHTS).unlink()
    write_bin_shards(folder, tensors)


def _checkpoints() -> Iterator[Case]:
    yield Case("torch/whole", stage.judged, Answer(stage.SAME), stage.copied("whole", _as_bin))
    yield Case("torch/sharded", stage.judged, Answer(stage.SAME), stage.copied("whole", _as_shards))
    for convert, name, path in ((_as_bin, BIN, f"input/{BIN}"), (_as_shards, BIN_SHARD, "/input")):
        for length in (0, 1, 7, 8, 30, 1000, 300_000, -1, -2, -22, -100):

            def cut(folder: Path, convert: Any = convert, name: str = name, length: int = length) -> None:
                convert(folder)
                damage.cut(length)(folder / name)

            says = "is an empty file" if not length else "is not a (complete archive|file of torch.save)"
            expect = Refusal("CheckpointError", says, path=path, problems=1)
            yield Case(f"torch/{name}/cut_{length}", stage.judged, expect, stage.copied("whole", cut))
        for label, (change, says) in damage.NOT_A_FILE.items():

            def swap(folder: Path, convert: Any = convert, name: str = name, change: damage.Damage = change) -> None:
                convert(folder)
                change(folder / name)

            expect = Refusal("CheckpointError", says, path=path, problems=1)
            yield Case(f"torch/{name}/{label}", stage.judged, expect, stage.copied("whole", swap))


def cases() -> Iterator[Case]:
    """Every case of PyTorch files."""
    yield from _files()
    yield from _checkpoints()
