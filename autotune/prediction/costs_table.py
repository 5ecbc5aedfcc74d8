"""Layer costs as a table for people and as a document for programs."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.dimensions.averages import average_of_all
from autotune.prediction.columns import holding_all, of_kind
from autotune.prediction.curves import Curves
from trials import wire
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, Coefficients, LayerKind
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.units import number_of
from trials.workload import DataProfile

_KIBI = 1 << 10
_SECONDS = ("forward_seconds", "backward_seconds", "recompute_seconds")
_TYPICAL_SAMPLES = 4
"""As many as in OmniBal's unpacked micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalPack:
    """A pack of mean samples of the data, for which costs are shown."""

    samples: int
    units: float
    tokens: float
    squares: float
    targets: float

    @classmethod
    def of(cls, data: DataProfile) -> "TypicalPack":
        units, tokens = data.vision_units / data.samples, data.text_tokens / data.samples
        count = _TYPICAL_SAMPLES
        return cls(
            samples=count,
            units=count * units,
            tokens=count * tokens,
            squares=count * tokens**2,
            targets=count * tokens * data.target_share,
        )

    @property
    def columns(self) -> Floats:
        return np.array((self.units, self.tokens, self.squares, 1.0, self.targets))

    def cost(self, coefficients: Coefficients, kind: LayerKind | None = None) -> float:
        """Return the cost of a layer of this kind, or of loading and other work outside of layers."""
        return float(self.columns @ (of_kind(kind, coefficients) if kind else (*coefficients, 0.0)))

    def seconds(self, costs: LayerCosts, kind: LayerKind) -> tuple[float, float, float]:
        """Return the (forward, backward, recompute) seconds of one layer."""
        cost, curve = costs[kind], self._curve(costs, kind)
        forward, backward, again = (
            curve * self.cost(each, kind)
            for each in (cost.forward_seconds, cost.backward_seconds, cost.recompute_seconds)
        )
        return forward, backward, again

    def kept_bytes(self, costs: LayerCosts, kind: LayerKind) -> float:
        """Return the bytes that one layer keeps; of the head, those that it holds at once."""
        targets = float(holding_all(np.array(self.targets), costs["head"]))
        return replace(self, targets=targets).cost(costs[kind].kept_bytes, kind)

    def selective_seconds(self, costs: LayerCosts, kind: LayerKind) -> float:
        """Return the seconds in which one layer is recomputed selectively."""
        return self._curve(costs, kind) * self.cost(costs[kind].selective_seconds, kind)

    def _curve(self, costs: LayerCosts, kind: LayerKind) -> float:
        return float(Curves(costs).at(self.columns[None])[0, KINDS.index(kind)])

    def exchange_seconds(self, exchange: Exchange) -> float:
        """Return the seconds in which ranks exchange for one layer, in both passes."""
        sizes = {size: getattr(self, size) / exchange.ranks for size in ("units", "tokens", "squares")}
        part = replace(self, **sizes)
        return part.cost(exchange.forward_seconds) + part.cost(exchange.backward_seconds)


def costs_document(costs: LayerCosts, pack: TypicalPack) -> dict[str, Any]:
    """Return the costs as JSON values, also evaluated for the typical pack."""
    at_typical = {
        kind: {
            **dict(zip(_SECONDS, pack.seconds(costs, kind), strict=True)),
            "kept_bytes": pack.kept_bytes(costs, kind),
            "selective_seconds": pack.selective_seconds(costs, kind),
            "selective_bytes": pack.cost(cost.selective_bytes, kind),
            "noisy": cost.is_noisy,
        }
        for kind, cost in costs.layers
    }
    return {"typical_pack": wire.to_document(pack), "at_typical_pack": at_typical, "costs": wire.to_document(costs)}


