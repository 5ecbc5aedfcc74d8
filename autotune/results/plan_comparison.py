"""Two tried plans side by side, also of studies on other hardware."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from autotune.plan_text import plan_parts
from autotune.results.explanation_report import is_visible, share_text
from autotune.results.known_plan import Speed, counted_runs, is_corrected, known_text, of_tried
from autotune.results.study_report import tried_document
from autotune.results.text_table import PIPE_WIDTH, table, terminal_width
from autotune.results.time_parts import NAMES
from storage.nearness import Difference, differences, fields_of
from storage.records import TrialSummary, TriedPlan
from trials import wire
from trials.outcome import Completed, StageMeasurement
from trials.units import speed_text
from trials.workload import Workload

_MEBI = 1 << 20
# A choice: the differences that weigh most come first, and the line stays readable.
_SHOWN = 6
_SECONDS = {
    "load_seconds": "load",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "update",
    "idle_seconds": "idle",
}
_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeans:
    """Means of a stage over its ranks and runs; seconds are those of a mean step."""

    load_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    idle_seconds: float
    peak_bytes: int
    """Peak bytes of the stage's fullest rank."""
    static_bytes: int
    """Static bytes of the stage's fullest rank."""


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """Two tried plans."""

    first: TriedPlan
    second: TriedPlan
    ran: Mapping[str, Sequence[TrialSummary]]
    """The trials behind winners among them, by the study's id."""
    elsewhere: tuple[TriedPlan, ...] = ()
    """The plans as winners of studies other than the one in which they are compared."""

    @property
    def plans(self) -> tuple[TriedPlan, TriedPlan]:
        return self.first, self.second

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Differences between the workloads, the most important first."""
        return differences(*(fields_of(tried.workload) for tried in self.plans))

    @property
    def ratio(self) -> Speed | None:
        """Speed of the second plan divided by that of the first; None if one has none, or the samples differ."""
        if (gain := _gain(self.second, self.first)) is not None:
            return gain
        if (gain := _gain(self.first, self.second)) is not None:
            return Speed(mean=1 / gain.mean, error=gain.error / gain.mean**2)
        one, other = (of_tried(tried).speed for tried in self.plans)
        if one is None or other is None or not _same_samples(self.first.workload, self.second.workload):
            return None
        mean = other.mean / one.mean
        # Independent relative errors add up in squares.
        return Speed(mean=mean, error=mean * math.hypot(one.error / one.mean, other.error / other.mean))

    @property
    def uncorrected(self) -> tuple[str, ...]:
        """Ids of the plans whose speed is in the ratio without a correction for drift of the machine."""
        if _gain(self.second, self.first) or _gain(self.first, self.second):
            return ()
        return tuple(dict.fromkeys(tried.plan.id for tried in self.plans if not is_corrected(tried)))


def _gain(winner: TriedPlan, other: TriedPlan) -> Speed | None:
    """Return the gain over a baseline that the study states, without the drift that both share; else None."""
    if winner.won is None or winner.study.id != other.study.id:
        return None
    gains = (each for each in winner.won.baselines if each.plan_id == other.plan.id and not each.is_best)
    return next((Speed(mean=each.gain, error=each.gain_error) for each in gains), None)


def _same_samples(one: Workload, other: Workload) -> bool:
    """Return whether the samples per second of two workloads are comparable."""
    both = one, other
    # Another order of the same samples gives packs as full, and compiled layers train the same model.
    data = [replace(work.data, lengths_digest="") for work in both]
    if any(each.target_tokens is None for each in data):  # an earlier version did not store them
        data = [replace(each, target_tokens=None) for each in data]
    models = [replace(work.model, compiler=None).fingerprint for work in both]
    jobs = [(work.global_batch_samples, work.oversize) for work in both]
    return all(first == second for first, second in (data, models, jobs))


def stage_means(tried: TriedPlan) -> tuple[StageMeans, ...]:
    """Return the means of each stage; empty for a plan that no trial measured to its end."""
    outcomes = [trial.result.outcome for trial in counted_runs(tried)]
    ranks = [rank for outcome in outcomes if isinstance(outcome, Completed) for rank in outcome.measurement.stages]
    stages = sorted({rank.stage for rank in ranks})
    return tuple(_means([rank for rank in ranks if rank.stage == stage]) for stage in stages)


def _means(ranks: Sequence[StageMeasurement]) -> StageMeans:
    return StageMeans(
        **{name: fmean(getattr(rank, name) for rank in ranks) for name in _SECONDS},
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        static_bytes=max(rank.static_bytes for rank in ranks),
    )


def comparison_document(compared: PlanComparison) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    return {
        "plans": [
            {
                **tried_document(tried, compared.ran.get(tried.study.id, ())),
                "study": tried.study.name,
                "workload": wire.to_document(tried.workload),
                "known": known_text(tried),
                "estimated_samples_per_second": speed and speed.mean,
                "estimated_samples_per_second_error": speed and speed.error,
                "stages": [wire.to_document(stage) for stage in stage_means(tried)],
            }
            for tried in compared.plans
            for speed in (of_tried(tried).speed,)
        ],
        "speed_ratio": wire.to_document(compared.ratio),
        "differences": [wire.to_document(each) for each in compared.differences],
        "won_elsewhere": [f"{tried.plan.id}@{tried.study.name}" for tried in compared.elsewhere],
    }


def comparison_text(compared: PlanComparison) -> str:
    """Show both plans in columns, then how they differ in speed and in what they were measured on."""
    header = ("", *(tried.plan.id for tried in compared.plans))
    width = terminal_width() or PIPE_WIDTH
    sections = [table(header, list(_rows(compared)), width)]
    if any(tried.time for tried in compared.plans):
        sections.append(f"Where the time of an epoch goes:\n{table(header, list(_time_rows(compared)), width)}")
    stages = [stage_means(tried) for tried in compared.plans]
    if any(stages):
        names = [f"{name} ms" for name in _SECONDS.values()]
        columns = ("stage", *names, "peak MiB", "of limit", "static MiB")
        sections += [
            f"Stages of {tried.plan.id}, in a mean step:\n{table(columns, _stage_rows(tried, means))}"
            for tried, means in zip(compared.plans, stages, strict=True)
            if means
        ]
    return "\n\n".join((*sections, _verdict(compared)))


def _rows(compared: PlanComparison) -> Iterator[tuple[str, ...]]:
    columns = [_column(tried) for tried in compared.plans]
    for name in columns[0]:
        yield (name, *(column[name] for column in columns))


def _column(tried: TriedPlan) -> dict[str, str]:
    work, speed = tried.workload, of_tried(tried).speed
    epoch = None if speed is None else work.data.samples / speed.mean
    return {
        "study": tried.study.name,
        "model": work.model.name,
        "hardware": str(work.hardware),
        "samples/s": _NOTHING if speed is None else speed_text(speed.mean, speed.error),
        "epoch s": _NOTHING if epoch is None else f"{epoch:,.1f}",
        "known": known_text(tried),
        **plan_parts(tried.plan),
    }


def _time_rows(compared: PlanComparison) -> Iterator[tuple[str, ...]]:
    """Yield the share of each part of an epoch for the plans that their study explains."""
    times = [tried.time for tried in compared.plans]
    known = [time for time in times if time]
    shares = [{part.name: share_text(part, time) for part in time.parts} if time else {} for time in times]
    names = dict.fromkeys(name for share in shares for name in share)
    for name in (name for name in names if is_visible(name, known)):
        yield (NAMES[name], *(share.get(name, "unknown") for share in shares))


def _stage_rows(tried: TriedPlan, means: Sequence[StageMeans]) -> list[tuple[str, ...]]:
    limit = tried.workload.memory_limit_bytes
    return [
        (
            str(number),
            *(f"{getattr(stage, name) * 1000:.0f}" for name in _SECONDS),
            f"{stage.peak_bytes / _MEBI:,.0f}",
            f"{stage.peak_bytes / limit:.0%}",
            f"{stage.static_bytes / _MEBI:,.0f}",
        )
        for number, stage in enumerate(means)
    ]


def _verdict(compared: PlanComparison) -> str:
    one, other = (tried.plan.id for tried in compared.plans)
    if one == other:
        one, other = (f"{tried.plan.id}@{tried.study.name}" for tried in compared.plans)
    ratio, found = compared.ratio, compared.differences
    if ratio is not None:
        lines = [f"{other} is {ratio.mean:.2f} +- {ratio.error:.2f} times as fast as {one}"]
        if compared.uncorrected:
            plans = ", ".join(compared.uncorrected)
            lines.append(f"Not corrected for drift of the machine, which the +- leaves out: {plans}")
    elif any(of_tried(tried).speed is None for tried in compared.plans):
        lines = ["One of the plans has no measured speed, so their speeds are not compared"]
    else:
        lines = [
            "Their samples/s are not comparable: they were measured on another model, data, batch or over-size rule"
        ]
    if found:
        rest = len(found) - _SHOWN
        more = f"; {rest} more" if rest > 0 else ""
        lines.append(f"Measured on different workloads: {'; '.join(map(str, found[:_SHOWN]))}{more}")
    for tried in compared.elsewhere:
        speed, name = of_tried(tried).speed, f"{tried.plan.id}@{tried.study.name}"
        assert speed is not None, "a winner has a speed"
        lines.append(
            f"{tried.plan.id} also won study {tried.study.name}, with {speed_text(speed.mean, speed.error)} samples/s; "
            f"name it {name} to compare that"
        )
    return "\n".join(lines)
