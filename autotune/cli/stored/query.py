"""The commands `plans`, `show` and `compare`: stored plans next to this machine, a job or each other."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.context import Options
from autotune.errors import HardwareError
from autotune.machine.agent import living, place
from autotune.machine.hardware import probe_hardware, software
from autotune.results import study_report
from autotune.results.evidence import trials_behind, trials_behind_each
from autotune.results.launch_report import ShownLaunch
from autotune.results.plan_comparison import PlanComparison, comparison_document, comparison_text
from autotune.results.study_report import Known
from storage.annotation import Annotation
from storage.errors import UnknownPlan, UnknownRecord
from storage.nearness import Fields, fields_of, fields_of_machine
from storage.reading import read_store
from storage.records import BestPlan, LaunchRecord, TriedPlan
from storage.store import Store
from storage.validity import Now, Validity, Verdict, parallel_of, validity
from trials import wire
from trials.units import number_of
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from autotune.job_file import JobFile
    from trials.job import Job

_NEAREST = 5
_SORTS: Mapping[str, Callable[[Known], Any]] = {
    "speed": lambda known: -known.best.estimated_samples_per_second,
    "gain": lambda known: (known.gain is None, -(known.gain or 0.0)),
    "found": lambda known: -known.best.created.timestamp(),
    "distance": lambda known: known.distance,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFilter:
    """Choice and order of the plans to list."""

    here: bool
    like: "JobFile | None"
    hardware: str | None
    model: str | None
    verdict: str | None
    in_use: bool
    tag: str | None
    archived: bool
    sort: str | None
    top: int | None


def list_plans(options: Options, wanted: PlanFilter) -> None:
    """List plans; without a machine or a job to compare with, the latest search comes first."""
    if wanted.sort == "distance" and not (wanted.here or wanted.like):
        raise click.UsageError("--sort distance needs --here, or --like JOB, from which to count it; add one of them")
    job, now = _job_to_compare(options, wanted.like) if wanted.like else (None, None)
    with read_store(options.database_url(job.database if job else None)) as store:
        found: Sequence[Known]
        if now or wanted.here:
            found = _nearest_plans(store, wanted, now)
        else:
            used, here = _uses(store), _now_on(cache(_hardware_here))  # a probe for each number, not each plan
            found = [
                Known(
                    best=best,
                    validity=_validity(best, here(best.workload, best.parallel)),
                    used_by=_users(used, best),
                )
                for best in store.best_plans(**_conditions(wanted))
            ]
        found = _annotated(store, wanted, found)
        found = _chosen(wanted, found, is_near=bool(now or wanted.here))
        stored = len(found) or len(store.best_plans(archived=True))
        behind = trials_behind_each([known.best for known in found], store)
        found = [replace(known, trials=trials) for known, trials in zip(found, behind, strict=True)]
    options.give(
        lambda: {"plans": [_document(known) for known in found]},
        lambda: study_report.plans_text(found) if found else _none_text(stored),
    )


def _job_to_compare(options: Options, file: "JobFile") -> "tuple[Job, Workload]":
    from autotune.workload import look_at, workload_of

    job = file.job
    return job, workload_of(job, look_at(job), options.display)


def _none_text(stored: int) -> str:
    if not stored:
        return "No plan is known; run `autotune tune JOB`."
    return f"None of {number_of(stored, 'known plan')} matches; `autotune plans --archived` lists all of them."


def _chosen(wanted: PlanFilter, found: Sequence[Known], *, is_near: bool) -> Sequence[Known]:
    """Filter, sort and cut the list; plans near a job or machine that cannot hold are left out where others do."""
    found = [known for known in found if known.used_by or not wanted.in_use]
    if wanted.verdict:
        found = [known for known in found if known.validity.verdict == wanted.verdict]
    elif is_near:
        holding = [known for known in found if known.validity.verdict is not Verdict.INVALID]
        found = holding or found[: wanted.top or _NEAREST]
    if wanted.sort:
        found.sort(key=_SORTS[wanted.sort])
    return found[: wanted.top]


def _nearest_plans(store: Store, wanted: PlanFilter, now: Workload | None) -> list[Known]:
    """Return the plans nearest to the job, or to this machine, nearest first."""
    here = probe_hardware()
    fields: Fields = fields_of(now) if now else fields_of_machine(here, software())
    # More than are shown, because the caller still filters by verdict and use.
    found = store.nearest_plans(fields, limit=max(wanted.top or 0, 1000), **_conditions(wanted))
    used = _uses(store)
    on_here = _now_on(lambda _, groups: here.of_group(groups))
    return [
        Known(
            best=near.best,
            validity=_validity(near.best, now or on_here(near.best.workload, near.best.parallel)),
            used_by=_users(used, near.best),
            differences=near.differences,
            distance=near.distance,
        )
        for near in found
    ]


def _conditions(wanted: PlanFilter) -> dict[str, Any]:
    """Return the conditions that the store checks."""
    return {
        "hardware_name": wanted.hardware,
        "model_name": wanted.model,
        "tag": wanted.tag,
        "archived": wanted.archived,
    }


def _annotated(store: Store, wanted: PlanFilter, found: Sequence[Known]) -> Sequence[Known]:
    """Add notes and tags, and which studies are archived."""
    annotations = store.annotations("plan")
    studies = store.studies(archived=True) if wanted.archived else ()  # else no plan of an archived study was found
    archived = {study.id for study in studies if study.archived}
    return [
        replace(
            known,
            annotation=annotations.get(known.best.plan.id, Annotation()),
            is_archived=known.best.study_id in archived,
        )
        for known in found
    ]


def show_plan(options: Options, plan: str) -> None:
    from autotune.certification.certificate import stored_certificates
    from autotune.certification.certificate_report import certificate_text
    from autotune.folders import certificates_folder, work_folder
    from autotune.results.known_plan import known_text

    with read_store(options.database_url()) as store:
        here = _now_on(cache(_hardware_here))
        tried = _found(store, plan, here)
        uses = _uses(store)
        places = {use.launch.id: use.place for use in uses}
        trainings = [_training(store, each, tried, places.get(each.id)) for each in store.launches(tried.plan.id)]
        ran = trials_behind(tried.won, store) if tried.won else ()
        used = _users(uses, tried)
        annotation = store.annotations("plan", [tried.plan.id]).get(tried.plan.id, Annotation())
        agents = store.agents()
    folder = certificates_folder(work_folder(options.database_url()))
    certificates = stored_certificates(folder, tried.plan.id)
    holds = _validity(tried, here(tried.workload, parallel_of(tried.study.settings)))
    known = known_text(tried)
    options.give(
        lambda: {
            **study_report.tried_document(tried, ran),
            "known": known,
            **_state(holds, used),
            "launches": [
                {**wire.to_document(each.launch), "changes": wire.to_document(each.changes)} for each in trainings
            ],
            **wire.to_document(annotation),
            "certificates": [wire.to_document(each) for each in certificates],
        },
        lambda: "\n\n".join(
            (
                study_report.show_text(
                    tried,
                    known,
                    holds,
                    trainings,
                    ran=ran,
                    used_by=used,
                    annotation=annotation,
                    agents=agents,
                ),
                *(certificate_text(each, tried.workload.fingerprint) for each in certificates),
            )
        ),
    )


def _now_on(hardware: Callable[[int, int], Hardware]) -> Now:
    """Return what puts a workload on this machine; model and data are taken as they were.

    `hardware` describes the machine for a number of devices, and of groups of ranks that share it.
    """
    return lambda then, groups: replace(then, hardware=hardware(then.hardware.devices, groups), software=software())


def _hardware_here(devices: int, groups: int) -> Hardware:
    """Probe this machine with `devices` devices, or with all where there are fewer, for one of several groups."""
    try:
        here = probe_hardware(devices)
    except HardwareError:
        here = probe_hardware()
    return here.of_group(groups)


def _validity(best: BestPlan | TriedPlan, now: Workload) -> Validity:
    return validity(best.workload, now, imported_from=best.imported_from)


def _training(store: Store, launch: LaunchRecord, tried: TriedPlan, place: str | None) -> ShownLaunch:
    workload = store.workload(launch.workload_fingerprint)
    changes = validity(tried.workload, workload).changes
    # Another folder of the same model, or order of the data, is no other workload.
    differing = tuple(change for change in changes if change.verdict is not Verdict.VALID)
    return ShownLaunch(launch=launch, workload=workload, changes=differing, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A process that trains now."""

    launch: LaunchRecord
    workload: Workload
    place: str


