"""What the figures of a winner rest on: disturbed runs, figures corrected for drift, and plans that were searched."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.search.roles import BASELINES
from autotune.search.study_settings import answers
from storage.records import BestPlan, StudyRecord, TrialSummary
from storage.store import Store
from trials.units import number_of

ROUNDING = 0.005
"""Share by which a figure may be outside the range of its measurements without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A stated time outside the range of its measurements, because it is corrected for the machine's drift."""

    name: str
    """`best`, or the role of a baseline."""
    epoch_seconds: float
    measured: tuple[float, float]
    """Shortest and longest measured seconds of an epoch."""

    def __str__(self) -> str:
        return f"{self.name} {self.epoch_seconds:.1f} (its runs {range_text(self.measured)})"


def range_text(measured: tuple[float, float]) -> str:
    """Return the shortest and the longest of some seconds."""
    shortest, longest = (f"{seconds:.1f}" for seconds in measured)
    return shortest if shortest == longest else f"{shortest} to {longest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A reason why another plan may be the better one."""

    summary: str
    """A few words, for lists of plans."""
    text: str
    """The doubt in full, with the remedy."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the figures of a winner rest on."""

    runs: int
    """Trials of the study with a measurement."""
    disturbed_runs: int
    winner_runs: int
    """Trials of the winner with a measurement."""
    disturbed_winner_runs: int
    disturbance: str | None
    """Reason of the winner's last disturbed run, or of the last one where none of its runs was."""
    tried_plans: int
    """Plans other than the baselines that ran, whatever their outcome."""
    searched_plans: int
    """Tried plans that were measured."""
    corrected: tuple[Corrected, ...]
    faster: tuple[str, ...] = ()
    """Roles of the baselines that ran faster than the winner, and that the trainer of the search, if any, can hold."""
    why_not: tuple[str, ...] = ()
    """Why each of them did not win, in words."""

    @property
    def all_disturbed(self) -> bool:
        """Whether no measured run was quiet."""
        return 0 < self.runs == self.disturbed_runs

    @property
    def warnings(self) -> Sequence[str]:
        """What to keep in mind about the figures, in words."""
        if not self.corrected:
            return tuple(map(str, self.doubts))
        stated = ", ".join(map(str, self.corrected))
        text = f"Epoch s corrected for the speed of the machine, which changed during the search: {stated}"
        return *map(str, self.doubts), text

    @property
    def doubts(self) -> Sequence[Doubt]:
        """Warnings after which another plan may be the better one."""
        return tuple(self._doubts())

    def _doubts(self) -> Iterator[Doubt]:
        measured = number_of(self.runs, "measured run")
        if self.runs and self.tried_plans and not self.searched_plans:
            yield Doubt(
                summary="only baselines completed",
                text="No plan besides the baselines completed, and this is the fastest of them by "
                f"{measured}, whether or not search.space has it; the trials name the causes",
            )
        if self.runs and not self.tried_plans:
            yield Doubt(
                summary="only baselines tried",
                text="Nothing was searched: the budget allowed the baselines alone, and this is the fastest of them by "
                f"{measured}, whether or not search.space has it; raise search.time_limit or search.trials",
            )
        if self.disturbed_runs:
            yield Doubt(
                summary=f"{self.disturbed_runs} of {self.runs} runs disturbed",
                text=f"Disturbed: {self.disturbed_runs} of {self.runs} measured runs, {self.disturbed_winner_runs} of "
                f"{self.winner_runs} of the winner (the last time {self.disturbance}); measure again with "
                "`autotune tune JOB --fresh` on an idle machine",
            )
        if self.faster:
            found = (f"{role} ({why})" for role, why in zip(self.faster, self.why_not, strict=True))
            yield Doubt(
                summary=f"{', '.join(self.faster)} ran faster",
                text=f"Faster than the best plan in its own runs, but it cannot win: {', '.join(found)}",
            )


def trials_behind(best: BestPlan, store: Store) -> Sequence[TrialSummary]:
    """Return the trials on which the winner's figures rest: of its study, and before it unless it began afresh."""
    return trials_behind_each([best], store)[0]


