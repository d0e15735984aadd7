# SPDX-License-Identifier: MIT OR Apache-2.0
"""Speed on a GPU beside CTranslate2 and transformers, on the real models' shapes with random weights.

    python -m benchmarks.gpu_speed --out gpu_speed.json

runs where a GPU is; the peers run if they are installed (`--peers none` leaves them out). Each shape is written as a
checkpoint, loaded, checked, and timed: encoder and prefill, decode steps, how much of them is the host's, and every
kind of launch against its floor; then beam search in the same way (`--beams 0` leaves it out). Then each peer loads the
same checkpoint in a process of its own, compares its logits with ours, and is timed by the same protocol
(`benchmarks.peers.protocol`). The JSON is written as the run goes on, so a run that is cut short keeps what it has. The
exit status is 1 when anything went wrong; `problems` says what.

`--device host --only tiny --peers none` goes through all of it on a machine without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import metrale
from benchmarks import gpu_report
from benchmarks.peers import runner
from gpu_runtime import GpuBackend, dtypes
from metrale.bench import beams, engine_busy, serving
from metrale.bench.breakdown import breakdown, passes, recording
from metrale.bench.check import check
from metrale.bench.decode import Batch, Busy, device_times, wall_times
from metrale.bench.floors import FLOP_PER_S, READ_BYTES_PER_S
from metrale.bench.machine import GPU_PACKAGES, describe, describe_gpu, read_smi
from metrale.bench.parts import places
from metrale.bench.protocol import CHECK_SOURCES, NEW_TOKENS, RUNS, SOURCE_TOKENS, Lengths, beam_batches
from metrale.bench.shapes import SHAPES, parameters, work_folder, write_checkpoint
from metrale.bench.timing import Clock, Reader, ceilings, open_device
from metrale.nllb.model import NllbModel

LONG_BATCH, LONG_SOURCE = 64, 64
READER_BYTES: Final = {"cuda": 4 << 30, "host": 1 << 16}
PEER_SECONDS: Final = {"ctranslate2": 150.0, "transformers": 300.0}
STEP_GRAPHS: Final = {"auto": None, "on": True, "off": False}


class Run:
    """One run: its options, what it found so far, and how long it has been going on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.start = time.perf_counter()
        self.report: dict[str, Any] = {
            "benchmark": "gpu_speed",
            "protocol": {
                "source_tokens": SOURCE_TOKENS,
                "new_tokens": NEW_TOKENS,
                "step": "(total of 64 tokens - total of 1) / 63",
                "beams": options.beams,
                "dtype": options.dtype,
                "step_graphs": options.step_graphs,
                "batch_invariant": options.batch_invariant,
                "weights": "random",
            },
            "floors": {"read_bytes_per_s": READ_BYTES_PER_S, "flop_per_s": FLOP_PER_S},
            "machine": describe("metrale", "numpy", *GPU_PACKAGES, commit=options.commit),
            "shapes": {},
            "peers": {},
            "problems": [],
        }

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{self.seconds:6.1f} s] {text}", file=sys.stderr, flush=True)

    def problem(self, text: str) -> None:
        """Keep what went wrong."""
        self.report["problems"].append(text)
        self.say(f"PROBLEM: {text}")

    def save(self) -> None:
        """Write the JSON as it is now."""
        self.report["seconds"] = round(self.seconds, 1)
        if self.options.out is not None:
            self.options.out.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")


