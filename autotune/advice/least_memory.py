"""The least memory of a rank under any plan of a job, before anything is measured."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.advice.data_sheets import DATA_SHEETS
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
    """What the longest sample needs with everything recomputed: weights, gradients, states and activations."""

    layout: str
    bytes: int
    """On a rank of the stage that needs most."""
    is_profiled: bool
    """Whether layouts are among them whose exchanges a profile has to time, and packs that ranks share."""

    @classmethod
    def of(cls, job: Job, survey: Survey, costs: LayerCosts | None) -> "LeastMemory | None":
        """Compute it from a profile's `costs`, or else from layers without values.

        Return None for layers that cannot be computed without values, and where the job names layouts that only a
        profile knows.
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
        return cls(layout=layout_name(layout), bytes=needed, is_profiled=costs is not None)

    def __str__(self) -> str:
        known = "" if self.is_profiled else " known without a profile"
        return f"the leanest layout{known}, {self.layout}, needs about {math.ceil(self.bytes / _MEBI):,} MiB on a rank"

    def findings(self, limit: int | None) -> Iterator[Finding]:
        """Yield a limit in bytes per rank, if one is known, that is below it."""
        if limit is None or limit >= self.bytes:
            return
        still = "" if self.is_profiled else "; ZeRO 3, tensor parallelism or packs that ranks share may still fit"
        yield Finding(
            what=f"a rank may use {size_setting(limit)}, but for the longest sample {self}{still}",
            remedy="raise hardware.memory_limit if the device has more, give more devices, or train less of the model "
            "(training.freeze, training.lora)",
        )


def _costs_of_sheet(job: Job, survey: Survey) -> LayerCosts:
    """Return costs whose bytes hold on every device; their seconds are of none of here."""
    work = survey.workload
    sizes = design(work.data, work.model, (), DEVICES_OF_NODE, 0.0).sizes
    return SheetCosts.of(next(iter(DATA_SHEETS.values())), job.model, job.training, sizes).on(work.hardware.devices)
