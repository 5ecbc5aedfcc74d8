"""Variants of a job's data, as a table for people and as a document for programs."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autotune.forecast.model_settings import settings_text
from autotune.forecast.what_if import Variant, WhatIf
from autotune.plan_text import plan_text
from autotune.results.text_table import table
from trials import wire
from trials.data.index import DatasetIndex
from trials.data.indexing import LISTED
from trials.units import number_of, time_text

_MEBI = 1 << 20
_SHOWN_LINES = 5


def what_if_text(found: WhatIf) -> str:
    """Return a table with a column for each variant, the best plans, and the samples that fill most of a pack."""
    now, *_ = found.variants
    # A part of a sample's repeats is a random choice, which counts by its expectation.
    unit = "of an epoch" if not np.any(now.index.repeats % 1) else "of an epoch, about"
    names = [_name(each) for each in found.variants]

    def row(name: str, unit: str, value: Callable[[Variant], float]) -> tuple[str, ...]:
        entries = [f"{value(each):,.0f}" for each in found.variants]
        for number, each in enumerate(found.variants[1:], start=1):
            if value(now) and value(each) != value(now):
                entries[number] += f" ({value(each) / value(now):.2f}x)"
        return (name, unit, *entries)

    rows = [
        row("samples", "of an epoch", lambda each: _samples(each.index)),
        row("lost", "records", lambda each: each.lost),
        row("cut", "records", lambda each: each.packs.material.cut),
        row("text tokens", unit, lambda each: _total(each.index, "text_tokens")),
        row("vision units", unit, lambda each: _total(each.index, "vision_units")),
        row("target tokens", unit, lambda each: _total(each.index, "target_tokens")),
        row("forward passes", "GFLOP, analytic", lambda each: each.operations / 1e9),
        *([] if found.unknown else _forecast_rows(found)),
    ]
    parts = [table(("", "", *names), rows), *_lost(found), *_notes(found), _largest(found)]
    return "\n\n".join(parts)


def what_if_document(found: WhatIf) -> dict[str, Any]:
    """Return the contents of `what_if_text` as JSON values: seconds and bytes; null where they are not forecast."""
    index = found.variants[0].index
    return {
        "corrected_by_trials": found.trials,
        "unknown": found.unknown,
        "variants": [_document(each) for each in found.variants],
        "largest": [
            {
                "where": index.where(int(row)),
                "lengths": [lengths and wire.to_document(lengths) for lengths in _lengths(found, int(row))],
            }
            for row in found.largest
        ],
    }


def _document(variant: Variant) -> dict[str, Any]:
    forecast, report = variant.forecast, variant.packs.material.found
    return {
        "settings": dict(variant.settings),
        "samples": _samples(variant.index),
        "lost": variant.lost,
        "lost_lines": list(variant.lost_lines),
        "cut": variant.packs.material.cut,
        "skipped_lines": report.bad,
        "bad_lines": [str(line) for line in report.bad_lines],
        "text_tokens": _total(variant.index, "text_tokens"),
        "vision_units": _total(variant.index, "vision_units"),
        "target_tokens": _total(variant.index, "target_tokens"),
        "operations": variant.operations,
        "epoch_seconds": forecast and forecast.prediction.epoch_seconds,
        "epoch_seconds_error": forecast and forecast.epoch_seconds_error,
        "peak_bytes": forecast and max(forecast.prediction.stage_bytes),
        "plan": forecast and wire.to_document(forecast.plan),
    }


def _name(variant: Variant) -> str:
    return settings_text(variant.settings) or "now"


def _samples(index: DatasetIndex) -> int:
    return round(float(np.sum(index.repeats)))


def _total(index: DatasetIndex, column: str) -> float:
    """Return the sum of a column over an epoch, which shows samples as often as their file says."""
    return float(np.sum(getattr(index, column) * index.repeats))


def _forecast_rows(found: WhatIf) -> Iterator[tuple[str, ...]]:
    now = found.variants[0].forecast
    seconds, peaks = ["time of an epoch", "predicted"], ["peak of a device", "MiB, predicted"]
    for each in found.variants:
        if each.forecast is None:
            seconds.append("no plan fits")
            peaks.append("-")
            continue
        prediction = each.forecast.prediction
        ratio = f" ({prediction.epoch_seconds / now.prediction.epoch_seconds:.2f}x)" if now and each.settings else ""
        seconds.append(f"{time_text(prediction.epoch_seconds)}{ratio}")
        peaks.append(f"{max(prediction.stage_bytes) / _MEBI:,.0f}")
    yield tuple(seconds)
    yield tuple(peaks)


def _lost(found: WhatIf) -> Iterator[str]:
    for each in found.variants:
        if each.lost:
            hidden = each.lost - len(shown := each.lost_lines[:_SHOWN_LINES])
            more = [f"and {hidden} more; `--json` lists the first {LISTED}"] if hidden else []
            yield "\n  ".join((f"Lost with {_name(each)}, {number_of(each.lost, 'record')}:", *shown, *more))


def _notes(found: WhatIf) -> Iterator[str]:
    if found.unknown:
        yield f"Seconds and bytes are unknown: {found.unknown}"
        return
    corrected = f", corrected by {number_of(found.trials, 'trial')}" if found.trials else ""
    plans = (f"  {_name(each)}: {plan_text(each.forecast.plan)}" for each in found.variants if each.forecast)
    yield "\n".join((f"Best plans, from the profile of the layers{corrected}:", *plans))


def _largest(found: WhatIf) -> str:
    index = found.variants[0].index
    rows = []
    for row in map(int, found.largest):
        shown = (
            f"{lengths.vision_units} + {lengths.text_tokens}" if lengths else "lost" for lengths in _lengths(found, row)
        )
        rows.append((index.where(row), *shown))
    title = "The samples that fill most of a pack, which set its capacities and the peak (vision units + text tokens):"
    return f"{title}\n{table(('', *map(_name, found.variants)), rows)}"


def _lengths(found: WhatIf, row: int) -> Iterator[Any]:
    """Yield the lengths of a sample of the job under each variant; None where it is lost."""
    record = found.variants[0].index.record[row]
    for each in found.variants:
        rows = np.flatnonzero(each.index.record == record)
        yield each.index.lengths(int(rows[0])) if len(rows) else None
