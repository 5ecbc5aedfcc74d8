"""The choice of a plan to train a job with: a stored one, or that of a file."""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from autotune.errors import JobError, PlanNotValid, PredictError
from autotune.events import Listener, Note
from autotune.plan_file import is_plan_file, read_plan
from autotune.results.evidence import trials_behind
from autotune.results.known_plan import KnownPlan, counted_runs, known_text, of_tried, of_winner
from autotune.results.rival import Rival, rival_of
from autotune.search.study_settings import has_packs, packs_of
from storage.errors import UnknownRecord
from storage.nearness import fields_of
from storage.records import BestPlan, FinishedTrial, StudyRecord, TrialRecord, TriedPlan
from storage.store import Store
from storage.validity import Validity, Verdict, validity
from trials.outcome import Completed
from trials.plan import Plan
from trials.tasks.training.output import RECORD_FILE, read_record
from trials.units import size_setting, speed_text
from trials.workload import Workload

if TYPE_CHECKING:
    from autotune.workload import Prepared

Keeps: TypeAlias = Callable[[Rival], bool]
"""Says whether to train with the winner although this baseline measured faster."""
Binds: TypeAlias = Callable[[StudyRecord], bool]
"""Says whether a training fails where a trial of this study needed more memory than the limit."""
_LOOKED_AT = 50
"""Nearest winners that are considered for an offer."""
_MEBI = 1 << 20
# A choice: on accelerators a peak near the limit may be what the allocator kept, which is less with a lower limit.
_SURE = 0.9
"""Share of the limit of a trial up to which its peak is what the plan needs."""


def known_winner(store: Store, now: Workload, output: Path | None = None) -> BestPlan:
    """Return the winner of the last search on exactly this workload; searches without a trainer come before others.

    Raise PlanNotValid if there is none, with an offer of the nearest plan for as many devices: for the training in
    `output`, where there is one.
    """
    winner = store.last_winner(now.fingerprint)
    if winner is None:
        raise PlanNotValid(
            f"no plan is known for this job here{but_unused(store, now)}; run `autotune tune JOB` or "
            f"`autotune run JOB` first{_or_nearest(store, now, output)}"
        )
    return winner


def but_unused(store: Store, now: Workload) -> str:
    """Name a winner on exactly this workload that is not taken by itself: an archived one, else an imported one."""
    found = store.best_plans(workload_fingerprint=now.fingerprint, archived=True)
    # Where no winner is known, those that were not imported are of archived studies.
    for best in (each for each in found if each.imported_from is None):
        return f", except in an archived search (`autotune studies unarchive {store.study(best.study_id).name}`)"
    for best in found:
        return f", except plan {best.plan.id}, which is imported and used only where it is named"
    return ""


def note_faster(store: Store, best: BestPlan, listener: Listener) -> None:
    """Note the fastest winner of another search here on the same workload, if it was faster by more than both errors.

    It is one within the limits of the winner's trainer: the last search may have had a narrower space, or a machine
    that was slower.
    """
    others = store.best_plans(workload_fingerprint=best.workload.fingerprint)  # the fastest first
    held = (each for each in others if each.imported_from is None and best.trainer in (None, each.trainer))
    fastest = next(held, best)
    then, now = fastest.estimated_samples_per_second, best.estimated_samples_per_second
    errors = fastest.estimated_samples_per_second_error + best.estimated_samples_per_second_error
    if fastest.plan.id != best.plan.id and then - now > errors:
        name, day = store.study(fastest.study_id).name, f"{fastest.created:%Y-%m-%d}"
        text = (
            f"Study {name} of {day} measured plan {fastest.plan.id} faster ({speed_text(then)} against "
            f"{speed_text(now)} samples/s); `launch` and `export` take it with --plan {fastest.plan.id}"
        )
        listener(Note(text=text))


def unasked(rival: Rival) -> bool:
    """Train with the baseline that measured faster where search.space has it, else with the winner."""
    return not rival.may_win


def trusted(
    store: Store, best: BestPlan, listener: Listener, output: Path | None = None, keeps: Keeps = unasked
) -> KnownPlan:
    """Return the winner, or the baseline that measured faster in its own runs unless `keeps` the winner.

    The `listener` gets which of the two it is and why, and what `note_faster` says. A training that has begun in
    `output` goes on with its own.
    """
    rival = rival_of(best, trials_behind(best, store))
    begun = _begun(output)
    if begun is None:
        note_faster(store, best, listener)
    if rival is None:
        return of_winner(best)
    # A training that began with neither of the two keeps its own plan, so the answer would change nothing.
    if begun == best.plan.id or (begun != rival.plan_id and (begun is not None or keeps(rival))):
        listener(Note(text=f"Taking plan {best.plan.id}, not {rival.plan_id}; {rival}"))
        return of_winner(best)
    listener(Note(text=f"Taking plan {rival.plan_id}, not {best.plan.id}; {rival}"))
    return of_tried(store.find_plan(rival.plan_id, lambda *_: best.workload))


