"""Packing and step building, against other packers on real lengths, and at scale. Prints one JSON object.

    python -m benchmarks.packing [--lengths FOLDER] [--qv 8 ...] [--qt 4096 ...] [--sizes 10000 ...] [--fuzz 10000]
        [--mixed 60000]

The lengths are caches in OmniBal's form, `[{"vit_num": 5, "token_num": 1341, "image_flags": 5}, ...]`. What depends on
chance is seeded. Times are medians of repeats that are taken in turns. Each size runs in a process of its own, on one
core, so that its memory can be measured alone. `--mixed` is the number of generated samples whose steps are compared
with steps in random order; 0 of any option leaves its part out.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from autotune.epoch_balance import balance, mixing
from autotune.packing.material import paper_weights
from benchmarks.cases.lengths import CAPACITIES, add_lengths, generated, index_of
from benchmarks.output.result import Check, at_least, at_most, finish, show
from benchmarks.references import packers as reference
from trials import plugins
from trials.arrays import Ints
from trials.data.epoch import BEST, Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.neutral import neutrality
from trials.data.order import epoch_order
from trials.data.packers import PACKERS, best_fit
from trials.data.packs import build_packs
from trials.errors import DataError
from trials.plan import Packed

WEIGHTS = paper_weights()
FULL = 0.9
"""Rows where at least this share of the packs meets the relaxation are held to the bars on dist ratios."""
BARS = {8: (0.006, 0.99), 64: (0.03, 0.97)}
"""(most dist ratio, least cost efficiency) by data-parallel ranks."""
GLOBAL_BATCH = 1024
MICRO_BATCHES = 4
"""Of a step on each rank, where steps are compared with random ones."""
REPEATS = 3
SCALE_SAMPLES, SCALE_SECONDS, SCALE_MEBIBYTES = 1_270_000, 3.0, 1024
HISTOGRAM_SECONDS = 0.020


def main() -> None:
    arguments = _arguments()
    if arguments.one_size:
        print(json.dumps(_built(arguments.lengths, *arguments.one_size)))
        return
    index = load(arguments.lengths)
    rows = [_row(index, qv, qt) for qt in arguments.qt for qv in arguments.qv]
    scale = [_in_process(arguments.lengths, size, packer) for size in arguments.sizes for packer in _packers()]
    fuzz = {"fuzzed": arguments.fuzz, "wrong": sum(map(_packed_wrongly, range(arguments.fuzz)))}
    mixed = [*mixed_rows(index, arguments.mixed)]
    checks = [at_most("wrongly packed random sets", [fuzz["wrong"]], 0)]
    for part, check in ((rows, _row_checks), (scale, _scale_checks), (mixed, _mixed_checks)):
        checks += check(part) if part else []
    finish([*rows, *scale, fuzz, *mixed], checks)


# --- rows: one pair of capacities ---


def _row(index: DatasetIndex, qv: int, qt: int) -> dict[str, Any]:
    show(f"qv {qv}, qt {qt}")
    units, tokens = index.vision_units.astype(np.int64), index.text_tokens.astype(np.int64)
    packing = Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 128)
    order = epoch_order(index, 0, 0)
    packers = {name: replace(packing, packer=name) for name in plugins.names(PACKERS)}
    packs = {name: build_packs(index, order, each, 0, "fail") for name, each in packers.items()}
    sizes = best_fit.Sizes.of(units, tokens)
    steps = [_steps(index, replace(packing, packer=BEST), ranks) for ranks in BARS]
    return {
        "qv": qv,
        "qt": qt,
        "bound": max(math.ceil(units.sum() / qv), math.ceil(tokens.sum() / qt)),
        "reference_packs": {
            **{f"isf-{rounds}": reference.isf(units, tokens, (qv, qt), rounds) for rounds in (1, 10, 100)},
            "first-fit-decreasing": reference.first_fit_decreasing(units, tokens, (qv, qt)),
            "histogram": reference.best_histogram(units, tokens, (qv, qt)),
        },
        "packs": {name: len(found) for name, found in packs.items()},
        "seconds": _in_turns(
            {name: lambda each=each: build_packs(index, order, each, 0, "fail") for name, each in packers.items()}
            | {"histogram": lambda: best_fit.patterns(sizes, packing)}
        ),
        "exactly_once": all(sorted(found.samples.tolist()) == list(range(len(index))) for found in packs.values()),
        "within": all(found.sums(units).max() <= qv and found.sums(tokens).max() <= qt for found in packs.values()),
        "full": 1 - max(step["relaxation_missed"] for step in steps),
        "steps": steps,
    }


def _steps(index: DatasetIndex, packing: Packed, ranks: int) -> dict[str, Any]:
    """Build two epochs."""
    first, second = (_epoch(index, packing, ranks, epoch=epoch) for epoch in (0, 1))
    found = balance(first, WEIGHTS)
    return {
        "data_parallel": ranks,
        "packer": first.packing.packer if isinstance(first.packing, Packed) else None,
        "packs": found.packs,
        "relaxation_missed": found.relaxation_missed,
        "dist_ratio_vision": found.dist_ratio_vision,
        "dist_ratio_language": found.dist_ratio_language,
        "attention_balance_ratio": found.attention_balance_ratio,
        "cost_efficiency": found.cost_efficiency,
        "step_cost_efficiency": found.step_cost_efficiency,
        "steps_near_global_batch": found.steps_near,
        "largest_variance": max(neutrality(first).variances.values()),
        "mixing": mixing(first, second),
    }


def _row_checks(rows: list[dict[str, Any]]) -> list[Check]:
    more = [row["packs"]["cutting-stock"] - min(row["reference_packs"].values()) for row in rows]
    checks = [
        at_most("packs of cutting-stock more than the fewest of the references", more, 0),
        at_least("rows with every sample exactly once and within the capacities", map(_sound, rows), 1),
        at_most("seconds of the histogram packer", (row["seconds"]["histogram"] for row in rows), HISTOGRAM_SECONDS),
    ]
    full = [step for row in rows if row["full"] >= FULL for step in row["steps"]]
    for ranks, (most, least) in BARS.items():
        steps = [step for step in full if step["data_parallel"] == ranks]
        for kind in ("vision", "language"):
            ratios = [step[f"dist_ratio_{kind}"] for step in steps]
            checks.append(at_most(f"dist ratio, {kind}, {ranks} ranks", ratios, most))
        efficiency = [step["cost_efficiency"] for step in steps]
        checks.append(at_least(f"cost efficiency, {ranks} ranks", efficiency, least))
    return checks


def _sound(row: Mapping[str, Any]) -> bool:
    return bool(row["exactly_once"] and row["within"])


# --- scale: many samples ---


def _built(lengths: Path, size: str, packer: str) -> dict[str, Any]:
    """Pack samples drawn from the real ones, and build steps; the memory is that of the whole process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    index = load(lengths)
    drawn = np.random.default_rng(0).integers(len(index), size=int(size))
    index = index_of(index.vision_units[drawn].astype(np.int64), index.text_tokens[drawn].astype(np.int64))
    packing = Packed(qv=15, qt=4096, qv_min=15, qt_min=4096 - 128, packer=packer)
    start = time.perf_counter()
    epoch = _epoch(index, packing, 8, epoch=0)
    _ = epoch.assignment  # the steps, which are built when they are asked for
    seconds = time.perf_counter() - start
    mebibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "samples": int(size),
        "packer": packer,
        "packs": len(epoch.packs),
        "seconds": seconds,
        "mebibytes": mebibytes,
    }


