"""Plans that a training would use without a search: packs, defaults of frameworks, recipes of OmniBal and HBP."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

from autotune.dimensions.folds import layout_name
from autotune.dimensions.usual import zero_stages
from autotune.prediction.columns import TOKENS, UNITS
from autotune.prediction.predictor import Predictor
from autotune.search.hbp import hbp_plan
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.packed import fastest_packed
from autotune.search.roles import Role
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import layer_counts
from autotune.search.space.capacities import omnibal_capacities
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage
from trials.workload import Workload

DEFAULT_SAMPLES = 4
"""Samples of an unpacked micro-batch, as OmniBal's baselines have them."""
AS_FAST = 1.03
"""Largest ratio of predicted times with which two plans count as equally fast before they ran."""
_MOST_STAGES = 4
"""Stages of OmniBal's pipelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePlan:
    """A plan to compare with."""

    role: Role
    plan: Plan


def baselines(
    workload: Workload,
    predictor: Predictor,
    solver: Solver,
    limits: Limits,
    *,
    hold_all: bool,
    levels: bool = False,
    named: Container[str] = (),
) -> Iterator[BaselinePlan]:
    """Yield packs without a pipeline, the default with everything recomputed, and OmniBal's anchor and its neighbours.

    Of each kind, the first plan is the one to begin with.

    Where no such packs fit, the default with nothing recomputed is tried as well. HBP's plan comes next, where `levels`
    of packs may help, and that of ZeRO 3, where it is needed or its layout is `named`. A neighbour for which no
    recompute count fits the memory yields no plan. `hold_all` is that of `capacities`.
    """
    packed = fastest_packed(workload, solver, limits, hold_all=hold_all)
    yield from (BaselinePlan(role=Role.PACKED, plan=plan) for plan in packed)
    layout = default_layout(workload)
    padded = Padded(samples=DEFAULT_SAMPLES)
    # Packs that recompute nothing are compared where they fit, so the default would be a further trial for nothing.
    defaults = {Role.DEFAULT: True} | ({Role.DEFAULT_NO_RECOMPUTE: False} if not packed else {})
    for role, recompute in defaults.items():
        stages = _uniform(limits.vision_layers, limits.language_layers, layout.pipeline, recompute)
        yield BaselinePlan(role=role, plan=Plan(packing=padded, layout=layout, stages=stages))
    packing = _omnibal_packing(omnibal_capacities(workload.data, DEFAULT_SAMPLES, hold_all=hold_all), predictor, layout)
    for boundaries in _neighbours(solver.forward_boundaries(packing, layout)):
        plan = solver.fit_fewest(packing, layout, boundaries)
        if plan is not None:
            yield BaselinePlan(role=Role.OMNIBAL, plan=plan)
    if levels and (found := hbp_plan(workload, predictor, solver)) is not None:
        yield BaselinePlan(role=Role.HBP, plan=found)
    if (plan := zero3_plan(workload, solver, limits, named)) is not None:
        yield BaselinePlan(role=Role.ZERO3, plan=plan)


def needed_baselines(plans: Mapping[Role, Plan], predictor: CalibratedPredictor) -> set[Role]:
    """Return the roles that run whatever the budget is: the current plan, and the plans predicted fastest.

    The fastest are those of the plans that keep the training, where there are any: the others could not win.
    """
    keeping = [role for role, plan in plans.items() if not predictor.learning_faults(plan)]
    seconds = {role: predictor.epoch_seconds(plans[role]) for role in keeping or plans}
    fastest = min(seconds.values(), default=0.0)
    # Without the fastest there is no gain to state.
    return {role for role in plans if role == Role.CURRENT_PLAN or seconds.get(role, math.inf) <= AS_FAST * fastest}


def zero3_plan(workload: Workload, solver: Solver, limits: Limits, named: Container[str] = ()) -> Plan | None:
    """Return the usual plan of DeepSpeed trainings without a pipeline: ZeRO 3, everything recomputed, unpacked samples.

    A micro-batch has as many samples as fit, 1, 2, 4 and so on, among those that keep the global batch. None where
    none fits, where the profile cannot predict it, and where ZeRO 1 fits with as many samples: ZeRO 3
    exchanges more. With its layout among the `named` ones, it is returned wherever it fits.
    """
    devices = workload.hardware.devices
    layout = Layout(pipeline=1, data=devices, zero=3)
    if devices == 1 or solver.unprofiled(layout):
        return None
    stages = _uniform(limits.vision_layers, limits.language_layers, 1, True)
    found, samples = None, 1
    while samples * devices <= workload.global_batch_samples:
        plan = Plan(packing=Padded(samples=samples), layout=layout, stages=stages)
        if solver.fullest(plan)[0] > limits.usable_bytes:
            # More samples need more memory still.
            break
        found = plan if solver.keeps_batch(plan.packing, layout) else found
        samples *= 2
    if found is None or layout_name(layout) in named:
        return found
    before = replace(found, layout=replace(layout, zero=1))
    return found if solver.fullest(before)[0] > limits.usable_bytes else None


def default_layout(workload: Workload) -> Layout:
    """Return a pipeline over at most 4 devices, data parallelism over the rest, and the plainest ZeRO stage."""
    devices, layers = workload.hardware.devices, workload.model.vision_layers + workload.model.language_layers
    most = min(devices, layers, _MOST_STAGES)
    pipeline = max(degree for degree in range(1, most + 1) if devices % degree == 0)
    data = devices // pipeline
    return Layout(pipeline=pipeline, data=data, zero=zero_stages(workload.model, data)[0])


def _omnibal_packing(candidates: Iterable[Packed], predictor: Predictor, layout: Layout) -> Packed:
    """Return those of OmniBal's capacities whose packs differ least, among those that keep the global batch.

    Its published search goes along the ray qt = k qv, with k the mean tokens per vision unit, where a pack holds on
    average from 4 to 5 samples, as many as the unpacked micro-batch, and takes the least imbalance.
    """

    def unevenness(packing: Packed) -> tuple[bool, float]:
        sizes = predictor.sizes(packing, layout)
        both = sizes.table[:, [UNITS, TOKENS]]
        return not sizes.epoch.keeps_batch, float((both.std(axis=0) / both.mean(axis=0)).sum())

    return min(candidates, key=unevenness)


def _uniform(vision: int, language: int, stages: int, recompute: bool) -> tuple[Stage, ...]:
    """Return stages of equally many layers, the remainder on the first ones: DeepSpeed's `uniform` partition."""
    each, left = divmod(vision + language, stages)
    boundaries = [each * number + min(left, number) for number in range(1, stages + 1)]
    return tuple(
        Stage(
            vision=of_vision,
            language=of_language,
            recompute_vision=recompute * of_vision,
            recompute_language=recompute * of_language,
        )
        for of_vision, of_language in layer_counts(boundaries, vision)
    )


def _neighbours(boundaries: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the anchor, then every inner boundary moved by up to a layer, independently (OmniBal, model partition)."""
    inner, last = boundaries[:-1], boundaries[-1]
    for shift in sorted(product((-1, 0, 1), repeat=len(inner)), key=lambda shift: sum(map(abs, shift))):
        moved = (*(end + by for end, by in zip(inner, shift, strict=True)), last)
        if all(start < end for start, end in pairwise((0, *moved))):
            yield moved