def binding(prepared: "Prepared") -> Binds | None:
    """Return what says which trials a training of the job repeats; None for one whose ranks keep no limit of memory."""
    # As in `trials.tasks.session`, which gives other trainings on a CPU no meter.
    if prepared.workload.hardware.accelerator == "cpu" and prepared.job.hardware.memory_limit is None:
        return None
    return lambda study: has_packs(study, prepared.job.training, packs_of(prepared.index))


def choose_plan(
    store: Store,
    now: Workload,
    wanted: Plan | str | None,
    listener: Listener,
    output: Path | None = None,
    *,
    keeps: Keeps = unasked,
    binds: Binds | None = None,
) -> KnownPlan:
    """Return a plan, the one in a plan file, the tried one whose id begins with a text, or the last winner.

    In place of the last winner it may be the plan that `trusted` returns.

    The id may also be that of a plan which the training in `output` has, or had before a change. The `listener` gets
    how well the plan is known; one that was measured under other conditions has no speed. Raise PlanNotValid if there
    is no plan, or it does not hold here, or a trial that `binds` needed more memory than the limit, unless it is the
    plan of that training, which may run already; and what `Store.find_plan` raises. `binds` is None for a training
    that keeps no limit.
    """
    if wanted is None:
        winner = known_winner(store, now, output)
        listener(Note(text=known_text(store.find_plan(winner.plan.id, study_id=winner.study_id))))
        return trusted(store, winner, listener, output, keeps)
    given = _given(wanted)
    try:
        # By its id, so that a file of a plan that was tried gets what its trials say.
        tried = store.find_plan(given.id if isinstance(given, Plan) else given, lambda *_: now)
    except UnknownRecord:
        own = given if isinstance(given, Plan) else _trained(given, output)
        if own is None:
            raise
        listener(Note(text=f"Plan {own.id} was never tried: nothing is known of its speed and memory"))
        return KnownPlan(plan=own, speed=None)
    found = validity(tried.workload, now, imported_from=tried.imported_from)
    if found.verdict is Verdict.INVALID:
        raise PlanNotValid(f"plan {tried.plan.id} does not hold here: {_reasons(found)}; run `autotune tune JOB`")
    ran_within = found.verdict is Verdict.VALID and counted_runs(tried)  # this very limit
    if binds is not None and not ran_within:
        _check_memory(store, now, tried, listener, is_own=_begun(output) == tried.plan.id, binds=binds)
    known = of_tried(tried)
    if found.verdict is Verdict.REMEASURE:
        # A plan is as fast with another limit of memory.
        is_promised = all(change.field == "memory_limit_bytes" for change in found.changes)
        known = known if is_promised else replace(known, speed=None)
        changes = "; ".join(map(str, found.changes))
        promised = "" if is_promised else ", so that no speed is promised"
        listener(Note(text=f"Plan {tried.plan.id} was measured under other conditions{promised}: {changes}"))
    listener(Note(text=known_text(tried)))
    return known


def is_of_store(wanted: Plan | str | None, output: Path) -> bool:
    """Return whether only a store can have the plan: it is no value, in no file, and of no training in `output`."""
    if wanted is None:
        return _begun(output) is None
    return isinstance(wanted, str) and not is_plan_file(wanted) and _trained(wanted, output) is None


def check_new(store: Store, now: Workload, output: Path) -> None:
    """Raise JobError when a training has begun in `output`: a search would most likely find another plan.

    The message says how to continue it: with its plan, or where that cannot run here with another one.
    """
    record = read_record(output / RECORD_FILE)
    if record is None:
        return
    own = record.settings.plan
    if reason := _obstacle(store, now, record.plan):
        raise JobError(
            f"training.output {output} holds a training with plan {own}, which cannot run here: {reason}; run "
            "`autotune tune JOB` and continue from its last checkpoint by `autotune launch JOB --resume-with PLAN` "
            f"with the winner{_or_nearest(store, now, output)}; or name another folder"
        )
    raise JobError(
        f"training.output {output} holds a training with plan {own}, and no plan is known for this job here; "
        f"continue with `autotune launch JOB --plan {own}`, or name another folder"
    )


def _obstacle(store: Store, now: Workload, plan: Plan) -> str:
    """Return why the plan of a training cannot run here; empty where it may."""
    if (needed := plan.layout.world_size) > now.hardware.devices:
        return f"it needs {needed} devices, and the job has {now.hardware.devices}"
    with suppress(UnknownRecord):
        tried = store.find_plan(plan.id, lambda *_: now)
        return _reasons(validity(tried.workload, now, imported_from=tried.imported_from))
    return ""


