"""Results as tables for people and as documents for programs."""

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from autotune.plan_text import plan_parts, plan_text, trial_text
from autotune.results.certainty import certainty_lines
from autotune.results.evidence import evidence_of
from autotune.results.explanation_report import explanation_text, plan_time_text
from autotune.results.headline import headline_of
from autotune.results.launch_report import ShownLaunch, launch_text
from autotune.results.payback import paybacks
from autotune.results.rival import faster_tie, rival_of
from autotune.results.text_table import PIPE_WIDTH, table, terminal_width
from autotune.search.study_settings import TRAINER
from storage.annotation import Annotation
from storage.baseline import Baseline
from storage.nearness import Difference
from storage.records import (
    BestPlan,
    FinishedTrial,
    StudyRecord,
    TrialRecord,
    TrialSummary,
    TriedPlan,
)
from storage.validity import Validity
from trials import wire
from trials.outcome import Completed, StageMeasurement
from trials.plan import Layout
from trials.units import number_of, speed_text
from trials.workload import Workload

_MEBI = 1 << 20
# Choices: of differences, those that weigh most; of a note, about what a column of a table holds.
_SHOWN = 4
_SHOWN_OF_A_NOTE = 40
_NO_ANNOTATION = Annotation()
_ANNOTATION = ("tags", "note")
"""Columns of a table that are left out where they are empty."""
_OPTIONAL = ("job", "for", "doubts", *_ANNOTATION)
"""Columns of a table of plans that are left out where they are empty."""
_UNFINISHED = (
    "An unfinished search goes on with its `autotune tune JOB`, and `autotune studies delete STUDY` removes its study."
)


def best_text(best: BestPlan, trials: Sequence[TrialSummary] = ()) -> str:
    """Show the winner, the baselines and ties, the fastest first; `trials` are those on which the figures rest."""
    tied = () if best.explanation is None else best.explanation.tied
    rows = [
        ("best", _speed(best), f"{best.epoch_seconds:.1f}", ""),
        *(
            (
                baseline.role if baseline.is_neutral else f"{baseline.role}, changes what is learned",
                _speed(baseline),
                f"{best.workload.data.samples / baseline.estimated_samples_per_second:.1f}",
                f"{baseline.gain:.2f} +- {baseline.gain_error:.2f}",
            )
            for baseline in sorted((*best.baselines, *tied), key=lambda baseline: baseline.gain)
        ),
    ]
    header = ("plan", "samples/s", "epoch s", "gain of best")
    lines = [f"Plan {best.plan.id}\n  {plan_text(best.plan)}\n\n{table(header, rows)}"]
    if best.explanation is not None:
        # The detail of a crash has several lines.
        lines += (f"No result of {each.role}: {each.reason.splitlines()[0]}" for each in best.explanation.failed)
    if (headline := headline_of(best)) is not None:
        lines.append(headline.text)
    lines += certainty_lines(best)
    lines += evidence_of(best, trials).warnings
    if (rival := rival_of(best, trials)) is not None:
        taken = "it" if rival.may_win else "the best plan"
        asked = f"; `launch` and `run` ask, or without a terminal take {taken}" if rival.left_out is None else ""
        lines.append(f"{rival.sentence}{asked}")
    if (tie := faster_tie(best, trials)) is not None:
        lines.append(tie.sentence)
    why = [explanation_text(best, _changed_text(best))] if best.explanation else paybacks(best)
    lines += filter(None, (*why, _pareto_text(best)))
    return "\n".join(lines)


def _changed_text(best: BestPlan) -> str:
    """Show what the winner changes in the baseline with which it is compared; empty without any."""
    usual = best.explanation.of_usual if best.explanation else None
    if usual is None:
        return ""
    before, after = plan_parts(usual.plan), plan_parts(best.plan)
    rows = [(name, before[name], after[name]) for name in before if before[name] != after[name]]
    return table(("what changed", usual.role, "best"), rows) if rows else ""