def _in_process(lengths: Path, size: int, packer: str) -> dict[str, Any]:
    show(f"{size} samples, {packer}")
    command = [sys.executable, "-m", "benchmarks.packing", "--lengths", str(lengths), "--one-size", str(size), packer]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(REPEATS)]
    seconds = [run["seconds"] for run in runs]
    return {
        **runs[0],
        "seconds": statistics.median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "mebibytes": max(run["mebibytes"] for run in runs),
    }


def _scale_checks(scale: list[dict[str, Any]]) -> list[Check]:
    large = [row for row in scale if row["samples"] == SCALE_SAMPLES]
    return [
        at_most(f"seconds for {SCALE_SAMPLES} samples, any packer", (row["seconds"] for row in large), SCALE_SECONDS),
        at_most(f"MiB for {SCALE_SAMPLES} samples, any packer", (row["mebibytes"] for row in large), SCALE_MEBIBYTES),
    ]


# --- steps next to random order ---


def mixed_rows(real: DatasetIndex, count: int) -> Iterator[dict[str, Any]]:
    """Yield how the steps of each kind of data, packer and number of ranks vary, of `count` generated samples."""
    for kind, (qv, qt) in {**CAPACITIES, "real": (15, 4096)}.items() if count else ():
        index = real if kind == "real" else generated(kind, count)
        for packer, ranks in product(plugins.names(PACKERS), BARS):
            row = {"data": kind, "packer": packer, "data_parallel": ranks}
            row |= _mixed(index, Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 128, packer=packer), ranks)
            show(
                ", ".join(
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                )
            )
            yield row


