"""Forecasts as a text for people and as a document for programs."""

from collections.abc import Sequence
from typing import Any

from autotune.forecast.forecast import Forecast, Forecaster
from autotune.forecast.gantt import gantt, legend
from autotune.plan_text import plan_text, recompute_text, recomputed_text
from autotune.results.text_table import table
from autotune.results.time_parts import MEANINGS, NAMES
from autotune.search.solver.limits import HEADROOM
from trials import wire
from trials.arrays import Floats
from trials.units import number_of, speed_text

_MEBI = 1 << 20


def forecast_text(forecaster: Forecaster, found: Sequence[Forecast]) -> str:
    """Return the devices and data, a table of the plans if there are several, and the first plan in detail."""
    first, *others = found
    sections = [_header(forecaster)]
    if others:
        rows = [
            (
                forecast.plan.id,
                _epoch_seconds(forecast),
                speed_text(forecast.predicted_samples_per_second),
                f"{forecast.prediction.idle_share:.1%}",
                f"{max(forecast.prediction.stage_bytes) / _MEBI:,.0f}",
                plan_text(forecast.plan),
            )
            for forecast in found
        ]
        plans = table(("plan", "epoch s", "samples/s", "idle", "most MiB", ""), rows)
        sections.append(f"{plans}\nThe solver leaves {1 - HEADROOM:.0%} of the memory free, since predictions err")
    timeline, steps = first.timeline, len(first.prediction.step_seconds)
    where = f", data rank {timeline.data_rank}" if first.plan.layout.data > 1 else ""
    step = f"A typical step, {timeline.step + 1} of {steps}{where}, {timeline.seconds:.3g} s"
    sections += [_plan(first), _parts(first), _stages(first), f"{step}\n{gantt(timeline)}\n{legend(timeline)}"]
    return "\n\n".join(sections)


def forecast_document(forecaster: Forecaster, found: Sequence[Forecast]) -> dict[str, Any]:
    """Return the forecasts as JSON values: seconds, bytes, and shares of 1."""
    cluster = forecaster.cluster
    return {
        "model": wire.to_document(forecaster.shape),
        "samples": forecaster.workload.data.samples,
        "skipped_lines": forecaster.report.bad,
        "global_batch_samples": forecaster.job.training.global_batch_samples,
        "devices": {"name": cluster.name, "count": cluster.devices, "memory_limit_bytes": cluster.memory_limit_bytes},
        "measured": cluster.measured,
        "extrapolated": list(cluster.extrapolated),
        "corrected_by_trials": forecaster.trials,
        "layer_residual": cluster.costs.residual,
        "plans": [_document(forecast) for forecast in found],
    }


def _document(forecast: Forecast) -> dict[str, Any]:
    prediction, timeline = forecast.prediction, forecast.timeline
    return {
        "id": forecast.plan.id,
        "plan": wire.to_document(forecast.plan),
        "epoch_seconds": prediction.epoch_seconds,
        "epoch_seconds_error": forecast.epoch_seconds_error,
        "predicted_samples_per_second": forecast.predicted_samples_per_second,
        "idle_share": prediction.idle_share,
        "parts": forecast.parts,
        "batch_deviation": prediction.batch_deviation,
        "keeps_batch": forecast.keeps_batch,
        "fits": forecast.fits,
        "stages": [
            {"idle_share": idle, **wire.to_document(memory)}
            for idle, memory in zip(prediction.stage_idle, prediction.stage_memory, strict=True)
        ],
        "step": {
            "number": timeline.step,
            "data_rank": timeline.data_rank,
            "seconds": timeline.seconds,
            "forward": _rounded(timeline.forward),
            "backward": _rounded(timeline.backward),
            **({} if timeline.weights is None else {"weights": _rounded(timeline.weights)}),
            "update": _rounded(timeline.update),
        },
    }


