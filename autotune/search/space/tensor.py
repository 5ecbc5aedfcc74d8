"""Layouts whose ranks hold the language layers together: those that a job names, and those that may help."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autotune.errors import JobError
from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import layout_name, layouts
from autotune.workload import Prepared, check_tensor_degree
from trials.errors import InvalidPlan
from trials.plan import Layout, Packed, Packing, Plan
from trials.workload import Workload

_WORTH = 1.05
"""Most that the best plan of such a layout may be predicted to take, as a multiple of the best plan without."""
_HOPELESS = 1.3
"""The same for the first packs that are looked at, above which no others are."""
_CLASSES, _FURTHER = 4, 2
"""Classes of sizes of packs, of each of which one is looked at, and further ones of the best class."""
_MOST = 4
"""Layouts that are searched, so that they take no more time than those without."""
_NAME = re.compile(r"p(\d{1,9})-d(\d{1,9})-t(\d{1,9})-z([0-3])")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOffer:
    """The layouts with a tensor degree above 1 that are searched, and why, or why none is."""

    layouts: tuple[Layout, ...]
    reason: str | None
    """None where no ranks can hold layers together."""


def check_named(prepared: Prepared) -> None:
    """Raise JobError, with the arithmetic, for a named tensor degree that the model, LoRA or the nodes do not allow."""
    for name in prepared.job.search.space.layouts or ():
        if (layout := tensor_layout(name, prepared.workload)) is not None:
            try:
                check_tensor_degree(prepared, layout.tensor)
            except InvalidPlan as error:
                raise _refused(name, str(error)) from error


def tensor_layout(name: str, workload: Workload) -> Layout | None:
    """Return the layout of a name with a tensor degree, such as `p2-d1-t4-z0`; None for another name.

    Raises JobError, with the arithmetic, for one that these devices or a chain of these layers cannot have.
    """
    if (found := _NAME.fullmatch(name)) is None:
        return None
    pipeline, data, tensor, zero = map(int, found.groups())
    try:
        layout = Layout(pipeline=pipeline, data=data, tensor=tensor, zero=zero)  # type: ignore[arg-type]
    except InvalidPlan as error:
        raise _refused(name, str(error)) from error
    model, hardware = workload.model, workload.hardware
    if layout.world_size != hardware.devices:
        raise _refused(
            name, f"{pipeline} x {data} x {tensor} = {layout.world_size} ranks are not the {hardware.devices} devices"
        )
    if (layers := model.vision_layers + model.language_layers) < pipeline:
        raise _refused(name, f"{pipeline} stages need a layer each but the model has {layers}")
    if model.dtype == "bfloat16" and zero == 0:
        raise _refused(name, "bfloat16 weights need ZeRO 1, which keeps a float32 copy of them")
    if tensor == 1:
        raise _refused(name, f"without a tensor degree the name is {layout_name(layout)}")
    return layout


def check_timed(chosen: Iterable[Layout], solver: Solver) -> None:
    """Raise JobError for a named layout whose exchanges the profile has not timed."""
    for layout in chosen:
        if layout.tensor > 1 and layout.tensor not in solver.tensor_degrees:
            raise _refused(
                layout_name(layout),
                f"the profile has no times of what {layout.tensor} ranks exchange that hold layers together; measure "
                "them with `autotune profile JOB --fresh`",
            )


def possible_layouts(workload: Workload, solver: Solver) -> tuple[Layout, ...]:
    """Return the layouts of all devices with each tensor degree that was timed, is a power of two and fits a node."""
    hardware = workload.hardware
    return tuple(
        replace(layout, tensor=degree)
        for degree in solver.tensor_degrees
        if degree & (degree - 1) == 0 and hardware.has_groups(degree)
        for layout in layouts(workload.model, hardware.devices // degree)
        if layout.zero <= 1
    )


def offered_layouts(
    possible: Sequence[Layout], solver: Solver, usual: Sequence[Packed], without: Sequence[Plan]
) -> TensorOffer:
    """Return those of the layouts whose best plan is predicted to be nearly as fast as the plans `without`, or faster.

    Each is compared with a few of the `usual` packs. Where no plan without a tensor degree fits, the best plan with one
    takes its place.
    """
    if not possible:
        return TensorOffer(layouts=(), reason=None)
    of_packings: dict[Packing, float] = {}
    for plan, takes in zip(without, solver.epoch_seconds(without), strict=True):
        of_packings[plan.packing] = min(takes, of_packings.get(plan.packing, np.inf))
    least = min(of_packings.values(), default=np.inf)
    likely = sorted(usual, key=lambda packing: of_packings.get(packing, np.inf))
    seconds = {layout: _least_seconds(layout, solver, likely, _HOPELESS * least) for layout in possible}
    best = min(seconds, key=lambda layout: seconds[layout])
    most = _WORTH * min(least, seconds[best])
    found = sorted((layout for layout in possible if seconds[layout] <= most), key=lambda layout: seconds[layout])
    if not found or seconds[best] == np.inf:
        return TensorOffer(layouts=(), reason=_why_none(best, seconds[best], least))
    return TensorOffer(layouts=tuple(found[:_MOST]), reason=_why(found[:_MOST], seconds[best], least))


def _least_seconds(layout: Layout, solver: Solver, likely: Sequence[Packed], hopeless: float) -> float:
    """Return the epoch seconds of the best plan with some of the packs, the best ones first; infinite if none fits.

    The best of each class of sizes is looked at, and the next ones of the best class unless it is `hopeless`. Where
    nothing is, as no other plan fits, all packs are looked at.
    """

    def take(packings: Iterable[Packed]) -> float:
        plans = (solver.solve(packing, layout) for packing in packings)
        return min(solver.epoch_seconds([plan for plan in plans if plan is not None]), default=np.inf)

    kept = [packing for packing in likely if solver.keeps_batch(packing, layout)]
    if hopeless == np.inf:
        return take(kept)
    by_size = sorted(kept, key=lambda packing: (packing.qt, packing.qv))
    edges = np.linspace(0, len(kept), _CLASSES + 1).round().astype(int).tolist()
    sizes = [sorted(by_size[slice(*each)], key=kept.index) for each in pairwise(edges)]
    firsts = [take(packings[:1]) for packings in sizes]
    best = min(firsts)
    return best if best > hopeless else min(best, take(sizes[firsts.index(best)][1 : 1 + _FURTHER]))


def _why(found: Sequence[Layout], best: float, least: float) -> str:
    names = ", ".join(map(layout_name, found))
    if least == np.inf:
        return f"Tensor degrees are searched with {names}: no plan with tensor degree 1 fits the memory"
    return (
        f"Tensor degrees are searched with {names}: with the first packs that were compared, an epoch is predicted to "
        f"take {best / least:.2f} times as long as the best with tensor degree 1"
    )


def _why_none(layout: Layout, best: float, least: float) -> str:
    told = "Tensor degree 1 is best and the only one that is searched: "
    if best == np.inf:
        return f"{told}no plan with a higher one fits the memory and keeps the global batch"
    return f"{told}an epoch with {layout_name(layout)} is predicted to take {best / least:.2f} times as long"


def _refused(name: str, why: str) -> JobError:
    return JobError(f"search.space.layouts: {name!r} cannot be searched: {why}")
