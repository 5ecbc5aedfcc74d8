"""Costs of all kinds of layers of a model and of what its ranks exchange, fitted to a profile."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from trials.costs.coefficients import KINDS, NOTHING, Coefficients, LayerKind, Measured, MeasuredCost, SlowCall
from trials.costs.exchange import Exchange, ExchangeName
from trials.costs.layer import LayerCost
from trials.costs.profiled_sizes import ProfiledSizes
from trials.plan import ZeroStage
from trials.units import check_measured


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost(MeasuredCost):
    """Sending a pack's states to the next stage; both are 0 where there is one rank."""

    latency_seconds: Measured
    """Time of all messages that announce the states."""
    seconds_per_byte: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCost(MeasuredCost):
    """Messages between the stages of one layout, and averages of gradients that run while its ranks compute."""

    pipeline: int
    data: int
    link: LinkCost
    """Link of the slowest stage to the next one, inside a node where both are on one; 0 with one stage."""
    between: LinkCost | None = None
    """Link of the slowest stage to the next one on another node; None where all stages are on one node."""
    bucket_bytes: int = 0
    """Least bytes of gradients to average at once during a computation; 0 where that was not timed."""
    hidden_share: Annotated[Measured, Field(le=1)] = 0.0
    """Share of averages in such buckets that a computation of the same length hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost(MeasuredCost):
    """Reading and encoding a pack on the stages that need it, as coefficients like those of `LayerCost`."""

    pixels_seconds: Coefficients = NOTHING
    """Seconds on the first stage, which decodes the images."""
    labels_seconds: Coefficients = NOTHING
    """Seconds on the last stage, when it is not also the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost(MeasuredCost):
    """The optimizer's step, with the engine's work around it except averaging gradients."""

    zero: ZeroStage
    data_parallel: int
    """Number of ranks on which it was measured; 1 is without ZeRO."""
    seconds_per_parameter: Measured
    """Seconds on every rank for each parameter of its stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of all kinds of layers of one model on one kind of hardware."""

    layers: tuple[tuple[LayerKind, LayerCost], ...]
    loading: LoadCost
    link: LinkCost
    """Sending in layouts that were not timed."""
    updates: tuple[UpdateCost, ...]
    """The cost on a single rank comes first."""
    residual: Measured
    """Median relative error of the fitted forward and backward times on the profiled sizes."""
    communications: tuple[CommunicationCost, ...] = ()
    """The layouts that were timed."""
    exchanges: tuple[Exchange, ...] = ()
    """All that was timed; with one rank, copies alone."""
    of_node: int = 0
    """Ranks on each of several nodes; 0 where all were on one."""
    compile_seconds: Measured | None = None
    """Seconds in which a rank compiles layers of all kinds; None where layers were not compiled."""
    slow_calls: tuple[SlowCall, ...] = ()
    kept_states: tuple[int, ...] = ()
    """Numbers of the vision layers whose states the projector takes too, ascending; stages before it pass them on."""
    added_features: int = 0
    """Number of the first language layers behind which features are added; stages before these pass them on."""
    shortened: tuple[tuple[str, float], ...] = ()
    """`ProfileReport.shortened`."""
    disturbance: str | None = None
    """What disturbed the machine while it was profiled, in words."""
    sizes: ProfiledSizes | None = None
    """Sizes of the data that were profiled; None where they are not known."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no measurement can give, and unless every kind of layer has one cost."""
        check_measured(self)
        if missing := [kind for kind in KINDS if kind not in dict(self.layers)]:
            raise ValueError(f"there are no costs of {', '.join(missing)}")
        if len(self.layers) > len(KINDS):
            raise ValueError(f"there are costs of {len(self.layers)} kinds of layers, not of {', '.join(KINDS)} alone")
        if not self.updates:
            raise ValueError("there is no cost of an update")

    def __getitem__(self, kind: LayerKind) -> LayerCost:
        return dict(self.layers)[kind]

    def exchange(self, name: ExchangeName, ranks: int = 1, layer: LayerKind | None = None) -> Exchange | None:
        """Return this exchange with the next larger number of ranks that was timed, or else with the most.

        None where it was not timed.
        """
        timed = sorted((each for each in self.exchanges if (each.name, each.layer) == (name, layer)), key=_ranks)
        return next((each for each in timed if each.ranks >= ranks), timed[-1] if timed else None)

    def timed_degrees(self, name: ExchangeName) -> tuple[int, ...]:
        """Return the numbers of ranks whose exchanges around a language layer were timed, ascending."""
        return tuple(sorted(each.ranks for each in self.exchanges if (each.name, each.layer) == (name, "language")))

    @property
    def is_of_one_rank(self) -> bool:
        """Whether one rank alone was profiled, which has no others to exchange anything with."""
        return all(update.data_parallel == 1 for update in self.updates)

    def with_workers(self, workers: int) -> "LayerCosts":
        """Return the costs with `workers` loading processes per rank: with any, packs are ready in time."""
        return replace(self, loading=LoadCost()) if workers else self

    @property
    def noisy_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds whose times spread too far even after they were measured again."""
        return tuple(kind for kind, cost in self.layers if cost.is_noisy)


def _ranks(exchange: Exchange) -> int:
    return exchange.ranks
