"""Full trainings: promised speed, comparison with trainings without autotune, and kills. Prints one JSON object.

    python -m benchmarks.training [--part promises rival loops kills neutral recommended]
        [--families internvl qwen2_5_vl llava] [--cases example unlimited "free steps" pages tiles shards]
        [--rounds 3] [--scale 1.0]

All trainings are started by the command line, on two ranks. `promises` tunes and trains small models of three families
on photos. `rival` trains the example in turns with autotune and with `benchmarks/references/hf_trainer.py`, and
computes the loss on a held-out part with transformers. `loops` trains these cases in turns with autotune and with
`benchmarks/references/packed_loop.py`, whole epochs of the same samples. `kills` kills one training again and again,
and compares its losses with those of undisturbed ones. `neutral` trains the example for 300 steps with packs and in
random order, with three seeds. `recommended` trains the models of `promises` with the plans that `autotune recommend`
gives from a profile. `--scale` shrinks everything for a quick look; the checks then say less.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.full_training.following import CommandFailed
from benchmarks.full_training.kills import LEFT_SECONDS, killed
from benchmarks.full_training.loops import CASES, loops
from benchmarks.full_training.neutral import neutral
from benchmarks.full_training.photos import FAMILIES
from benchmarks.full_training.promises import promises
from benchmarks.full_training.recommended import recommended
from benchmarks.full_training.rival import compare
from benchmarks.output.result import Check, at_least, at_most, finish, show
from benchmarks.prediction import kendall
from trials.units import time_setting

Row: TypeAlias = Mapping[str, Any]
STEPS, SHORT_STEPS = 200, 60
SAMPLES, HELD_OUT, SEEDS = 800, 200, 3
LOOP_SAMPLES = 400
KILLS = 20
RECOMMENDED_STEPS = 50
NEUTRAL_STEPS, NEUTRAL_SAMPLES, NEUTRAL_HELD_OUT = 300, 1600, 64
LOSS_TOLERANCE = 1e-5
"""Relative difference that counts as the same loss: the last bits of a sum may differ between processes."""


def main() -> None:
    arguments = _arguments()
    rows: list[Row] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as name:
        folder = Path(name)
        _settle(folder)
        for part in arguments.part:
            found: list[Row] = []
            try:
                for row in _PARTS[part](folder, arguments):
                    show({"benchmark": part, **row})
                    found.append({"benchmark": part, **row})
                checks += _CHECKS[part](found)
            except CommandFailed as error:
                found.append({"benchmark": part, "failed": str(error)})
                checks.append(at_least(f"{part}: ran to the end", [], 1))
            rows += found
    finish(rows, checks)


def _settle(folder: Path) -> None:
    """Keep the database, caches and devices of this benchmark apart from the user's."""
    os.environ |= {"XDG_DATA_HOME": str(folder / "home" / "data"), "XDG_CACHE_HOME": str(folder / "home" / "cache")}
    for name in ("AUTOTUNE_DB_URL", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)


# --- parts ---


