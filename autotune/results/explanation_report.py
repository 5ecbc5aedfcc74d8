"""Why a plan won, as text: where the time went, what each change gives, what it costs, and what would help further."""

import math
from collections.abc import Iterator, Sequence

from autotune.dimensions.folds import layout_name
from autotune.plan_text import plan_parts
from autotune.results.headline import SIGNIFICANT, named_role, not_run_text, speed_of_baseline
from autotune.results.payback import payback_text
from autotune.results.text_table import table
from autotune.results.time_parts import BASES, MEANINGS, NAMES, useful_work_note
from autotune.search.roles import Role
from storage.explanation import IDEAL, UNEXPLAINED, ChangeEffect, Explanation, PlanTime, TimePart
from storage.records import BestPlan
from trials.plan import Padded, Plan
from trials.units import number_of
from trials.workload import Workload

_MEBI = 1 << 20
# Choices: a loss of 2 % is about what trials can tell, and more than three pieces of advice hide the first.
_WORTH_ADVICE = 0.02
_MOST_ADVICE = 3
_LEAST_SHOWN = 0.0005
"""Share of an epoch that is not shown as 0.0%."""
_WAYS = {
    "recompute-alone": "recomputation in data parallelism",
    "shards": "shards of weights, ZeRO 3",
    "zero-bubble": "a pipeline with zero bubble",
}
_DECODE_AHEAD = "decode images ahead on free cores, by data.workers, or let images be smaller"
_PACK = "pack the samples"
_LARGER_PACKS = "larger packs, of which fewer have no image and so a zero one"
_LARGER_PARTS = "larger packs are shared more evenly, and a larger global batch has more packs to choose from"
_NO_CORE = "let images be smaller; no core is free to decode them ahead"
_ADVICE = {
    "stage_imbalance": "stages hold whole layers; a model or a pipeline degree with a more even split would remove it",
    "data_imbalance": "a larger global batch has more packs to choose from for each step",
    "bubble": "a larger global batch has more micro-batches; twice as many halve it, about",
    "communication": "faster links between the devices, or fewer stages and data ranks",
    "optimizer": "a larger global batch updates less often",
}


def explanation_text(best: BestPlan, changed: str) -> str:
    """Return why the winner won; empty for a winner without an explanation.

    `changed` shows what it changes in the baseline with which it is compared.
    """
    why = best.explanation
    if why is None:
        return ""
    sections = (
        _headline(best, why),
        changed,
        _parts_table([*{time.plan_id: time for time in (why.of_usual, why.winner) if time is not None}.values()]),
        _changes(best, why),
        _memory(why, best.workload.memory_limit_bytes),
        _ways(why),
        _payback(best, why),
        _further(why, best.workload),
    )
    return "\n" + "\n\n".join(filter(None, sections))


def plan_time_text(time: PlanTime) -> str:
    """Return where the time of one plan goes."""
    return f"{_losses(time)}\n\n{_parts_table([time])}"


def _headline(best: BestPlan, why: Explanation) -> str:
    usual, winner = why.of_usual, why.winner
    if usual is None and (over := best.fastest_baseline) is not None:
        return (
            f"Why it won: {named_role(over.role)} was measured in an earlier search and not in this one, so only the "
            f"time of the winner is explained. {_losses(winner)}"
        )
    if usual is None:
        return (
            f"Why it won: no baseline was measured in its search, so only its own time is explained. {_losses(winner)}"
        )
    if usual.plan_id == winner.plan_id:
        plan = f"plan within the limits of {best.trainer}" if best.trainer else "plan"
        alone = f"no other baseline that may win ran to its end{not_run_text(best)}"
        return f"Why it won: no {plan} was faster than {named_role(usual.role)}, and {alone}. {_losses(winner)}"
    is_slower = speed_of_baseline(*_gain(best, usual, winner)) == "faster"
    heading = f"Where the time goes: {named_role(usual.role)} is faster" if is_slower else "Why it won"
    return f"{heading}. {_losses(usual)}"


