# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m tests.fuzz TARGET --seconds N``: inputs that lead further into a reader are kept and changed again.

A finding is an exception that is no CheckpointError, an answer that cannot be right, more than some seconds or more
than a gigabyte. It is saved, and ``python -m tests.fuzz TARGET --replay FILE`` runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

NAMES: Final = ("safetensors", "config", "tokenizer", "adapter", "torch")
MOST_SECONDS: Final = 10
"""Of one input. Nothing takes one on a machine with nothing else to do."""
MOST_MEGABYTES: Final = 1500
LONGEST: Final = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="inputs of other runs; new ones are added")
    parser.add_argument("--findings", type=Path, default=Path("findings"), metavar="DIR", help="where findings go")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run this one input instead")
    args = parser.parse_args()
    return replay(args.target, args.replay) if args.replay else fuzz(args)


def replay(name: str, path: Path) -> int:
    """Run one input; return 1 when it is a finding."""
    from tests.fuzz.targets import TARGETS

    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        try:
            was_read = TARGETS[name].check(path.read_bytes(), Path(folder) / "input")
        except Exception:
            traceback.print_exc()
            return 1
        print(f"{'read' if was_read else 'refused'} in {time.monotonic() - start:.2f} s")
    return 0


def fuzz(args: argparse.Namespace) -> int:
    """Fuzz one target; return 0 when nothing was found. libFuzzer ends the process itself."""
    try:
        import atheris
    except ImportError:
        print("there is no atheris: pip install -e '.[fuzz]'", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=["metrale.checkpoint", "metrale.nllb"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS

    target = TARGETS[args.target]
    place = Path(tempfile.mkdtemp())
    corpus: Path = args.corpus or place / "corpus"
    for folder in (corpus, args.findings):
        folder.mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(target.seeds()):
        (corpus / f"seed-{args.target}-{at}").write_bytes(seed)

    def one_input(data: bytes) -> None:
        target.check(data, place / "input")

    def change(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        found = bytes(atheris.Mutate(data, most)) if draw.random() < 0.2 else target.change(bytes(data), draw)
        return found if len(found) <= most else bytes(data)

    options = [
        *(f"-max_total_time={args.seconds}", f"-seed={args.seed}", f"-timeout={MOST_SECONDS}"),
        *(f"-rss_limit_mb={MOST_MEGABYTES}", f"-max_len={LONGEST}", f"-artifact_prefix={args.findings}/{args.target}-"),
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one_input, custom_mutator=change)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
