"""The plan of trainings that are fast without a search: packs of one hand-picked length, in data parallelism alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from autotune.dimensions.usual import sharded_layouts, zero_stages
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import up_to_step
from trials.errors import DataError, InvalidPlan
from trials.plan import MOST_UNITS, SIMPLE_PACKER, Layout, Packed, Plan
from trials.workload import Workload

_RECOMPUTED = ((False, False), (True, False), (True, True))
"""Whether vision and language layers are recomputed: trainers have a switch for all layers, and some for a tower."""
# A choice: of the example's packs, those with ZeRO 2 were predicted 4 % faster than others, and ran a tenth slower.
_MAYBE_AS_FAST = 1.1
"""Largest ratio of predicted times of two plans of which either may be the faster one."""


def fastest_packed(workload: Workload, solver: Solver, limits: Limits, *, hold_all: bool) -> list[Plan]:
    """Return the plan predicted fastest of packs of one length that recompute all layers, those of vision, or none.

    It has one stage, every device in data parallelism, and the least ZeRO stage that fits. Packs are filled by length
    alone. The lengths give each rank 1, 2, 4 and so on packs in a step, down to those of one sample. `hold_all` is that
    of `capacities`. Plans of another ZeRO stage or recomputation that may be as fast follow, each of its best length,
    in the order of their predicted times.

    Empty where no length fits the memory and keeps the global batch.
    """
    plans = packed_plans(workload, solver, limits, hold_all=hold_all)
    seconds = dict(zip(plans, solver.epoch_seconds(plans), strict=True))
    ways = {(plan.layout, plan.stages): plan for plan in sorted(plans, key=lambda plan: -seconds[plan])}
    near = [plan for plan in ways.values() if seconds[plan] <= _MAYBE_AS_FAST * min(seconds.values())]
    return sorted(near, key=lambda plan: seconds[plan])


def packed_plans(workload: Workload, solver: Solver, limits: Limits, *, hold_all: bool) -> list[Plan]:
    """Return all plans that `fastest_packed` compares."""
    layouts = tuple(_layouts(workload, solver))
    packings = _packings(workload, hold_all=hold_all)
    return [plan for packing in packings for plan in _fitting(packing, layouts, solver, limits)]


def _layouts(workload: Workload, solver: Solver) -> Iterator[Layout]:
    """Yield the layouts with the ZeRO stages that were timed, ascending."""
    devices = workload.hardware.devices
    plain = (Layout(pipeline=1, data=devices, zero=zero) for zero in zero_stages(workload.model, devices))
    for layout in (*plain, *sharded_layouts(devices)):
        if solver.unprofiled(layout) is None:
            yield solver.overlapped(layout)


def _packings(workload: Workload, *, hold_all: bool) -> Iterator[Packed]:
    """Yield packs of the lengths, the longest first."""
    data, devices = workload.data, workload.hardware.devices
    # No pack has more images than the data, so that its length alone is full.
    qv = min(max(data.vision_units, 1), MOST_UNITS)
    least = data.longest_text_tokens if hold_all else data.text_tokens / data.samples
    tokens = workload.global_batch_samples * data.text_tokens / data.samples / devices
    while True:
        qt = min(up_to_step(max(tokens, least)), MOST_UNITS)
        yield Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt, packer=SIMPLE_PACKER)
        if tokens <= least:
            return
        tokens /= 2


def _fitting(packing: Packed, layouts: Sequence[Layout], solver: Solver, limits: Limits) -> Iterator[Plan]:
    """Yield the plans that recompute nothing, vision layers, and all, each with the least ZeRO stage that fits."""
    try:
        keeps = solver.keeps_batch(packing, layouts[0])
    except (InvalidPlan, DataError):  # too few samples for a step of such packs
        return
    if not keeps:
        return
    # With a single stage, the leanest split is the only one.
    whole = [solver.leanest(packing, layout, recompute=False) for layout in layouts]
    for vision, language in _RECOMPUTED:
        plans = (_recomputing(plan, vision=vision, language=language) for plan in whole)
        fitting = (plan for plan in plans if solver.fullest(plan)[0] <= limits.usable_bytes)
        yield from islice(fitting, 1)


def _recomputing(plan: Plan, *, vision: bool, language: bool) -> Plan:
    (stage,) = plan.stages
    freed = replace(stage, recompute_vision=vision * stage.vision, recompute_language=language * stage.language)
    return replace(plan, stages=(freed,))
