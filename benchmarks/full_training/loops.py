"""Tuned trainings in turns with a plain packed loop, from the same weights, on whole epochs of the same samples."""

import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from autotune import Plan, SampleDataset
from autotune.job_file import load_job
from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import stored_costs
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.workload import prepare
from benchmarks.cases import pages
from benchmarks.full_training.following import CommandFailed, autotune, run
from benchmarks.full_training.jobs import make_example, write_job
from benchmarks.full_training.rival import drawn
from benchmarks.full_training.turns import Command, Timed, in_turns
from benchmarks.machines.analytic import without_deferral, without_selective
from storage.store import open_store
from trials import wire
from trials.data.epoch import EpochSettings, build_epoch
from trials.plan import SIMPLE_PACKER, Layout, Packed
from trials.stage import TOWERS, Stage

BATCH, RANKS = 16, 2
_PACKS = (1, 2, 4)
"""Packs of a rank and step for which lengths are swept."""
_TILE = 56
_ALIKE = ("tuned", "loop with our packs")
_HAND, _WHOLE = "engine, loop's plan", "engine, layers recomputed as a whole"
_RIVAL = "loop, "
"""How the names of sides begin that a person has without autotune."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A job with the weights of its model, and its plan."""

    folder: Path
    job: Path
    model: Path
    data: Path
    limit: int | None
    loops: Mapping[str, Mapping[str, Any]]
    """Sides that a person has without autotune, with the settings in which they differ."""
    plan: Plan
    plan_id: str


def loops(folder: Path, *, samples: int, rounds: int, search: Mapping[str, Any], cases: Sequence[str]) -> Iterator[Any]:
    """Yield rows: for each case the plan and the loop's sweep, then each training, then ratios of their speeds."""
    for name in cases:
        case = _tuned(folder / name, name, samples, search)
        sides, described = _sides(case)
        yield {"case": name, "part": "sides", "plan_text": case.plan_id, **described}
        alike = {side: sides[side] for side in _ALIKE if _ALIKE[-1] in sides}
        found: dict[str, list[dict[str, Timed]]] = {"round": [], "equal packs": []}
        for number in range(rounds):
            for part, taking in (("round", sides), ("equal packs", alike)):
                started = {side: command(case.folder / f"{part} {number}, {side}") for side, command in taking.items()}
                found[part].append(in_turns(started))
                speeds = {side: timed.samples_per_second for side, timed in found[part][-1].items()}
                yield {"case": name, "part": part, "speeds": speeds}
        last = difference(found["equal packs"][-1])
        yield {"case": name, "part": "ratios", **ratios(*found.values()), "loss_difference": last}


def ratios(rounds: Sequence[Mapping[str, Timed]], equal_packs: Sequence[Mapping[str, Timed]]) -> dict[str, Any]:
    """Return the median speed of each side, and the median, least and most ratio of two sides' speeds in a round.

    The engine and the loop with `equal_packs` take turns by themselves. What a launch does now and then, besides its
    ranks, comes due while it stands still, and takes a part of its next turn: the larger, the more sides there are.
    """

    def over(one: str, other: str, rounds: Sequence[Mapping[str, Timed]] = rounds) -> list[float] | None:
        if one not in rounds[0] or other not in rounds[0]:
            return None
        return _median_least_most(sides[one].samples_per_second / sides[other].samples_per_second for sides in rounds)

    return {
        "speeds": {side: statistics.median(sides[side].samples_per_second for sides in rounds) for side in rounds[0]},
        "engine": over("tuned", "loop with our packs", equal_packs),
        "over_fastest": _median_least_most(
            sides["tuned"].samples_per_second
            / max(timed.samples_per_second for side, timed in sides.items() if side.startswith(_RIVAL))
            for sides in rounds
        ),
        "over_random": over("tuned", "loop, random"),
        "over_matched": over("tuned", "loop, matched"),
        "over_all_rows": over("tuned", "loop, all rows"),
        "over_hand": over("tuned", _HAND),
        "over_whole": over("tuned", _WHOLE),
        "packs": over("loop with our packs", "loop, matched"),
    }


def _median_least_most(values: Iterable[float]) -> list[float]:
    found = sorted(values)
    return [statistics.median(found), found[0], found[-1]]


