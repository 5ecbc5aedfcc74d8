"""Where the numbers of a tool's result come from, and which parts are too long for an assistant."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

_MEASURED, _PREDICTED, _ANALYTIC, _EXACT = "measured", "predicted", "analytic", "exact"
_BY_EITHER = "measured or predicted"
_BY_BASIS, _BY_MEASURED, _BY_ORIGIN = "field basis", "field measured", "field origin"
ORIGINS = {
    _MEASURED: "by trials, or by trainings, on real devices",
    _PREDICTED: "fitted from a profile of a device, and corrected by trials where there are some; nothing was run",
    _ANALYTIC: "from the sizes of the model and the data sheet of a device; nothing was run",
    _EXACT: "set, counted, read, or computed without an estimate",
    _BY_EITHER: "by runs or by predictions that trials have corrected, whichever is lower",
    _BY_BASIS: "as the field `basis` of the same object says; what is simulated or predicted was not measured",
    _BY_MEASURED: "measured where the field `measured` of the same object is true, else predicted",
    _BY_ORIGIN: "predicted, from measured layers or from a data sheet, as the field `origin` of the same object says",
}
"""Origins of numbers, and what they mean."""

_GIVEN = {
    **dict.fromkeys(("plan", "model", "data", "workload", "hardware", "software", "settings", "seed"), _EXACT),
    **dict.fromkeys(("samples", "skipped_lines", "devices"), _EXACT),
}
_STUDIES = {
    **_GIVEN,
    **dict.fromkeys(("parameters", "number", "steps", "runs", "stage", "data_rank", "tensor_rank", "rank"), _EXACT),
    **dict.fromkeys(("text_tokens", "vision_units", "limit_bytes", "first_step", "last_step"), _EXACT),
    **dict.fromkeys(("evidence", "validity", "distance", "differences"), _EXACT),
    "corrected": _MEASURED,
    "confidence": _BY_EITHER,
    "with_predictions": _PREDICTED,
}
_ORIGINS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    **dict.fromkeys(("plans", "show", "compare", "studies", "tune"), (_MEASURED, _STUDIES)),
    "launch": (
        _MEASURED,
        dict.fromkeys(
            ("commands", "step", "steps", "model_step", "speeds_since", "of", "samples", "blank_samples"), _EXACT
        ),
    ),
    "predict": (
        _PREDICTED,
        {**_GIVEN, **dict.fromkeys(("global_batch_samples", "corrected_by_trials", "number", "data_rank"), _EXACT)},
    ),
    "recommend": (
        _ANALYTIC,
        {**_GIVEN, **dict.fromkeys(("memory_limit_bytes", "deadline_seconds", "corrected_by_trials"), _EXACT)},
    ),
    "pack": (
        _EXACT,
        {
            **dict.fromkeys(("cost", "cost_per_sample", "cost_efficiency", "step_cost_efficiency"), _ANALYTIC),
            **dict.fromkeys(("cost_model", "operations", "forward_flops_per_sample"), _ANALYTIC),
            **dict.fromkeys(("epoch_seconds", "epoch_seconds_error", "peak_bytes"), _PREDICTED),
        },
    ),
    "doctor": (_EXACT, {}),
}
"""Origin of the numbers of each tool, and of those under some keys."""

_LONG = {
    "plans": {"explanation", "histogram", "pareto"},
    "studies": {"explanation", "histogram", "measurement", "pareto"},
    "show": {"histogram"},
    "compare": {"histogram", "measurement", "winner"},
    "tune": {"histogram"},
    "predict": {"forward", "backward", "weights", "update"},
}
"""Keys of parts that are left out: what another tool says of one plan, and the times of each pass."""

SCHEMA = {"type": "object", "required": ["result", "provenance", "left_out", "notes"]}
"""JSON Schema of an answer."""


def answer(tool: str, result: Mapping[str, Any], notes: Collection[str]) -> dict[str, Any]:
    """Return the result of a tool with the origins of its numbers; of keys, only those that it has."""
    long = _LONG.get(tool, set())
    kept = _without(result, long)
    keys, (origin, others) = _keys(kept), _ORIGINS[tool]
    here = {key: each for key, each in others.items() if key in keys}
    here |= {place: said for place, each in _objects(kept) if (said := _said(each))}
    return {
        "result": kept,
        "provenance": {
            "numbers": origin,
            "except": here,
            "meanings": {each: ORIGINS[each] for each in (origin, *here.values())},
        },
        "left_out": sorted(_keys(result) & long),
        "notes": list(dict.fromkeys(notes)),
    }


def _objects(value: object, place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each object of a result, behind the two innermost keys that lead to it: `a.b`."""
    match value:
        case Mapping():
            yield place, value
            for key, inner in value.items():
                yield from _objects(inner, f"{place.rpartition('.')[2]}.{key}")
        case list():
            for inner in value:
                yield from _objects(inner, place)


def _keys(value: object) -> set[str]:
    return {key for _, each in _objects(value) for key in each}


def _said(value: Mapping[str, Any]) -> str | None:
    """Return the origin of the numbers of an object that says itself how it is known."""
    kinds = {"basis": (str, _BY_BASIS), "measured": (bool, _BY_MEASURED), "origin": (str, _BY_ORIGIN)}
    return next((said for key, (kind, said) in kinds.items() if isinstance(value.get(key), kind)), None)


def _without(value: Any, long: Collection[str]) -> Any:
    match value:
        case Mapping():
            return {key: _without(inner, long) for key, inner in value.items() if key not in long}
        case list():
            return [_without(inner, long) for inner in value]
    return value
