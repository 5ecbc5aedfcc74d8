"""What a trainer can hold of a plan."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trials.job import SpaceSection
from trials.plan import Layout, Padded, Plan, ZeroStage
from trials.stage import TOWERS, Recomputed, Stage
from trials.units import number_of

Packs: TypeAlias = Literal["in order", "in any order", "by length", "none"]
"""Packs as they are, with their steps and rows; as they are, shuffled; packs of the trainer's own, within capacities;
or none, so that micro-batches are padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The limits of a trainer in data parallelism over all devices."""

    packs: Packs
    no_packs: str = "packs of samples with images"
    """What the trainer lacks where it has no packs, in words."""
    zero: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    towers: Literal["apart", "together", "vision always"] = "together"
    """Whether checkpointing has a switch for each tower, one for both, or one for the language model alone."""

    @property
    def switches(self) -> tuple[tuple[bool, bool], ...]:
        """Whether (vision, language) layers are recomputed, for each position of the switches; least work first."""
        match self.towers:
            case "apart":
                return ((False, False), (True, False), (False, True), (True, True))
            case "together":
                return ((False, False), (True, True))
            case "vision always":
                return ((True, False), (True, True))

    def layouts(self, candidates: Iterable[Layout]) -> tuple[Layout, ...]:
        """Return those of the layouts that the trainer can hold."""
        return tuple(layout for layout in candidates if not any(self._of_layout(layout)))

    def space(self, names: tuple[str, ...], layers: tuple[int, int], switch: tuple[bool, bool]) -> SpaceSection:
        """Return the space with these layouts and one position of the switches; `layers` are (vision, language)."""
        recomputed = tuple(count * is_on for count, is_on in zip(layers, switch, strict=True))
        return SpaceSection.model_validate(
            {"layouts": names, "sequence": ("1",), "split": (sum(layers),), "recompute": (recomputed,)}
        )

    def missing(self, plan: Plan) -> tuple[str, ...]:
        """Return what of the plan the trainer does not have, in words; empty where it can hold the plan."""
        found = (*self._of_layout(plan.layout), *self._of_packing(plan), *self._of_stages(plan))
        return tuple(dict.fromkeys(found))  # levels may lack the same

    def splits_alike(self, plan: Plan) -> bool:
        """Return whether the trainer can spread the model over the devices as the plan does."""
        return not any(self._of_layout(plan.layout)) and max(plan.packing.degrees) == 1

    def recomputes_alike(self, plan: Plan) -> bool:
        """Return whether the trainer can keep and recompute in each stage what the plan does."""
        return not any(self._of_stages(plan))

    def _of_layout(self, layout: Layout) -> Iterator[str]:
        if layout.pipeline > 1:
            yield f"a pipeline of {layout.pipeline} stages"
        if layout.tensor > 1:
            yield f"a tensor degree of {layout.tensor}"
        if layout.zero not in self.zero:
            yield f"ZeRO {layout.zero}"
        if layout.reduce_within > 1:
            yield f"averages of gradients within {layout.reduce_within} ranks first"
        if layout.offload != "none":
            yield f"offload of kept outputs ({layout.offload})"

    def _of_packing(self, plan: Plan) -> Iterator[str]:
        packing = plan.packing
        if len(packing.degrees) > 1:
            yield f"packs of {len(packing.degrees)} levels"
        elif packing.degrees != (1,):
            yield f"packs that {packing.degrees[0]} ranks share"
        elif self.packs == "none" and not isinstance(packing, Padded):
            yield self.no_packs

    def _of_stages(self, plan: Plan) -> Iterator[str]:
        for stage in plan.stages:
            if once := stage.gathered_once:
                yield f"{number_of(once, 'layer')} whose weights are gathered once"
        for number, stage in enumerate(plan.stages):
            where = f" in stage {number}" if len(plan.stages) > 1 else ""
            for level in stage.recomputed:
                if (switch := switch_of(stage, level)) not in self.switches:
                    counts = ", ".join(_counts(stage, level))
                    yield f"{counts}{where}" if switch is None else f"checkpointing of {counts}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A trainer to which plans are exported."""

    name: str
    """Its module in `autotune.exporting.trainers`, as `--for` and `--to` spell it."""
    title: str
    """Its name for messages."""
    abilities: Abilities


def switch_of(stage: Stage, level: Recomputed) -> tuple[bool, bool] | None:
    """Return whether all layers of (vision, language) are recomputed; None where some of a kind are, or selectively.

    A kind without layers goes with the other.
    """
    held = {tower: getattr(stage, tower) for tower in TOWERS}
    if any(level.selective(tower) or level.whole(tower) not in (0, held[tower]) for tower in TOWERS):
        return None
    language = bool(level.language)
    return (bool(level.vision) if held["vision"] else language, language)


def _counts(stage: Stage, level: Recomputed) -> Iterator[str]:
    for tower in TOWERS:
        whole, selective, held = level.whole(tower), level.selective(tower), getattr(stage, tower)
        if selective:
            yield f"selective recomputation of {number_of(selective, f'{tower} layer')}"
        if whole or selective:
            yield f"{whole} of {held} {tower} layers recomputed"