def _mixed(index: DatasetIndex, packing: Packed, ranks: int) -> dict[str, Any]:
    """Build two epochs whose steps have about `MICRO_BATCHES` packs on each rank."""
    packs = build_packs(index, epoch_order(index, 0, 0), packing, 0, "own-pack")
    settings = EpochSettings(
        global_batch_samples=round(len(index) / len(packs) * ranks * MICRO_BATCHES), weights=WEIGHTS
    )
    first, second = (build_epoch(index, packing, settings, data_parallel=ranks, number=number) for number in range(2))
    found, compared = balance(first, WEIGHTS), neutrality(first)
    return {
        "packs": found.packs,
        "steps": compared.steps,
        "variances": compared.variances,
        "steps_near": compared.steps_near,
        "together_again": _together_again(first, second),
        "cost_per_sample": found.cost_per_sample,
        "cost_efficiency": found.cost_efficiency,
    }


def _together_again(first: Epoch, second: Epoch) -> float:
    """Return the share of the pairs of samples in a pack that share one in the next epoch, too."""
    packs = [np.empty(len(epoch.index), dtype=np.int64) for epoch in (first, second)]
    for pack_of_row, epoch in zip(packs, (first, second), strict=True):
        pack_of_row[epoch.packs.samples] = np.repeat(np.arange(len(epoch.packs)), epoch.packs.counts)
    counts = (np.unique(each, return_counts=True)[1] for each in (packs[0], packs[0] * len(first.index) + packs[1]))
    pairs, both = (int((count * (count - 1)).sum()) for count in counts)
    return both / max(pairs, 1)


def _mixed_checks(rows: list[dict[str, Any]]) -> list[Check]:
    return [
        at_most("variance between steps over random order", (max(row["variances"].values()) for row in rows), 2.0),
        at_least("share of the steps near the global batch", (row["steps_near"] for row in rows), 0.99),
        at_most("share of the pairs that meet again", (row["together_again"] for row in rows), 0.01),
    ]


# --- fuzz ---


def _packed_wrongly(seed: int) -> bool:
    """Return whether any packer loses, doubles or overfills on a random set of lengths, or on a degenerate one."""
    random = np.random.default_rng(seed)
    qv, qt, count = (int(random.integers(*bounds)) for bounds in ((0, 40), (1, 2000), (0, 60)))
    units, tokens = random.integers(0, 50, count), random.integers(1, 2500, count)
    match seed % 5:
        case 1:
            units, tokens = units[:1], tokens[:1]
        case 2:
            units, tokens = np.full_like(units, 3), np.full_like(tokens, 200)
        case 3:
            units += qv + 1
    packings = (Packed(qv=qv, qt=qt, qv_min=0, qt_min=0, packer=name) for name in plugins.names(PACKERS))
    return not all(_is_sound(units, tokens, packing, seed) for packing in packings)


def _is_sound(units: Ints, tokens: Ints, packing: Packed, seed: int) -> bool:
    """Return whether each item is packed once, within the capacities or alone, and a set without items is refused."""
    index = index_of(units, tokens)
    try:
        packs = build_packs(index, np.arange(len(index)), packing, seed, "own-pack")
    except DataError:
        return not len(units)
    above = (packs.sums(units) > packing.qv) | (packs.sums(tokens) > packing.qt)
    once = sorted(packs.samples.tolist()) == list(range(len(units)))
    return once and bool((packs.counts > 0).all()) and bool((packs.counts[above] == 1).all())


# --- what all of them use ---


def load(folder: Path) -> DatasetIndex:
    """Return the samples of every length cache in the folder."""
    records = [record for path in sorted(folder.glob("*.json")) for record in json.loads(path.read_text())]
    if not records:
        sys.exit(f"{folder} holds no length caches (*.json); name another folder with --lengths")
    units = [record["vit_num"] if record["image_flags"] else 0 for record in records]
    return index_of(np.array(units), np.array([record["token_num"] for record in records]))


def _epoch(index: DatasetIndex, packing: Packed, ranks: int, *, epoch: int) -> Epoch:
    return build_epoch(
        index,
        packing,
        EpochSettings(global_batch_samples=GLOBAL_BATCH, weights=WEIGHTS, oversize="fail"),
        data_parallel=ranks,
        number=epoch,
    )


def _packers() -> tuple[str, ...]:
    return (*plugins.names(PACKERS), BEST)


def _in_turns(timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each, run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(REPEATS):
        for name, run in timed.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_lengths(parser)
    parser.add_argument("--qv", type=int, nargs="*", default=list(range(8, 19)))
    parser.add_argument("--qt", type=int, nargs="*", default=[4096, 6144, 8192])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, SCALE_SAMPLES, 10_000_000])
    parser.add_argument("--fuzz", type=int, default=10_000, help="random sets of lengths to pack")
    parser.add_argument("--mixed", type=int, default=60_000, help="generated samples (%(default)s)")
    parser.add_argument("--one-size", nargs=2, metavar=("SAMPLES", "PACKER"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
