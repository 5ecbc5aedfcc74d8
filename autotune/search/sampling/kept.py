"""Plans of the same packs compared by the layers whose outputs they keep for the backward pass."""

from itertools import chain

from trials.model.cut import cut
from trials.plan import Packed, Plan
from trials.stage import TOWERS, Recomputed, Stage


def recomputes_more(plan: Plan, other: Plan) -> bool:
    """Return whether a plan is another one that recomputes further layers, so that it cannot be faster."""
    if plan == other or (plan.packing, plan.layout) != (other.packing, other.layout):
        return False
    return all(
        _keeping_all(one) == _keeping_all(its)
        and all(kept <= of_other for kept, of_other in zip(_kept(one), _kept(its), strict=True))
        for one, its in zip(plan.stages, other.stages, strict=True)
    )


def _keeping_all(stage: Stage) -> Stage:
    return stage.recomputing([Recomputed(vision=0, language=0) for _ in stage.recomputed])


def asks_for_more(plan: Plan, failed: Plan, number: int) -> bool:
    """Return whether a stage surely needs as much memory as the failed plan's stage: it is no smaller in any way."""
    one, other = plan.packing, failed.packing
    if isinstance(one, Packed) and isinstance(other, Packed) and one.sequence == other.sequence:
        sizes = ((each.qv, each.qt, each.qv_min, each.qt_min) for each in (one, other))
        is_larger = one.packer == other.packer and all(mine >= its for mine, its in zip(*sizes, strict=True))
    else:
        is_larger = one == other
    if plan.layout != failed.layout or not is_larger:
        return False
    return all(mine >= its for mine, its in zip(_held(plan, number), _held(failed, number), strict=True))


def _held(plan: Plan, number: int) -> tuple[int, ...]:
    """Return a stage's layers, those that it keeps, whether it projects, and its uses of spare memory."""
    stage, part = plan.stages[number], cut(plan)[number]
    return stage.vision, stage.language, *_kept(stage), part.projects, part.gathered_once, part.most_deferred


def _kept(stage: Stage) -> tuple[int, ...]:
    """Return the layers of each level and kind that are not recomputed as a whole, and those not recomputed."""
    return tuple(
        chain.from_iterable(
            (layers - level.whole(tower), layers - level.whole(tower) - level.selective(tower))
            for level in stage.recomputed
            for tower, layers in zip(TOWERS, (stage.vision, stage.language), strict=True)
        )
    )
