"""The result of a study in a few sentences and figures."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from autotune.dimensions.folds import layout_text
from autotune.plan_text import packing_text, recompute_text
from autotune.report.charts.chart import Table
from autotune.report.charts.quantities import TIMES, seconds_text, with_error
from autotune.report.sides import ComparedPlan, compared_baseline
from autotune.report.source import StudySource
from autotune.results.certainty import certainty_text
from autotune.results.evidence import evidence_of
from autotune.results.headline import headline_of
from autotune.results.payback import paybacks
from autotune.results.rival import faster_tie
from storage.records import BestPlan
from trials.plan import Plan
from trials.stage import TOWERS
from trials.units import speed_decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One figure with its name."""

    name: str
    value: str
    note: str = ""


def headline(source: StudySource, sides: Sequence[ComparedPlan]) -> str:
    """Return one sentence with the result."""
    runs = len(source.timed)
    if not runs and source.winner is None:
        return "No trial of this search was measured to its end, so there is no result yet."
    if source.winner is None:
        lost = "The winner of this search cannot be read" if source.study.finished else "This search has no winner yet"
        return f"{lost}; {runs} trial{'s' * (runs != 1)} measured so far."
    if (gain := headline_of(source.winner, lambda value, error: with_error(value, error, 2))) is not None:
        return f"{gain.text}."
    before = sides[0] if sides[0].key == "before" else None
    return f"The search found a plan. {_estimated_gain(before, source.winner)}"


def _estimated_gain(before: ComparedPlan | None, best: BestPlan) -> str:
    """Say what is known of a gain where no baseline was measured to its end."""
    if before is None or before.time is None or not before.time.shortened:
        return "Its gain is not known, because no baseline was measured to its end."
    gain = before.time.epoch_seconds / best.epoch_seconds
    return (
        f"It trains about {gain:.2f} times as fast as the fastest baseline ({before.time.role}), whose run ended early "
        "as clearly slower."
    )


def notes(source: StudySource) -> tuple[str, ...]:
    """Return what to keep in mind about the figures of the winner."""
    if (best := source.winner) is None:
        return ()
    tie = faster_tie(best, source.behind)
    return *evidence_of(best, source.behind).warnings, *([] if tie is None else [tie.sentence])


def _rate(speed: float, error: float) -> str:
    return f"{with_error(speed, error, speed_decimals(speed))} samples/s"


def cards(source: StudySource, sides: Sequence[ComparedPlan]) -> Iterator[Card]:
    """Yield the main figures, as far as they are known."""
    best = source.winner
    within = f" within the limits of {best.trainer}" if best is not None and best.trainer else ""
    names = {"before": compared_baseline(best), "after": "best plan"}
    for side in sides:
        if (speed := side.speed) is not None:
            epoch = "" if side.epoch_seconds is None else f"{seconds_text(side.epoch_seconds)} an epoch"
            epoch += ", from a run that ended early" if side.time is not None and side.time.shortened else ""
            yield Card(name=names[side.key], value=_rate(speed.mean, speed.error), note=epoch)
    if best is None:
        return
    for baseline in best.baselines:
        if not baseline.is_best and (not sides or baseline.role not in sides[0].roles):
            gain = with_error(baseline.gain, baseline.gain_error, 2)
            rate = _rate(baseline.estimated_samples_per_second, baseline.estimated_samples_per_second_error)
            changes = "" if baseline.is_neutral else "; it changes what is learned"
            yield Card(name=f"gain over {baseline.role}", value=f"{gain}{TIMES}", note=f"{rate}{changes}")
    if best.confidence is not None:
        ties = f"a tie with {', '.join(best.ties)}" if best.ties else f"among the plans{within or ' that ran'}"
        yield Card(name="probability to be the fastest", value=certainty_text(best), note=ties)
    cost = seconds_text(best.search_seconds)
    yield Card(name="time of the search's trials", value=cost, note="; ".join(paybacks(best)))
    evidence = evidence_of(best, source.behind)
    if evidence.disturbed_runs:
        yield Card(
            name="disturbed runs",
            value=f"{evidence.disturbed_runs} of {evidence.runs}",
            note="by other load, so the probability is less certain",
        )


def changes(sides: Sequence[ComparedPlan]) -> Table:
    """Return what the plans set, side by side."""
    settings = [_settings(side.plan) for side in sides]
    return Table(
        caption="What the plans set",
        header=("setting", *(side.title for side in sides)),
        rows=tuple((name, *(each[name] for each in settings)) for name in settings[0]),
    )


def _settings(plan: Plan) -> dict[str, str]:
    freed = "; ".join(_recomputed(plan, level) for level in range(len(plan.packing.degrees)))
    return {
        "plan": plan.id,
        "micro-batches": packing_text(plan.packing),
        "devices": layout_text(plan.layout, TIMES),
        "layers of the stages": _stages((stage.vision, stage.language) for stage in plan.stages),
        "recomputed or offloaded layers": f"{recompute_text(plan.layout)}: {freed}",
    }


def _recomputed(plan: Plan, level: int) -> str:
    """Return the recomputed layers of the stages for packs of a level, in words."""
    of_level = [stage.recomputed[level] for stage in plan.stages]
    text = _stages((each.vision, each.language) for each in of_level)
    if any(each.selective(tower) for each in of_level for tower in TOWERS):
        text += f"; selectively {_stages((each.selective_vision, each.selective_language) for each in of_level)}"
    return f"level {level + 1}: {text}" if level else text


def _stages(counts: Iterable[tuple[int, int]]) -> str:
    """Return the layers of each stage in words; equal neighbours are counted."""
    found = []
    for (vision, language), same in groupby(counts):
        kinds = ((vision, "vision"), (language, "language"))
        layers = " + ".join(f"{count} {kind}" for count, kind in kinds if count) or "none"
        stages = len(list(same))
        found.append(f"{stages} {TIMES} {layers}" if stages > 1 else layers)
    return " | ".join(found)