def _rounded(times: Floats) -> Any:
    """Return times rounded to microseconds, [micro-batches, stages, (begin, end)]; the update has no micro-batches."""
    return times.round(6).tolist()


def _header(forecaster: Forecaster) -> str:
    cluster, shape = forecaster.cluster, forecaster.shape
    trials = forecaster.trials
    corrected = number_of(trials, "trial") if trials else "no trials"
    lines = [
        f"{shape.name} in {shape.dtype} on {cluster.profiled.hardware.resized(cluster.devices)}, limit "
        f"{cluster.memory_limit_bytes / _MEBI:,.0f} MiB per rank; "
        f"{number_of(forecaster.workload.data.samples, 'sample')} an epoch, global batch "
        f"{forecaster.job.training.global_batch_samples}",
        f"Measured: {cluster.measured}; fitted with a median error of {cluster.costs.residual:.1%}",
        f"Corrected by {corrected}; +- is the standard error",
        *(f"Extrapolated: {what}" for what in cluster.extrapolated),
    ]
    if cluster.costs.noisy_kinds:
        lines.append(f"Noisy in the profile: {', '.join(cluster.costs.noisy_kinds)}; profile again on an idle machine")
    return "\n".join(lines)


def _epoch_seconds(forecast: Forecast) -> str:
    return f"{forecast.prediction.epoch_seconds:.1f} +- {forecast.epoch_seconds_error:.1f}"


def _plan(forecast: Forecast) -> str:
    prediction = forecast.prediction
    lines = [
        f"Plan {forecast.plan.id}",
        f"  {plan_text(forecast.plan)}",
        f"  epoch {_epoch_seconds(forecast)} s in {number_of(len(prediction.step_seconds), 'step')}, "
        f"{speed_text(forecast.predicted_samples_per_second)} samples/s, idle {prediction.idle_share:.1%}",
    ]
    if forecast.exceeds_host:
        lines.append(
            "  DOES NOT FIT: a rank is expected to offload more than the host has for it; offload fewer layers"
        )
    elif not forecast.fits:
        lines.append("  DOES NOT FIT: a stage is expected to need more than the limit; recompute more layers")
    if not forecast.keeps_batch:
        lines.append(
            f"  MISSES THE BATCH: its steps are off by {prediction.batch_deviation:.1%} of the global batch; "
            f"a search runs plans within training.batch_tolerance"
        )
    return "\n".join(lines)


def _parts(forecast: Forecast) -> str:
    whole = forecast.prediction.epoch_seconds
    # z: no minus sign before a part that is rounded to 0.
    rows = [
        (NAMES[name], f"{seconds:z.2f}", f"{seconds / whole:z.1%}", MEANINGS[name])
        for name, seconds in forecast.parts.items()
    ]
    return table(("part of the epoch", "seconds", "share", "what it is"), rows)


def _stages(forecast: Forecast) -> str:
    prediction, limit, layout = forecast.prediction, forecast.memory_limit_bytes, forecast.plan.layout
    rows = [
        (
            str(number),
            f"{stage.vision}v+{stage.language}l",
            "; ".join(map(recomputed_text, stage.recomputed)),
            f"{idle:.1%}",
            f"{memory.expected / _MEBI:,.0f}",
            f"{memory.low / _MEBI:,.0f} to {memory.high / _MEBI:,.0f}",
            f"{memory.expected / limit:.0%}",
            f"{memory.static / _MEBI:,.0f}",
            *([] if layout.offload == "none" else [f"{memory.host / _MEBI:,.0f}"]),
        )
        for number, (stage, idle, memory) in enumerate(
            zip(forecast.plan.stages, prediction.stage_idle, prediction.stage_memory, strict=True)
        )
    ]
    header = ["stage", "layers", recompute_text(layout), "idle", "peak MiB", "range", "of limit", "static MiB"]
    return table([*header, *([] if layout.offload == "none" else ["host MiB"])], rows)
