"""Layouts whose ranks hold the language layers together: checks of those that a job names, and those that may help."""

from dataclasses import replace

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import layouts, named_layout, refused
from autotune.search.space.offers import FurtherLayouts
from autotune.workload import Prepared, check_layout
from trials.errors import InvalidPlan
from trials.workload import Workload


def check_named(prepared: Prepared) -> None:
    """Raise JobError, with the reason, for a named layout that the model, its training or the nodes do not allow."""
    for name in prepared.job.search.space.layouts or ():
        if (layout := named_layout(name, prepared.workload)) is not None:
            try:
                check_layout(prepared, layout)
            except InvalidPlan as error:
                raise refused(name, str(error)) from error


def further_cut(workload: Workload, solver: Solver) -> FurtherLayouts:
    """Return the layouts of all devices with each tensor degree that was timed, is a power of two and fits a node."""
    hardware = workload.hardware
    return FurtherLayouts(
        possible=tuple(
            replace(layout, tensor=degree)
            for degree in solver.tensor_degrees
            if degree & (degree - 1) == 0 and hardware.has_groups(degree)
            for layout in layouts(workload.model, hardware.devices // degree)
        ),
        searched="Tensor degrees are",
        usual="tensor degree 1",
        usual_alone="Tensor degree 1 is best and the only one that is searched",
    )
