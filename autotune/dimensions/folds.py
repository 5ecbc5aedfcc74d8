"""What all dimensions of layouts say together: names, texts, coordinates, checks and offers."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.dimensions.degrees import DataDimension, PipelineDimension
from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.node_reduction import NodeReductionDimension
from autotune.dimensions.offload import OffloadDimension
from autotune.dimensions.overlap import OverlapDimension
from autotune.dimensions.sequence import SequenceDimension
from autotune.dimensions.tensor import TensorDimension
from autotune.dimensions.usual import SHARDING
from autotune.dimensions.zero import ZeroDimension
from autotune.dimensions.zero_bubble import ZeroBubbleDimension
from autotune.errors import JobError
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.errors import InvalidPlan
from trials.plan import Layout
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from trials.job import Job

DIMENSIONS: tuple[Dimension, ...] = (
    PipelineDimension(),
    DataDimension(),
    SequenceDimension(),
    TensorDimension(),
    ZeroDimension(),
    NodeReductionDimension(),
    OverlapDimension(),
    OffloadDimension(),
    ZeroBubbleDimension(),
)
"""In the order of their parts in names and texts."""
_NAME = re.compile("".join(each.pattern for each in DIMENSIONS))


def layout_name(layout: Layout) -> str:
    """Return the name of a layout in jobs and studies: `p2-d1-z0`, or `p2-d1-t4-z0` with tensor degree 4.

    `-w4` follows where 4 data ranks of a node average gradients first, `-ov`, `-ol` or `-ovl` where vision layers,
    language layers or both offload what they keep, and `-zb` where stages defer weight gradients.
    """
    return "".join(each.code(layout) for each in DIMENSIONS)


def named_layout(name: str, workload: Workload) -> Layout | None:
    """Return the layout of a name such as `p1-d4-z3`, of those beyond the usual ones; None for another name.

    Raise JobError, with the arithmetic, for one that these devices or a chain of these layers cannot have.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    values: dict[str, Any] = {}
    for dimension in DIMENSIONS:
        fields = {field: found[field] for field in re.compile(dimension.pattern).groupindex}
        values |= {field: dimension.value(code) for field, code in fields.items() if code is not None}
    # A usual layout, which callers know without this.
    if values.keys() == {"pipeline", "data", "zero"} and values["zero"] not in SHARDING:
        return None
    try:
        layout = Layout(**values)
        _check_devices(layout, workload)
    except InvalidPlan as error:
        raise refused(name, str(error)) from error
    if layout_name(layout) != name:
        raise refused(name, f"a degree of 1 is left out, so that the name is {layout_name(layout)}")
    return layout


def _check_devices(layout: Layout, workload: Workload) -> None:
    """Raise InvalidPlan, with the arithmetic, for a layout that these devices and layers cannot have."""
    devices = workload.hardware.devices
    if layout.world_size != devices:
        degrees = (layout.pipeline, layout.data, *([layout.tensor] if layout.tensor > 1 else []))
        raise InvalidPlan(f"{' x '.join(map(str, degrees))} = {layout.world_size} ranks are not the {devices} devices")
    for dimension in DIMENSIONS:
        dimension.check_devices(layout, workload)


def check_named(job: "Job", workload: Workload) -> None:
    """Raise JobError, with the reason, for a named layout that the model, its training or the nodes do not allow."""
    for name in job.search.space.layouts or ():
        if (layout := named_layout(name, workload)) is not None:
            try:
                check_layout(layout, job, workload.hardware)
            except InvalidPlan as error:
                raise refused(name, str(error)) from error


def refused(name: str, why: str) -> JobError:
    """Return the error for a named layout that cannot be searched."""
    return JobError(f"search.space.layouts: {name!r} cannot be searched: {why}")


def check_layout(layout: Layout, job: "Job", hardware: Hardware) -> None:
    """Raise InvalidPlan, with the reason, for a layout that the model, its training or the nodes do not allow."""
    if job.training.compile:
        from trials.model.refusals.compiling import check_compilable  # noqa: PLC0415 - look-ups do without models

        check_compilable(layout)
    for dimension in DIMENSIONS:
        dimension.check(layout, job, hardware)


def layout_text(layout: Layout, times: str = "x") -> str:
    """Return the layout in words; `times` stands between degrees."""
    return "".join(each.text(layout, times) for each in DIMENSIONS)


def layout_coordinates(layout: Layout) -> tuple[float, ...]:
    """Return where the layout lies: at a distance of 1 two layouts have little in common."""
    return tuple(coordinate for each in DIMENSIONS for coordinate in each.coordinates(layout))


def unprofiled(costs: LayerCosts, layout: Layout, *, exactly: bool = False) -> str | None:
    """Return what plans with this layout need beyond the costs; None where they can be predicted.

    With `exactly` a degree counts as known only if it was timed itself.
    """
    found = (each.unprofiled(costs, layout, exactly=exactly) for each in DIMENSIONS)
    return next((missing for missing in found if missing), None)


def exchanges(costs: LayerCosts, layout: Layout, sequence: int = 1) -> Sequence[Exchange]:
    """Return what ranks exchange in this layout for packs that `sequence` data ranks compute together.

    Raise ValueError where the profile has not timed it.
    """
    found: Sequence[Exchange] = ()
    for each in DIMENSIONS:
        found = each.exchanges(costs, layout, sequence, found)
    return found


def further_layouts(workload: Workload, solver: PlanSolver) -> list[FurtherLayouts]:
    """Return the kinds of layouts that may be searched in addition to the usual ones."""
    return [found for each in DIMENSIONS if (found := each.further(workload, solver)) is not None]
