"""The explanation of a search's winner, from its trials and the predictions that they corrected."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from autotune.search.explanation.changes import Changes
from autotune.search.explanation.measured_time import MeasuredTime, usable
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.roles import BASELINES
from autotune.search.solver.limits import Limits
from autotune.search.winner import Roles, Standings, Winner, ranked
from storage.explanation import BEST, Explanation, FailedBaseline, PlanTime
from storage.records import FinishedTrial
from trials.outcome import Completed, Failed, Measurement, Rejected
from trials.plan import Plan

# A choice: each explanation simulates several plans, and people compare two or three.
_MOST_TIES = 3
"""Ties whose time is explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explainer:
    """Explainer of the winner of a study."""

    predictor: CalibratedPredictor
    surrogate: Surrogate
    limits: Limits
    trials: Sequence[FinishedTrial]
    """All trials that the search knows, also those of other studies."""
    study_id: str
    samples: int
    """Samples of an epoch."""
    not_run: tuple[str, ...] = ()
    """Roles of the baselines that the limits of the search left out."""
    roles: Roles = field(default_factory=dict)
    """Roles in which this study tried plans; baselines have theirs where an earlier search ran them."""
    missing: Callable[[Plan], str | None] = lambda _: None
    """Returns why the trainer of the search cannot hold a plan."""

    def explain(self, standings: Standings, winner: Winner) -> Explanation | None:
        """Return why the winner won; None if no run of it measured steps of this epoch."""
        best = standings.entries[winner.number].plan
        found = [(plan, self._time(standings, plan, role)) for plan, role in self._plans(standings, winner)]
        times = {time.role: (plan, time) for plan, time in found if time is not None}
        if BEST not in times:
            return None

        # As for the gain that is stated first; only the ranks are used here.
        ranks = {each.role: each.rank_of_choice for each in standings.compare(winner.number, 1, self.missing)}

        def preference(role: str) -> tuple[tuple[bool, ...], bool, float]:
            plan, time = times[role]
            changes_learning = self.predictor.learning_faults(plan) != ()
            unranked = self.missing(plan) is not None, changes_learning, changes_learning, False
            # A trial that ended early was clearly slower than others, so complete ones come first.
            return ranks.get(role, unranked), time.shortened, time.epoch_seconds

        usual = min((str(role) for role in BASELINES if role in times), key=preference, default=None)
        if usual in ranks and min(ranks.values()) < ranks[usual]:
            usual = None  # an earlier search measured a better choice
        measured = [entry.plan for entry in standings.entries]
        changes = Changes(self.predictor, self.surrogate, self.limits, self.trials, measured)
        return Explanation(
            plans=tuple(time for _, time in times.values()),
            usual=usual,
            changes=changes.towards(best, *times[usual]) if usual and times[usual][0] != best else (),
            further=changes.without_recompute(*times[BEST]),
            ways=changes.ways_to_fit(*times[BEST]),
            not_run=self.not_run,
            failed=tuple(self._failed({*times, *self.not_run}, standings)),
            tied=standings.compare_ties(winner, self.samples),
            certainty=winner.certainty,
        )

    def _failed(self, others: Container[str], standings: Standings) -> Iterator[FailedBaseline]:
        """Yield the kinds of baselines besides `others` without a result, with the reason of the last trial of one."""
        for role in BASELINES:
            of_role = (trial for trial in self.trials if role in self.roles.get(trial.plan, ()))
            match [trial.result.outcome for trial in of_role]:
                case _ if role in others or standings.baseline(role) is not None:
                    pass
                case [*_, Failed(cause=cause)]:
                    yield FailedBaseline(role=str(role), reason=str(cause))
                case [*_, Rejected(reason=reason)]:
                    yield FailedBaseline(role=str(role), reason=reason)

    def _plans(self, standings: Standings, winner: Winner) -> Iterator[tuple[Plan, str]]:
        """Yield (plan, role) of the winner, of one plan of each kind of baseline, and of ties."""
        yield standings.entries[winner.number].plan, BEST
        for role in BASELINES:
            number = standings.baseline(role)
            plan = self._unranked(role) if number is None else standings.entries[number].plan
            if plan is not None:
                yield plan, str(role)
        for number in winner.ties[:_MOST_TIES]:
            yield standings.entries[number].plan, f"tie {standings.entries[number].plan.id}"

    def _unranked(self, role: str) -> Plan | None:
        """Return the first plan of a kind of baseline that was measured without a rank."""
        # A baseline that was clearly slower ended early and has no rank, but its steps were measured.
        completed = (trial for trial in self._own if isinstance(trial.result.outcome, Completed))
        return next((trial.plan for trial in completed if trial.role == role), None)

    def _time(self, standings: Standings, plan: Plan, role: str) -> PlanTime | None:
        runs = [(trial, run) for trial, run in self._runs(plan) if usable(run.measurement, plan, self.predictor)]
        if not runs:
            return None
        measured = [run.measurement for _, run in runs]
        of_runs = fmean(trial.result.epoch_seconds or 0.0 for trial, _ in runs)
        entry = next((entry for entry in standings.entries if entry.plan == plan), None)
        seconds = of_runs if entry is None else entry.epoch_seconds
        own_error = fmean(trial.result.epoch_seconds_error or 0.0 for trial, _ in runs)
        error = own_error if entry is None else entry.epoch_seconds_error
        time = MeasuredTime(
            self.predictor,
            plan,
            measured,
            epoch_seconds=seconds,
            epoch_seconds_error=error,
            run_seconds=of_runs,
        )
        return PlanTime(
            plan=plan,
            role=role,
            epoch_seconds=seconds,
            epoch_seconds_error=error,
            steps=time.steps,
            parts=time.parts,
            stage_peak_bytes=_peaks(measured, plan.layout.pipeline),
            runs=len(runs),
            disturbed=all(trial.result.is_disturbed for trial, _ in runs),
            shortened=all(run.shortened for _, run in runs),
        )

    def _runs(self, plan: Plan) -> list[tuple[FinishedTrial, Completed]]:
        """Return the study's runs that rank the plan; runs that ended early only where it has no complete one."""
        of_plan = [trial for trial in self._own if trial.plan == plan]
        found = [(trial, trial.result.outcome) for trial in ranked(of_plan) or of_plan]
        return [(trial, outcome) for trial, outcome in found if isinstance(outcome, Completed)]

    @property
    def _own(self) -> Sequence[FinishedTrial]:
        """The trials of the study: with the seed of another one, a step of the same number has other packs."""
        return [trial for trial in self.trials if trial.study_id == self.study_id]


def _peaks(runs: Sequence[Measurement], stages: int) -> tuple[int, ...]:
    ranks = [rank for run in runs for rank in run.stages]
    return tuple(max(rank.peak_bytes for rank in ranks if rank.stage == stage) for stage in range(stages))
