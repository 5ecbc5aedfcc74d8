"""Proposes what to try next: the plan with the greatest expected improvement per second of its trial."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import count, islice
from statistics import NormalDist, fmean, median
from typing import TypeAlias

import numpy as np

from autotune.prediction.features import LAYER_COSTS
from autotune.prediction.memory import StageBytes
from autotune.search.execution.ledger import MOST_TRANSIENT_FAILURES, duration_seconds, is_conclusive
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.sampling.kept import asks_for_more, recomputes_more
from autotune.search.sampling.neutral import NeutralPlans, at_most_of_packs
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import WantedSplits
from autotune.search.space.origins import Origin
from autotune.search.space.space import Space
from autotune.search.winner import ranked
from storage.records import FinishedTrial
from trials.arrays import Floats
from trials.job import SearchSection
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Layout, Packing, Plan

# A choice: each of these plans needs the derivatives of its step by all factors.
_COMPARED = 32
"""Plans predicted fastest whose posterior is computed."""
# With 24 solved packings in place of 8, and an error that plans of similar packs share, it lowered the regret after 12
# trials from 1.3 to 0.2 % (median of 20 held-out machines of benchmarks/search.py).
_COMPARED_OF_PACKS = 3
"""Most of them with the same packing and layout: their variants are alike, but other packs may be predicted wrongly."""
_LOOKS = 4
"""Most times that candidates are looked for while packs of all of them change what is learned."""
_SOLVED = 24
"""Packings and layouts, predicted fastest, for which splits are solved with corrected costs."""
_SOLVED_OF_LAYOUT = 6
"""Further packings of each layout, predicted fastest, that are solved as well."""
# Choices: each step of a climb predicts dozens of neighbours.
_AROUND = 8
"""Packings and layouts around whose best plan others are looked for."""
_CLIMBS = 8
"""Most steps of a climb to ever better predicted neighbours."""
_CLIMB_GAIN = 1.07
"""Most by which a climb is expected to be faster than its start; on 20 simulated workloads it was at most 1.06."""
# With one climb from one packing the first plan was 1.1 % behind the best known (median of ten changed jobs).
_INFORMED_CLIMBS = 8
"""Climbs from different packings, of all pipeline degrees, where an earlier search has corrected the predictions."""
# Keeps quotients and logarithms finite where a plan cannot fit.
_LEAST_CHANCE = 1e-9
# On twelve simulated machines with noise of memory 0.92 trials of a search ran out of it with the 90 %, and 1.08 with
# 80 %.
_CHANCES = (0.025, 0.9, 0.95)
"""Least probability that a plan fits the memory, of those that are tried: at first, after one trial that ran out of
memory, and after more."""
_WRONG_BYTES, _WRONG_TIMES = 0.02, 0.1
"""Changes of predicted bytes, and of the times of layers relative to each other, after which the space is renewed."""
_SPLITS = WantedSplits(count=3, within=1.03)
_INTERVAL = 2.0
"""Standard deviations on each side of the interval of a stage's bytes."""
_WEIGHTS = (0.0, 0.25, 1.0)
"""Exponents of the memory in the scalarized objective, where memory is one; they take turns."""
_SHARES = (1.0, 0.8, 0.6)
"""Shares of the memory limit for which splits are solved, where memory is an objective."""
_NORMAL = NormalDist()
Solve: TypeAlias = Callable[[Packing, Layout, WantedSplits], tuple[Plan, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan to try next."""

    plan: Plan
    gain: float
    """Expected improvement on the best plan so far, as a share of its time; infinite while there is none."""


class Advisor:
    """Choice of the next plan from predictions and trials; deterministic for the same trials in the same order."""

    def __init__(self, space: Space, predictor: CalibratedPredictor, limits: Limits, settings: SearchSection) -> None:
        self.space = space
        self.surrogate = Surrogate(predictor)
        self._predictor = predictor
        self._limits = limits
        self._settings = settings
        self._trials: list[FinishedTrial] = []
        self.tried: set[Plan] = set()
        """Plans that need not be tried again."""
        self._transient_failures: Counter[Plan] = Counter()
        self._failed: set[Plan] = set()
        self._neutral = NeutralPlans(predictor.learning_faults)
        self._measured: tuple[Plan, ...] = ()
        """Plans that completed and may win."""
        self._exceeded: list[tuple[Plan, int]] = []
        self._overheads: list[float] = []
        """Seconds of completed trials beyond their steps, each taken to last as long as a timed one."""
        self._factors: Floats = np.ones(len(LAYER_COSTS) + 2)
        """`CalibratedPredictor.factors` when the space was last renewed."""
        self._renew_space()
        self._weights = _WEIGHTS if "memory" in settings.objectives else (0.0,)
        self._weight_shift = 0
        self._renew_solvers()
        self.pending: frozenset[Plan] = frozenset()
        """Plans whose trials are running; each is taken to come out as expected."""
        self._proposed: dict[frozenset[Plan], Proposal | None] = {}
        """Proposals since the last trial, by pending plans."""

    def _renew_solvers(self) -> None:
        """Solve with corrected costs, also for less memory where that is an objective."""
        shares = _SHARES if len(self._weights) > 1 else (1.0,)
        within = self._cautious
        limits = [replace(within, memory_limit_bytes=round(share * within.memory_limit_bytes)) for share in shares]
        solvers = [self.space.solver.within(self._predictor.corrected, each) for each in limits]
        self._solve: list[Solve] = [cache(solver.solutions) for solver in solvers]
        factor, least = self._predictor.epoch_factor, solvers[0].least_seconds
        self._least_seconds: Callable[[Packing, Layout], float] = lambda *packs: factor * least(*packs)

    @property
    def _least_chance(self) -> float:
        return _CHANCES[min(len(self._exceeded), len(_CHANCES) - 1)]

    @property
    def _cautious(self) -> Limits:
        """The limits, with as much memory left free as the least chance asks for."""
        margin = 1 + max(_NORMAL.inv_cdf(self._least_chance), 0.0) * self._predictor.byte_noise
        return replace(self._limits, usable_share=min(self._limits.usable_share, 1 / margin))

    def learn(self, trial: FinishedTrial, *, answers: bool = True) -> None:
        """Learn from a trial. Its plan is not proposed again, unless it failed transiently for the first time.

        Nor does a trial that `answers` nothing keep its plan from being proposed.
        """
        if is_conclusive(trial):
            self._predictor.learn(trial, self._settings)
        self.surrogate.learn(trial)
        self._renew_space()
        self._trials.append(trial)
        self._transient_failures[trial.plan] += not is_conclusive(trial)
        is_over = is_conclusive(trial) or self._transient_failures[trial.plan] >= MOST_TRANSIENT_FAILURES
        if answers and is_over:
            self.tried.add(trial.plan)
        completed = dict.fromkeys(each.plan for each in ranked(self._trials))
        self._failed = self.tried.difference(completed)
        self._measured = tuple(filter(self.may_win, completed))
        match trial.result.outcome:
            case Completed(measurement=measurement):
                steps = (self._settings.warmup_steps + len(measurement.steps)) * fmean(measurement.step_seconds)
                self._overheads.append(max(duration_seconds(trial) - steps, 0.0))
            case Failed(cause=OutOfMemory(stage=stage)) if is_conclusive(trial):
                self._exceeded.append((trial.plan, stage))
            case _:
                pass
        # The solvers and their caches belong to the corrected costs before this trial.
        self._renew_solvers()
        self._weight_shift = 0
        self._proposed.clear()

    def may_win(self, plan: Plan) -> bool:
        """Return whether a plan that completes may win; other baselines are only compared with the winner."""
        return self.space.allows(plan) and not self._predictor.learning_faults(plan)

    def next_weight(self) -> bool:
        """Switch to the next scalarization weight; return False when all were used since the last trial."""
        if self._weight_shift + 1 == len(self._weights):
            return False
        self._weight_shift += 1
        self._proposed.clear()
        return True

    def _renew_space(self) -> None:
        """Renew the space where trials show that the profile is wrong: other plans fit, or are good."""
        now = self._predictor.factors
        change = np.log(now) - np.log(self._factors)
        times, sizes = change[: len(LAYER_COSTS)], change[len(LAYER_COSTS) :]
        # A factor that all layers share favours no plan.
        if np.ptp(times) > _WRONG_TIMES or np.abs(sizes).max() > _WRONG_BYTES:
            self.space.renew(Solver(self._predictor.corrected, self._cautious))
            self._factors = now

    def best(self) -> Plan | None:
        """Return the measured plan with the fastest posterior mean; None before any measurement."""
        if not self._measured:
            return None
        return self._measured[int(np.argmin(self.surrogate.posterior(self._measured).mean))]

    def to_beat(self) -> float | None:
        """Return the epoch seconds of the best plan at the machine's present speed.

        None before any measurement, and where a slower plan may be better by another objective.
        """
        best = self.best() if set(self._settings.objectives) <= {"time"} else None
        if best is None:
            return None
        return self.surrogate.epoch_seconds((best,))[0] * self.surrogate.slowness

    def predicted(self, within: float, without: Collection[int] = ()) -> Iterator[Plan]:
        """Yield the plan predicted best for each pipeline degree, if within a factor `within` of the best; best first.

        Best is the plan with the greatest probability of fitting the memory, divided by its time. Degrees `without` are
        left out, but their starts count among the best.
        """
        climbs = _INFORMED_CLIMBS if self._predictor.is_inherited else 1
        climbed: dict[int, set[Packing]] = defaultdict(set)
        yielded, least, number = set[int](), math.inf, count()
        # Plans that were found on a climb; starts of climbs, and origins of starts, at the least that they may come to.
        # The number decides between equal costs: plans cannot be compared.
        waiting: list[tuple[float, int, float, Origin | Plan, bool]] = []
        for origin in self.space.origins:
            seconds = origin.bound(self._least_seconds) / _CLIMB_GAIN
            # Where memory counts as well, a bound of the time bounds no cost: then all origins are solved first.
            cost = math.log(seconds) if seconds and not self._exponent else -math.inf
            waiting.append((cost, next(number), seconds, origin, False))
        heapify(waiting)
        while waiting:
            _, _, seconds, at, is_found = heappop(waiting)
            degree = at.layout.pipeline
            if seconds > within * least or degree in yielded:
                continue
            may_climb = not climbed[degree] or sum(map(len, climbed.values())) < climbs
            if isinstance(at, Origin):
                starts = self.space.solved(at) if may_climb else []
                for start, takes, chance in zip(starts, self._seconds(starts), self._chances(starts), strict=True):
                    least = min(least, takes / max(chance, _LEAST_CHANCE))
                    cost = self._cost(start) - math.log(_CLIMB_GAIN)
                    heappush(waiting, (cost, next(number), takes / _CLIMB_GAIN, start, False))
            elif is_found:
                yielded.add(degree)
                yield at
            elif may_climb and at.packing not in climbed[degree]:
                climbed[degree].add(at.packing)
                seen = [each for each in self._climbed(at) if each not in self._failed] if degree not in without else []
                found = self._neutral.best(seen, self._chance_over_time(seen))
                if seen and not found:  # another start may lead elsewhere
                    climbed[degree].remove(at.packing)
                if found:
                    takes = self._seconds([found])[0]
                    least = min(least, takes)
                    cost = self._cost(found) - math.log(max(self._chances([found])[0], _LEAST_CHANCE))
                    heappush(waiting, (cost, next(number), takes, found, True))

    def _climbed(self, start: Plan) -> list[Plan]:
        """Return the plans that may fit, of those seen on a climb from `start` to ever better predicted neighbours."""
        found: dict[Plan, None] = {}
        top = start
        for _ in range(_CLIMBS):
            around = dict.fromkeys((top, *self._resolved(top), *self.space.neighbours(top)))
            self._predictor.plans_memory(around)  # kept, as the times in `_ordered` are
            fitting = [plan for plan in around if self.may_fit(plan) and self.space.holds(plan)]
            found |= dict.fromkeys(fitting)
            before, top = top, self._ordered(fitting)[0] if fitting else top
            if top == before:
                break
        return list(found)

    def _resolved(self, start: Plan) -> list[Plan]:
        solved = (plan for solve in self._solve for plan in solve(start.packing, start.layout, _SPLITS))
        return [*dict.fromkeys(map(self.space.pointed, solved))]

    def propose(self, also_pending: Iterable[Plan] = ()) -> Proposal | None:
        """Return the plan to try next; None when no candidate is left."""
        waiting = self.pending.union(also_pending)
        if waiting in self._proposed:
            return self._proposed[waiting]
        found: Proposal | None = None
        able = (*self._measured, *filter(self.may_win, waiting))
        for _ in range(_LOOKS):
            if found or not (candidates := [plan for plan in self._candidates() if plan not in waiting]):
                break
            if able:
                gains = self._gains(candidates, able, waiting) * self._chances(candidates)
                worth = gains / self.trial_seconds(candidates)
            else:
                gains, worth = np.full(len(candidates), math.inf), self._chance_over_time(candidates)
            if plan := self._neutral.best(candidates, worth):
                found = Proposal(plan=plan, gain=float(gains[candidates.index(plan)]))
        self._proposed[waiting] = found
        return found

    # --- where to look ---

    def _candidates(self) -> list[Plan]:
        """Return plans that were not tried and may fit, the one predicted best first."""
        starts = self._ordered([plan for plan in self.space.starts if not self._neutral.excludes(plan)])
        found = dict.fromkeys((*self._measured, *starts[: 2 * _COMPARED]))
        for start in self._leading(starts):
            found |= dict.fromkeys(self._resolved(start))
        best: dict[tuple[Packing, Layout], Plan] = {}
        for plan in self._ordered(tuple(found)):
            best.setdefault((plan.packing, plan.layout), plan)
        for plan in list(best.values())[:_AROUND]:
            found |= dict.fromkeys(self._climbed(plan))
        fresh = (plan for plan in found if plan not in self.tried and not self._neutral.excludes(plan))
        fitting = (plan for plan in fresh if self.may_fit(plan) and not self._is_no_faster(plan))
        pointed = (plan for plan in self._ordered(tuple(fitting)) if self.space.holds(plan))
        return list(islice(at_most_of_packs(pointed, _COMPARED_OF_PACKS), _COMPARED))

    def _is_no_faster(self, plan: Plan) -> bool:
        """Return whether a plan that ran does the same with less recomputation, where memory is no objective."""
        return len(self._weights) == 1 and any(recomputes_more(plan, other) for other in self._measured)

    def _leading(self, starts: Sequence[Plan]) -> Iterator[Plan]:
        """Yield the first plans, and the first ones of each layout."""
        of_layout: Counter[Layout] = Counter()
        for number, start in enumerate(starts):
            of_layout[start.layout] += 1
            # Where the profile of a layout is wrong, its splits are worse than others until they are solved anew.
            if number < _SOLVED or of_layout[start.layout] <= _SOLVED_OF_LAYOUT:
                yield start

    def _ordered(self, plans: Sequence[Plan]) -> list[Plan]:
        self._predictor.plans_epoch_seconds(plans)
        return sorted(plans, key=self._cost)

    def _cost(self, plan: Plan) -> float:
        """Return the logarithm of the predicted time plus the weighted memory."""
        return math.log(self._predictor.epoch_seconds(plan)) + self._weight_of(plan)

    def may_fit(self, plan: Plan) -> bool:
        """Return whether the plan may fit: by its prediction, and compared with plans that ran out of memory."""
        is_above = self._limits.first_above(self._predictor.memory(plan)) is not None
        if is_above or self._chances([plan])[0] < self._least_chance:
            return False
        return not any(asks_for_more(plan, failed, stage) for failed, stage in self._exceeded)

    # --- what it is worth ---

    def trial_seconds(self, candidates: Sequence[Plan]) -> Floats:
        """Return what a trial of each plan would take, warm-up and overhead included, [candidates]."""
        # An early end of the trial is not expected, so slow plans look a little dearer than they are.
        steps = self._settings.warmup_steps + self._settings.timed_steps
        overhead = median(self._overheads) if self._overheads else 0.0
        seconds: Floats = overhead + steps * self._predictor.steps_seconds(candidates)
        return seconds

    def _gains(self, candidates: Sequence[Plan], able: Sequence[Plan], waiting: Collection[Plan]) -> Floats:
        """Return the expected improvement (Jones, Schonlau, Welch 1998) on the able plans, a share, [candidates].

        Trials of the `waiting` plans are taken to come out as expected (Kriging believer, Ginsbourger et al. 2010).
        """
        plans = (*candidates, *able, *waiting)
        posterior = self.surrogate.posterior(plans).given(range(len(plans) - len(waiting), len(plans)))
        weights = np.array([self._weight_of(plan) for plan in (*candidates, *able)])
        best = len(candidates) + int(np.argmin((posterior.mean[: len(weights)] + weights)[len(candidates) :]))
        gains = []
        for number in range(len(candidates)):
            # The joint posterior counts: error that both plans share is no chance to improve.
            less, error = posterior.difference(best, number)
            less += float(weights[best] - weights[number])
            share = less / error if error > 0 else math.copysign(math.inf, less)
            gains.append(less * _NORMAL.cdf(share) + error * _NORMAL.pdf(share) if error > 0 else max(less, 0.0))
        return np.array(gains)

    def _weight_of(self, plan: Plan) -> float:
        """Return the weighted logarithm of the plan's memory, which adds to that of its time; 0 unless an objective.

        The weight changes from trial to trial, so that the trade-off is found (ParEGO, Knowles 2006).
        """
        exponent = self._exponent
        return exponent * math.log(max(stage.expected for stage in self._predictor.memory(plan))) if exponent else 0.0

    @property
    def _exponent(self) -> float:
        return self._weights[(len(self._trials) + self._weight_shift) % len(self._weights)]

    def _chance_over_time(self, candidates: Sequence[Plan]) -> Floats:
        """Return the objective while nothing was measured, [candidates]."""
        seconds = np.exp([self._cost(plan) for plan in candidates])
        ratio: Floats = self._chances(candidates) / seconds
        return ratio

    def _chances(self, candidates: Sequence[Plan]) -> Floats:
        """Return the probability that each plan fits the memory, [candidates]."""

        def chance(stage: StageBytes) -> float:
            room, width = self._limits.memory_limit_bytes - stage.expected, max(stage.high - stage.expected, 1.0)
            return _NORMAL.cdf(_INTERVAL * room / width)

        return np.array([math.prod(map(chance, self._predictor.memory(plan))) for plan in candidates])

    def _seconds(self, candidates: Sequence[Plan]) -> Floats:
        return np.array([self._predictor.epoch_seconds(plan) for plan in candidates])
