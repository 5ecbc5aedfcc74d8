"""What forecasts find in a store: profiles of layers, and trials."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autotune.job_file import load_job
from autotune.machine.hardware import probe_hardware, software
from autotune.model_shape import model_shape
from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from storage.store import open_store
from tests.machines.simulated import SimulatedLauncher, Undisturbed
from tests.programs.users import JobFile
from tests.values.storage import NOON, WORKLOAD, result_of
from tests.values.training import PACKED, plan_of, prepared_of
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.plan import Plan

PLAN = plan_of("8+0r2,0", "4+8", packing=PACKED)
IN_BFLOAT16 = replace(PLAN, layout=replace(PLAN.layout, zero=1))
"""The same plan for a job in bfloat16, which ZeRO 0 cannot train."""
OTHERS = (
    plan_of("9+0", "3+8", packing=PACKED),
    plan_of("6+0", "6+8r0,4", packing=PACKED),
    plan_of("12+8", data=2, packing=PACKED),
    plan_of("12+2", "0+6", packing=PACKED),
    plan_of("12+8r6,0", data=2, packing=PACKED),
)
"""Plans of trials that teach what the layers cost."""


def store_profile(job: JobFile, costs: LayerCosts, document: str | None = None, **hardware: Any) -> None:
    """A profile of the job's model on this machine, or on other hardware."""
    here = replace(probe_hardware(2), **hardware)
    workload = replace(WORKLOAD, model=model_shape(load_job(job.path).model), hardware=here, software=software())
    with open_store() as store:
        store.add_workload(workload)
        keys = (here.fingerprint, workload.model.fingerprint, workload.software)
        store.save_layer_profile(*keys, document or wire.encode(costs))


class Trials:
    """Trials in the store that ran on ranks for which other costs are the truth."""

    def __init__(self, example: Path, folder: Path, costs: LayerCosts) -> None:
        self.prepared = prepared_of(example, folder)
        self.costs = costs

    def predictor(self, costs: LayerCosts) -> Predictor:
        return Predictor(costs, self.prepared.epoch, 4)

    def seconds(self, plan: Plan, truth: LayerCosts) -> float:
        return self.predictor(truth).predict(plan).epoch_seconds

    def keep(
        self,
        plans: Sequence[Plan],
        truth: LayerCosts,
        *,
        factor_of: Callable[[Plan], float] = lambda _: 1.0,
        disturbance: str | None = None,
        settings: Mapping[str, object] = MappingProxyType({}),
        seed: int = 0,
        **changes: Any,
    ) -> None:
        """`factor_of` says how much slower a plan is than by the truth; `changes` are those of the workload.

        `settings` and `seed` are those of the study.
        """
        workload = replace(self.prepared.workload, **changes)
        launcher = SimulatedLauncher(self.predictor(truth), factor_of=factor_of)
        calibrated = CalibratedPredictor(self.predictor(self.costs))
        runner = Runner(self.prepared, calibrated, launcher, watch=Undisturbed)
        with open_store() as store:
            study = store.create_study(store.add_workload(workload), settings, seed)
            for number, plan in enumerate(plans):
                trial = store.start_trial(study.id, plan, "sampled")
                ran = runner.run(plan)
                result = replace(
                    result_of(trial.id, ran.outcome),
                    epoch_seconds=ran.epoch_seconds,
                    epoch_seconds_error=ran.epoch_seconds_error,
                    disturbance=disturbance,
                    finished=NOON + timedelta(minutes=number),
                )
                store.finish_trial(result)