def _pareto_text(best: BestPlan) -> str:
    """List the plans of the Pareto set."""
    if not best.pareto:
        return ""
    rows = [
        (
            each.plan.id,
            speed_text(each.estimated_samples_per_second),
            f"{each.peak_bytes / _MEBI:.0f}",
            "-" if each.joules_per_sample is None else f"{each.joules_per_sample:.1f}",
        )
        for each in best.pareto
    ]
    return f"\n{table(('Pareto set', 'samples/s', 'peak MiB', 'J/sample'), rows)}"


def best_document(best: BestPlan, trials: Sequence[TrialSummary] | None = None) -> dict[str, Any]:
    """Return the winner as JSON values; with the `trials` of its study also what the figures rest on."""
    evidence = {} if trials is None else {"evidence": _plain(evidence_of(best, trials))}
    if trials is not None:
        evidence |= {"rival": _plain(rival_of(best, trials)), "faster_tie": _plain(faster_tie(best, trials))}
    headline = headline_of(best)
    return {"id": best.plan.id, "headline": None if headline is None else _plain(headline), **_plain(best), **evidence}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A stored plan, compared with this machine or a job."""

    best: BestPlan
    validity: Validity
    used_by: tuple[str, ...] = ()
    """The processes that train with it now."""
    differences: tuple[Difference, ...] | None = None
    """Differences from the given workload, the most important first; None when none was given."""
    distance: float | None = None
    annotation: Annotation = _NO_ANNOTATION
    """Tags and note of the plan."""
    is_archived: bool = False
    """Whether its study is."""
    trials: Sequence[TrialSummary] = ()
    """Trials on which the plan's figures rest."""

    @property
    def gain(self) -> float | None:
        """Gain over the fastest baseline; None where none was measured."""
        over = self.best.fastest_baseline
        return None if over is None else over.gain


def _jobs(workloads: Iterable[Workload]) -> list[str]:
    """Return in what the jobs of these workloads differ; empty texts where they are alike."""
    jobs = [
        (
            f"batch {work.global_batch_samples}",
            f"limit {work.memory_limit_bytes / _MEBI:,.0f} MiB",
            work.model.dtype,
            number_of(work.data.samples, "sample"),
        )
        for work in workloads
    ]
    varying = [len(set(column)) > 1 for column in zip(*jobs, strict=True)]
    return [", ".join(compress(job, varying)) for job in jobs]


