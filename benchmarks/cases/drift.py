"""How fast a machine is at a moment, compared with the time when its layers were profiled."""

from dataclasses import replace

import numpy as np

from autotune.prediction.curves import Curves
from autotune.prediction.features import COSTS, scaled
from autotune.workload import Prepared
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.outcome import Measurement
from trials.plan import Layout, Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.stage import Stage
from trials.tasks.answer import LayerTiming, ProfileReport
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


def slowness(prepared: Prepared, pool: WarmPool, costs: LayerCosts) -> float:
    """Return what a few layers take now on all ranks at once, over what they took in the profile: the median."""
    model, ranks = prepared.workload.model, prepared.workload.hardware.devices
    plan = Plan(
        packing=Padded(samples=1),
        layout=Layout(pipeline=1, data=ranks, zero=0),
        stages=(Stage(vision=model.vision_layers, language=model.language_layers),),
    )
    answer = pool.ask(prepared.request(plan, _PROBES), prepared.job.search.trial_timeout)
    assert isinstance(answer, Answers), answer
    reports = [report for report in answer.reports if isinstance(report, ProfileReport)]
    return float(np.median([_ratio(timing, costs) for report in reports for timing in report.timings]))


def _ratio(timing: LayerTiming, costs: LayerCosts) -> float:
    cost, size = costs[timing.layer], np.array((timing.units, timing.tokens, timing.squares, 1.0))
    columns = np.array([(*size, timing.tokens)])  # all tokens of a probe are targets
    fitted = size @ np.array(cost.forward_seconds) + size @ np.array(cost.backward_seconds)
    profiled = fitted * Curves(costs).at(columns)[0, KINDS.index(timing.layer)]
    return float((timing.forward_seconds + timing.backward_seconds) / profiled)


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