def measure_case(run: Run, model: NllbModel, size: int, clock: Clock, reader: Reader, busy: Busy) -> dict[str, Any]:
    """Time one batch size: whole generations, the device alone, and each kind of launch."""
    options = run.options
    case: dict[str, Any] = {"wall": wall_times(model, size, options.repeats)}
    if not case["wall"]["same_tokens_each_time"]:
        run.problem(f"batch {size}: equal calls chose different tokens")
    host = case["wall"]["host_enqueue_ms"]["median"]
    case["device"] = device_times(model, size, clock, busy, host, options.repeats)
    case["serving"] = serving.measure(model, size, clock, busy, options.repeats)
    case["serving"]["busy_by_events"] = engine_busy.measure(model, size, options.repeats)
    for problem in serving_problems(case, model):
        run.problem(f"batch {size}: {problem}")
    with Batch(model, size) as batch:
        with recording(model.gpu) as prefill:
            tokens = batch.choose(batch.prefill())
        case["launches_per_prefill"] = prefill.counts()
        if not options.no_ops:
            case["encoder"] = breakdown(clock, reader, passes(prefill.calls)[0], options.op_repeats)
            tokens = batch.choose(batch.prefill())
        for _ in range(NEW_TOKENS // 2):
            tokens = batch.choose(batch.decode(tokens))
        with recording(model.gpu) as step:
            batch.choose(batch.decode(tokens))
        case["launches_per_step"] = step.counts()
        if prefill.unseen() or step.unseen():
            run.problem(f"batch {size}: {prefill.unseen() + step.unseen()} launches are in no breakdown")
        if not options.no_ops:
            where = places(model.device_weights, step.calls)
            case["decode"] = breakdown(clock, reader, step.calls, options.op_repeats, where)
    return case


def serving_problems(case: dict[str, Any], model: NllbModel) -> list[str]:
    """Return what is wrong with the steps that the engine makes; of their ids no more is kept."""
    served, found = case["serving"], []
    if served.pop("ids") != case["wall"].pop("ids") or not served["same_tokens_each_time"]:
        found.append("steps that the device feeds chose other tokens than those that the host feeds")
    expected = int(model.step_graphs)
    if served["graph_launches_per_step"] != expected:
        found.append(f"a step launches {served['graph_launches_per_step']} graphs, and not {expected}")
    return found


def measure_shape(run: Run, name: str, folder: Path, gpu: GpuBackend, clock: Clock, reader: Reader) -> None:
    """Load, check and time one checkpoint."""
    options, entry = run.options, run.report["shapes"][name]
    limits = {
        "max_batch": max(*options.batches, CHECK_SOURCES),
        "max_source_len": LONG_SOURCE,
        "max_new_tokens": NEW_TOKENS + 2,
        "step_graphs": STEP_GRAPHS[options.step_graphs],
        "batch_invariant": options.batch_invariant,
    }
    start = time.perf_counter()
    with metrale.load(folder, gpu, options.dtype, **limits) as model:
        seconds = time.perf_counter() - start
        entry["load"] = {"s": round(seconds, 3), "gb_per_s": round(entry["checkpoint"]["bytes"] / seconds / 1e9, 2)}
        plan = model.memory_plan()
        entry["memory_bytes"] = {part: getattr(plan, part) for part in ("weights", "kv", "logits", "workspace")}
        run.say(f"{name}: loaded in {seconds:.2f} s")
        entry["check"] = check(model, folder, gpu, options.dtype, limits, options.batches)
        run.say(f"{name}: check {entry['check']}")
        if not entry["check"]["passed"]:
            run.problem(f"{name}: the logits are wrong, so nothing was timed: {entry['check']}")
            return
        busy = Busy(clock, reader)
        for size in options.batches:
            case = entry["cases"][str(size)] = measure_case(run, model, size, clock, reader, busy)
            step, device = case["wall"]["step_ms"]["median"], case["device"]["step_device_ms"]["median"]
            run.say(f"{name} batch {size}: step {step:.3f} ms, device alone {device:.3f} ms")
            run.save()
        if max(options.batches) >= LONG_BATCH and not options.no_ops:
            with Batch(model, LONG_BATCH, Lengths(LONG_SOURCE)) as batch:
                with recording(gpu) as prefill:
                    batch.choose(batch.prefill())
                entry["encoder_64x64"] = breakdown(clock, reader, passes(prefill.calls)[0], options.op_repeats)
        if gpu.kind() == "cuda":
            entry["nvidia_smi_after"] = read_smi()
        report_damage(run, name, gpu)


def measure_beams(run: Run, name: str, folder: Path, gpu: GpuBackend, clock: Clock, reader: Reader) -> None:
    """Load one checkpoint again, with a lane for each beam, and time beam search."""
    options, entry = run.options, run.report["shapes"][name]
    batches = beam_batches(name, options.beams)
    if not batches or not entry["check"]["passed"]:
        return
    limits = {
        "max_batch": options.beams * max(batches),
        "max_source_len": SOURCE_TOKENS,
        "max_new_tokens": NEW_TOKENS + 2,
        "step_graphs": STEP_GRAPHS[options.step_graphs],
        "batch_invariant": options.batch_invariant,
    }
    with metrale.load(folder, gpu, options.dtype, **limits) as model:
        busy = Busy(clock, reader)
        for size in batches:
            case, problems = beams.measure(model, size, options.beams, options.dtype, clock, reader, busy, options)
            entry.setdefault("beams", {})[str(size)] = case
            for problem in problems:
                run.problem(f"{name}: {problem}")
            step, device = case["wall"]["step_ms"]["median"], case["device"]["step_device_ms"]["median"]
            run.say(f"{name} batch {size}, {options.beams} beams: step {step:.3f} ms, device alone {device:.3f} ms")
            run.save()
        report_damage(run, name, gpu)


def report_damage(run: Run, name: str, gpu: GpuBackend) -> None:
    """Say which blocks have a byte written beside them."""
    damaged = [str(block) for block in gpu.scan_redzones()]
    if damaged:
        run.problem(f"{name}: bytes were written beside {damaged}")


def measure_ours(run: Run, folders: dict[str, Path]) -> None:
    """Write each checkpoint, and measure metrale on it."""
    options = run.options
    with open_device(options.device) as gpu:
        run.report["device"] = describe_gpu(gpu)
        run.say(f"device: {run.report['device']}")
        clock = Clock(gpu)
        with Reader(gpu, READER_BYTES[gpu.kind()]) as reader:
            run.report["ceilings"] = ceilings(clock, reader, dtypes.short_name(options.dtype), options.repeats)
            run.say(f"ceilings: {run.report['ceilings']}")
            for name, folder in folders.items():
                start = time.perf_counter()
                size = write_checkpoint(folder, SHAPES[name], options.dtype)
                seconds = round(time.perf_counter() - start, 2)
                run.report["shapes"][name] = {
                    "parameters": parameters(SHAPES[name]),
                    "checkpoint": {"bytes": size, "write_s": seconds, "folder": str(folder.parent)},
                    "cases": {},
                }
                run.say(f"{name}: wrote {size / 1e9:.2f} GB in {seconds} s")
                try:
                    measure_shape(run, name, folder, gpu, clock, reader)
                    measure_beams(run, name, folder, gpu, clock, reader)
                except Exception as error:
                    traceback.print_exc()
                    run.problem(f"{name}: {type(error).__name__}: {error}"[:2000])
                run.save()
        clock.close()


def measure_peers(run: Run, folders: dict[str, Path]) -> None:
    """Run each peer on all checkpoints, in what is left of the time."""
    options = run.options
    if not folders:
        run.problem("the peers were not run: metrale gave them nothing to compare with")
        return
    for name in options.peers:
        arguments = [
            *(f"{shape}={folder}" for shape, folder in folders.items()),
            *("--device", "cpu" if options.device == "host" else "cuda"),
            *("--dtype", options.dtype, "--batches", ",".join(map(str, options.batches)), "--check"),
            *("--beams", str(options.beams), "--runs", str(RUNS if not options.quick else options.repeats)),
        ]
        seconds = min(PEER_SECONDS[name], options.seconds - run.seconds)
        run.say(f"{name}: at most {seconds:.0f} s")
        result = run.report["peers"][name] = runner.run(name, arguments, seconds)
        for problem in runner.problems_of(name, result):
            run.problem(problem)
        run.save()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or host")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--only", "--shape", default="600M,3.3B", help=f"shapes, of {', '.join(SHAPES)}")
    parser.add_argument("--batches", default="1,8,64", help="batch sizes")
    parser.add_argument("--beams", type=int, default=4, help="width of the beam searches; 0: none")
    parser.add_argument("--step-graphs", default="auto", choices=tuple(STEP_GRAPHS), help="whether steps are replayed")
    parser.add_argument("--batch-invariant", action="store_true", help="each sequence to the same bits in any batch")
    parser.add_argument("--peers", default="ct2,hf", help="of ct2 and hf, or none")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each kind")
    parser.add_argument("--op-repeats", type=int, default=15, help="replays of each kind of launch")
    parser.add_argument("--no-ops", action="store_true", help="leave out where the time of each pass goes")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--seconds", type=float, default=540, help="the whole run; peers are stopped at its end")
    parser.add_argument("--commit", help="the commit that is measured, where git is not there to say")
    parser.add_argument("--work", type=Path, help="folder for checkpoints")
    options = parser.parse_args(words)
    options.only = options.only.split(",")
    if options.beams not in (0, *range(2, 65)):
        parser.error(f"--beams: expected 2 to 64, or 0, got {options.beams}")
    unknown = sorted(set(options.only) - set(SHAPES))
    if unknown:
        parser.error(f"--only: expected shapes of {', '.join(SHAPES)}, got {', '.join(unknown)}")
    try:
        options.batches = sorted({int(size) for size in options.batches.split(",")})
        options.peers = (
            [] if options.peers == "none" else [runner.SHORT_NAMES[name] for name in options.peers.split(",")]
        )
    except (KeyError, ValueError) as error:
        parser.error(f"--batches takes numbers and --peers {', '.join(runner.SHORT_NAMES)} or none: {error}")
    if options.quick:
        options.repeats, options.op_repeats = 2, 3
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    run = Run(parse(words))
    options = run.options
    with tempfile.TemporaryDirectory(dir=work_folder(options.only, options.dtype, options.work)) as work:
        folders = {name: Path(work, name) for name in options.only}
        try:
            measure_ours(run, folders)
        except Exception as error:
            traceback.print_exc()
            run.problem(f"{type(error).__name__}: {error}"[:2000])
        run.save()
        print(gpu_report.summary(run.report), flush=True)
        if options.peers:
            measure_peers(run, {name: folder for name, folder in folders.items() if (folder / "logits.npz").exists()})
    run.save()
    print(f"\n{gpu_report.ops_tables(run.report)}\n\n{gpu_report.summary(run.report)}", flush=True)
    run.say("done")
    return 1 if run.report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
