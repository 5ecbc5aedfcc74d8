"""What to try next: the plan of the greatest expected improvement for each second that its trial takes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist, median
from typing import TypeAlias

import numpy as np

from autotune.predict.costs import Array
from autotune.predict.features import LAYER_COSTS
from autotune.predict.memory import StageBytes
from autotune.search.execution.ledger import MOST_ACCIDENTS, duration_seconds, says_something
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import Wanted
from autotune.search.space.space import Space
from autotune.search.winner import ranked
from storage.records import FinishedTrial
from trials.job import SearchSection
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Layout, Packed, Packing, Plan

_COMPARED = 32
"""Plans whose posterior is asked for, out of those that are predicted fastest."""
_SOLVED = 8
"""Packings and layouts that are split anew with corrected costs, and so many of each layout beside:"""
_SOLVED_OF_LAYOUT = 2
_AROUND = 4
"""Packings and layouts around whose best plan others are looked for."""
_CLIMBS = 8
_WRONG_BYTES, _WRONG_TIMES = 0.02, 0.1
"""Changes of the predicted bytes, and of the times of layers against each other, that are worth a space made anew."""
_SPLITS = Wanted(count=3, within=1.03)
_INTERVAL = 2.0
"""Standard deviations on each side of the interval of a stage's bytes."""
_WEIGHTS = (0.0, 0.25, 1.0)
_SHARES = (1.0, 0.8, 0.6)
"""Of the memory, where less of it is an objective."""
_NORMAL = NormalDist()
Solve: TypeAlias = Callable[[Packing, Layout, Wanted], tuple[Plan, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan that was not tried."""

    plan: Plan
    gain: float
    """Expected improvement on the best plan so far, as a share of its time; infinite while there is none."""


class Advisor:
    """Looks ahead from predictions and trials. The same for the same trials in order."""

    def __init__(self, space: Space, predictor: CalibratedPredictor, limits: Limits, settings: SearchSection) -> None:
        self.space = space
        self.surrogate = Surrogate(predictor)
        self._predictor = predictor
        self._limits = limits
        self._settings = settings
        self._trials: list[FinishedTrial] = []
        self._tried: set[Plan] = set()
        self._accidents: Counter[Plan] = Counter()
        self._failed: set[Plan] = set()
        self._measured: tuple[Plan, ...] = ()
        """Those that may win."""
        self._exceeded: list[tuple[Plan, int]] = []
        self._beside: list[float] = []
        self._factors: Array = np.ones(len(LAYER_COSTS) + 2)
        """`CalibratedPredictor.factors` that the space was made with."""
        self._renew_space()
        self._weights = _WEIGHTS if "memory" in settings.objectives else (0.0,)
        self._turned = 0
        self._solve = self._solvers()
        self.pending: frozenset[Plan] = frozenset()
        """Plans whose trials are running: each is taken to come out as it is expected to."""
        self._proposed: dict[frozenset[Plan], Proposal | None] = {}
        """Until the next lesson, by pending plans."""

    def _solvers(self) -> list[Solve]:
        """Splits by corrected costs, cached; also for less memory where that is an objective."""
        shares = _SHARES if len(self._weights) > 1 else (1.0,)
        limits = [replace(self._limits, memory_bytes=round(share * self._limits.memory_bytes)) for share in shares]
        return [cache(Solver(self._predictor.corrected, each).solutions) for each in limits]

    def learn(self, trial: FinishedTrial) -> None:
        """From any trial: its plan is not proposed again, unless it had an accident for the first time."""
        if says_something(trial):
            self._predictor.learn(trial.plan, trial.result.outcome, self._settings)
        self.surrogate.learn(trial)
        self._renew_space()
        self._trials.append(trial)
        self._accidents[trial.plan] += not says_something(trial)
        if says_something(trial) or self._accidents[trial.plan] >= MOST_ACCIDENTS:
            self._tried.add(trial.plan)
        completed = dict.fromkeys(each.plan for each in ranked(self._trials))
        self._failed = self._tried.difference(completed)
        self._measured = tuple(filter(self.space.allows, completed))
        match trial.result.outcome:
            case Completed(measurement=measurement):
                self._beside.append(max(duration_seconds(trial) - sum(measurement.step_seconds), 0.0))
            case Failed(cause=OutOfMemory(stage=stage)) if says_something(trial):
                self._exceeded.append((trial.plan, stage))
            case _:
                pass
        self._solve = self._solvers()
        self._turned = 0
        self._proposed.clear()

    def has_tried(self, plan: Plan) -> bool:
        """Whether it need not be tried again."""
        return plan in self._tried

    def turn(self) -> bool:
        """Weighs the objectives in another way; False when all were looked at since the last trial."""
        if self._turned + 1 == len(self._weights):
            return False
        self._turned += 1
        self._proposed.clear()
        return True

    def _renew_space(self) -> None:
        """Where trials show that the profile is wrong, other plans can be trained than it said, or are good."""
        now = self._predictor.factors
        more = np.log(now) - np.log(self._factors)
        layers, kept = more[: len(LAYER_COSTS)], more[len(LAYER_COSTS) :]
        if np.ptp(layers) > _WRONG_TIMES or np.abs(kept).max() > _WRONG_BYTES:
            self.space.renew(Solver(self._predictor.corrected, self._limits))
            self._factors = now

    def best(self) -> Plan | None:
        """The plan that is fastest after all that is known; None while nothing was measured."""
        if not self._measured:
            return None
        return self._measured[int(np.argmin(self.surrogate.posterior(self._measured).mean))]

    def to_beat(self) -> float | None:
        """Seconds that an epoch under the best plan would take now, at the machine's speed; None before any trial."""
        best = self.best()
        if best is None:
            return None
        return math.exp(float(self.surrogate.posterior((best,)).mean[0])) * self.surrogate.slowness

    def predicted(self, within: float) -> list[Plan]:
        """For each pipeline degree the plan that is predicted best, if that takes at most `within` times the best's.

        The best first. Best is that of the greatest chance to fit the memory over its time.
        """
        first: dict[int, Plan] = {}
        for start in self._ordered(self.space.starts):
            first.setdefault(start.layout.pipeline, start)
        seen = ([plan for plan in self._climbed(start) if plan not in self._failed] for start in first.values())
        climbed = [plans for plans in seen if plans]
        found = self._ordered([plans[int(np.argmax(self._chance_over_time(plans)))] for plans in climbed])
        seconds = self._seconds(found)
        return [plan for plan, takes in zip(found, seconds, strict=True) if takes <= within * seconds[0]]

    def _climbed(self, start: Plan) -> list[Plan]:
        """All that may fit of what is seen on the way from a plan to ever better predicted neighbours."""
        found: dict[Plan, None] = {}
        top = start
        for _ in range(_CLIMBS):
            around = dict.fromkeys((top, *self._resolved(top), *self.space.neighbours(top)))
            fitting = [plan for plan in around if self.may_fit(plan) and self.space.point(plan) is not None]
            found |= dict.fromkeys(fitting)
            before, top = top, self._ordered(fitting)[0] if fitting else top
            if top == before:
                break
        return list(found)

    def _resolved(self, start: Plan) -> list[Plan]:
        return [plan for solve in self._solve for plan in solve(start.packing, start.layout, _SPLITS)]

    def propose(self, also_pending: Iterable[Plan] = ()) -> Proposal | None:
        """None when there is nothing left to try."""
        waiting = self.pending.union(also_pending)
        if waiting not in self._proposed:
            self._proposed[waiting] = self._best_proposal(waiting)
        return self._proposed[waiting]

    def _best_proposal(self, waiting: frozenset[Plan]) -> Proposal | None:
        candidates = [plan for plan in self._candidates() if plan not in waiting]
        if not candidates:
            return None
        known = (*self._measured, *waiting)
        if not known:
            return Proposal(plan=candidates[int(np.argmax(self._chance_over_time(candidates)))], gain=math.inf)
        gains = self._gains(candidates, known) * self._chances(candidates)
        chosen = int(np.argmax(gains / self._trial_seconds(candidates)))
        return Proposal(plan=candidates[chosen], gain=float(gains[chosen]))

    # --- where to look ---

    def _candidates(self) -> list[Plan]:
        """Plans that were not tried and may fit, the one predicted best first."""
        starts = self._ordered(self.space.starts)
        found = dict.fromkeys((*self._measured, *starts[: 2 * _COMPARED]))
        for start in self._leading(starts):
            found |= dict.fromkeys(self._resolved(start))
        best: dict[tuple[Packing, Layout], Plan] = {}
        for plan in self._ordered(tuple(found)):
            best.setdefault((plan.packing, plan.layout), plan)
        for plan in list(best.values())[:_AROUND]:
            found |= dict.fromkeys(self._climbed(plan))
        fitting = (plan for plan in found if plan not in self._tried and self.may_fit(plan))
        pointed = (plan for plan in self._ordered(tuple(fitting)) if self.space.point(plan) is not None)
        return [plan for plan, _ in zip(pointed, range(_COMPARED), strict=False)]

    def _leading(self, starts: Sequence[Plan]) -> Iterator[Plan]:
        """The first ones, and the first of each layout: one that was profiled wrong is split worse than others."""
        of_layout: Counter[Layout] = Counter()
        for number, start in enumerate(starts):
            of_layout[start.layout] += 1
            if number < _SOLVED or of_layout[start.layout] <= _SOLVED_OF_LAYOUT:
                yield start

    def _ordered(self, plans: Sequence[Plan]) -> list[Plan]:
        return sorted(plans, key=self._cost)

    def _cost(self, plan: Plan) -> float:
        """Logarithm of its predicted time, with what else counts."""
        return math.log(self._predictor.epoch_seconds(plan)) + self._weight_of(plan)

    def may_fit(self, plan: Plan) -> bool:
        """Whether it is neither predicted to need too much memory, nor asks for more than a plan that did."""
        if self._limits.first_above(self._predictor.memory(plan)) is not None:
            return False
        return not any(_asks_for_more(plan, failed, stage) for failed, stage in self._exceeded)

    # --- what it is worth ---

    def _gains(self, candidates: Sequence[Plan], known: Sequence[Plan]) -> Array:
        """Expected improvement (Jones, Schonlau, Welch 1998) on what is or will be known, as a share, [candidates]."""
        posterior = self.surrogate.posterior((*candidates, *known))
        weights = np.array([self._weight_of(plan) for plan in (*candidates, *known)])
        best = len(candidates) + int(np.argmin((posterior.mean + weights)[len(candidates) :]))
        gains = []
        for number in range(len(candidates)):
            less, error = posterior.difference(best, number)
            less += float(weights[best] - weights[number])
            share = less / error if error > 0 else math.copysign(math.inf, less)
            gains.append(less * _NORMAL.cdf(share) + error * _NORMAL.pdf(share) if error > 0 else max(less, 0.0))
        return np.array(gains)

    def _weight_of(self, plan: Plan) -> float:
        """What its memory counts beside its logarithmic time, where memory is an objective.

        The weight goes from trial to trial through a few, so that the trade-off is found (ParEGO, Knowles 2006).
        """
        exponent = self._weights[(len(self._trials) + self._turned) % len(self._weights)]
        return exponent * math.log(max(stage.expected for stage in self._predictor.memory(plan))) if exponent else 0.0

    def _chance_over_time(self, candidates: Sequence[Plan]) -> Array:
        """What is looked for while nothing was measured, [candidates]."""
        seconds = np.exp([self._cost(plan) for plan in candidates])
        ratio: Array = self._chances(candidates) / seconds
        return ratio

    def _chances(self, candidates: Sequence[Plan]) -> Array:
        """That a plan fits the memory, [candidates]."""
        return np.array([math.prod(map(self._chance, self._predictor.memory(plan))) for plan in candidates])

    def _chance(self, stage: StageBytes) -> float:
        room, width = self._limits.memory_bytes - stage.expected, max(stage.high - stage.expected, 1.0)
        return _NORMAL.cdf(_INTERVAL * room / width)

    def _trial_seconds(self, candidates: Sequence[Plan]) -> Array:
        """Warm-up and what is beside the steps included, [candidates]."""
        steps = self._settings.warmup_steps + self._settings.timed_steps
        counts = np.array([self._predictor.base.sizes(plan.packing, plan.layout).epoch.steps for plan in candidates])
        beside = median(self._beside) if self._beside else 0.0
        seconds: Array = beside + steps * self._seconds(candidates) / counts
        return seconds

    def _seconds(self, candidates: Sequence[Plan]) -> Array:
        return np.array([self._predictor.epoch_seconds(plan) for plan in candidates])


def _asks_for_more(plan: Plan, failed: Plan, number: int) -> bool:
    """Whether that stage surely needs no less memory than the one that ran out of it: monotone in all that it holds."""
    if plan.layout != failed.layout or not _holds_more(plan, failed):
        return False
    return all(mine >= its for mine, its in zip(_held(plan, number), _held(failed, number), strict=True))


def _holds_more(plan: Plan, failed: Plan) -> bool:
    one, other = plan.packing, failed.packing
    if isinstance(one, Packed) and isinstance(other, Packed):
        sizes = ((each.qv, each.qt, each.qv_min, each.qt_min) for each in (one, other))
        return one.packer == other.packer and all(mine >= its for mine, its in zip(*sizes, strict=True))
    return one == other


def _held(plan: Plan, number: int) -> tuple[int, ...]:
    """Layers of a stage, those of them that keep everything, and whether it holds the projector."""
    stage = plan.stages[number]
    kept = stage.vision - stage.recompute_vision, stage.language - stage.recompute_language
    projects = stage.vision > 0 and not any(later.vision for later in plan.stages[number + 1 :])
    return stage.vision, stage.language, *kept, projects