def difference(sides: Mapping[str, Timed]) -> float | None:
    """Return the largest relative difference of a step's loss in our engine and in the loop, with the same packs."""
    if "loop with our packs" not in sides:
        return None
    ours, theirs = (np.array([line["loss"] for line in sides[n].lines]) for n in ("tuned", "loop with our packs"))
    return float(np.max(np.abs(ours / theirs - 1)))


# --- cases ---


def _tuned(folder: Path, name: str, samples: int, search: Mapping[str, Any]) -> _Case:
    setting = CASES[name]
    limit, training, loops = setting.limit, setting.training, setting.loops
    source, data = setting.make(folder, samples)
    model = drawn(source, folder / "drawn", 0)
    job = write_job(
        folder / "job.yaml",
        model,
        data,
        model={"weights": "pretrained"},
        hardware={"memory_limit": f"{limit}MiB" if limit else None},
        training=training,
        search=search,
    )
    tuned = run(autotune("tune", job, "--json"), folder / "tune")
    document = tuned.document
    return _Case(
        folder=folder,
        job=job,
        model=model,
        data=data,
        limit=limit << 20 if limit else None,
        loops=loops,
        plan=wire.decode(Plan, json.dumps(document["plan"])),
        plan_id=document["id"],
    )


def _example(folder: Path, samples: int) -> tuple[Path, Path]:
    model, data, _ = make_example(folder / "example", samples)
    return model, data


def _tiles(folder: Path, samples: int) -> tuple[Path, Path]:
    """Return the example with 9 to 13 tiles in a fifth of the samples, and at most 5 in the others."""
    model, data = _example(folder, samples)
    settings = model / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_patches": 12}))
    chance = random.Random(0)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record in records:
        if isinstance(record.get("image"), str):
            path = data.parent / record["image"]
            with Image.open(path) as image:
                size = image.size
                if chance.random() < 0.25:  # of the four fifths with one image
                    columns, rows = chance.choice(((2, 4), (4, 2), (3, 3), (2, 5), (5, 2), (3, 4), (4, 3)))
                    size = (columns * _TILE, rows * _TILE)
                elif (area := size[0] * size[1]) > 12_000:  # more pixels are cut into 8 tiles or more
                    size = (round(size[0] * (12_000 / area) ** 0.5), round(size[1] * (12_000 / area) ** 0.5))
                image.resize(size).save(path, compress_level=1)
            record |= {"width": size[0], "height": size[1]}
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return model, data


def _pages(folder: Path, samples: int) -> tuple[Path, Path]:
    pages.make_job(folder, samples)
    return folder / "model", folder / "data" / "train.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """How the job of a case is made, and the loops that are its rivals."""

    make: Callable[[Path, int], tuple[Path, Path]]
    """Makes the model and a number of samples in a folder, and returns their paths."""
    limit: int | None = None
    """MiB of a rank."""
    training: Mapping[str, Any] = field(default_factory=dict)
    loops: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {
            "loop, random": {"matched": False},
            "loop, matched": {},
            "loop, all rows": {"target_rows": False},
        }
    )


CASES: Mapping[str, _Setting] = {
    "example": _Setting(make=_example, limit=200),
    "unlimited": _Setting(make=_example),
    # The matched loop has steps of 4 to 25 samples, whose lengths vary 11 times as much as those of random ones.
    "free steps": _Setting(make=_example, training={"batch_tolerance": 0.9, "step_variance": 20.0}),
    "pages": _Setting(make=_pages, limit=220),
    "tiles": _Setting(make=_tiles, limit=200),
    # Whole weights and gradients with moments in shards (ZeRO 1) take 68 MiB, and 8 MiB more in the least packs.
    "shards": _Setting(
        make=_example,
        limit=75,
        loops={"loop, shards": {"shards": True}, "loop, shards, random": {"shards": True, "matched": False}},
    ),
}


# --- sides ---


def _sides(case: _Case) -> tuple[dict[str, Callable[[Path], Command]], Mapping[str, Any]]:
    """Return the command of each side, in a folder, and the loop's settings after its sweep."""
    index = SampleDataset(case.job).index
    tokens = BATCH / RANKS * index.text_tokens.sum() / len(index)
    lengths = [int(tokens / packs) for packs in _PACKS]
    swept: dict[str, Any] = {}
    for name, changes in case.loops.items():
        sweep = _loop(case, case.folder / f"sweep {name}", lengths=lengths, steps=1, **changes)
        ended = run(sweep.words, sweep.folder, sweep.progress, sweep.environment)
        found = json.loads(next(line for line in ended.printed.splitlines() if line.startswith('{"length"')))
        swept[name] = {**changes, "lengths": [found["length"]], "recomputed": found["recomputed"]}
    sides: dict[str, Callable[[Path], Command]] = {"tuned": partial(_launch, case, plan=case.plan)}
    sides |= {name: partial(_loop, case, **given) for name, given in swept.items()}
    if "loop, matched" in swept:
        sides[_HAND] = partial(_launch, case, plan=_by_hand(case.plan, swept["loop, matched"]))
    else:  # the engine gathers a layer ahead, for which loops with shards leave no memory
        sides[_WHOLE] = partial(_launch, case, plan=_whole_layers(case))
    levels = [level for stage in case.plan.stages for level in stage.recomputed]
    # The loop recomputes layers as a whole, so it cannot run plans that recompute some selectively.
    is_whole = not any(level.selective(tower) for level in levels for tower in TOWERS)
    if case.plan.layout.data == RANKS and max(case.plan.packing.degrees) == 1 and is_whole:
        sides["loop with our packs"] = partial(_loop, case, packs=str(_packs(case)))
    return sides, {"plan": json.loads(case.plan.document), "swept": swept}