def _check_memory(
    store: Store, now: Workload, tried: TriedPlan, listener: Listener, *, is_own: bool, binds: Binds
) -> None:
    """Raise PlanNotValid where the plan surely needs more memory than the limit; tell the listener where it may.

    Trials of this very model, data and software on such devices alone are sure. `is_own` says that the training has
    begun with the plan.
    """
    limit, plan = now.memory_limit_bytes, tried.plan
    known = store.comparable_trials(now)
    above = [(study, trial) for study, trial in known if _peak_bytes((trial,), plan) > limit]
    sure = (trial for study, trial in above if _is_sure(store, study, trial) and binds(study))
    if not is_own and (peak := _peak_bytes(sure, plan)):
        least = size_setting(math.ceil(peak / _MEBI) * _MEBI)
        raise PlanNotValid(
            f"plan {plan.id} does not fit here: its fullest rank needed {_above(peak, now)}; raise "
            f"hardware.memory_limit to at least {least}, or run `autotune tune JOB`"
        )
    peak = _peak_bytes((*tried.trials, *(trial for _, trial in known)), plan)
    if peak > limit:
        text = f"Of plan {plan.id}, the fullest rank needed {_above(peak, now)}, so that it may run out of memory"
        listener(Note(text=text))


def _is_sure(store: Store, study: StudyRecord, trial: FinishedTrial) -> bool:
    """Return whether the peak of a trial is what its plan needs, on any device."""
    work = store.workload(study.workload_fingerprint)
    return work.hardware.accelerator == "cpu" or _peak_bytes((trial,), trial.plan) <= _SURE * work.memory_limit_bytes


def _peak_bytes(trials: Iterable[TrialRecord], plan: Plan) -> int:
    """Return the most bytes of a rank in the completed ones of these trials with a plan; 0 where there is none."""
    outcomes = (t.result.outcome for t in trials if isinstance(t, FinishedTrial) and t.plan.id == plan.id)
    return max((each.measurement.peak_bytes for each in outcomes if isinstance(each, Completed)), default=0)


def _above(peak_bytes: int, now: Workload) -> str:
    peak, limit = (f"{size / _MEBI:,.1f} MiB" for size in (peak_bytes, now.memory_limit_bytes))
    return f"{peak} when it was measured, and the limit is {limit}"


def _begun(output: Path | None) -> str | None:
    """Return the id of the plan of the training in `output`; None without one."""
    record = None if output is None else read_record(output / RECORD_FILE)
    return None if record is None else record.settings.plan


def _reasons(found: Validity) -> str:
    """Return what makes a plan invalid; empty where nothing does."""
    return "; ".join(str(change) for change in found.changes if change.verdict is Verdict.INVALID)


def _given(wanted: Plan | str) -> Plan | str:
    """Return the plan where it is given by a file, else what was given."""
    if isinstance(wanted, Plan) or not is_plan_file(wanted):
        return wanted
    try:
        return read_plan(Path(wanted))
    except PredictError as error:
        raise PlanNotValid(str(error)) from error


def _trained(id_prefix: str, output: Path | None) -> Plan | None:
    """Return the only plan of the training in `output` whose id begins with a text; None where none or several do."""
    record = None if output is None else read_record(output / RECORD_FILE)
    plans = () if record is None else (record.plan, *(change.plan for change in record.changes))
    found = {plan.id: plan for plan in plans if plan.id.startswith(id_prefix.lower())}
    return next(iter(found.values())) if len(found) == 1 else None


def _or_nearest(store: Store, now: Workload, output: Path | None) -> str:
    """Name the nearest plan that may run here, as a further remedy; empty where there is none."""
    is_begun = _begun(output) is not None
    here = [trial for _, trial in store.comparable_trials(now)]
    for near in store.nearest_plans(fields_of(now), limit=_LOOKED_AT):
        best = near.best
        found = validity(best.workload, now, imported_from=best.imported_from)
        if found.verdict is Verdict.INVALID or best.plan.layout.world_size > now.hardware.devices:
            continue
        if _peak_bytes((*here, *store.trials(best.study_id)), best.plan) <= now.memory_limit_bytes:
            changes = "; ".join(map(str, found.changes))
            how = f"train with the nearest by `--plan {best.plan.id}`"
            if is_begun:
                how = (
                    f"continue the training in {output} from its last checkpoint with the nearest by "
                    f"`autotune launch JOB --resume-with {best.plan.id}`"
                )
            return f", or {how}, which was not measured here: {changes}"
    return ""