def plans_text(found: Sequence[Known]) -> str:
    rows = [
        (
            known.best.plan.id,
            known.best.workload.model.name,
            str(known.best.workload.hardware),
            _speed(known.best),
            "-" if (over := known.best.fastest_baseline) is None else f"{over.gain:.2f} +- {over.gain_error:.2f}",
            known.best.created.strftime("%Y-%m-%d %H:%M"),
            "" if known.distance is None else f"{known.distance:.3g}",
            f"{known.validity.verdict}{_reason(known.validity)}",
            job,
            known.best.trainer or "",
            ", ".join(doubt.summary for doubt in evidence_of(known.best, known.trials).doubts),
            ", ".join(known.annotation.tags),
            _first_line(known.annotation.note),
        )
        for known, job in zip(found, _jobs(known.best.workload for known in found), strict=True)
    ]
    header = ("plan", "model", "hardware", "samples/s", "gain", "found (UTC)", "distance", "here", *_OPTIONAL)
    lines = [_table_of_used(header, rows, len(_OPTIONAL), terminal_width() or PIPE_WIDTH)]
    if any(row[header.index("doubts")] for row in rows):
        lines.append("`autotune show PLAN` explains the doubts about a plan")
    for known in found:
        if known.is_archived:
            lines.append(f"{known.best.plan.id} is of an archived study")
        if known.used_by:
            lines.append(f"{known.best.plan.id} is in use: {', '.join(known.used_by)}")
        if known.differences:
            rest = len(known.differences) - _SHOWN
            more = f"; {rest} more" if rest > 0 else ""
            lines.append(f"{known.best.plan.id} differs in {'; '.join(map(str, known.differences[:_SHOWN]))}{more}")
    # Once each: a plan may have won on several workloads.
    return "\n".join(dict.fromkeys(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A stored study with what it is listed with."""

    study: StudyRecord
    work: Workload
    best: BestPlan | None
    annotation: Annotation


def study_document(listed: Listed, behind: Sequence[TrialSummary] | None = None) -> dict[str, Any]:
    """Return a study and its result as JSON values; with the trials `behind` its winner, also their evidence."""
    best = None if listed.best is None else best_document(listed.best, behind)
    return {**_plain(listed.study), "workload": _plain(listed.work), "best": best, **_plain(listed.annotation)}


def studies_text(found: Sequence[Listed], stored: int) -> str:
    """List the studies that a filter has found of those `stored`."""
    if not stored:
        return "No study is known; run `autotune tune JOB`."
    if not found:
        count = number_of(stored, "known study", "known studies")
        return f"None of {count} matches; `autotune studies --archived` lists all of them."
    rows = [
        (
            listed.study.name,
            str(listed.work.hardware),
            listed.study.started.strftime("%Y-%m-%d %H:%M"),
            _end_text(listed.study),
            "" if listed.best is None else listed.best.plan.id,
            "" if listed.best is None else _speed(listed.best),
            listed.study.imported_from or "",
            job,
            ", ".join(listed.annotation.tags),
            _first_line(listed.annotation.note),
        )
        for listed, job in zip(found, _jobs(listed.work for listed in found), strict=True)
    ]
    first = ("study", "hardware", "began (UTC)", "ended", "best plan", "samples/s", "imported from")
    header = (*first, "job", *_ANNOTATION)
    hint = _UNFINISHED if any(listed.study.finished is None for listed in found) else ""
    return "\n\n".join(filter(None, (_table_of_used(header, rows, 1 + len(_ANNOTATION)), hint)))


def _end_text(study: StudyRecord) -> str:
    end = "unfinished" if study.finished is None else study.finished.strftime("%Y-%m-%d %H:%M")
    return end if study.archived is None else f"{end}, archived"


def _table_of_used(
    header: Sequence[str], rows: Sequence[Sequence[str]], optional: int, width: int | None = None
) -> str:
    """Return a table without the empty ones of its last `optional` columns."""
    first = len(header) - optional
    kept = [number for number in range(len(header)) if number < first or any(row[number] for row in rows)]
    return table([header[number] for number in kept], [[row[number] for number in kept] for row in rows], width)


def _first_line(note: str | None) -> str:
    return textwrap.shorten((note or "").partition("\n")[0], _SHOWN_OF_A_NOTE, placeholder=" ...")


def annotation_text(annotation: Annotation) -> str:
    """Return the tags and the whole note, each on lines of its own; empty without any."""
    tags = f"Tags: {', '.join(annotation.tags)}" if annotation.tags else ""
    return "\n".join(filter(None, (tags, f"Note: {annotation.note}" if annotation.note else "")))


def study_text(
    listed: Listed, trials: Sequence[TrialRecord], behind: Sequence[TrialSummary], agents: Collection[str]
) -> str:
    """Show the trials of a study in their order, and its winner, whose figures rest on the trials `behind` it.

    `agents` are the ids of those that have not ended.
    """
    best, samples = listed.best, listed.work.data.samples
    lines = [trial_text(trial, samples, agents) for trial in trials]
    cannot_be_read = "The winner of this study cannot be read; `autotune db check` says why."
    none = "This study has no winner yet." if listed.study.finished is None else cannot_be_read
    winner = best_text(best, behind) if best else none
    # The row has no tags and note: both follow in full.
    head = studies_text([replace(listed, annotation=Annotation())], 1)
    return "\n".join((head, *filter(None, (annotation_text(listed.annotation),)), "", *lines, "", winner))


def tried_document(tried: TriedPlan, ran: Sequence[TrialSummary]) -> dict[str, Any]:
    """Return a tried plan as JSON values; for a winner with all that is stored of it. `ran` are its study's trials."""
    won = tried.won
    found = best_document(won, ran) if won else {"id": tried.plan.id, **_plain(tried)}
    time = None if tried.time is None else _plain(tried.time)
    return {**found, "won": won is not None, "time": time, "trials": [_plain(trial) for trial in tried.trials]}


def show_text(
    tried: TriedPlan,
    known: str,
    validity: Validity,
    trainings: Sequence[ShownLaunch],
    *,
    ran: Sequence[TrialSummary],
    used_by: Sequence[str],
    annotation: Annotation,
    agents: Collection[str],
) -> str:
    """Show the plan, how certain it is, its measurements, and whether it holds here.

    `ran` are its study's trials, and `agents` the ids of those that have not ended.
    """
    named = f"Plan {tried.plan.id}\n  {plan_text(tried.plan)}"
    sections = [
        best_text(tried.won, ran) if tried.won else named,
        f"{known}\nHere: {validity.verdict}{_reason(validity)}",
    ]
    if not tried.won and (time := tried.time):
        sections.append(plan_time_text(time))
    sections += filter(None, (annotation_text(annotation),))
    finished = [trial for trial in tried.trials if isinstance(trial, FinishedTrial)]
    work, trainer = tried.workload, tried.study.settings.get(TRAINER)
    sections.append(
        f"Model {work.model.name} ({work.model.family}, {work.model.vision_layers} vision and "
        f"{work.model.language_layers} language layers, {work.model.parameters / 1e6:.1f} M parameters, "
        f"{work.model.dtype}{f'; trained: {work.model.trained}' if work.model.trained else ''}"
        f"{'; compiled layers' if work.model.compiler else ''})\n"
        f"Data {number_of(work.data.samples, 'sample')} an epoch, {work.data.text_only_samples} of them without "
        "images\n"
        f"Hardware {work.hardware}, limit {work.memory_limit_bytes / _MEBI:.0f} MiB per rank\n"
        f"Searched {tried.study.started:%Y-%m-%d %H:%M} UTC{f' for {trainer}' if trainer else ''} with torch "
        f"{work.software.torch}, deepspeed {work.software.deepspeed}, transformers {work.software.transformers}"
    )
    sections += [trial_text(trial, work.data.samples, agents) for trial in tried.trials]
    # The last one, since the winner is measured over more steps at the end.
    if completed := [trial for trial in finished if isinstance(trial.result.outcome, Completed)]:
        sections.append(f"The stages of trial {completed[-1].number}:\n{_stages_text(completed[-1])}")
    sections += map(launch_text, trainings)
    if used_by:
        sections.append(f"In use: {', '.join(used_by)}")
    return "\n\n".join(sections)


def _stages_text(trial: FinishedTrial) -> str:
    outcome = trial.result.outcome
    stages: Iterable[StageMeasurement] = outcome.measurement.stages if isinstance(outcome, Completed) else ()
    rows = [
        (
            ".".join(map(str, _coordinates(trial.plan.layout, stage))),
            *(
                f"{seconds * 1000:.0f}"
                for seconds in (
                    stage.load_seconds,
                    stage.forward_seconds,
                    stage.backward_seconds,
                    stage.optimizer_seconds,
                    stage.idle_seconds,
                )
            ),
            f"{stage.peak_bytes / _MEBI:.0f}",
            f"{stage.static_bytes / _MEBI:.0f}",
        )
        for stage in stages
    ]
    return table(
        ("stage.rank", "load ms", "forward ms", "backward ms", "update ms", "idle ms", "peak MiB", "static MiB"), rows
    )


def _coordinates(layout: Layout, rank: StageMeasurement) -> tuple[int, ...]:
    """Return stage and data rank, and the tensor rank where several hold a copy of the stage."""
    return (rank.stage, rank.data_rank, *([rank.tensor_rank] if layout.tensor > 1 else []))


def _speed(of: BestPlan | Baseline) -> str:
    return speed_text(of.estimated_samples_per_second, of.estimated_samples_per_second_error)


def _reason(validity: Validity) -> str:
    return f" ({'; '.join(str(change) for change in validity.changes[:3])})" if validity.changes else ""


def _plain(value: object) -> Mapping[str, Any]:
    document: Mapping[str, Any] = wire.to_document(value)
    return document