def _by_hand(plan: Plan, swept: Mapping[str, Any]) -> Plan:
    """Return the loop's settings as a plan."""
    (length,), freed = swept["lengths"], swept["recomputed"]
    layers = {kind: sum(getattr(stage, kind) for stage in plan.stages) for kind in ("vision", "language")}
    most = (1 << 31) - 1
    return Plan(
        packing=Packed(qv=most, qt=length, qv_min=most, qt_min=length, packer=SIMPLE_PACKER),
        layout=Layout(pipeline=1, data=RANKS, zero=0),
        stages=(Stage(**layers, recompute_vision=freed[0], recompute_language=freed[1]),),
    )


def _whole_layers(case: _Case) -> Plan:
    """Return the plan of least predicted time of those that recompute layers as a whole alone, and defer nothing."""
    prepared = prepare(load_job(case.job), case.folder / "whole")
    with open_store() as store:
        profiled = stored_costs(prepared.workload, store)
    if profiled is None:
        raise CommandFailed(f"the search of {case.job} has stored no profile")
    costs = without_deferral(without_selective(profiled))
    predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
    space = feasible_space(prepared.workload, Solver(predictor, Limits.of(prepared.workload)), remedy="")
    return min(space.starts, key=predictor.epoch_seconds)


def _packs(case: _Case) -> Path:
    """Write the plan's packs of an epoch with their recomputed layers, as the loop reads them; return the file."""
    samples = SampleDataset(case.job)
    settings = EpochSettings.of_job(samples.job, samples.weights)
    epoch = build_epoch(samples.index, case.plan.packing, settings, data_parallel=RANKS)
    (stage,) = case.plan.stages
    freed = [(level.vision, level.language) for level in stage.recomputed]

    def of(pack: int) -> tuple[list[int], tuple[int, int]]:
        return epoch.packs.pack(pack).tolist(), freed[epoch.packs.level_of_pack[pack]]

    steps = [[[*map(of, packs)] for packs in epoch.rows(step).T.tolist()] for step in range(epoch.steps)]
    file = case.folder / "packs.json"
    file.write_text(json.dumps(steps))
    return file


def _launch(case: _Case, folder: Path, *, plan: Plan) -> Command:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(plan.document)
    output = folder / "output"
    command = autotune("launch", case.job, "--plan", folder / "plan.json", "--set", f"training.output={output}")
    # Each has a lock and a database of its own, which let one training at a time use the devices.
    apart = {"XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    return Command(words=command, folder=folder, progress=output / "progress.jsonl", environment=apart)


def _loop(case: _Case, folder: Path, **settings: Any) -> Command:
    folder.mkdir(parents=True)
    progress = folder / "progress.jsonl"
    given = {
        "model": str(case.model),
        "data": str(case.data),
        "progress": str(progress),
        "memory_limit": case.limit,
        "global_batch": BATCH,
        **settings,
    }
    (folder / "runs.json").write_text(json.dumps([given]))
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)  # as autotune's ranks have
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    words: list[str | Path] = [*launcher, "-m", "benchmarks.references.packed_loop", folder / "runs.json"]
    return Command(words=words, folder=folder, progress=progress, environment=environment)
