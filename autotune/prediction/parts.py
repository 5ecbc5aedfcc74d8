"""Pipeline stages as counts of layers, so that thousands of possible stages are computed at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np

from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.model.cut import Cut, cut
from trials.plan import Plan
from trials.stage import TOWERS

VISION, LANGUAGE = KINDS.index("vision"), KINDS.index("language")
"""Columns of the kinds of layers that can be recomputed."""
PROJECTOR, HEAD = KINDS.index("projector"), KINDS.index("head")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Layers of some stages, [stages, kinds] in the order of KINDS."""

    layers: Floats
    recomputed: Floats
    """Number of `layers`, the first ones, that are recomputed."""
    selective: Floats
    """Number of those after them that are recomputed selectively."""
    gathered_once: Floats
    """Number of `layers`, the last ones, whose weights stay from the forward to the backward pass (ZeRO 3)."""
    most_deferred: Ints
    """Most packs whose weight gradients wait, [stages]."""

    @classmethod
    def of(cls, cuts: Sequence[Cut], level: int = 0) -> "Parts":
        """Return the stages of one plan, with what they recompute for packs of a level."""
        return cls._of(_counts(each, level) for each in cuts)

    @classmethod
    def of_levels(cls, plan: Plan) -> tuple["Parts", ...]:
        """Return the plan's stages for each level, with the layers that packs of the level recompute."""
        cuts = cut(plan)
        return tuple(cls.of(cuts, level) for level in range(len(plan.packing.degrees)))

    @classmethod
    def of_plans(cls, plans: Sequence[Plan]) -> tuple["Parts", Ints]:
        """Return (distinct stages of plans, last stages at the end; numbers of each plan's stages [plans, stages])."""
        stages = [[_counts(each) for each in cut(plan)] for plan in plans]
        # Column 4 is the head, which only last stages have.
        different = sorted(set(chain.from_iterable(stages)), key=lambda counts: (counts[4], counts))
        number = {counts: place for place, counts in enumerate(different)}
        return cls._of(different), np.array([[number[counts] for counts in of_plan] for of_plan in stages])

    @classmethod
    def of_layers(cls, layers: Floats, recomputed: Floats, selective: Floats) -> "Parts":
        """Return stages that neither defer weight gradients nor gather weights once; counts are [stages, kinds]."""
        nothing = np.zeros_like(layers)
        return cls(
            layers=layers,
            recomputed=recomputed,
            selective=selective,
            gathered_once=nothing,
            most_deferred=nothing[:, 0].astype(np.int64),
        )

    @classmethod
    def _of(cls, stages: Iterable[tuple[int, ...]]) -> "Parts":
        ends = (len(KINDS) + each for each in (0, 2, 4, 6))
        layers, *of_towers, deferred = np.split(np.array([*stages], dtype=np.float64), [*ends], axis=1)
        of_kinds = np.zeros((3, *layers.shape))
        of_kinds[..., [VISION, LANGUAGE]] = of_towers
        return cls(
            **dict(zip(("recomputed", "selective", "gathered_once"), of_kinds, strict=True)),
            layers=layers,
            most_deferred=deferred[:, 0].astype(np.int64),
        )

    @property
    def before_head(self) -> "Parts":
        """These stages without the head."""
        return replace(self, layers=self.layers * (np.arange(len(KINDS)) < HEAD))

    @property
    def key(self) -> tuple[bytes, ...]:
        """What equal stages have in common, and no others."""
        return tuple(getattr(self, field.name).tobytes() for field in fields(self))

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, stages: slice | Ints) -> "Parts":
        return Parts(**{field.name: getattr(self, field.name)[stages] for field in fields(self)})


def _counts(stage: Cut, level: int = 0) -> tuple[int, ...]:
    """Return the layers of each kind, then of vision and language the recomputed, selective and gathered ones.

    The last count is that of `most_deferred`.
    """
    freed = stage.levels[level]
    gathered_language = min(stage.gathered_once, len(stage.language))
    return (
        *(stage.embeds, len(stage.vision), stage.projects, len(stage.language), stage.heads),
        *(*map(freed.whole, TOWERS), *map(freed.selective, TOWERS)),
        *(stage.gathered_once - gathered_language, gathered_language),
        stage.most_deferred,
    )


def told_apart(parts: Parts, stages: Ints, places: Ints) -> tuple[Parts, Ints, Ints]:
    """Tell stages apart that are alike in layers but not in their places, numbers from 0 [plans or 1, stages].

    Return the different ones, which each of `stages` [plans, stages] is, and their places.
    """
    count = int(places.max()) + 1
    different, rows = np.unique(stages * count + places, return_inverse=True)
    return parts[different // count], rows.reshape(stages.shape), different % count
