"""A recommendation as a text for people and as a document for programs."""

from itertools import chain
from typing import Any

from autotune.advice.operations import HOST_SECONDS
from autotune.advice.recommendation import DeviceChoice, Origin, Recommendation
from autotune.plan_text import plan_parts, plan_text
from autotune.results.text_table import table
from trials import wire
from trials.plan import Padded
from trials.units import duration_text, number_of, speed_text, time_text

_MEBI = 1 << 20
_LEAST = 0.01
"""Device-hours, or their price, below which a job is too small for its figures to matter."""
_SOURCES: dict[Origin, str] = {
    "measured": "measured, from the profile of the model's layers",
    "measured layers, analytic links": "layers are measured on one device; exchanges are analytic, from the data sheet",
    "analytic": f"analytic, from the data sheet, and {HOST_SECONDS * 1e3:.0f} ms or more for a layer, in which the "
    "host launches its operations, without the time to read and decode images: nothing was measured, which "
    "`autotune profile JOB` does on a device",
}


def recommendation_text(found: Recommendation, price: float | None) -> str:
    """Return the numbers of devices as a table, and the advised one with its plan."""
    training, evaluation = found.job.training, found.job.evaluation
    evaluates = evaluation.samples is not None or evaluation.sources is not None
    most = f", at most {number_of(training.max_steps, 'step')}" if training.max_steps else ""
    head = (
        f"{found.shape.name} in {found.shape.dtype} on {found.device}, limit {_limits(found)} MiB per rank; "
        f"{number_of(found.samples, 'sample')} an epoch, "
        f"{number_of(training.epochs, 'epoch')}{most}, global batch {training.global_batch_samples}"
        f"{'; without the time of evaluations' if evaluates else ''}"
    )
    rows = [_row(found, choice, price) for choice in found.choices]
    names = (
        "devices",
        "epoch",
        "training",
        "samples/s",
        "device-hours",
        *(["price"] if price else []),
        "most MiB",
        "plan",
    )
    return "\n\n".join((head, table(names, rows), _advice(found), _origin(found)))


def _limits(found: Recommendation) -> str:
    """Return the least and the most memory of a rank, in MiB: ranks on a CPU share it."""
    limits = {f"{each.memory_limit_bytes / _MEBI:,.0f}": each.memory_limit_bytes for each in found.choices}
    return " to ".join(dict.fromkeys((min(limits, key=limits.__getitem__), max(limits, key=limits.__getitem__))))


def _row(found: Recommendation, choice: DeviceChoice, price: float | None) -> tuple[str, ...]:
    forecast = choice.forecast
    if forecast is None:
        return (str(choice.devices), *("-" for _ in range(5 if price else 4)), "-", "does not fit")
    plan, hours = forecast.plan, found.device_hours(choice)
    assert not isinstance(plan.packing, Padded)  # as all starts of a space are
    last = plan.packing.levels[-1]
    of_last = [stage.recomputed[-1] for stage in plan.stages]
    freed = sum(each.vision + each.language for each in of_last)
    selectively = sum(each.selective_vision + each.selective_language for each in of_last)
    how = "recomputed" if plan.layout.offload == "none" else "recomputed or offloaded"
    layers = found.shape.vision_layers + found.shape.language_layers
    return (
        str(choice.devices),
        time_text(forecast.prediction.epoch_seconds),
        time_text(found.training_seconds(choice)),
        speed_text(forecast.predicted_samples_per_second),
        _at_least(hours, f"{hours:.3g}"),
        *([_at_least(price * hours, f"{price * hours:.2f}")] if price else []),
        f"{max(forecast.prediction.stage_bytes) / _MEBI:,.0f}",
        f"{plan_parts(plan)['layout']}; packs of {last.qt} tokens; {freed} of {layers} layers {how}"
        f"{f', {selectively} selectively' if selectively else ''}",
    )


def _at_least(value: float, text: str) -> str:
    """Return the text of a value, and for one that shows as nothing how little it is at most."""
    return text if value >= _LEAST else f"<{_LEAST}"


def _advice(found: Recommendation) -> str:
    advised = found.advised
    limit = found.deadline_seconds
    if advised is None or advised.forecast is None:
        fastest = min(found.choices, key=found.training_seconds)
        if fastest.forecast is None:
            return f"No plan fits: {found.choices[-1].why_not}"
        assert limit is not None, "a plan that fits is advised unless it takes too long"
        return (
            f"None of these ends within {duration_text(limit)}: the nearest is {number_of(fastest.devices, 'device')} "
            f"with {duration_text(found.training_seconds(fastest))}"
        )
    why = "The fewest devices that fit" if limit is None else f"The fewest that end within {duration_text(limit)}"
    return f"{why}: {advised.devices}\nPlan {advised.forecast.plan.id}: {plan_text(advised.forecast.plan)}"


def _origin(found: Recommendation) -> str:
    """Say where the numbers come from, and how far off they may be."""
    lines = []
    for origin in dict.fromkeys(each.origin for each in found.choices):
        choices = [each for each in found.choices if each.origin == origin]
        counts = ", ".join(str(each.devices) for each in choices)
        error = f"times may be off by {max(each.relative_error for each in choices):.0%}"
        trials = max(each.trials for each in choices)
        corrected = f", corrected by {number_of(trials, 'trial')}" if trials else ""
        lines.append(f"{counts}: {_SOURCES[origin]}{corrected}; {error}")
        lines += [f"  Not measured: {text}" for text in dict.fromkeys(chain(*(each.extrapolated for each in choices)))]
    sheet = f"Data sheet: {found.sheet.source}" if found.sheet else ""
    profiled = f"Profile: {found.profiled}" if found.profiled else ""
    return "\n".join(filter(None, ("Where the numbers of devices have their times from:", *lines, sheet, profiled)))


def recommendation_document(found: Recommendation, price: float | None) -> dict[str, Any]:
    """Return the recommendation as JSON values: seconds, bytes, and shares of 1."""
    advised = found.advised
    return {
        "model": wire.to_document(found.shape),
        "device": found.device,
        "data_sheet": found.sheet and wire.to_document(found.sheet),
        "profiled": found.profiled,
        "samples": found.samples,
        "skipped_lines": found.skipped_lines,
        "deadline_seconds": found.deadline_seconds,
        "advised_devices": advised.devices if advised else None,
        "choices": [_choice_document(found, choice, price) for choice in found.choices],
    }


def _choice_document(found: Recommendation, choice: DeviceChoice, price: float | None) -> dict[str, Any]:
    forecast = choice.forecast
    if forecast is None:
        return {
            "devices": choice.devices,
            "memory_limit_bytes": choice.memory_limit_bytes,
            "fits": False,
            "why_not": choice.why_not,
        }
    hours = found.device_hours(choice)
    return {
        "devices": choice.devices,
        "memory_limit_bytes": choice.memory_limit_bytes,
        "fits": True,
        "origin": choice.origin,
        "relative_error": choice.relative_error,
        "corrected_by_trials": choice.trials,
        "extrapolated": list(choice.extrapolated),
        "epoch_seconds": forecast.prediction.epoch_seconds,
        "training_seconds": found.training_seconds(choice),
        "predicted_samples_per_second": forecast.predicted_samples_per_second,
        "device_hours": hours,
        "price": None if price is None else price * hours,
        "peak_bytes": max(forecast.prediction.stage_bytes),
        "plan": wire.to_document(forecast.plan),
    }