def costs_text(costs: LayerCosts, pack: TypicalPack) -> str:
    """Return a line for each kind that the model has, then loading, links, reduction and updates."""
    lines = [
        f"A typical pack has {pack.samples} mean samples: {pack.units:.1f} vision units, {pack.tokens:.0f} text tokens "
        f"with {pack.targets:.0f} targets",
        "",
        f"{'layer':<18}{'forward ms':>11}{'backward ms':>12}{'recompute ms':>13}{'kept KiB':>10}"
        f"{'error':>7}{'noise':>7}",
    ]
    for kind, cost in costs.layers:
        if not cost.parameters:
            continue
        forward, backward, again = (f"{seconds * 1e3:.3f}" for seconds in pack.seconds(costs, kind))
        kept = f"{pack.kept_bytes(costs, kind) / _KIBI:.0f}"
        mark = "  noisy" if cost.is_noisy else ""
        error, noise = f"{cost.seconds_error:.1%}", f"{cost.noise:.0%}"
        lines.append(f"{kind:<18}{forward:>11}{backward:>12}{again:>13}{kept:>10}{error:>7}{noise:>7}{mark}")
    lines.append("")
    for kind, cost in costs.layers:
        if cost.can_select:
            share = pack.cost(cost.selective_bytes, kind) / max(pack.cost(cost.kept_bytes, kind), 1)
            seconds = pack.selective_seconds(costs, kind)
            lines.append(f"selective  {seconds * 1e3:.3f} ms per {kind} layer, which keeps {share:.0%} of its bytes")
    pixels, labels = (pack.cost(each) * 1e3 for each in (costs.loading.pixels_seconds, costs.loading.labels_seconds))
    lines += [
        f"loading    {pixels:.3f} ms, of labels alone {labels:.3f} ms",
        f"link       {_link(costs.link)}",
        f"reduction  {_nanoseconds_per_kibi(average_of_all(costs))}",
    ]
    lines += [
        f"{cost.pipeline} stages x {cost.data} data ranks: link {_link(cost.link)}"
        for cost in costs.communications
        if cost.pipeline > 1 and cost.data > 1  # the line above is of stages alone
    ]
    lines += [
        f"{cost.data} data ranks: a computation hides {cost.hidden_share:.0%} of a reduction in buckets of "
        f"{cost.bucket_bytes >> 10} KiB"
        for cost in costs.communications
        if cost.bucket_bytes
    ]
    lines += [
        f"between nodes, {cost.pipeline} stages x {cost.data} data ranks: link {_link(cost.between)}"
        for cost in costs.communications
        if cost.between
    ]
    lines += [
        f"{each.name:<11}{pack.exchange_seconds(each) * 1e3:.3f} ms per language layer, {each.ranks} ranks"
        for each in costs.exchanges
        if each.layer == "language"
    ]
    lines += [f"{each.name:<11}{_of_bytes(each)}" for each in costs.exchanges if each.layer is None]
    for update in costs.updates:
        sharded = f", {update.data_parallel} data ranks, ZeRO {update.zero}" if update.data_parallel > 1 else ""
        lines.append(f"update     {update.seconds_per_parameter * 1e9:.2f} ns per parameter{sharded}")
    if costs.compile_seconds is not None:
        lines.append(f"compiling  {costs.compile_seconds:.0f} s on each rank, before its first step")
    return "\n".join(lines)


def _of_bytes(exchange: Exchange) -> str:
    """Return the time of each byte, and the ranks whose exchange it is."""
    times = [_nanoseconds_per_kibi(seconds) for seconds in exchange.seconds_per_byte if seconds]
    within = f", {exchange.within} of a node first" if exchange.within > 1 else ""
    stages = f"{exchange.pipeline} stages x " if exchange.pipeline > 1 else ""
    return f"{' and back '.join(times) or '0'}, {stages}{number_of(exchange.ranks, 'rank')}{within}"


def _link(link: LinkCost) -> str:
    return f"{link.latency_seconds * 1e6:.0f} us and {_nanoseconds_per_kibi(link.seconds_per_byte)}"


def _nanoseconds_per_kibi(seconds_per_byte: float) -> str:
    return f"{seconds_per_byte * 1e9 * _KIBI:.1f} ns per KiB"
