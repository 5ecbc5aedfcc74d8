"""Plans and trials as text."""

from collections.abc import Collection

from autotune.dimensions.folds import layout_text
from storage.records import FinishedTrial, RunningTrial, TrialRecord
from trials.outcome import Completed, Failed, Outcome, Rejected
from trials.plan import MOST_UNITS, Layout, Levelled, Offload, Packing, Padded, Plan
from trials.stage import Recomputed
from trials.units import number_of, speed_text

_MEBI = 1 << 20
_FREEING: dict[Offload, str] = {
    "none": "recompute",
    "vision": "offload v, recompute l",
    "language": "recompute v, offload l",
    "both": "offload",
}


def plan_text(plan: Plan) -> str:
    """Return one line with layout, split, recompute and packing."""
    parts = plan_parts(plan)
    recompute = "recompute " if plan.layout.offload == "none" else ""
    return f"{parts['layout']}; split {parts['split']}; {recompute}{parts['recompute']}; {parts['packing']}"


def plan_parts(plan: Plan) -> dict[str, str]:
    """Return the text of each part of a plan, by its name."""
    fewer = any(stage.most_deferred is not None for stage in plan.stages)
    deferring = f" deferring {' | '.join(map(str, plan.most_deferred))} packs" if fewer else ""
    once = sum(stage.gathered_once for stage in plan.stages)  # of the one stage that ZeRO 3 has
    gathering = f" gathering {number_of(once, 'layer')} once" if once else ""
    freed = "" if plan.layout.offload == "none" else f"{recompute_text(plan.layout)} "
    return {
        "packing": packing_text(plan.packing),
        "layout": layout_text(plan.layout) + deferring + gathering,
        "split": " | ".join(f"{stage.vision}v+{stage.language}l" for stage in plan.stages),
        "recompute": freed + "; ".join(_recomputed(plan, level) for level in range(len(plan.packing.degrees))),
    }


def recompute_text(layout: Layout) -> str:
    """Return what happens to layers that do not keep what their backward pass needs."""
    return _FREEING[layout.offload]


def _recomputed(plan: Plan, level: int) -> str:
    """Return the recomputed layers of the stages for packs of a level."""
    levels = [stage.recomputed[level] for stage in plan.stages]
    text = " | ".join(map(recomputed_text, levels))
    return f"level {level + 1} {text}" if level else text


def recomputed_text(recomputed: Recomputed) -> str:
    """Return the recomputed layers of a stage, then those that are recomputed selectively."""
    whole = f"{recomputed.vision}v+{recomputed.language}l"
    vision, language = recomputed.selective_vision, recomputed.selective_language
    return f"{whole} and {vision}v+{language}l selectively" if vision or language else whole


def packing_text(packing: Packing) -> str:
    if isinstance(packing, Padded):
        return f"{number_of(packing.samples, 'sample')}, padded"
    if isinstance(packing, Levelled):
        levels = [f"level {number} {packing_text(each)}" for number, each in enumerate(packing.levels, start=1)]
        return "; ".join([*levels, *(["steps of one level"] if packing.whole_steps else [])])
    relaxed = f"Q'v {_capacity(packing.qv_min)}, Q't {_capacity(packing.qt_min)}"
    shared = f", shared by {packing.sequence} ranks" if packing.sequence > 1 else ""
    return f"packs of Qv {_capacity(packing.qv)}, Qt {_capacity(packing.qt)} ({relaxed}; {packing.packer}){shared}"


def _capacity(units: int) -> str:
    return "unlimited" if units == MOST_UNITS else str(units)


def outcome_text(outcome: Outcome, epoch_seconds: float | None, samples: int) -> str:
    """Return how a trial ended; `samples` are those of an epoch, and the speed is that of the whole epoch.

    The few timed steps may have other samples, so that their own speed would not agree with the seconds.
    """
    speed = f"{speed_text(samples / epoch_seconds)} samples/s" if epoch_seconds else ""
    match outcome:
        case Completed(shortened=True):
            return f"ended early, clearly slower: {speed}"
        case Completed(measurement=measurement):
            return f"epoch {epoch_seconds:.1f} s, {speed}, peak {measurement.peak_bytes / _MEBI:.0f} MiB"
        case Rejected(reason=reason):
            return f"rejected: {reason}"
        case Failed(cause=cause):
            return f"failed: {cause}"


def trial_line(trial: FinishedTrial, samples: int, *, known: bool) -> str:
    """Return the two lines of a trial; `samples` are those of an epoch."""
    prefix = "known" if known else f"trial {trial.number}"
    outcome = outcome_text(trial.result.outcome, trial.result.epoch_seconds, samples)
    disturbed = f"; disturbed: {trial.result.disturbance}" if trial.result.disturbance else ""
    disturbed += "; its result arrived after the trial was given up" if trial.given_up else ""
    return f"{prefix:>9}  {trial.role:<20} {outcome}{disturbed}\n{named_plan(trial.plan)}"


def trial_text(trial: TrialRecord, samples: int, agents: Collection[str]) -> str:
    """Return the two lines of a trial of a study, also without a result.

    `samples` are those of an epoch, and `agents` those that have not ended.
    """
    match trial:
        case FinishedTrial():
            return trial_line(trial, samples, known=False)
        case RunningTrial() if trial.agent_id in agents:
            state = "running, or its process died"
        case RunningTrial():
            state = "ended without a result"
        case _:
            state = "given up"
    return f"trial {trial.number}  {trial.role:<20} {state}\n{named_plan(trial.plan)}"


def named_plan(plan: Plan) -> str:
    """Return the second line of a trial: the plan's ID and text."""
    return f"{'':>11}{plan.id}  {plan_text(plan)}"
