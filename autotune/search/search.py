"""One search: baselines, the plans predicted best, the sampler's proposals, and repeated runs of the finalists."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

import optuna

from autotune.search.baselines import Baseline
from autotune.search.execution.attempt import Attempt
from autotune.search.execution.failures import give_up, stop_if_all_fail
from autotune.search.execution.ledger import (
    AGAIN,
    BASELINES,
    CONFIRM,
    INHERITED,
    PREDICTED,
    REFERENCE,
    SAMPLED,
    Ledger,
    Listener,
    busy_seconds,
    duration_seconds,
    ran,
)
from autotune.search.execution.runner import Runner
from autotune.search.execution.slots import Lanes
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.proposals import Judgement, Proposals, judge
from autotune.search.space.space import Space
from autotune.search.winner import FINALISTS, SMALL_LOSS, Field, field_of, ranked
from storage.records import FinishedTrial, RunningTrial, TrialRecord, TrialResult
from trials.job import SearchSection
from trials.outcome import Completed, Rejected
from trials.plan import Plan

_log = logging.getLogger(__name__)
_PREDICTED_PLANS = 3
_NEARLY = 1.2
"""Plans of other pipeline degrees are tried first when they take at most so many times the best one's time."""
_AS_FAST = 1.03
"""The winner of an earlier search is tried when it is predicted to take at most so many times the best one's time."""
_NEIGHBOURS = 2
"""Further plans of a kind of baseline that are tried, those predicted fastest."""
_REFERENCE_EVERY = 8
"""Trials after which one plan is run again, to see the machine drift."""
OWN_SAMPLER = "model"
"""Others do not know what a further trial may gain, and spend the budget."""
_IDLE_SUGGESTIONS = 50
"""After so many suggestions in a row that need no run, the sampler has nothing new to say."""
_LOOK_SECONDS = 0.5
"""Between looks at what other agents did, while there is nothing else to do."""
_LEAST_GAIN = 0.001
_GAIN_IN_NOISE = 0.1
"""An expected gain below this share of the error of one trial, or below _LEAST_GAIN, is not worth a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A trial to run."""

    plan: Plan
    role: str
    suggestion: optuna.Trial | None = None
    """That the plan comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A trial that runs."""

    trial: RunningTrial
    suggestion: optuna.Trial | None


