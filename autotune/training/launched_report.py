"""The result of a launch as text, and as values for programs."""

from typing import Any

from autotune.results.known_plan import KnownPlan
from autotune.training.full_training import Launched
from trials import wire
from trials.tasks.answer import TrainingReport
from trials.tasks.training.progress import Evaluated, best_evaluation
from trials.units import number_of, speed_text

_LONG_DATA_WAIT = 0.02
"""Share of a training's time above which more workers are worth their cores."""
_TO_GO_ON = "; to go on, raise training.epochs or training.max_steps; to train again, name another training.output"


def launched_document(chosen: KnownPlan, launched: Launched) -> dict[str, Any]:
    """Return the values for programs."""
    last, best = _last_and_best(launched)
    return {
        "plan": chosen.plan.id,
        "steps": launched.report.steps,
        "finished": launched.report.finished,
        "model": None if launched.report.model is None else str(launched.report.model),
        "model_step": launched.model_step,
        "blank_samples": launched.blank_samples,
        "training_samples_per_second": launched.training_samples_per_second,
        "disturbance": launched.disturbance,
        "data_wait_share": launched.data_wait_share,
        "speeds_since": launched.speeds_since,
        "drift": None if launched.drift is None else wire.to_document(launched.drift),
        "retunes": [wire.to_document(each) for each in launched.retunes],
        "promised_samples_per_second": launched.promised_samples_per_second,
        "last_evaluation": wire.to_document(last) if last else None,
        "best_evaluation": wire.to_document(best) if best else None,
    }


def launched_text(chosen: KnownPlan, launched: Launched, workers: int, spare: int) -> str:
    """Return the lines for people; `workers` are the loading processes per rank, which may use `spare` cores."""
    lines = [_steps_text(chosen, launched)]
    if (measured := launched.training_samples_per_second) is not None:
        since = "" if launched.speeds_since is None else f" since step {launched.speeds_since}"
        lines.append(f"Measured {speed_text(measured)} samples/s{since}{_promise_text(chosen, launched, measured)}")
    if launched.disturbance is not None and launched.steps:
        lines.append(f"Disturbed: {launched.disturbance}; on an idle machine the training is faster")
    lines += [retune.text for retune in launched.retunes]
    if launched.drift is not None:
        lines.append(f"Drift: {launched.drift}")
    if (waited := launched.data_wait_share) is not None:
        remedy = f"raise data.workers, now {workers}," if workers < spare else "no core is free"
        remedy = f"; {remedy} to decode images ahead" if waited > _LONG_DATA_WAIT else ""
        lines.append(f"Waited for data in {waited:.1%} of the time{remedy}")
    last, best = _last_and_best(launched)
    if last and best:
        at = "the best" if best == last else f"best {best.evaluation_loss:.3f} after step {best.step}"
        lost = last.blank_samples
        blank = f"; without {number_of(lost, 'sample')} that could not be read, which the logs name" if lost else ""
        lines.append(f"Evaluation loss {last.evaluation_loss:.3f} after step {last.step}, {at}{blank}")
    if launched.report.model is not None:
        lines.append(f"The model is in {launched.report.model}")
    elif not launched.report.finished:
        before = "" if launched.model_step is None else f"; model/ is still that of step {launched.model_step}"
        lines.append(f"The model is written after the last step: a larger --steps, or none, goes on{before}")
    return "\n".join(lines)


def stopped_text(report: TrainingReport, last_step: int | None) -> str:
    """Return the line about a training that was asked to stop; `last_step` is that of the launch, if it has its own."""
    done = report.steps
    # After its last step, a training can only be stopped in the evaluation.
    if report.finished or done == last_step:
        return f"Stopped in the evaluation after step {done}, the last one; the same command makes it"
    return f"Stopped after step {done} with a checkpoint; the same command goes on with step {done + 1}"


def _steps_text(chosen: KnownPlan, launched: Launched) -> str:
    report, steps = launched.report, launched.steps
    if not steps:
        to_go_on = _TO_GO_ON if report.finished else ""
        return f"Nothing was left to train after {number_of(report.steps, 'step')}{to_go_on}"
    to = f", to step {report.steps}," if report.steps != steps else ""
    # A search in between may have changed the plan.
    plan = f"{'at last ' if launched.retunes else ''}with plan {chosen.plan.id}"
    return f"Trained {number_of(steps, 'step')}{to} {plan}"


def _promise_text(chosen: KnownPlan, launched: Launched, measured: float) -> str:
    promised, speed = launched.promised_samples_per_second, chosen.speed
    if promised is None or speed is None:
        return ""
    error = promised * speed.error / speed.mean
    return f", promised {speed_text(promised, error)} for samples of as many tokens ({measured / promised - 1:+.0%})"


def _last_and_best(launched: Launched) -> tuple[Evaluated | None, Evaluated | None]:
    """Return the last evaluation of the training, and the first one with the lowest loss; None where there is none."""
    found = launched.evaluations
    return found[-1] if found else None, best_evaluation(found)
