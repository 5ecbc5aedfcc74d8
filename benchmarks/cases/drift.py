"""How fast a machine is at a moment, compared with the time when its layers were profiled."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from autotune.prediction.features import COSTS, scaled
from autotune.search.execution.profiling import profile_layers
from autotune.workload import Prepared
from trials.arrays import Floats
from trials.costs.layer_costs import LayerCosts
from trials.outcome import Measurement
from trials.plan import Layout, Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.stage import Stage
from trials.tasks.answer import ProfileReport
from trials.tasks.request import ProbeSizes, Profile

_PROBES = Profile(
    sizes=ProbeSizes(unit_counts=(4, 12), sample_shapes=((4, 64), (1, 256))),
    curve_sizes=ProbeSizes(),
    curve_spread=0.0,
    zero_stages=(),
    exchange_seconds=None,
    repeats=4,
    of_node=2,
)
_TIMES = ("load_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "idle_seconds")


def timed_profile(prepared: Prepared, pool: WarmPool, folder: Path) -> tuple[LayerCosts, Floats]:
    """Return the costs of a profile, and the seconds of a few layers then: the mean of directly before and after it.

    These seconds are measured, and no fit has a part in them: one that is wrong by a factor in all layers would count
    as a machine of another speed.
    """
    before = layer_seconds(prepared, pool)
    costs = profile_layers(prepared, pool, folder)
    return costs, (before + layer_seconds(prepared, pool)) / 2


def layer_seconds(prepared: Prepared, pool: WarmPool) -> Floats:
    """Return what a few layers take now on all ranks at once, forward and backward, [ranks * layers]."""
    model, ranks = prepared.workload.model, prepared.workload.hardware.devices
    plan = Plan(
        packing=Padded(samples=1),
        layout=Layout(pipeline=1, data=ranks, zero=0),
        stages=(Stage(vision=model.vision_layers, language=model.language_layers),),
    )
    answer = pool.ask(prepared.request(plan, _PROBES), prepared.job.search.trial_timeout)
    assert isinstance(answer, Answers), answer
    reports = [report for report in answer.reports if isinstance(report, ProfileReport)]
    return np.array([each.forward_seconds + each.backward_seconds for report in reports for each in report.timings])


def slowness(prepared: Prepared, pool: WarmPool, then: Floats) -> float:
    """Return what a few layers take now over `then`, their seconds at the profile: the median."""
    return float(np.median(layer_seconds(prepared, pool) / then))


def at_speed(costs: LayerCosts, slowness: float) -> LayerCosts:
    """Return the costs on a machine that computes `slowness` times as long as in the profile, and sends as fast."""
    return scaled(costs, [1.0 if name == "communication" else slowness for name in COSTS])


def at_profiled_speed(measurement: Measurement, slowness: float) -> Measurement:
    """Return what would have been measured on a machine as fast as it was in the profile."""
    return replace(
        measurement,
        step_seconds=tuple(seconds / slowness for seconds in measurement.step_seconds),
        stages=tuple(
            replace(stage, **{name: getattr(stage, name) / slowness for name in _TIMES}) for stage in measurement.stages
        ),
    )
