"""The layers of a pipeline stage, and what becomes of what they keep, as a part of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from trials.errors import InvalidPlan

Tower: TypeAlias = Literal["vision", "language"]
TOWERS: tuple[Tower, ...] = get_args(Tower)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Layers of a stage, the first ones of each kind, that are recomputed in the backward pass.

    The `selective` layers behind them keep outputs of matrix products and attention, and recompute the rest from these.
    """

    vision: int
    language: int
    selective_vision: int = 0
    selective_language: int = 0

    def whole(self, tower: Tower) -> int:
        """Return the layers of this kind that are recomputed as a whole."""
        return self.vision if tower == "vision" else self.language

    def selective(self, tower: Tower) -> int:
        """Return the layers of this kind that are recomputed selectively."""
        return self.selective_vision if tower == "vision" else self.selective_language


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: its layers of each kind, and how many of them, the first ones, are recomputed.

    Where the layout offloads a kind of layers, what these keep is offloaded instead, and nothing is recomputed.
    """

    vision: int
    language: int
    recompute_vision: int = 0
    recompute_language: int = 0
    selective_vision: int = 0
    """Further layers that are recomputed selectively."""
    selective_language: int = 0
    further_levels: tuple[Recomputed, ...] = ()
    """Recomputed layers for packs of the second level, the third, and so on."""
    most_deferred: int | None = None
    """Most packs whose weight gradients wait, with `zero_bubble`; None: as many as there are stages before."""
    gathered_once: int = 0
    """Layers, the last ones, whose weights stay from the forward to the backward pass of a pack, with ZeRO 3."""

    def __post_init__(self) -> None:
        if self.vision < 0 or self.language < 0 or self.vision + self.language == 0:
            raise InvalidPlan(f"a stage needs at least one layer, not {self.vision} vision + {self.language} language")
        if not 0 <= self.gathered_once <= self.vision + self.language:
            raise InvalidPlan(
                f"a stage of {self.vision} vision and {self.language} language layers cannot gather "
                f"{self.gathered_once} of them once; use gathered_once 0 to {self.vision + self.language}"
            )
        for level in self.recomputed:
            for tower, layers in zip(TOWERS, (self.vision, self.language), strict=True):
                whole, selective = level.whole(tower), level.selective(tower)
                if min(whole, selective) < 0 or whole + selective > layers:
                    also = f" and {selective} selectively" if selective else ""
                    raise InvalidPlan(
                        f"a stage of {self.vision} vision and {self.language} language layers cannot recompute "
                        f"{whole} {tower} layers{also}"
                    )

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """Recomputed layers for packs of each level."""
        first = Recomputed(
            vision=self.recompute_vision,
            language=self.recompute_language,
            selective_vision=self.selective_vision,
            selective_language=self.selective_language,
        )
        return (first, *self.further_levels)

    def recomputing(self, of_levels: Sequence[Recomputed]) -> "Stage":
        """Return the stage with these recomputed layers for packs of each level."""
        first, *further = of_levels
        return replace(
            self,
            recompute_vision=first.vision,
            recompute_language=first.language,
            selective_vision=first.selective_vision,
            selective_language=first.selective_language,
            further_levels=tuple(further),
        )