def _losses(time: PlanTime) -> str:
    """Say in which parts most of the time is lost."""
    runs = f"{time.runs} runs" if time.runs > 1 else "one run"
    doubt = ", all disturbed" if time.disturbed else ", ended early" if time.shortened else ""
    useful = time.part(IDEAL)
    text = (
        f"With {named_role(time.role)} an epoch takes {_with_error(time.epoch_seconds, time.epoch_seconds_error)} s in "
        f"{number_of(time.steps, 'step')} (measured in {runs}{doubt}), of which "
        f"{useful.seconds / time.epoch_seconds:.1%} is useful work."
    )
    first, second, *_ = time.causes
    if first.seconds <= 0:
        return text
    # An order is only stated where the errors allow it.
    apart = first.seconds - second.seconds > SIGNIFICANT * math.hypot(first.error, second.error)
    largest = f"The largest loss is {NAMES[first.name]}: {share_text(first, time)} of the time"
    if second.seconds <= 0:
        return f"{text} {largest}."
    order = ", then" if apart else "; within the errors it may also be"
    losses = f"{text} {largest}{order} {NAMES[second.name]}: {share_text(second, time)}."
    rest = time.part(UNEXPLAINED)
    if rest.seconds > max(first.seconds, SIGNIFICANT * rest.error):
        losses += f" Even more is not explained: {share_text(rest, time)}."
    return losses


def _parts_table(times: Sequence[PlanTime]) -> str:
    """Return the parts of one or two plans: useful work, then the losses of the first plan by size, then the rest."""
    first = times[0]
    order = [IDEAL, *(part.name for part in first.causes), UNEXPLAINED]
    order = [name for name in order if is_visible(name, times)]
    rows = [(NAMES[name], *(entry for time in times for entry in _entries(time.part(name), time))) for name in order]
    whole = [entry for time in times for entry in (_with_error(time.epoch_seconds, time.epoch_seconds_error), "100%")]
    columns = [column for time in times for column in (f"{time.role} s", "share")]
    shown = table(("part of an epoch", *columns), [*rows, ("whole", *whole)])
    note = useful_work_note(times[0], times[-1])
    return "\n".join((shown, "", *(_legend(name, times) for name in order), *([note] if note else [])))


def is_visible(name: str, times: Sequence[PlanTime]) -> bool:
    """Return whether a part of the time is more than 0.0 % of one of the plans."""
    return any(abs(time.part(name).seconds) >= _LEAST_SHOWN * time.epoch_seconds for time in times)


def _legend(name: str, times: Sequence[PlanTime]) -> str:
    """Say what a part is, and how it is known."""
    bases = dict.fromkeys(BASES[time.part(name).basis] for time in times)
    return f"- {NAMES[name]}: {MEANINGS[name]} ({'; '.join(bases)})"


def _entries(part: TimePart, time: PlanTime) -> tuple[str, str]:
    return _with_error(part.seconds, part.error), share_text(part, time)


def _changes(best: BestPlan, why: Explanation) -> str:
    usual, winner = why.of_usual, why.winner
    if usual is None or usual.plan_id == winner.plan_id or not why.changes:
        return ""
    gain, error = _gain(best, usual, winner)
    together = (
        _with_error(winner.epoch_seconds, winner.epoch_seconds_error),
        f"{gain:.2f} +- {error:.2f}",
        f"{winner.peak_bytes / _MEBI:,.0f}",
        "measured",
    )
    names = [_change_name(effect, usual.plan) for effect in why.changes]
    if [effect.plan.id for effect in why.changes] == [winner.plan_id]:
        rows = [(*names, *together)]
    else:
        rows = [*map(_change_row, why.changes, names), ("all together", *together)]
    return table((f"change of {usual.role}", "epoch s", "gain", "peak MiB", "known"), rows)


def _change_name(effect: ChangeEffect, usual: Plan) -> str:
    """Name what differs from the baseline: layout and split go together, but may not both differ."""
    if effect.change == "recompute":  # as far as the memory needs it without the other changes
        return f"recompute alone ({plan_parts(effect.plan)['recompute']})"
    if effect.change != "split":
        return f"{effect.change} alone"
    names = {"layout": effect.plan.layout != usual.layout, "split": effect.plan.boundaries != usual.boundaries}
    return f"{' and '.join(name for name, differs in names.items() if differs)} alone"


def _gain(best: BestPlan, usual: PlanTime, winner: PlanTime) -> tuple[float, float]:
    """Return (how much faster the winner is than the usual settings, standard error), as the baselines say."""
    for baseline in best.baselines:
        if baseline.role == usual.role:
            return baseline.gain, baseline.gain_error
    # A plan whose runs all ended early has no rank, so it is not among them.
    gain = usual.epoch_seconds / winner.epoch_seconds
    return gain, gain * math.hypot(
        usual.epoch_seconds_error / usual.epoch_seconds, winner.epoch_seconds_error / winner.epoch_seconds
    )