def _uses(store: Store) -> Sequence[_Use]:
    launches = store.running_launches()
    agents = store.agents() if launches else {}
    return [
        _Use(launch=launch, workload=store.workload(launch.workload_fingerprint), place=place(agent))
        for launch in launches
        if (agent := living(launch, agents)) is not None
    ]


def _users(uses: Sequence[_Use], of: BestPlan | TriedPlan) -> tuple[str, ...]:
    """Return the processes that train with the plan, where what was measured of it does not say nothing."""
    return tuple(
        use.place
        for use in uses
        if use.launch.plan_id == of.plan.id and validity(of.workload, use.workload).verdict is not Verdict.INVALID
    )


def _document(known: Known) -> dict[str, Any]:
    return {
        **study_report.best_document(known.best, known.trials),
        **_state(known.validity, known.used_by),
        **wire.to_document(known.annotation),
        "archived": known.is_archived,
        "distance": known.distance,
        "differences": None if known.differences is None else [wire.to_document(one) for one in known.differences],
    }


def _state(holds: Validity, used_by: Sequence[str]) -> dict[str, Any]:
    return {"validity": wire.to_document(holds), "used_by": list(used_by)}


def compare_plans(options: Options, first: str, second: str) -> None:
    with read_store(options.database_url()) as store:
        best_known = _found(store, first), _found(store, second)
        one, other = _together(store, best_known, (first, second))
        if (one.plan.id, one.study.id) == (other.plan.id, other.study.id):
            raise click.UsageError(f"{first} and {second} are one plan, {one.plan.id}@{one.study.id}; name two")
        ran = {tried.study.id: trials_behind(tried.won, store) for tried in (one, other) if tried.won}
    # A plan of which only runs of an earlier search are compared may have won a later one.
    elsewhere = tuple(
        tried for tried in best_known if tried.won and tried.study.id not in (one.study.id, other.study.id)
    )
    compared = PlanComparison(first=one, second=other, ran=ran, elsewhere=elsewhere)
    options.give(lambda: comparison_document(compared), lambda: comparison_text(compared))


