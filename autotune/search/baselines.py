"""What a training would use without this search: the framework's default, and OmniBal's step-by-step recipe."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from autotune.predict.predictor import MOST_BATCH_DEVIATION, Predictor
from autotune.search.execution.ledger import BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import omnibal_capacities
from autotune.search.space.layouts import zero_stages
from trials.plan import Layout, Packed, Padded, Plan, Stage
from trials.workload import Workload

DEFAULT_SAMPLES = 4
"""Samples of an unpacked micro-batch, as OmniBal's baselines have them."""
_MOST_STAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A plan to compare with."""

    role: str
    plan: Plan


def baselines(
    workload: Workload, predictor: Predictor, solver: Solver, limits: Limits, *, hold_all: bool
) -> Iterator[Baseline]:
    """First the default with everything recomputed, then with nothing, then OmniBal's recipe with its neighbours.

    A neighbour for which no recompute count fits the memory yields no plan. `hold_all` is that of `capacities`.
    """
    layout = default_layout(workload)
    padded = Padded(samples=DEFAULT_SAMPLES)
    for role, recompute in ((BASELINE_DEFAULT, True), (BASELINE_KEPT, False)):
        stages = _uniform(limits.vision_layers, limits.language_layers, layout.pipeline, recompute)
        yield Baseline(role=role, plan=Plan(packing=padded, layout=layout, stages=stages))
    packing = _omnibal_packing(omnibal_capacities(workload.data, DEFAULT_SAMPLES, hold_all=hold_all), predictor, layout)
    for ends in _neighbours(solver.forward_ends(packing, layout)):
        plan = solver.fit_fewest(packing, layout, ends)
        if plan is not None:
            yield Baseline(role=BASELINE_OMNIBAL, plan=plan)


def default_layout(workload: Workload) -> Layout:
    """A pipeline over all devices up to 4, data parallelism over the rest, and the plainest ZeRO stage."""
    devices, layers = workload.hardware.devices, workload.model.vision_layers + workload.model.language_layers
    most = min(devices, layers, _MOST_STAGES)
    pipeline = max(degree for degree in range(1, most + 1) if devices % degree == 0)
    data = devices // pipeline
    return Layout(pipeline=pipeline, data=data, zero=zero_stages(workload.model, data)[0])


def _omnibal_packing(candidates: Iterable[Packed], predictor: Predictor, layout: Layout) -> Packed:
    """Of OmniBal's capacities, the ones whose packs differ least, among those that keep the global batch.

    Its published search goes along the ray qt = k qv, with k the mean tokens per vision unit, where a pack holds on
    average from 4 to 5 samples, as many as the unpacked micro-batch, and takes the least imbalance.
    """

    def unevenness(packing: Packed) -> tuple[bool, float]:
        sizes = predictor.sizes(packing, layout)
        spread = sizes.table.std(axis=0) / sizes.table.mean(axis=0)
        return sizes.epoch.batch_deviation > MOST_BATCH_DEVIATION, float(spread[0] + spread[1])

    return min(candidates, key=unevenness)


def _uniform(vision: int, language: int, stages: int, recompute: bool) -> tuple[Stage, ...]:
    """Equally many layers on every stage, the first ones with what is left: DeepSpeed's `uniform` partition."""
    each, left = divmod(vision + language, stages)
    ends = [each * number + min(left, number) for number in range(1, stages + 1)]
    return tuple(
        _all_or_nothing(min(end, vision) - min(start, vision), max(end - vision, 0) - max(start - vision, 0), recompute)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def _all_or_nothing(vision: int, language: int, recompute: bool) -> Stage:
    return Stage(
        vision=vision,
        language=language,
        recompute_vision=vision if recompute else 0,
        recompute_language=language if recompute else 0,
    )


def _neighbours(ends: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The anchor, then every inner boundary moved by up to a layer, independently (OmniBal, model partitioning)."""
    inner, last = ends[:-1], ends[-1]
    for shift in sorted(product((-1, 0, 1), repeat=len(inner)), key=lambda shift: sum(map(abs, shift))):
        moved = (*(end + by for end, by in zip(inner, shift, strict=True)), last)
        if all(start < end for start, end in pairwise((0, *moved))):
            yield moved
