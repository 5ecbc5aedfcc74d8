"""What ranks exchange, as a profile would have timed it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trials.costs.coefficients import KINDS, Coefficients
from trials.costs.exchange import Exchange, ExchangeName
from trials.costs.layer_costs import LayerCosts


def exchanging(costs: LayerCosts, *exchanges: Exchange) -> LayerCosts:
    """Return the costs with these exchanges in place of all with their names."""
    kept = without(costs, *(each.name for each in exchanges)).exchanges
    return replace(costs, exchanges=(*kept, *exchanges))


def without(costs: LayerCosts, *names: ExchangeName) -> LayerCosts:
    """Return the costs without exchanges of these names."""
    return replace(costs, exchanges=tuple(each for each in costs.exchanges if each.name not in names))


def named(costs: LayerCosts, name: ExchangeName) -> list[Exchange]:
    return [each for each in costs.exchanges if each.name == name]


def averages(seconds_per_byte: float, ranks: int = 2, *, pipeline: int = 1, within: int = 1) -> Exchange:
    """Return averages of gradients that take so long."""
    return Exchange.of_bytes("average", ranks, 0.0, seconds_per_byte, pipeline=pipeline, within=within)


def copies(out: float, back: float) -> Exchange:
    """Return copies to the host and back that take so long for each byte."""
    return Exchange.of_bytes("copy", 1, out, back)


def around_layers(ranks: int, forward: Coefficients, backward: Coefficients) -> Exchange:
    """Return what tensor ranks exchange for a language layer."""
    return Exchange(
        name="tensor",
        ranks=ranks,
        layer="language",
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=forward,
    )


def of_weights(ranks: int, seconds: Sequence[float], scatter: float) -> Iterator[Exchange]:
    """Yield gathers of a layer of each kind that take so long, and scatters of a byte of gradients."""
    for kind, each in zip(KINDS, seconds, strict=True):
        gather: Coefficients = (0, 0, 0, each)
        backward: Coefficients = (0, 0, 0, 0 if kind == "head" else each)
        yield Exchange(name="gather", ranks=ranks, layer=kind, forward_seconds=gather, backward_seconds=backward)
    yield Exchange.of_bytes("scatter", ranks, 0.0, scatter)
