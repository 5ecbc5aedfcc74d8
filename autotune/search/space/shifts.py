"""Steps between plans along the axes of a space: boundaries, recomputed layers, and uses of spare memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from autotune.search.solver.rungs import TOWER, Rungs, rungs_of, with_rungs
from trials.plan import Plan
from trials.stage import Recomputed, Stage, Tower

_APART = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Further rungs of vision and language layers that a neighbour has."""
_TOGETHER = (*_APART, (-1, -1), (1, 1))
"""Those where towers are recomputed whole: trainers may have one switch for both."""


def uses(plan: Plan) -> tuple[int, ...]:
    """Return how a plan uses memory that is left: layers gathered once, or the packs that later stages defer at most.

    It is empty for layouts without such a use.
    """
    if plan.layout.shards_weights:
        return (plan.stages[0].gathered_once,)
    return plan.most_deferred[1:] if plan.layout.zero_bubble else ()


def using_more(plan: Plan, further: Sequence[int]) -> Plan:
    """Return the plan with further `uses`, or fewer, as far as there are any; one stage at least defers packs."""
    if not any(further):
        return plan
    wanted = [max(use + more, 0) for use, more in zip(uses(plan), further, strict=True)]
    if plan.layout.shards_weights:
        (stage,) = plan.stages
        return replace(plan, stages=(replace(stage, gathered_once=min(*wanted, stage.vision + stage.language)),))
    if not any(wanted):
        return plan
    first, *others = plan.stages
    # A stage that defers all that it can has no number: as many as there are stages before it.
    deferring = (
        replace(stage, most_deferred=most if most < number else None)
        for number, (stage, most) in enumerate(zip(others, wanted, strict=True), 1)
    )
    return replace(plan, stages=(first, *deferring))


def using_other(plan: Plan) -> Iterator[Plan]:
    """Yield the plans of which one use of memory is one more or less."""
    count = len(uses(plan))
    for number in range(count):
        for by in (-1, 1):
            yield using_more(plan, [by * (place == number) for place in range(count)])


def further_rungs(stage: Stage, usual: Stage, rungs: Rungs) -> tuple[int, int]:
    """Return how many more rungs vision and language layers have than usual: the most of all levels.

    A level that recomputes nothing may have a shift below what the usual counts allow.
    """

    def shift(tower: Tower, each: int) -> int:
        counts = [
            (rungs_of(one, tower, each), rungs_of(one, tower, each) - rungs_of(other, tower, each))
            for one, other in zip(stage.recomputed, usual.recomputed, strict=True)
        ]
        recomputing = [more for count, more in counts if count]
        return max(recomputing) if recomputing else min(more for _, more in counts)

    return shift("vision", rungs[0]), shift("language", rungs[1])


def recomputing_more(stage: Stage, rungs: Rungs, vision: int, language: int) -> Stage:
    """Return the stage with more rungs of its layers at every level, or fewer, as far as it has them."""

    def more(level: Recomputed) -> Recomputed:
        level = with_rungs(level, "vision", stage.vision, rungs[0], vision)
        return with_rungs(level, "language", stage.language, rungs[1], language)

    return stage.recomputing([*map(more, stage.recomputed)])


def recomputing_other(plan: Plan, rungs: Rungs) -> Iterator[Plan]:
    """Yield the plans of which one stage has one rung more or less."""
    for number, stage in enumerate(plan.stages):
        steps = (recomputing_more(stage, rungs, *step) for step in (_TOGETHER if rungs == TOWER else _APART))
        for changed in (step for step in steps if step != stage):
            yield replace(plan, stages=(*plan.stages[:number], changed, *plan.stages[number + 1 :]))


def moved(boundaries: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield stage boundaries of which one is moved by a layer."""
    for number in range(len(boundaries) - 1):
        for by in (-1, 1):
            moved = (*boundaries[:number], boundaries[number] + by, *boundaries[number + 1 :])
            if all(start < end for start, end in pairwise((0, *moved))):
                yield moved