@dataclass(slots=True, kw_only=True)
class Search:
    """Works through one study; what is answered already is not run again."""

    settings: SearchSection
    ledger: Ledger
    proposals: Proposals
    space: Space
    predictor: CalibratedPredictor
    advisor: Advisor
    runners: Sequence[Runner]
    """Each on devices of its own: so many trials run at the same time."""
    listener: Listener
    tell: Callable[[str], None] = _log.info
    """Told why no further plan is tried."""
    clock: Callable[[], float] = time.monotonic
    _to_compare: dict[str, list[Plan]] = field(init=False, default_factory=dict)
    """Baselines that were not tried yet."""
    _baselines: dict[Plan, frozenset[str]] = field(init=False, default_factory=dict)
    """Their roles, also of those that were tried for another reason before."""
    _deadline: float = field(init=False)
    """On the clock; what the study's trials took in earlier runs is spent."""

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.settings.time_limit - busy_seconds(self.ledger.trials)

    def explore(self, baselines: Iterable[Baseline], inherited: Sequence[Plan] = ()) -> None:
        """Spends the budget, or less when no gain is left, together with the other agents of the study.

        The plans predicted best and those of earlier searches come first: a search that is ended early has them.

        Raises TrialsKeepFailing when several trials in a row fail of anything but memory.
        """
        for trial in self.ledger.everything():
            self.advisor.learn(trial)
        self._synchronize()
        with Lanes[_Running, TrialResult](self.runners) as lanes:
            self._work(chain(self._seeds(baselines, inherited), self._samples(), self._neighbours()), lanes)

    def confirm(self) -> Field:
        """Repeats the finalists in turns, so that a drift of the machine meets them all alike; all plans as they stand.

        Once with the baselines, and then those that may win, until one is sure or the time is spent. For one agent, on
        one and the same devices, when all others are done.

        Raises NoFeasiblePlan when no plan completed, and TrialsKeepFailing.
        """
        self._catch_up()
        while self.ledger.open:  # another agent finishes its last trial
            time.sleep(_LOOK_SECONDS)
            self._catch_up()
        if not self._field().repeated:
            give_up("no plan of the search space completed", self.ledger.trials)
        with Lanes[_Running, TrialResult](self.runners[:1]) as lanes:
            self._work(self._repeats(), lanes)
        return self._field()

    # --- the budget ---

    def _left_to_compare(self) -> int:
        """Trials for further plans of the baselines: all baselines together take about a quarter."""
        compared = sum(trial.role in BASELINES for trial in self._spent())
        most = 0
        for plans in self._to_compare.values():
            untried = sum(self.ledger.answer(plan) is None for plan in plans)
            most += min(untried, max(_NEIGHBOURS - (len(plans) - untried), 0))
        return min(most, max(self.settings.trials // 4 + 1 - compared, 0))

    def _roles(self) -> set[str]:
        return {trial.role for trial in (*self.ledger.everything(), *self.ledger.open)}

    def _spent(self) -> list[TrialRecord]:
        """The trials that count against the budget, those that run among them."""
        trials = (*filter(ran, self.ledger.trials), *self.ledger.open)
        return [trial for trial in trials if trial.role != CONFIRM]

    def _may_go_on(self, owed: int = 0) -> bool:
        """Whether a trial is left beside those owed, and time for it and for the confirmation."""
        is_left = len(self._spent()) + owed < self.settings.trials and not self.ledger.is_closing
        return is_left and self._has_time(1 + FINALISTS + len(BASELINES))

    def _has_time(self, runs: int) -> bool:
        """For so many more, by the clock and by the hours of the devices, where also what runs now is owed."""
        counted = [trial for trial in self.ledger.trials if trial.role != CONFIRM]
        completed = [trial for trial in counted if isinstance(trial.result.outcome, Completed)]
        mean = fmean(map(duration_seconds, completed)) if completed else 0.0
        of_devices = fmean(map(_device_seconds, completed)) if completed else 0.0
        spent = sum(map(_device_seconds, self.ledger.trials)) + of_devices * (runs + len(self.ledger.open))
        hours = math.inf if self.settings.device_hours is None else self.settings.device_hours
        return self.clock() + mean * runs < self._deadline and spent < 3600 * hours

    def _is_worth(self, gain: float) -> bool:
        return gain > max(_LEAST_GAIN, _GAIN_IN_NOISE * self.advisor.surrogate.noise)

    # --- what is tried ---

    def _seeds(self, baselines: Iterable[Baseline], inherited: Sequence[Plan]) -> Iterator[_Wanted]:
        to_compare = self._to_compare
        for baseline in baselines:
            to_compare.setdefault(baseline.role, []).append(baseline.plan)
        for role, plans in ((PREDICTED, self._predicted()), (INHERITED, self._inherited(inherited))):
            for plan in plans:
                if self._may_go_on(owed=len(to_compare.keys() - self._roles())):
                    yield from self._seed(plan, role)
        for role, plans_of_role in to_compare.items():  # always, whatever the budget is
            yield from self._seed(plans_of_role.pop(0), role)

    def _neighbours(self) -> Iterator[_Wanted]:
        """Further plans of the kinds of baselines that have some."""
        for role, plans in self._to_compare.items():
            for _ in range(min(_NEIGHBOURS, len(plans))):
                fitting = filter(self.advisor.may_fit, plans)
                fastest = min(fitting, key=self.predictor.epoch_seconds, default=None)
                if fastest and self._left_to_compare() and self._may_go_on():
                    plans.remove(fastest)
                    yield from self._seed(fastest, role)

    def _predicted(self) -> Iterator[Plan]:
        """Each after what the one before it taught, and of another pipeline degree, unless that one could not run."""
        degrees: set[int] = set()
        for _ in range(_PREDICTED_PLANS):
            found = (plan for plan in self.advisor.predicted(_NEARLY) if plan.layout.pipeline not in degrees)
            plan = next(found, None)
            if plan is None:
                return
            yield plan
            known = self.ledger.answer(plan)
            if known is None or isinstance(known.result.outcome, Completed):
                degrees.add(plan.layout.pipeline)

    def _inherited(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Those that are predicted to be nearly as fast as the best of what was tried."""
        for plan in plans:
            tried = min((self.predictor.epoch_seconds(trial.plan) for trial in self.ledger.trials), default=math.inf)
            if self.predictor.epoch_seconds(plan) <= _AS_FAST * tried:
                yield plan

    def _seed(self, plan: Plan, role: str) -> Iterator[_Wanted]:
        known = self.ledger.answer(plan)
        if role in BASELINES:
            self._baselines[plan] = self._baselines.get(plan, frozenset()) | {role}
        if known is None:
            yield _Wanted(plan=plan, role=role)
        elif known.study_id not in {trial.study_id for trial in self.ledger.trials}:
            self.listener(known, True)

    def _samples(self) -> Iterator[_Wanted | None]:
        idle = 0
        while idle < _IDLE_SUGGESTIONS:
            if not self._is_promising():
                if not self.ledger.open:
                    self.tell(self._why_enough())
                    return
                yield None  # what still runs may change that, and must be over before the finalists are repeated
                continue
            suggestion = self.proposals.suggest(self.ledger.agent_id)
            plan = self.space.plan(suggestion.params)
            known = self.ledger.answer(plan)
            if known is not None:
                self.proposals.tell(suggestion, known.id, SAMPLED, self._judge(known))
                idle += 1
                continue
            if plan in {trial.plan for trial in self.ledger.open}:
                self.proposals.tell(suggestion, None, SAMPLED, Judgement.nothing())
                idle += 1
                yield None
                continue
            idle = 0 if self._rejection(plan) is None else idle + 1
            yield _Wanted(plan=plan, role=SAMPLED, suggestion=suggestion)
            if self._may_go_on():
                yield from self._reference()

    def _is_promising(self) -> bool:
        """Whether one more trial is affordable and, where the sampler knows, worth it."""
        if not self._may_go_on(owed=self._left_to_compare()):
            return False
        if self.settings.sampler != OWN_SAMPLER:
            return True
        self.advisor.pending = frozenset(trial.plan for trial in self.ledger.open)
        while True:
            proposal = self.advisor.propose()
            if proposal is not None and self._is_worth(proposal.gain):
                return True
            if not self.advisor.turn():
                return False

    def _why_enough(self) -> str:
        """No further plan is sampled, in words."""
        left = self.settings.trials - len(self._spent()) - self._left_to_compare()
        if self.ledger.is_closing:
            return "Another agent is repeating the finalists"
        if left <= 0:
            return f"The {self.settings.trials} trials of search.trials are used up"
        if not self._may_go_on(owed=self._left_to_compare()):
            return "The remaining time or device hours are reserved for repeating the finalists"
        proposal, noise = self.advisor.propose(), self.advisor.surrogate.noise
        if proposal is None:
            return "Every promising plan has been tried"
        return (
            f"A further plan is expected to gain {proposal.gain:.2%}, too little beside the {noise:.1%} by which a "
            f"trial errs: {left} trials are left over"
        )

    def _reference(self) -> Iterator[_Wanted]:
        """The same plan again after some trials."""
        again = [number for number, trial in enumerate(self.ledger.trials) if trial.role == REFERENCE]
        since = self.ledger.trials[again[-1] + 1 if again else 0 :]
        reference = self.ledger.trials[again[0]].plan if again else self.advisor.best()
        is_running = any(trial.role == REFERENCE for trial in self.ledger.open)
        if reference is not None and sum(map(ran, since)) >= _REFERENCE_EVERY and not is_running:
            yield _Wanted(plan=reference, role=REFERENCE)

    def _repeats(self) -> Iterator[_Wanted]:
        for number in range(self.settings.confirm_rounds):
            now = self._field()
            for plan in now.contenders(FINALISTS) if number else now.finalists(FINALISTS):
                if self._confirmations(plan) <= number:
                    yield _Wanted(plan=plan, role=CONFIRM)
            now = self._field()
            is_sure = not now.repeated or now.verdict().loss <= SMALL_LOSS
            if is_sure or not self._has_time(FINALISTS):
                return

    def _confirmations(self, plan: Plan) -> int:
        """Those that rank the plan."""
        return sum(
            trial.role == CONFIRM and trial.plan == plan and trial.result.contamination is None
            for trial in ranked(self.ledger.trials)
        )

    def _field(self) -> Field:
        roles = dict(self._baselines)
        for trial in self.ledger.trials:  # another search's present plan is none of this one
            roles[trial.plan] = roles.get(trial.plan, frozenset()) | {trial.role}
        return field_of(self.ledger.everything(), self.advisor.surrogate, roles, self.space.allows)

    # --- trials ---

    def _synchronize(self) -> None:
        """Optuna's study with what agents left behind that are gone."""
        trials = [trial for trial in self.ledger.left() if trial.role not in AGAIN]
        with self.ledger.exclusive():
            self.proposals.synchronize(trials, self._judge, self.ledger.is_left)

    def _work(self, wanted: Iterator[_Wanted | None], lanes: Lanes[_Running, TrialResult]) -> None:
        """Asks for a next trial whenever devices are free; where there is none yet, waits until one has ended."""
        for want in wanted:
            if want is not None:
                self._start(want, lanes)
            elif not lanes.are_busy:
                time.sleep(_LOOK_SECONDS)  # others run trials of this study
            self._collect(lanes, wait_for_one=want is None or lanes.are_full)
            self._catch_up()
        while lanes.are_busy:
            self._collect(lanes, wait_for_one=True)

    def _start(self, want: _Wanted, lanes: Lanes[_Running, TrialResult]) -> None:
        trial = self.ledger.begin(want.plan, want.role, self.space.point(want.plan) or {})
        if trial is None:  # another agent was faster
            if want.suggestion:
                self.proposals.tell(want.suggestion, None, SAMPLED, Judgement.nothing())
            return
        run = _Running(trial=trial, suggestion=want.suggestion)
        if rejection := self._rejection(want.plan):
            self._keep(run, self.ledger.put(trial, Attempt(outcome=rejection)))
            return
        steps = self.proposals.steps(want.suggestion, self.advisor.to_beat()) if want.suggestion else None

        def measure(runner: Runner, on_wait: Callable[[], None]) -> TrialResult:
            return self.ledger.put(trial, runner.run(want.plan, steps, on_wait))

        lanes.start(run, measure)

    def _collect(self, lanes: Lanes[_Running, TrialResult], *, wait_for_one: bool) -> None:
        for run, result in lanes.done(wait_for_one=wait_for_one):
            self._keep(run, result)

    def _keep(self, run: _Running, result: TrialResult) -> None:
        trial = self.ledger.finish(run.trial, result)
        self.advisor.learn(trial)
        self.listener(trial, False)
        if run.suggestion:
            self.proposals.tell(run.suggestion, trial.id, trial.role, self._judge(trial))
        elif trial.role not in AGAIN:
            self.proposals.add(trial, self._judge(trial))
        self._stop_if_all_fail()

    def _catch_up(self) -> None:
        """With the other agents of the study."""
        news, gone = self.ledger.catch_up()
        for trial in news:
            self.advisor.learn(trial)
            self.listener(trial, True)
        if gone:  # or Optuna would take their plans for running for ever
            self._synchronize()

    def _rejection(self, plan: Plan) -> Rejected | None:
        return self.runners[0].rejection(plan)

    def _stop_if_all_fail(self) -> None:
        """Raises NoFeasiblePlan or TrialsKeepFailing: what fails here may work on another agent's machine."""
        ours = [trial for trial in self.ledger.trials if trial.agent_id == self.ledger.agent_id and ran(trial)]
        stop_if_all_fail(ours, found_any=bool(ranked(self.ledger.everything())))

    def _judge(self, trial: FinishedTrial) -> Judgement:
        return judge(trial.result.outcome, trial.result.epoch_seconds, self.predictor.epoch_seconds(trial.plan))


def _device_seconds(trial: FinishedTrial) -> float:
    """Of all devices that it ran on."""
    return trial.plan.layout.world_size * duration_seconds(trial)
