"""Chart of the causes of the time of an epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.report.charts.chart import (
    PAPER,
    Chart,
    ChartBasis,
    Row,
    Spec,
    Table,
    boxes,
    category,
    coloured,
    number,
    spec,
    tooltip,
)
from autotune.report.charts.quantities import PLUS_MINUS, percent_text, seconds_text
from autotune.report.sides import ComparedPlan
from autotune.report.simulation import Simulated
from autotune.results.time_parts import BASES, MEANINGS, NAMES, useful_work_note
from storage.explanation import UNEXPLAINED, PlanTime

_COLOURS = {
    "ideal": "var(--green)",
    "padding": "var(--brown)",
    "recompute": "var(--purple)",
    "loading": "var(--yellow)",
    "stage_imbalance": "var(--orange)",
    "data_imbalance": "var(--red)",
    "bubble": "var(--pink)",
    "communication": "var(--blue)",
    "optimizer": "var(--grey)",
    "unexplained": "var(--faint)",
}
_ROUNDING = 1e-6
"""Share of an epoch that the sum of its parts may differ from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One part of the bar of a plan."""

    side: str
    name: str
    seconds: float
    error: float | None
    """Standard error; None if unknown."""
    share: float
    """Share of the epoch's time."""
    basis: str

    @property
    def error_text(self) -> str:
        return "unknown" if self.error is None else f"{PLUS_MINUS} {seconds_text(self.error)}"

    @property
    def row(self) -> Row:
        return {
            "plan": self.side,
            "part": NAMES[self.name],
            "what": MEANINGS[self.name],
            "known": self.basis,
            "seconds": round(self.seconds, 4),
            "error": self.error_text,
            "share": round(self.share, 4),
            # Vega-Lite would stack the parts by name.
            "order": list(_COLOURS).index(self.name),
        }

    @property
    def line(self) -> tuple[str, ...]:
        amounts = seconds_text(self.seconds), self.error_text, percent_text(self.share)
        return (self.side, NAMES[self.name], *amounts, self.basis, MEANINGS[self.name])


def is_known(side: ComparedPlan) -> bool:
    """Return whether the causes of the plan's time are measured or simulated."""
    return side.time is not None or isinstance(side.simulated, Simulated)


def causes(found: Sequence[ComparedPlan]) -> Chart:
    """Chart the seconds of an epoch by cause, a row for each plan: as trials explain them, else as predicted.

    The causes of all sides are known.
    """
    parts = [part for side in found for part in _parts(side)]
    colours = {NAMES[name]: colour for name, colour in _COLOURS.items() if any(part.name == name for part in parts)}
    return Chart(
        id="causes",
        title="Where the time of an epoch goes",
        text=" ".join(_text(found, parts)),
        summary="; ".join(f"{plan}: {part} {seconds} ({share})" for plan, part, seconds, _, share, *_ in _lines(parts)),
        basis=_basis(found),
        spec=_spec([part.row for part in parts], len(found), colours),
        legend=boxes(colours),
        table=Table(
            header=("plan", "part", "time of an epoch", "error", "share", "how it is known", "meaning"),
            rows=_lines(parts),
        ),
    )


def _lines(parts: Sequence[_Part]) -> tuple[tuple[str, ...], ...]:
    return tuple(part.line for part in parts)


def _parts(side: ComparedPlan) -> Iterator[_Part]:
    """Yield the parts of a plan's time, from the explanation if it has them."""
    if side.time is not None:
        for part in side.time.parts:
            yield _Part(
                side=side.key,
                name=part.name,
                seconds=part.seconds,
                error=part.error,
                share=part.seconds / side.time.epoch_seconds,
                basis=BASES[part.basis],
            )
        return
    assert isinstance(side.simulated, Simulated)
    prediction = side.simulated.prediction
    totals, whole = prediction.breakdown.totals, prediction.epoch_seconds or 1.0
    if abs(rest := whole - sum(totals.values())) > _ROUNDING * whole:  # what trials took besides the simulated schedule
        totals |= {UNEXPLAINED: rest}
    for name, seconds in totals.items():
        yield _Part(
            side=side.key,
            name=name,
            seconds=seconds * side.simulated.epoch_factor,
            error=None,
            share=seconds / whole,
            basis=BASES["predicted"],
        )


def _basis(found: Sequence[ComparedPlan]) -> ChartBasis:
    measured = [side.time is not None for side in found]
    return "measured" if all(measured) else "measured and predicted" if any(measured) else "predicted"


def _text(found: Sequence[ComparedPlan], parts: Sequence[_Part]) -> Iterator[str]:
    yield (
        "Only the green part is the work that the samples need. Everything else is waste, of which a plan can save "
        "some: padding, layers that are computed again, and ranks that wait for each other."
    )
    if times := [side.time for side in found if side.time is not None]:
        yield f"A measured bar as a whole is measured, its parts are known as follows: {_known(parts)}."
        if note := useful_work_note(times[0], times[-1]):
            yield note
    if any(part.seconds < 0 for part in parts):
        yield "A part below zero is what the simulation takes longer than the measured steps."
    yield f"{'; '.join(map(_compared, found))}.".capitalize()


def _known(parts: Sequence[_Part]) -> str:
    """Say which parts are known in which way."""
    names: dict[str, dict[str, None]] = {}
    for part in parts:
        if part.error is not None and part.seconds:
            names.setdefault(part.basis, {})[NAMES[part.name]] = None
    return "; ".join(f"{', '.join(several)}: {basis}" for basis, several in names.items())


def _compared(side: ComparedPlan) -> str:
    """Compare the measured seconds of an epoch with the predicted ones."""
    words = []
    if isinstance(side.simulated, Simulated):
        predicted = side.simulated.prediction.epoch_seconds * side.simulated.epoch_factor
        words.append(f"{seconds_text(predicted)} predicted")
    if side.time is not None:
        words.append(_measured(side.time))
    else:
        words.append("not measured" if side.epoch_seconds is None else f"{seconds_text(side.epoch_seconds)} by trials")
    return f"{side.key}: {', '.join(words)}"


def _measured(time: PlanTime) -> str:
    runs = f"{time.runs} runs" if time.runs > 1 else "one run"
    doubt = ", all disturbed" if time.disturbed else ", ended early as clearly slower" if time.shortened else ""
    seconds = f"{seconds_text(time.epoch_seconds)} {PLUS_MINUS} {seconds_text(time.epoch_seconds_error)}"
    return f"{seconds} measured in {runs}{doubt}"


def _spec(rows: Sequence[Row], plans: int, colours: dict[str, str]) -> Spec:
    return spec(
        rows,
        height=46 * plans,
        mark={"type": "bar", "stroke": PAPER, "strokeWidth": 0.5},
        encoding={
            "y": category("plan", axis={"labelFontSize": 13}),
            "x": number("seconds", "seconds of an epoch", stack="zero"),
            "order": {"field": "order", "type": "ordinal"},
            "color": coloured("part", colours),
            "tooltip": tooltip(
                ("plan", "plan"),
                ("part", "part"),
                ("what", "meaning"),
                ("seconds", "seconds", ".4~g"),
                ("error", "standard error"),
                ("share", "share", ".1%"),
                ("known", "known"),
            ),
        },
    )
