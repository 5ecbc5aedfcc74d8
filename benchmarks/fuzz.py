"""Hostile job files, plans, lengths, results, bundles, profiles, models and progress files, many thousands of them.

    python -m benchmarks.fuzz [--cases 20000] [--seed 0] [--processes 2] [--kind jobs plans ...]

Prints one JSON object. A case is a valid file with one to four faults; its kind, seed and number name it. A fault of
the program is a traceback, an error without a message, a terminal escape in what it tells, a result that is lost, a
refusal that leaves something behind, no end, the death of the process, or more memory than a case may take.
"""

import argparse
import os
from dataclasses import asdict

from benchmarks.output.result import at_least, at_most, finish
from tests.fuzz.fuzz import LIMITS, SHARES, fuzz


def main() -> None:
    arguments = _arguments()
    tallies = fuzz(
        arguments.cases,
        arguments.seed,
        processes=arguments.processes,
        shares={kind: SHARES[kind] for kind in arguments.kind},
    )
    rows = [{"seed": arguments.seed, **asdict(tally)} for tally in tallies]
    checks = [at_most(f"{tally.kind}: faults", [len(tally.faults)], 0) for tally in tallies]
    checks += [at_least(f"{tally.kind}: cases that are taken", [tally.taken], 1) for tally in tallies]
    checks += [at_least(f"{tally.kind}: cases that are refused", [tally.refused], 1) for tally in tallies]
    seconds, mebibytes = ([getattr(tally, f"most_{name}") for tally in tallies] for name in ("seconds", "mebibytes"))
    checks.append(at_most("seconds of the processor for a case", seconds, LIMITS.cpu_seconds))
    checks.append(at_most("MiB by which a process grew in a case", mebibytes, LIMITS.mebibytes))
    finish(rows, checks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="annotations come on top")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kind", nargs="+", choices=list(SHARES), default=list(SHARES))
    return parser.parse_args()


if __name__ == "__main__":
    main()
