"""Bytes of the stages of a plan, counted layer by layer as the passes of a step begin and end."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from benchmarks.machines.pipeline import Act, program
from trials.costs.coefficients import LayerKind
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import Epoch
from trials.engine.static_memory import GRADIENT_BYTES
from trials.model.cut import Cut, cut
from trials.plan import Plan
from trials.stage import Tower

Size: TypeAlias = tuple[float, float, float, float]
"""Units, tokens, squares and targets of a pack."""
_ELEMENT_BYTES, _STATE_BYTES = 2, 12
"""Of a 16-bit weight; of its float32 copy with two moments."""


def most_bytes(costs: LayerCosts, plan: Plan, packs: Sequence[Size]) -> tuple[float, ...]:
    """Return the most bytes of each stage in a step of ZeRO 1 with these packs of one data rank, in their order.

    Layers have neither shared nor transient bytes.
    """
    cuts = cut(plan)
    return tuple(_most(costs, plan, held, number, packs) for number, held in enumerate(cuts))


def most_of_epoch(costs: LayerCosts, plan: Plan, epoch: Epoch) -> tuple[float, ...]:
    """Return the most bytes of each stage in all steps of an epoch."""
    sizes = epoch.pack_sizes()
    table = np.stack([sizes.units, sizes.tokens, sizes.squares, sizes.targets], axis=1).astype(np.float64).tolist()
    steps = (epoch.rows(number) for number in range(epoch.steps))
    found = [most_bytes(costs, plan, [table[pack] for pack in of_rank]) for rows in steps for of_rank in rows.T]
    return tuple(np.max(found, axis=0).tolist())


def _most(costs: LayerCosts, plan: Plan, held: Cut, number: int, packs: Sequence[Size]) -> float:
    layers = [*_layers(costs, held)]
    parameters = sum(layer.parameters for _, layer, _ in layers)
    static = parameters * (_ELEMENT_BYTES + GRADIENT_BYTES + _STATE_BYTES / plan.layout.data)
    live = most = 0.0
    for act, pack in program(number, plan.layout.pipeline, len(packs)):
        if act is Act.FORWARD:
            live += sum(_kept(*layer, packs[pack]) for layer in layers)
            most = max(most, live)
        elif act is Act.BACKWARD:
            for kind, layer, freeing in reversed(layers):
                kept = _kept(kind, layer, freeing, packs[pack])
                most = max(most, live - kept + _while_running(kind, layer, freeing, packs[pack]))
                live -= kept
    return static + most


def _layers(costs: LayerCosts, held: Cut) -> Iterator[tuple[LayerKind, LayerCost, str]]:
    """Yield the layers of a stage in the order of the forward pass, each with how it frees memory."""
    if held.embeds:
        yield "vision_embedding", costs["vision_embedding"], "kept"
    yield from _of_tower(costs, held, "vision", len(held.vision))
    if held.projects:
        yield "projector", costs["projector"], "kept"
    yield from _of_tower(costs, held, "language", len(held.language))
    if held.heads:
        yield "head", costs["head"], "kept"


def _of_tower(costs: LayerCosts, held: Cut, tower: Tower, count: int) -> Iterator[tuple[LayerKind, LayerCost, str]]:
    (level,) = held.levels
    whole, selective = level.whole(tower), level.selective(tower)
    for place in range(count):
        freeing = "whole" if place < whole else "selective" if place < whole + selective else "kept"
        yield tower, costs[tower], freeing


def _kept(kind: LayerKind, layer: LayerCost, freeing: str, pack: Size) -> float:
    of_way = {"kept": layer.kept_bytes, "selective": layer.selective_bytes, "whole": layer.output_bytes}
    return _of_pack(kind, of_way[freeing], pack)


def _while_running(kind: LayerKind, layer: LayerCost, freeing: str, pack: Size) -> float:
    most = layer.selective_peak_bytes if freeing == "selective" else layer.kept_bytes
    return _of_pack(kind, most, pack)


def _of_pack(kind: LayerKind, coefficients: Sequence[float], pack: Size) -> float:
    units, tokens, squares, targets = pack
    size = units, targets if kind == "head" else tokens, squares, 1.0
    return float(np.dot(coefficients, size))
