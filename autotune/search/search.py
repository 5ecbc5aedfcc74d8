"""One search: the plans predicted best, baselines, the sampler's proposals, and repeated runs of the finalists."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from autotune.errors import TrialsKeepFailing
from autotune.events import Event, Listener, Note, Phase, PhaseBegan, SearchStatus, TrialBegan, TrialEnded
from autotune.search.baselines import AS_FAST, BaselinePlan
from autotune.search.best_so_far import best_so_far
from autotune.search.budget import Budget
from autotune.search.execution.failures import give_up
from autotune.search.execution.ledger import Ledger, ran
from autotune.search.execution.runner import Runner
from autotune.search.executor import LOOK_SECONDS, Candidate, Executor
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import BASELINES, Role
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.proposals import Judgement, Proposals
from autotune.search.space.space import Space
from autotune.search.to_compare import NEIGHBOURS, ToCompare
from autotune.search.winner import FINALISTS, SMALL_LOSS, Roles, Standings, ranked, standings_of
from storage.records import FinishedTrial
from trials.job import SearchSection
from trials.outcome import Completed
from trials.plan import Plan
from trials.units import number_of

# A choice: the best plans of three pipeline degrees; more would spend a small budget before the sampler has begun.
_PREDICTED_PLANS = 3
# A choice: before the first trial, predictions of two pipeline degrees may err by as much against each other.
_NEARLY = 1.2
"""Largest ratio to the best predicted time with which plans of other pipeline degrees are tried first."""
# A choice: an eighth of the trials is the price of telling drift from slower plans.
_REFERENCE_EVERY = 8
"""Trials after which one plan is run again, to see the machine drift."""
OWN_SAMPLER = "model"
"""The one sampler that knows what a further trial may gain; others spend the whole budget."""
# A choice: a suggestion takes milliseconds, and samplers of Optuna repeat themselves where few points are left.
_IDLE_SUGGESTIONS = 50
"""Suggestions in a row that need no run, after which the sampler is taken to have nothing new."""
# A choice: 0.1 % of a day's training is less than the trial that finds it.
_LEAST_GAIN = 0.001
_GAIN_IN_NOISE = 0.1
"""An expected gain below this share of the error of one trial, or below _LEAST_GAIN, is not worth a trial."""


@dataclass(slots=True, kw_only=True)
class Search:
    """Search of one study, and confirmation of its finalists; plans that are answered already are not run again."""

    settings: SearchSection
    ledger: Ledger
    proposals: Proposals
    space: Space
    predictor: CalibratedPredictor
    advisor: Advisor
    runners: Sequence[Runner]
    """Each on devices of its own; one trial runs on each of them at a time."""
    listener: Listener
    baselines: Iterable[BaselinePlan]
    queued: Sequence[Plan] = ()
    """Those of the job, which are tried before all others."""
    inherited: Sequence[Plan] = ()
    """Winners of earlier searches on similar workloads."""
    baseline_wins: bool = True
    """Whether the fastest baseline wins where no plan of the space completed."""
    clock: Callable[[], float] = time.monotonic
    _budget: Budget = field(init=False)
    _executor: Executor = field(init=False)
    _to_compare: ToCompare = field(init=False)
    _left_out: dict[Role, Plan] = field(init=False, default_factory=dict)
    """Baselines for which there was no time."""
    _roles: dict[Plan, frozenset[str]] = field(init=False, default_factory=dict)
    """Roles of the baselines, including those that were tried in another role before."""

    def __post_init__(self) -> None:
        settings, may_win = self.settings, self.advisor.may_win
        self._budget = Budget(settings=settings, ledger=self.ledger, clock=self.clock, may_win=may_win)
        self._to_compare = ToCompare(ledger=self.ledger, advisor=self.advisor, predictor=self.predictor)
        self._executor = Executor(
            ledger=self.ledger,
            proposals=self.proposals,
            space=self.space,
            predictor=self.predictor,
            advisor=self.advisor,
            listener=self._announce,
        )

    @property
    def not_run(self) -> tuple[Role, ...]:
        """Kinds of baselines that had no time, and that no other agent or search ran."""
        return tuple(role for role, plan in self._left_out.items() if self.ledger.answer(plan) is None)

    def explore(self) -> None:
        """Run trials until the budget is spent or no further gain is expected, together with the study's other agents.

        The plans predicted best and those of earlier searches come first: a search that is ended early has them.

        Raise TrialsKeepFailing when several trials in a row fail of anything but memory and no plan could win.
        """
        for trial in self.ledger.everything():
            self.advisor.learn(trial, answers=self.ledger.answer(trial.plan) is not None)
        self._executor.synchronize()
        self._run(chain(self._seeds(), self._samples(), self._neighbours()), self.runners)

    def confirm(self) -> Standings:
        """Repeat the finalists in turns, so that drift of the machine affects all alike, and return the standings.

        The first round includes the baselines that there is time for, later ones only plans that may win; it ends when
        one is sure to win or the time is spent. Then the winner is measured over more steps. Only one agent of a study
        may do so; it waits for the last trials of the others.

        Raise NoFeasiblePlan when no plan completed, and TrialsKeepFailing.
        """
        self._executor.catch_up()
        if self.ledger.open:
            self._announce(PhaseBegan(phase=Phase.REPEATS, text="Waiting for the last trials of other agents"))
        while self.ledger.open:
            time.sleep(LOOK_SECONDS)
            self._executor.catch_up()
        standings = self._standings()
        if not standings.repeated:
            give_up("no plan of the search space completed", self.ledger.trials)
        if not standings.has_searched:
            count = number_of(len(standings.repeated), "baseline")
            self._announce(Note(text=f"No plan of search.space completed; the best plan is the fastest of {count}"))
        self._announce(PhaseBegan(phase=Phase.REPEATS, text="Repeating the finalists in turns"))
        # On one group of devices alone: another group may be faster, which would favour its plans.
        self._run(chain(self._repeats(), self._final()), self.runners[:1])
        return self._standings()

    def _run(self, candidates: Iterator[Candidate | None], runners: Sequence[Runner]) -> None:
        """Run the candidates; trials that keep failing end that, and the search too where no plan could win."""
        try:
            self._executor.run(candidates, runners)
        except TrialsKeepFailing as error:
            # Other agents, on whose machines trials may not fail, would have to end with this one.
            others = any(trial.agent_id != self.ledger.agent_id for trial in self.ledger.open)
            if others or not self._standings().repeated:
                raise
            self._announce(Note(text=f"The search ends early with what completed: {error}"))

    def _announce(self, event: Event) -> None:
        """Pass the event on; announce what a trial leaves of the budget, and the best plan after it."""
        self.listener(event)
        if isinstance(event, TrialBegan | TrialEnded):
            able = [each for each in ranked(self.ledger.everything()) if self.advisor.may_win(each.plan)]
            status = SearchStatus(
                spent=len(self._budget.spent),
                trials=self.settings.trials,
                seconds_left=self._budget.seconds_left,
                best=best_so_far(self.advisor.best(), able, self.all_roles(), self.advisor.surrogate),
            )
            self.listener(status)

    # --- plans that are tried first ---

    def _seeds(self) -> Iterator[Candidate]:
        for baseline in self.baselines:
            self._to_compare.plans[baseline.role].append(baseline.plan)
        yield from self._queue()
        for number, plan in enumerate(self._predicted()):
            if not number and all(trial.role == Role.QUEUED for trial in self.ledger.trials):
                self._announce_costs(plan)
            if self._affords_seed():
                yield from self._seed(plan, Role.PREDICTED)
        for plan in self.inherited:
            completed = [trial.plan for trial in ranked(self.ledger.trials)]
            least = min(self.predictor.plans_epoch_seconds(completed), default=math.inf)
            if self.predictor.epoch_seconds(plan) <= AS_FAST * least and self._affords_seed():
                yield from self._seed(plan, Role.INHERITED)
        yield from self._compared()

    def _queue(self) -> Iterator[Candidate]:
        """Yield the queued plans, and say which of them the budget leaves out."""
        left_out = []
        for plan in self.queued:
            if self.ledger.answer(plan) or self._affords_seed():
                yield from self._seed(plan, Role.QUEUED)
            else:
                left_out.append(plan.id)
        if left_out:
            text = f"Of search.queue, the budget leaves out {', '.join(left_out)}; raise search.trials or its limits"
            self._announce(Note(text=text))

    def _compared(self) -> Iterator[Candidate]:
        """Yield the first plan of each kind of baseline: needed kinds always, other kinds while there is time.

        Where it is short, the kinds that are predicted slowest are left out: gains over those say least.
        """
        needed, left_out = self._to_compare.needed(), self._left_out
        firsts = {role: plans.pop(0) for role, plans in self._to_compare.plans.items()}

        def rank(role: Role) -> tuple[bool, float]:
            return self.predictor.learning_faults(firsts[role]) != (), self.predictor.epoch_seconds(firsts[role])

        # Those that can only be compared come last: a search that ends early has one that may win.
        waiting = sorted(firsts, key=lambda role: rank(role)[0])
        while waiting:
            role = waiting.pop(0)
            plan, faster = firsts[role], sum(rank(other)[1] < rank(role)[1] for other in waiting)
            if role in needed or self.ledger.answer(plan) or self._budget.has_time(1 + faster):
                yield from self._seed(plan, role)
                yield from self._faster(plan, role)
            else:
                left_out[role] = plan
        for role in sorted(left_out, key=rank):
            # Where all needed baselines were rejected, the search would end without a plan.
            has_none = not self.ledger.open and not any(map(ran, self.ledger.everything()))
            if has_none or self._budget.has_time(1):
                yield from self._seed(left_out.pop(role), role)

    def _faster(self, plan: Plan, role: Role) -> Iterator[Candidate]:
        """Yield a further plan of a kind of baseline, if it is predicted to be faster than this one was."""
        known, other = self.ledger.answer(plan), self._to_compare.further(role)
        measured = known.result.epoch_seconds if known else None
        if measured and other and AS_FAST * self.predictor.epoch_seconds(other) < measured and self._affords_seed():
            yield from self._compare(other, role)

    def _announce_costs(self, plan: Plan) -> None:
        """Say what the search will cost at least, by the predicted times: starts of ranks come on top."""
        needed, plans = self._to_compare.needed(), {role: each[0] for role, each in self._to_compare.plans.items()}
        seconds, *of_baselines = self.advisor.trial_seconds([plan, *plans.values()])
        of_role = dict(zip(plans, of_baselines, strict=True))
        waiting = {role: of_role[role] for role, each in plans.items() if self.ledger.answer(each) is None}
        always = sum(of_role[role] * (1 + (role in waiting)) for role in needed)  # with a repeat if it may win
        text = self._budget.costs_text(seconds, [*waiting.values()], always, len(self.runners), plan.layout.world_size)
        self._announce(Note(text=text))

    def _affords_seed(self) -> bool:
        """Return whether the budget allows a trial besides one for each kind of baseline that has none."""
        tried = {trial.role for trial in (*self.ledger.everything(), *self.ledger.open)}
        return self._budget.allows_trial(reserved=len(self._to_compare.plans.keys() - tried))

    def _predicted(self) -> Iterator[Plan]:
        """Yield the plans predicted fastest, each of another pipeline degree unless the one before could not run.

        Each is predicted after the trial of the one before it.
        """
        degrees: set[int] = set()
        for _ in range(_PREDICTED_PLANS):
            plan = next(self.advisor.predicted(_NEARLY, degrees), None)
            if plan is None:
                return
            yield plan
            known = self.ledger.answer(plan)
            if known is None or isinstance(known.result.outcome, Completed):
                degrees.add(plan.layout.pipeline)

    def _neighbours(self) -> Iterator[Candidate]:
        """Yield further plans of the kinds of baselines that have some."""
        for role, plans in self._to_compare.plans.items():
            for _ in range(min(NEIGHBOURS, len(plans))):
                if (plan := self._to_compare.further(role)) and self._left_to_compare() and self._budget.allows_trial():
                    yield from self._compare(plan, role)

    def _compare(self, plan: Plan, role: Role) -> Iterator[Candidate]:
        self._to_compare.plans[role].remove(plan)
        yield from self._seed(plan, role)

    def _seed(self, plan: Plan, role: Role) -> Iterator[Candidate]:
        known = self.ledger.answer(plan)
        if role in BASELINES:
            self._roles[plan] = self._roles.get(plan, frozenset()) | {role}
        if known is None:
            yield Candidate(plan=plan, role=role)
        elif known.study_id not in {trial.study_id for trial in self.ledger.trials}:
            self._announce(TrialEnded(trial=known, is_known=True))

    def _left_to_compare(self) -> int:
        """Count the trials kept for further plans of the baselines."""
        return self._to_compare.kept(self._budget.spent, self.settings.trials)

    # --- the sampler's proposals ---

    def _samples(self) -> Iterator[Candidate | None]:
        idle = 0
        while idle < _IDLE_SUGGESTIONS:
            if not self._is_promising():
                if not self.ledger.open:
                    self._announce(Note(text=self._stop_reason()))
                    return
                yield None  # what still runs may change that, and must be over before the finalists are repeated
                continue
            suggestion = self.proposals.suggest(self.ledger.agent_id)
            plan = self.space.plan(suggestion.params)
            known = self.ledger.answer(plan)
            if known or plan in {trial.plan for trial in self.ledger.open}:
                self.proposals.tell(suggestion, None, self._executor.judge(known) if known else Judgement.nothing())
                idle += 1
                if known is None:
                    yield None
                continue
            # A plan that is rejected before it runs is as idle as one that is known.
            idle = 0 if self.runners[0].rejection(plan) is None else idle + 1
            yield Candidate(plan=plan, role=Role.SAMPLED, suggestion=suggestion)
            if self._budget.allows_trial():
                yield from self._reference()
        self._announce(Note(text=f"The last {idle} suggestions of the sampler need no run, so the search ends"))

    def _is_promising(self) -> bool:
        """Return whether one more trial is affordable, may fit, and, where the sampler knows, is worth it."""
        if not self._budget.allows_trial(reserved=self._left_to_compare()) or self.space.is_empty:
            return False
        if self.settings.sampler != OWN_SAMPLER:
            return True
        self.advisor.pending = frozenset(trial.plan for trial in self.ledger.open)
        least = max(_LEAST_GAIN, _GAIN_IN_NOISE * self.advisor.surrogate.noise)
        while (proposal := self.advisor.propose()) is None or proposal.gain <= least:
            if not self.advisor.next_weight():
                return False
        return True

    def _stop_reason(self) -> str:
        """Return why no further plan is sampled, in words."""
        if not_run := self.not_run:
            return f"Too little is left of search.time_limit or search.device_hours; not run: {', '.join(not_run)}"
        reserved = self._left_to_compare()
        if reason := self._budget.why_none(reserved):
            return reason
        proposal, noise = self.advisor.propose(), self.advisor.surrogate.noise
        if proposal is None:
            return "Every promising plan has been tried"
        return (
            f"Another trial is expected to gain {proposal.gain:.2%}, which is too little given the {noise:.1%} error "
            f"of a trial; {self._budget.left(reserved)} of {self.settings.trials} trials are not needed"
        )

    # --- repeats ---

    def _reference(self) -> Iterator[Candidate]:
        """Yield the reference plan again, once enough trials have passed since its last run."""
        again = [number for number, trial in enumerate(self.ledger.trials) if trial.role == Role.REFERENCE]
        since = self.ledger.trials[again[-1] + 1 if again else 0 :]
        reference = self.ledger.trials[again[0]].plan if again else self.advisor.best()
        is_running = any(trial.role == Role.REFERENCE for trial in self.ledger.open)
        if reference is not None and sum(map(ran, since)) >= _REFERENCE_EVERY and not is_running:
            yield Candidate(plan=reference, role=Role.REFERENCE)

    def _repeats(self) -> Iterator[Candidate]:
        for number in range(self.settings.confirm_rounds):
            if self._is_settled() or (number and not self._budget.has_time(FINALISTS)):
                return
            now = self._standings()
            contenders = now.contenders(FINALISTS)
            for plan in contenders if number else now.finalists(FINALISTS):
                # An interrupted run of the study may have repeated it already.
                is_missing = len(self._confirmed(plan)) <= number
                # A baseline that is too slow to win is repeated for the error of the gain alone.
                if is_missing and (plan in contenders or self._budget.allows_repeat(plan)):
                    yield Candidate(plan=plan, role=Role.CONFIRM)

    def _is_settled(self) -> bool:
        """Return whether the winner is sure, and it and each kind of baseline were repeated."""
        now = self._standings()
        if not now.repeated:
            return True
        winner = now.winner()
        compared = (number for role in BASELINES if (number := now.baseline(role)) is not None)
        repeated = all(self._confirmed(now.entries[number].plan) for number in (winner.number, *compared))
        return repeated and winner.loss <= SMALL_LOSS

    def _confirmed(self, plan: Plan) -> list[FinishedTrial]:
        """Return the repeats of a finalist that count."""
        repeats = (trial for trial in ranked(self.ledger.trials) if trial.plan == plan)
        return [trial for trial in repeats if trial.role == Role.CONFIRM and not trial.result.is_disturbed]

    def _final(self) -> Iterator[Candidate]:
        """Yield the winner over more steps: a few similar steps do not give the speed of a whole training."""
        done = {trial.plan for trial in ranked(self.ledger.trials) if trial.role == Role.FINAL}
        for _ in range(FINALISTS):  # the longer measurement may make another plan the winner
            now = self._standings()
            if not now.repeated:
                return
            winner = now.entries[now.winner().number]
            if done and winner.plan not in done:
                self._announce(Note(text=f"After that, plan {winner.plan.id} is the fastest"))
            epoch_steps = len(self.predictor.predict(winner.plan).step_seconds)
            seconds = self._budget.seconds_for_final(winner.plan.layout.world_size)
            affordable = int(seconds / winner.epoch_seconds * epoch_steps) - self.settings.warmup_steps
            steps = min(self.settings.final_steps, affordable, epoch_steps)
            if winner.plan in done or steps <= self.settings.timed_steps:
                return
            done.add(winner.plan)
            self._announce(PhaseBegan(phase=Phase.REPEATS, text="Measuring the winner over more steps"))
            yield Candidate(plan=winner.plan, role=Role.FINAL, timed_steps=steps)

    def _standings(self) -> Standings:
        trials, roles, faults = self.ledger.everything(), self.all_roles(), self.predictor.learning_faults
        found = standings_of(trials, self.advisor.surrogate, roles, self.space.allows, lambda plan: not faults(plan))
        return replace(found, baseline_wins=self.baseline_wins)

    def all_roles(self) -> Roles:
        roles = dict(self._roles)
        for trial in self.ledger.trials:  # of this study alone: another search had another current plan
            roles[trial.plan] = roles.get(trial.plan, frozenset()) | {trial.role}
        return roles