def _together(store: Store, found: tuple[TriedPlan, TriedPlan], names: tuple[str, str]) -> tuple[TriedPlan, TriedPlan]:
    """Return the plans, in a study that tried both of them if there is one and none was chosen by the names."""
    one, other = found
    if one.study.id != other.study.id and not any(map(_is_of_a_study, found, names)):
        with suppress(UnknownPlan):
            return one, store.find_plan(other.plan.id, study_id=one.study.id)
        with suppress(UnknownPlan):
            return store.find_plan(one.plan.id, study_id=other.study.id), other
    return one, other


def _is_of_a_study(tried: TriedPlan, name: str) -> bool:
    """Return whether the name chose a study."""
    return not tried.plan.id.startswith(name.lower())


def _found(store: Store, name: str, now: Now | None = None) -> TriedPlan:
    """Return a plan by `PLAN`, `PLAN@STUDY`, or `STUDY` for its winner; the names may be shortened.

    Of the studies that tried a `PLAN`, take the one that is most valid `now`.
    """
    plan, _, study = name.partition("@")
    if study:
        return store.find_plan(plan, study_id=store.find_study(study).id)
    try:
        return store.find_plan(name, now)
    except UnknownPlan:
        with suppress(UnknownRecord):
            found = store.find_study(name)
            if (winner := store.winner(found.id)) is None:
                raise UnknownPlan(f"study {found.name} has no winner yet; name one of its plans") from None
            return store.find_plan(winner.plan.id, study_id=found.id)
        raise