def _change_row(effect: ChangeEffect, name: str) -> tuple[str, ...]:
    peak = f"{effect.peak_bytes / _MEBI:,.0f}"
    known = f"measured, {effect.plan.id}" if effect.measured else "predicted"
    if not effect.fits:
        return name, "-", "-", peak, "does not fit the memory"
    seconds = _with_error(effect.epoch_seconds, effect.epoch_seconds_error)
    return name, seconds, f"{effect.gain:.2f} +- {effect.gain_error:.2f}", peak, known


def _memory(why: Explanation, memory_limit_bytes: int) -> str:
    winner, usual = why.winner, why.of_usual
    most = winner.peak_bytes
    stage = winner.stage_peak_bytes.index(most)
    text = (
        f"Memory: its fullest stage, {stage}, needs {most / _MEBI:,.0f} MiB of {memory_limit_bytes / _MEBI:,.0f} MiB "
        f"({most / memory_limit_bytes:.0%})"
    )
    if usual is None or usual.plan_id == winner.plan_id:
        return text
    more = (most - usual.peak_bytes) / _MEBI
    return f"{text}, {abs(more):,.0f} MiB {'more' if more >= 0 else 'less'} than with {named_role(usual.role)}"


def _ways(why: Explanation) -> str:
    """Say how fast the best plans are that fit the memory in one way each."""
    ways = [
        f"{_WAYS[effect.change]} ({layout_name(effect.plan.layout)}) "
        f"{1 / effect.gain:.2f} +- {effect.gain_error / effect.gain**2:.2f}"
        for effect in why.ways
    ]
    if not ways:
        return ""
    return f"Ways to fit its packs into the memory, as times of its epoch, predicted: {', '.join(ways)}"


def _payback(best: BestPlan, why: Explanation) -> str:
    # A current plan without a whole run has no gain.
    current = [each for each in why.plans if each.role == Role.CURRENT_PLAN and not each.shortened]
    others = dict[str, PlanTime]()
    for each in (why.of_usual, *(each for each in current if each.plan_id != why.winner.plan_id)):
        if each is not None:
            others.setdefault(each.plan_id, each)
    return "\n".join(_paid_back(best, other, why.winner) for other in others.values())


def _paid_back(best: BestPlan, usual: PlanTime, winner: PlanTime) -> str:
    gain = (1.0, 0.0) if usual.plan_id == winner.plan_id else _gain(best, usual, winner)
    return payback_text(best, usual.role, gain, winner.epoch_seconds, winner.steps)


def _further(why: Explanation, workload: Workload) -> str:
    """Say what is left of the winner's losses, and what would reduce them."""
    lines = list(_advice(why, workload))
    return "\n".join(("What would help further:", *lines)) if lines else ""


def _advice(why: Explanation, workload: Workload) -> Iterator[str]:
    winner = why.winner
    advice = _ADVICE | {
        "loading": _DECODE_AHEAD if workload.hardware.spare_cores() else _NO_CORE,
        "padding": _PACK if isinstance(winner.plan.packing, Padded) else _LARGER_PACKS,
    }
    large = [
        part
        for part in winner.causes
        if part.seconds > max(_WORTH_ADVICE * winner.epoch_seconds, SIGNIFICANT * part.error)
    ]
    if winner.plan.layout.tensor > 1 or max(winner.plan.packing.degrees) > 1:
        advice["data_imbalance"] = _LARGER_PARTS
    for part in large[:_MOST_ADVICE]:
        what = advice.get(part.name) or _more_memory(why.further, workload.memory_limit_bytes)
        yield f"- {NAMES[part.name]}, {share_text(part, winner)} of the time: {what}"


def _more_memory(further: Sequence[ChangeEffect], memory_limit_bytes: int) -> str:
    if not further:
        return "more memory per rank"
    (effect,) = further
    gain = f"{effect.gain:.2f} +- {effect.gain_error:.2f} times as fast"
    if effect.peak_bytes > memory_limit_bytes:
        # Not less than it needs, and no promise of a search there, which leaves some memory free.
        least = math.ceil(effect.peak_bytes / _MEBI)
        return f"these packs need {least:,} MiB per rank to recompute nothing: {gain}, predicted"
    return f"recomputing nothing may just fit, at {effect.peak_bytes / _MEBI:,.0f} MiB: {gain}, predicted"


def _with_error(seconds: float, error: float) -> str:
    digits = 1 if abs(seconds) < 1000 else 0
    # z: no minus sign before a part that is rounded to 0.
    return f"{seconds:z,.{digits}f} +- {error:,.{digits}f}"


def share_text(part: TimePart, time: PlanTime) -> str:
    """Return the share of an epoch that a part takes, with its error."""
    return f"{part.seconds / time.epoch_seconds:z.1%} +- {part.error / time.epoch_seconds:.1%}"