def _promises(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    steps, short = (max(6, round(arguments.scale * each)) for each in (STEPS, SHORT_STEPS))
    return promises(folder / "promises", steps, short, _search(arguments.scale), arguments.families)


def _rival(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    scale = arguments.scale
    seeds = max(2, round(scale * SEEDS))
    samples, held_out = max(96, round(scale * SAMPLES)), max(20, round(scale * HELD_OUT))
    return compare(folder / "rival", samples=samples, held_out=held_out, seeds=seeds, search=_search(scale))


def _loops(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    scale = arguments.scale
    samples, rounds = max(96, round(scale * LOOP_SAMPLES)), arguments.rounds
    search = {"trials": max(2, round(scale * 14)), "time_limit": time_setting(max(20.0, scale * 180))}
    return loops(folder / "loops", samples=samples, rounds=rounds, search=search, cases=arguments.cases)


def _kills(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    scale = arguments.scale
    return killed(folder / "kills", max(3, round(scale * KILLS)), _search(min(scale, 0.5)))


def _neutral(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    scale = arguments.scale
    return neutral(
        folder / "neutral",
        steps=max(4, round(scale * NEUTRAL_STEPS)),
        samples=max(128, round(scale * NEUTRAL_SAMPLES)),
        held_out=max(32, round(scale * NEUTRAL_HELD_OUT)),
        seeds=SEEDS,
    )


def _recommended(folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    steps = max(8, round(arguments.scale * RECOMMENDED_STEPS))
    return recommended(folder / "recommended", steps, arguments.families)


def _search(scale: float) -> Mapping[str, Any]:
    return {"trials": max(2, round(scale * 10)), "time_limit": time_setting(max(20.0, scale * 75))}


def check_promises(rows: Sequence[Row]) -> list[Check]:
    errors = [abs(row["measured_over_promised"] - 1) for row in rows]
    fewest = min(row["steps"] for row in rows)
    waits = [row["wait_share_ahead"] for row in rows]
    return [
        at_most(f"difference from the promised samples per second, over {fewest} steps or more", errors, 0.05),
        at_most("share of the steps that waits for data, decoded ahead", waits, 0.02),
    ]


def check_rival(rows: Sequence[Row]) -> list[Check]:
    last = rows[-1]
    share = abs(last["loss_difference"]) / last["loss_spread"]
    return [
        at_least("samples per second over those of the Trainer, median of the seeds", [last["gain"]], 1.8),
        at_most("difference of the mean held-out losses over their spread", [share], 1.0),
    ]


def check_loops(rows: Sequence[Row]) -> list[Check]:
    found = {row["case"]: row for row in rows if row["part"] == "ratios"}
    limited = [row for case, row in found.items() if CASES[case].limit]
    free = [row for case, row in found.items() if not CASES[case].limit]
    same = [row for row in found.values() if row["engine"] is not None]
    whole = [row["over_whole"][0] for row in limited if row["over_whole"] is not None]
    over_fastest, over_hand = "tuned over the fastest loop", "tuned over the loop's plan in the engine"
    checks = []
    if same:
        differences = [row["loss_difference"] for row in same]
        checks += [
            at_most("relative difference of a step's loss with equal packs", differences, 1e-3),
            at_least("engine over the loop with equal packs", [row["engine"][0] for row in same], 0.98),
        ]
    if limited:
        checks.append(at_least(f"{over_fastest}, with a limit", [row["over_fastest"][0] for row in limited], 1.05))
    if whole:
        checks.append(at_least("tuned over the plan that recomputes layers as a whole alone", whole, 1.0))
    if free:
        checks += [
            at_least(f"{over_fastest}, without a limit", [row["over_fastest"][0] for row in free], 1.0),
            at_least(f"{over_hand}, without a limit", [row["over_hand"][0] for row in free], 1.0),
        ]
    return checks


def check_kills(rows: Sequence[Row]) -> list[Check]:
    kills = [row for row in rows if row["part"] == "kill"]
    expected = next(row["steps"] for row in rows if row["part"] == "undisturbed")
    ended = [row["steps"] / expected for row in rows if row["part"] == "end"]
    return [
        at_most("relative difference of a loss", [row["difference"] for row in rows], LOSS_TOLERANCE),
        at_least("steps of the killed training over those of the undisturbed one", ended, 1.0),
        at_most("seconds until no process was left", [row["seconds_to_end"] for row in kills], LEFT_SECONDS),
    ]


def check_neutral(rows: Sequence[Row]) -> list[Check]:
    last = rows[-1]
    name = "difference of the mean held-out losses by step over the spread of the seeds, at every step"
    return [at_most(name, [last["largest_share_of_spread"]], 1.0)]


def check_recommended(rows: Sequence[Row]) -> list[Check]:
    errors = [abs(row["measured_over_predicted"] - 1) for row in rows]
    pairs = [(row["predicted"], row["measured"]) for row in rows]
    return [
        at_most("difference from the recommended samples per second", errors, 0.25),
        at_least("Kendall's tau of recommended and measured samples per second", [kendall(pairs)], 0.8),
    ]


_PARTS: Mapping[str, Callable[[Path, argparse.Namespace], Iterator[Row]]] = {
    "promises": _promises,
    "rival": _rival,
    "loops": _loops,
    "kills": _kills,
    "neutral": _neutral,
    "recommended": _recommended,
}
_CHECKS: Mapping[str, Callable[[Sequence[Row]], list[Check]]] = {
    "promises": check_promises,
    "rival": check_rival,
    "loops": check_loops,
    "kills": check_kills,
    "neutral": check_neutral,
    "recommended": check_recommended,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="of promises and recommended"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="of the part loops")
    parser.add_argument("--rounds", type=int, default=3, help="of the part loops")
    parser.add_argument("--scale", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
