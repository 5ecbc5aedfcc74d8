"""The least memory that a rank needs to train on the longest sample of a job."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.advice.data_sheets import DATA_SHEETS
from autotune.advice.recommendation import Origin
from autotune.advice.sheet_costs import DEVICES_OF_NODE, SheetCosts
from autotune.dimensions.folds import layout_name
from autotune.errors import RecommendError
from autotune.machine.device_problems import Finding
from autotune.search.execution.profiling import design
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import leanest
from autotune.workload import Survey
from trials.costs.layer_costs import LayerCosts
from trials.data.pack_cost import cost_weights
from trials.job import Job
from trials.units import size_setting

_MEBI = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """Memory of the longest sample alone with every layer recomputed: weights, gradients, states and activations."""

    layout: str
    """The layout that needs least."""
    bytes: int
    """Of a rank of its fullest stage."""
    origin: Origin
    """`measured` by a profile, or `analytic`: then layouts and shared packs are left out that only a profile times."""

    @classmethod
    def of(cls, job: Job, survey: Survey, costs: LayerCosts | None) -> "LeastMemory | None":
        """Compute it from the `costs` of a profile; without one, from layers on torch's meta device.

        Without a profile, return None for layers that need values and for a job whose layouts only a profile times.
        """
        work = survey.workload
        try:
            known = costs or _costs_of_sheet(job, survey)
        except RecommendError:
            return None
        predictor = CalibratedPredictor.of_job(
            job,
            survey.index,
            cost_weights(work.model),
            costs=known,
            element_bytes=work.model.element_bytes,
            state=None,
        )
        solver = Solver(predictor.profiled, Limits.of(work, job.search.parallel))
        found = leanest(work, solver, job.search.space)
        if found is None:
            return None
        layout, needed = found
        return cls(layout=layout_name(layout), bytes=needed, origin="analytic" if costs is None else "measured")

    def __str__(self) -> str:
        known = " known without a profile" if self.origin == "analytic" else ""
        return f"the leanest layout{known}, {self.layout}, needs about {math.ceil(self.bytes / _MEBI):,} MiB on a rank"

    def findings(self, limit: int | None) -> Iterator[Finding]:
        """Yield the problem that a known limit, in bytes per rank, is below the least memory."""
        if limit is None or limit >= self.bytes:
            return
        still = "; layouts that `autotune profile JOB` times may need less" if self.origin == "analytic" else ""
        yield Finding(
            what=f"a rank may use {size_setting(limit)}, but for the longest sample {self}{still}",
            remedy="raise hardware.memory_limit if the device has more, give more devices, or train less of the model "
            "(training.freeze, training.lora)",
        )


def _costs_of_sheet(job: Job, survey: Survey) -> LayerCosts:
    """Return costs from the data sheet of some device: bytes are the same on every device, and seconds are not used."""
    work = survey.workload
    sizes = design(work.data, work.model, (), DEVICES_OF_NODE, 0.0).sizes
    return SheetCosts.of(next(iter(DATA_SHEETS.values())), job.model, job.training, sizes).on(work.hardware.devices)
