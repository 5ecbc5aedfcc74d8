"""A chart with its explanation and its table, and the parts of a Vega-Lite specification that charts share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Spec: TypeAlias = dict[str, Any]
Row: TypeAlias = Mapping[str, Any]
ChartBasis: TypeAlias = Literal["measured", "predicted", "measured and predicted"]
Shape: TypeAlias = Literal["box", "line", "diamond"]

# Colours are variables of the page's style sheet, which has values for light, dark and print.
COLOURS = {
    "forward": "var(--blue)",
    "backward": "var(--orange)",
    "weights": "var(--yellow)",
    "update": "var(--grey)",
    "recompute": "var(--purple)",
    "loading": "var(--yellow)",
    "waiting": "var(--faint)",
    "before": "var(--orange)",
    "after": "var(--blue)",
}
PICTURED: Spec = {"orient": "top", "title": None, "labelLimit": 0, "symbolType": "square"}
"""Legend of a picture."""
INK, MUTED, PAPER, LIMIT = "var(--ink)", "var(--muted)", "var(--paper)", "var(--red)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure of the report."""

    id: str
    title: str
    text: str
    """What the chart shows, and how to read it."""
    summary: str
    """The main figures in words, for readers who do not see the chart."""
    basis: ChartBasis
    spec: Spec
    legend: tuple[tuple[str, str, Shape], ...] = ()
    """(label, colour, shape)"""
    table: Table


def spec(rows: Sequence[Row], *, height: int, **parts: Any) -> Spec:
    """Return a specification that is as wide as the page, with its data inside."""
    return {
        "data": {"values": list(rows)},
        "width": "container",
        "height": height,
        **parts,
    }


def count_axis(most: int) -> Spec:
    """Return an axis of whole numbers up to `most`."""
    return {"tickCount": max(1, min(most, 8)), "format": "d"}


def boxes(colours: Mapping[str, str]) -> tuple[tuple[str, str, Shape], ...]:
    """Return a legend of these names and colours."""
    return tuple((name, colour, "box") for name, colour in colours.items())


def number(field: str, title: str | list[str] | None, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def category(field: str, *, order: Sequence[str] | None = None, **more: Any) -> Spec:
    """Return a channel of categories in this order, by default in the order of the rows."""
    return {"field": field, "type": "nominal", "title": None, "sort": None if order is None else list(order), **more}


def coloured(field: str, colours: Mapping[str, str], legend: Spec | None = None) -> Spec:
    """Return a colour channel. In a report its legend is part of the page, where it wraps; a picture gives one."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def tooltip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """Return tooltip lines of (field, title) or (field, title, number format)."""
    return [
        {"field": field, "title": title, **({"type": "quantitative", "format": how[0]} if how else {"type": "nominal"})}
        for field, title, *how in fields
    ]
