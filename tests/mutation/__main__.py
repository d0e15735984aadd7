# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs every mutant and fails when one survives: `python -m tests.mutation [GROUP ...]`.

With ``--kernels`` it is the CUDA kernels that are mutated, and a GPU that the tests run on.
"""

from __future__ import annotations

import os

# Small products in several processes: more than one BLAS thread in each would only get in the way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A mutant is noticed by the tests named for it, run here: other options, as of several processes, would hide it.
os.environ.pop("PYTEST_ADDOPTS", None)

import argparse
import collections
import signal
import sys

from tests.mutation.model_mutants import MODEL_MUTANTS
from tests.mutation.mutant import ROOT, AnyMutant
from tests.mutation.op_mutants import OP_MUTANTS
from tests.mutation.order_mutants import order_mutants
from tests.mutation.runner import MISSED, NOTICED, run_all

LEAST_PER_GROUP = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", nargs="*", help="only mutants of these groups")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only every N-th mutant, of those written by hand as of those found in the sources",
    )
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="do not run the tests without a mutant first: for where they have just been run, and passed",
    )
    parser.add_argument("--verbose", action="store_true", help="print each mutant and the test that noticed it")
    parser.add_argument("--kernels", action="store_true", help="mutate the CUDA kernels; needs a GPU")
    options = parser.parse_args()
    if options.kernels:
        return run_kernels(set(options.group), options.workers, options.verbose)
    known: list[AnyMutant] = [*OP_MUTANTS, *MODEL_MUTANTS, *order_mutants()]
    mutants = [mutant for mutant in known if not options.group or mutant.group in options.group]
    counts = collections.Counter(mutant.group for mutant in mutants)
    unknown = set(options.group) - set(counts)
    if unknown:
        print(f"no such group: {', '.join(sorted(unknown))}")
        return 2
    # read and not imported: a module that this process has loaded would hide its mutants
    sources = (ROOT / "metrale" / "ops").glob("*.py")
    ops = {path.stem for path in sources if "REGISTRY.register(" in path.read_text(encoding="utf-8")}
    if not options.group and not ops <= set(counts):
        print(f"ops without mutants: {', '.join(sorted(ops - set(counts)))}")
        return 2
    by_hand = {mutant.group for mutant in (*OP_MUTANTS, *MODEL_MUTANTS)}  # the others are all that there are
    thin = [group for group, count in counts.items() if count < LEAST_PER_GROUP and group in by_hand]
    if thin or not mutants:
        print(f"expected at least {LEAST_PER_GROUP} mutants in each group, too few in: {thin}")
        return 2
    for mutant in mutants:
        mutant.source()  # an outdated mutant is an error, found before anything runs
    mutants = mutants[:: max(options.every, 1)]
    counts = collections.Counter(mutant.group for mutant in mutants)
    unmutated = [] if options.no_baseline else list(dict.fromkeys(mutant.tests for mutant in mutants))
    for outcome in run_all(((None, tests) for tests in unmutated), options.workers):
        if outcome.code != MISSED:
            print(f"the tests fail without any mutant: {' '.join(outcome.tests)}\n{outcome.output}")
            return 2
    bad = 0
    for outcome in run_all(((mutant, mutant.tests) for mutant in mutants), options.workers):
        noticed = outcome.code in (NOTICED, -signal.SIGALRM)
        if not noticed:
            bad += 1
            what = "survives" if outcome.code == MISSED else f"breaks the run (exit code {outcome.code})"
            print(f"{what}: {outcome.mutant}")
            if outcome.code != MISSED:
                print(outcome.output)
        elif options.verbose:
            first = next((line for line in outcome.output.splitlines() if line.startswith("FAILED")), "timed out")
            print(f"{outcome.seconds:5.1f} s  {outcome.mutant}\n         {first}")
    for group, count in sorted(counts.items()):
        print(f"{count:4} mutants of {group}")
    print(f"{len(mutants)} mutants, {len(mutants) - bad} noticed, {bad} not")
    return 1 if bad else 0


def run_kernels(groups: set[str], workers: int, verbose: bool) -> int:
    """Run the mutants of the kernels of ``groups`` (empty: of all) and return the exit code."""
    from tests.backends import why_no_gpu
    from tests.mutation import kernel_runner

    reason = why_no_gpu()
    if reason:
        print(f"kernels are mutated on a GPU: {reason}")
        return 2
    mutants = [mutant for mutant in kernel_runner.kernel_mutants() if not groups or mutant.op in groups]
    counts = collections.Counter(mutant.op for mutant in mutants)
    wanted = groups or set(kernel_runner.ops_by_name())
    thin = sorted(name for name in wanted if counts[name] < LEAST_PER_GROUP)
    if thin:
        print(f"expected at least {LEAST_PER_GROUP} mutants of each kernel, too few of: {', '.join(thin)}")
        return 2
    for mutant in mutants:
        mutant.text()  # an outdated mutant is an error, found before anything runs
    unmutated = [kernel_runner.KernelMutant(name) for name in sorted(wanted)]
    for outcome in kernel_runner.run_all(unmutated, workers):
        if outcome.state != kernel_runner.MISSED:
            print(f"{outcome.mutant.op} fails without any mutant: {outcome.detail}")
            return 2
    bad: collections.Counter[str] = collections.Counter()
    for outcome in kernel_runner.run_all(mutants, workers):
        if outcome.state != kernel_runner.NOTICED:
            bad[outcome.mutant.op] += 1
            print(f"{outcome.state}: {outcome.mutant} {outcome.detail}")
        elif verbose:
            print(f"{outcome.seconds:5.1f} s  {outcome.mutant}\n         {outcome.detail}")
    for name, count in sorted(counts.items()):
        print(f"{count:4} mutants of {name}, {count - bad[name]} noticed")
    print(f"{len(mutants)} mutants, {len(mutants) - bad.total()} noticed, {bad.total()} not")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
