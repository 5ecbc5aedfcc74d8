"""What the database holds of one study, for its report."""

import logging
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.errors import NoProfile
from autotune.forecast.profile_file import ProfiledCosts, stored_costs
from autotune.prediction.calibration import CalibrationState
from autotune.prediction.fit.profiled_sizes import beyond_profile
from autotune.results.evidence import trials_behind
from autotune.results.known_plan import Speed, of_tried
from autotune.search.roles import BASELINES
from storage.annotation import Annotation
from storage.errors import DatabaseDamaged, UnknownRecord
from storage.explanation import Explanation, PlanTime
from storage.records import BestPlan, FinishedTrial, StudyRecord, TrialRecord, TrialSummary, TriedPlan
from storage.store import Store
from trials import wire
from trials.errors import WireError
from trials.outcome import Completed
from trials.plan import Plan
from trials.workload import Workload

_log = logging.getLogger(__name__)
NO_PROFILE = (
    "no profile of the layers is stored for this hardware, model and software; `autotune profile JOB` measures one on "
    "that machine"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySource:
    """A study with everything that is stored of it. Rows that cannot be read are left out."""

    study: StudyRecord
    workload: Workload
    trials: tuple[TrialRecord, ...]
    winner: BestPlan | None
    behind: Sequence[TrialSummary]
    """Trials on which the winner's figures rest, also of searches before; none without a winner."""
    annotation: Annotation
    profile: ProfiledCosts | str
    """Profile of the layers on exactly this hardware, model and software, of data with such sizes; else why there is
    none, as a clause."""
    calibration: CalibrationState | None
    """Corrections of the profile, as the search left them."""

    @property
    def finished(self) -> tuple[FinishedTrial, ...]:
        return tuple(trial for trial in self.trials if isinstance(trial, FinishedTrial))

    @property
    def timed(self) -> tuple[FinishedTrial, ...]:
        """The trials that measured their plan to the end."""
        return tuple(trial for trial in self.finished if is_whole(trial))

    def runs(self, plan: Plan) -> tuple[FinishedTrial, ...]:
        """Return the complete runs of a plan; disturbed runs only where it has no undisturbed one."""
        return self.runs_by_plan.get(plan, ())

    @property
    def runs_by_plan(self) -> Mapping[Plan, tuple[FinishedTrial, ...]]:
        """The `runs` of every plan that has some."""
        whole: dict[Plan, list[FinishedTrial]] = defaultdict(list)
        for trial in self.timed:
            whole[trial.plan].append(trial)
        return {
            plan: tuple([trial for trial in trials if trial.result.disturbance is None] or trials)
            for plan, trials in whole.items()
        }

    def peak_bytes(self, plan: Plan) -> Mapping[int, int]:
        """Return the most bytes of each stage, by its number, in all runs of a plan; empty without any."""
        if (time := self.time(plan)) is not None:
            return dict(enumerate(time.stage_peak_bytes))
        peaks: dict[int, int] = {}
        for outcome in (trial.result.outcome for trial in self.runs(plan)):
            for one in outcome.measurement.stages if isinstance(outcome, Completed) else ():
                peaks[one.stage] = max(peaks.get(one.stage, 0), one.peak_bytes)
        return peaks

    def speed(self, plan: Plan) -> Speed | None:
        """Return the samples per second of a plan, as the search or its runs found them; None without any."""
        if self.winner is not None and plan != self.winner.plan:
            if (time := self.time(plan)) is not None:
                mean = self.workload.data.samples / time.epoch_seconds
                return Speed(mean=mean, error=mean * time.epoch_seconds_error / time.epoch_seconds)
            roles = self.roles(plan)
            stated = [each for each in self.winner.baselines if each.role in roles and self._is_only(plan, each.role)]
            if stated:
                return Speed(
                    mean=stated[0].estimated_samples_per_second, error=stated[0].estimated_samples_per_second_error
                )
        trials = tuple(trial for trial in self.trials if trial.plan == plan)
        tried = TriedPlan(plan=plan, workload=self.workload, study=self.study, winner=self.winner, trials=trials)
        return of_tried(tried).speed

    def _is_only(self, plan: Plan, role: str) -> bool:
        """Return whether no other plan ran in this role."""
        return {trial.plan for trial in self.trials if trial.role == role} == {plan}

    @property
    def explanation(self) -> Explanation | None:
        """Why the winner won; None without a winner, and for one of an older version."""
        return None if self.winner is None else self.winner.explanation

    def time(self, plan: Plan) -> PlanTime | None:
        """Return where the measured time of a plan goes; None for a plan that is not explained."""
        return None if self.explanation is None else self.explanation.of(plan.id)

    def roles(self, plan: Plan) -> tuple[str, ...]:
        """Return why a plan was tried, by the explanation and by the trials of the study.

        A baseline that an earlier study measured may have no trial in that role here.
        """
        explained = () if self.explanation is None else self.explanation.plans
        tried = (trial.role for trial in self.trials if trial.plan == plan)
        return tuple(dict.fromkeys((*(time.role for time in explained if time.plan_id == plan.id), *tried)))

    @property
    def usual(self) -> Plan | None:
        """The baseline with which the winner is compared, as the explanation names it; without it, by the same rule.

        While none was measured, it is the first that was tried. None where an earlier study measured the fastest one:
        which plan it was is not known here.
        """
        explained = None if self.explanation is None else self.explanation.of_usual
        if explained is not None:
            return explained.plan
        over = None if self.winner is None else self.winner.fastest_baseline
        roles = BASELINES if over is None else (over.role,)
        runs = [trial for trial in self.finished if trial.role in roles and trial.result.epoch_seconds is not None]
        fastest = min(runs, key=lambda trial: (not is_whole(trial), trial.result.epoch_seconds), default=None)
        if fastest is not None:
            return fastest.plan
        tried = (trial.plan for role in BASELINES for trial in self.trials if trial.role == role)
        return next(tried, None) if over is None else None

    @property
    def best(self) -> Plan | None:
        """The winner, or the plan that is fastest so far."""
        if self.winner is not None:
            return self.winner.plan
        fastest = min(self.timed, key=lambda trial: trial.result.epoch_seconds or 0.0, default=None)
        return None if fastest is None else fastest.plan


def is_whole(trial: FinishedTrial) -> bool:
    """Return whether the trial measured its plan to the end."""
    outcome = trial.result.outcome
    return isinstance(outcome, Completed) and not outcome.shortened and (trial.result.epoch_seconds or 0.0) > 0


def find_study(store: Store, name: str | None) -> StudyRecord:
    """Return the study whose name or id begins with `name`, or the newest one. Raise UnknownRecord and AmbiguousId."""
    if name is not None:
        return store.find_study(name)
    if newest := store.studies(limit=1):
        return newest[0]
    if store.studies(archived=True, limit=1):
        raise UnknownRecord("all studies are archived; name one of `autotune studies --archived`")
    raise UnknownRecord("no study is stored, so there is nothing to report; run `autotune tune JOB` first")


def read_source(store: Store, study: StudyRecord) -> StudySource:
    """Read everything that is stored of a study. Raise DatabaseDamaged where its workload cannot be read."""
    workload = _checked(study.named(store.workload(study.workload_fingerprint)))
    if not isinstance(study.settings, Mapping):
        _log.warning("the settings of %s are left out: they are no mapping", study.name)
        study = replace(study, settings={})
    winner, profile = _winner(store, study), _profile(store, workload)
    return StudySource(
        study=study,
        workload=workload,
        trials=store.trials(study.id),
        winner=winner,
        behind=() if winner is None else trials_behind(winner, store),
        annotation=store.annotations("study", [study.id]).get(study.id, Annotation()),
        profile=profile,
        calibration=_calibration(study, profile),
    )


def _checked(workload: Workload) -> Workload:
    """Return the workload. Raise DatabaseDamaged where a number of it is none; the database does not check types."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pydantic warns where the types differ, which is what is looked for
            document = wire.encode(workload)
        return wire.decode(Workload, document)
    except (WireError, ValueError, TypeError) as error:
        raise DatabaseDamaged(f"the workload of the study cannot be used: {error}; run `autotune db repair`") from error


def _winner(store: Store, study: StudyRecord) -> BestPlan | None:
    try:
        return store.winner(study.id)
    except DatabaseDamaged as error:
        _log.warning("the winner of %s is left out: %s", study.name, error)
        return None


def _profile(store: Store, workload: Workload) -> ProfiledCosts | str:
    """Return the profile. A search of other data may have replaced the one of the study."""
    keys = workload.hardware.fingerprint, workload.model.fingerprint, workload.software
    try:
        if (stored := store.layer_profile(*keys)) is None:
            return NO_PROFILE
        profile = stored_costs(stored)
    except (DatabaseDamaged, NoProfile, ValueError) as error:
        _log.warning("the profile of the layers is left out: %s", error)
        return NO_PROFILE
    why = beyond_profile(profile.costs.sizes, workload.data, workload.model)
    return profile if why is None else f"{why}; `autotune profile JOB` with the job of this study measures one for them"


def _calibration(study: StudyRecord, profile: ProfiledCosts | str) -> CalibrationState | None:
    """Return the corrections of the profile that the search had; None for those of another one."""
    if study.calibration_state is None or study.finished is None:
        return None
    if isinstance(profile, ProfiledCosts) and profile.created > study.finished:
        _log.warning("the layers were profiled again after the search, so that its trials do not correct predictions")
        return None
    try:
        return wire.decode(CalibrationState, study.calibration_state)
    except WireError as error:
        _log.info("the corrections of the predictions are left out: %s", error)
        return None
