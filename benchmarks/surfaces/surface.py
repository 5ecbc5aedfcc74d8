"""A recorded surface: many plans of one workload, each measured for real in some rounds, to compare searches on."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import estimate_epoch
from autotune.search.solver.solver import Solver
from autotune.search.space.space import Axes, Point, Space
from benchmarks.cases.drift import at_profiled_speed
from storage.records import FinishedTrial, TrialResult
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import CostWeights, Epoch, EpochSettings
from trials.data.formats import AnnotationFile
from trials.data.index import COLUMNS, DatasetIndex
from trials.data.packs import Oversize, Packs
from trials.job import SearchSection
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Packed, Packing, Plan
from trials.workload import Workload

RECORDED = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.jsonl"))}
"""Files by the job and the machine that they were recorded on."""
REPLAYED_NOISE = 0.015
"""Of a trial, as a share: what the steps of one trial differ by on a machine that is left alone."""
_BEGINNING, _TRIAL_SECONDS = datetime(2026, 1, 1, tzinfo=UTC), 7.0
_NEAREST = 9
_NEAR = 9
"""Repeated runs that the drift at a run is taken from."""
_TURNS = 20
_MEDIAN_DEVIATION = 1.4826
"""Standard deviation of normal noise over its median absolute deviation."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, of normal noise."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of the file: what all runs have in common."""

    workload: Workload
    costs: LayerCosts
    """Profiled before the first run."""
    weights: CostWeights
    seed: int
    warmup_steps: int
    lengths: tuple[tuple[int, int, int], ...]
    """(vision units, text tokens, target tokens) of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPacks:
    """The packs of an epoch and their steps, which another version of the packers and of the steps would change."""

    samples: tuple[int, ...]
    """As in `Packs`, as are the starts."""
    starts: tuple[int, ...]
    micro_batches: int
    assignment: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, epoch: Epoch) -> "RecordedPacks":
        return cls(
            samples=tuple(epoch.packs.samples.tolist()),
            starts=tuple(epoch.packs.starts.tolist()),
            micro_batches=epoch.micro_batches,
            assignment=tuple(map(tuple, epoch.assignment.tolist())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a plan: a further line."""

    plan: Plan
    outcome: Completed | Failed
    began: float
    """Seconds since the epoch of Unix."""
    ended: float
    packs: RecordedPacks | None = None
    """In the first run with this packing and number of data ranks."""


def read_surface(path: Path) -> tuple[Header, list[Run]]:
    with path.open() as lines:
        header = wire.decode(Header, next(lines))
        return header, [wire.decode(Run, line) for line in lines]


def lengths_of(index: DatasetIndex) -> tuple[tuple[int, int, int], ...]:
    columns = (index.vision_units, index.text_tokens, index.target_tokens)
    return tuple(zip(*(column.tolist() for column in columns), strict=True))


def index_of(header: Header) -> DatasetIndex:
    """Return an index of samples with the recorded lengths, of which there are no files."""
    units, tokens, targets = np.array(header.lengths).T
    if not header.weights.target:  # recorded when the head ran on all tokens
        targets = tokens
    numbers = np.arange(len(units))
    columns = {**dict.fromkeys(COLUMNS, numbers), **dict.fromkeys(("file", "kind"), np.zeros_like(numbers))}
    columns |= {"vision_units": units, "text_tokens": tokens, "target_tokens": targets}
    nowhere = AnnotationFile(path=Path("/nowhere"), images=Path("/nowhere"), format="internvl", repeat=1.0)
    typed: dict[str, Any] = {name: columns[name].astype(kind) for name, kind in COLUMNS.items()}
    return DatasetIndex(files=(nowhere,), **typed)


class Surface:
    """What the recorded plans truly take: after all runs, without the drift of the machine."""

    def __init__(self, header: Header, runs: Sequence[Run]) -> None:
        self.header = header
        self.workload = header.workload
        self.index = index_of(header)
        self._packs = {(run.plan.packing, run.plan.layout.data): run.packs for run in runs if run.packs}
        self.predictor = Predictor(header.costs, self.epoch, self.workload.model.element_bytes)
        failed = [run for run in runs if isinstance(run.outcome, Failed) and _lasts(run.outcome)]
        too_large = {run.plan for run in failed}
        lasting = [*failed, *(run for run in runs if _lasts(run.outcome) and run.plan not in too_large)]
        lasting.sort(key=lambda run: run.began)
        self.trials = [_trial(self.predictor, run, number) for number, run in enumerate(lasting)]
        self.settings = SearchSection(warmup_steps=header.warmup_steps)
        measured = [(trial.plan, trial.result.epoch_seconds) for trial in self.trials]
        self.epoch_seconds, self.error = without_drift([(plan, seconds) for plan, seconds in measured if seconds])

    @property
    def best_seconds(self) -> float:
        return min(self.epoch_seconds.values())

    def epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        """Return the recorded epoch. Raise KeyError for packs that no run had."""
        recorded = self._packs[packing, data_parallel]
        return Epoch(
            index=self.index,
            packing=packing,
            packs=Packs(samples=np.array(recorded.samples), starts=np.array(recorded.starts), padded=False),
            data_parallel=data_parallel,
            micro_batches=recorded.micro_batches,
            settings=EpochSettings(
                global_batch_samples=self.workload.global_batch_samples,
                weights=self.header.weights,
                seed=self.header.seed,
                oversize=cast(Oversize, self.workload.oversize),
            ),
            arranged=lambda: np.array(recorded.assignment),
        )

    def replay(self, seed: int) -> Callable[[Plan, int], FinishedTrial]:
        """Return a function that gives a recorded run of a plan as a numbered trial: without drift, with new noise."""
        random = np.random.default_rng(seed)
        of_plan: dict[Plan, list[FinishedTrial]] = defaultdict(list)
        for trial in self.trials:
            of_plan[trial.plan].append(trial)

        def run(plan: Plan, number: int) -> FinishedTrial:
            recorded = of_plan[plan][int(random.integers(len(of_plan[plan])))]
            finished = _BEGINNING + timedelta(seconds=_TRIAL_SECONDS * number)
            result = replace(recorded.result, trial_id=f"{number:032x}", finished=finished)
            if isinstance(result.outcome, Completed) and result.epoch_seconds:
                seconds = self.epoch_seconds[plan] * math.exp(REPLAYED_NOISE * random.standard_normal())
                slowness = result.epoch_seconds / seconds
                outcome = replace(result.outcome, measurement=at_profiled_speed(result.outcome.measurement, slowness))
                result = replace(result, outcome=outcome, epoch_seconds=seconds)
            return replace(recorded, id=result.trial_id, number=number, started=finished, result=result)

        return run


def without_drift(runs: Sequence[tuple[Key, float]]) -> tuple[dict[Key, float], float]:
    """Return the seconds of each key, and the standard error, as a share, of keys that ran more than once.

    `runs` are in the order of time. The logarithm of the seconds of a run is the sum of its key's, the machine's drift
    and noise. A key's is the median over its runs, since other programs make some of them much slower. The drift at a
    run is the median difference of the `_NEAR` nearest runs of repeated keys from their keys' seconds. Both are
    computed in turns.
    """
    counts = Counter(key for key, _ in runs)
    numbers = {key: number for number, key in enumerate(counts)}
    keys, logs = np.array([numbers[key] for key, _ in runs]), np.log([seconds for _, seconds in runs])
    of_key = np.array(list(counts.values()))
    repeated = np.flatnonzero(of_key[keys] > 1)
    assert len(repeated) >= _NEAR, "recorded without repeats"
    near = np.array([repeated[np.argsort(abs(repeated - run), kind="stable")[:_NEAR]] for run in range(len(runs))])
    rows = [np.flatnonzero(keys == key) for key in range(len(counts))]
    drift = np.zeros(len(runs))
    for _ in range(_TURNS):
        found = np.array([np.median((logs - drift)[each]) for each in rows])
        drift = np.median((logs - found[keys])[near], axis=1)
        drift -= drift.mean()
    spread = _MEDIAN_DEVIATION * float(np.median(abs(logs - drift - found[keys])[repeated]))
    error = _MEDIAN_ERROR * spread / math.sqrt(float(np.median(of_key[of_key > 1])))
    return dict(zip(counts, np.exp(found).tolist(), strict=True)), error


class RecordedSpace(Space):
    """A space of the recorded plans alone: another point stands for the nearest of them."""

    def __init__(self, axes: Axes, solver: Solver, plans: Iterable[Plan]) -> None:
        super().__init__(axes, solver)
        whole = Space(axes, solver)
        points = {plan: whole.point(plan) for plan in plans}
        self._points = {plan: point for plan, point in points.items() if point is not None}

    @cached_property
    def starts(self) -> tuple[Plan, ...]:
        return tuple(self._points)

    def point(self, plan: Plan) -> Point | None:
        return self._points.get(plan)

    def holds(self, plan: Plan) -> bool:
        return plan in self._points

    def plan(self, point: Mapping[str, Any]) -> Plan:
        return min(self._points, key=lambda plan: _apart(self._points[plan], point))

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        if plan in self._points:
            here = self._points[plan]
            yield from sorted(self._points, key=lambda other: _apart(self._points[other], here))[1:_NEAREST]


def recorded_space(surface: Surface, solver: Solver) -> RecordedSpace:
    """Return the space of a surface's plans, with the axes that they need."""
    plans = [trial.plan for trial in surface.trials]
    packings = [plan.packing for plan in plans if isinstance(plan.packing, Packed)]
    axes = Axes(
        layouts=tuple(dict.fromkeys(plan.layout for plan in plans)),
        packers=tuple(sorted({packing.packer for packing in packings})),
        capacities=tuple(sorted({(packing.qv, packing.qt) for packing in packings})),
        qv_slacks=_usual_first(packing.qv - packing.qv_min for packing in packings),
        qt_slacks=_usual_first(packing.qt - packing.qt_min for packing in packings),
    )
    return RecordedSpace(axes, solver, plans)


def _usual_first(slacks: Iterable[int]) -> tuple[int, ...]:
    """Return the slacks, the commonest first: it is the usual one, the only one of packers that relax nothing."""
    return tuple(slack for slack, _ in Counter(slacks).most_common())


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return a distance in which a step of a boundary or a recompute count is as far as a tenth of a capacity."""
    far: float = 3.0 * (one["layout"] != other["layout"]) + 0.1 * (one["packer"] != other["packer"])
    far += abs(math.log(one["qv"] / other["qv"])) + abs(math.log(one["qt"] / other["qt"]))
    far += 0.1 * sum(
        min(abs(value - other[name]), 2) for name, value in one.items() if name.startswith(("boundary", "recompute"))
    )
    return far


def _lasts(outcome: Completed | Failed) -> bool:
    """Return whether it would end alike another time: a measurement, or too little memory."""
    return isinstance(outcome, Completed) or isinstance(outcome.cause, OutOfMemory)


def _trial(predictor: Predictor, run: Run, number: int) -> FinishedTrial:
    seconds = error = None
    if isinstance(run.outcome, Completed):
        seconds, error = estimate_epoch(run.outcome.measurement, predictor.predict(run.plan))
    result = TrialResult(
        trial_id=f"{number:032x}",
        outcome=run.outcome,
        epoch_seconds=seconds,
        epoch_seconds_error=error,
        finished=datetime.fromtimestamp(run.ended, UTC),
    )
    return FinishedTrial(
        id=result.trial_id,
        study_id="0" * 32,
        number=number,
        plan=run.plan,
        role="recorded",
        parameters={},
        started=datetime.fromtimestamp(run.began, UTC),
        result=result,
    )