def trials_behind_each(several: Sequence[BestPlan], store: Store) -> list[Sequence[TrialSummary]]:
    """Return `trials_behind` of each winner, with as many queries as for one winner."""
    studies = {study.id: study for study in store.studies(archived=True)}
    # Raises for a study that cannot be read.
    of_winners = [studies.get(best.study_id) or store.study(best.study_id) for best in several]
    places = set(map(_place, of_winners))
    counting = {study.id for study in studies.values() if _place(study) in places}
    own, known = defaultdict(list), defaultdict(list)
    for trial in store.summaries(*counting | {study.id for study in of_winners}):
        own[trial.study_id].append(trial)
        if trial.study_id in counting:
            known[_place(studies[trial.study_id])].append(trial)

    def before(best: BestPlan, study: StudyRecord) -> Iterator[TrialSummary]:
        for trial in () if study.settings.get("fresh") else known[_place(study)]:
            earlier = studies[trial.study_id]
            # A search has used the trials of a study that was archived after its start.
            is_used = earlier.archived is None or earlier.archived > study.started
            if is_used and earlier.id != study.id and trial.finished <= best.created and answers(earlier, study):
                yield trial

    return [[*before(best, study), *own[study.id]] for best, study in zip(several, of_winners, strict=True)]


def _place(study: StudyRecord) -> tuple[str, str | None]:
    """Return the workload, and the database of the search: searches use the trials of their own database alone."""
    return study.workload_fingerprint, study.imported_from


def evidence_of(best: BestPlan, trials: Sequence[TrialSummary]) -> Evidence:
    """Return the evidence for the winner's figures, from its `trials_behind`."""
    runs = [trial for trial in trials if trial.kind == "completed"]
    disturbed = [trial for trial in runs if trial.disturbance is not None]
    of_baselines = {trial.plan_id for trial in trials if trial.role in BASELINES}
    ran = {trial.plan_id for trial in trials if trial.kind != "rejected"}
    reasons = [trial.disturbance for trial in disturbed if trial.plan_id == best.plan.id] or [
        trial.disturbance for trial in disturbed
    ]
    faster = [each for each in best.baselines if each.gain < 1 - ROUNDING and each.left_out is None]
    return Evidence(
        runs=len(runs),
        disturbed_runs=len(disturbed),
        winner_runs=_count(runs, best.plan.id),
        disturbed_winner_runs=_count(disturbed, best.plan.id),
        disturbance=reasons[-1] if reasons else None,
        tried_plans=len(ran - of_baselines),
        searched_plans=len({trial.plan_id for trial in runs} - of_baselines),
        corrected=tuple(_corrected(best, runs)),
        faster=tuple(each.role for each in faster),
        why_not=tuple(each.only_compared or "it was not repeated" for each in faster),
    )


def _count(runs: Sequence[TrialSummary], plan_id: str) -> int:
    return sum(trial.plan_id == plan_id for trial in runs)


def _corrected(best: BestPlan, runs: Sequence[TrialSummary]) -> Iterator[Corrected]:
    ranges = ranges_of_runs(runs)
    stated = {"best": best.epoch_seconds}
    stated |= {each.role: best.workload.data.samples / each.estimated_samples_per_second for each in best.baselines}
    for name, seconds in stated.items():
        plans = {best.plan.id} if name == "best" else {trial.plan_id for trial in runs if trial.role == name}
        found = [ranges[plan] for plan in plans if plan in ranges]
        outside = [(low, high) for low, high in found if not low * (1 - ROUNDING) <= seconds <= high * (1 + ROUNDING)]
        # A kind of baseline may have several plans: its figure is from the fastest one, unknown here.
        if found and len(outside) == len(found):
            yield Corrected(name=name, epoch_seconds=seconds, measured=min(found))


def ranges_of_runs(runs: Sequence[TrialSummary]) -> Mapping[str, tuple[float, float]]:
    """Return the shortest and longest seconds of an epoch in the whole runs of each plan."""
    measured = defaultdict[str, list[float]](list)
    for trial in runs:
        if not trial.shortened and trial.epoch_seconds is not None:
            measured[trial.plan_id].append(trial.epoch_seconds)
    return {plan: (min(found), max(found)) for plan, found in measured.items()}
