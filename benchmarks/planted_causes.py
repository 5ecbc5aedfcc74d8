"""Planted causes of lost time, and the cause that the explanation names first. Prints one JSON object.

    python -m benchmarks.planted_causes [--seeds 5]

The baselines of each job are measured twice on a simulated machine of another form than the predictions
(`benchmarks/planted/machine.py`), which is profiled as ranks are. What a planted cause truly costs is what an epoch
takes longer under the usual settings than that of the same job without it, on the same machine.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.prediction.predictor import Predictor
from autotune.search.baselines import BaselinePlan, baselines
from autotune.search.execution.profiling import profile_layers
from autotune.search.execution.runner import Runner
from autotune.search.explanation.explainer import Explainer
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from autotune.search.roles import Role
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.winner import standings_of
from autotune.workload import Prepared
from benchmarks.output.result import at_least, finish
from benchmarks.planted.jobs import PLANTED, Planted, PlantedJob
from storage.explanation import Explanation, PlanTime
from tests.machines.simulated import Clock, SimulatedLedger, Undisturbed
from trials.plan import Plan
from trials.run.pool import Pool
from trials.stage import Stage

_MEASURED = (Role.DEFAULT, Role.OMNIBAL)
"""The first plan of each of these kinds is measured. Causes are planted in the default's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The explanation of a job's fastest baseline."""

    explanation: Explanation
    usual: Plan
    winner: Plan

    @property
    def time(self) -> PlanTime:
        """Where the time of the usual settings went."""
        found = self.explanation.of(self.usual.id)
        assert found is not None
        return found


def explained(planted: Planted, seed: int = 0) -> Explained:
    """Profile a job with a planted cause, measure the baselines, and explain the fastest of them."""
    prepared, machine = planted.job.prepared(seed), planted.job.machine(seed)
    costs = profile_layers(prepared, machine, Path(), Undisturbed)
    predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
    limits = Limits.of(prepared.workload)
    found = tuple(baselines(prepared.workload, predictor, Solver(predictor, limits), limits, hold_all=False))
    tried = [next(each for each in found if each.role == role) for role in _MEASURED]
    return explain(prepared, predictor, machine, tried, machine)


def explain(
    prepared: Prepared, predictor: Predictor, pool: Pool, tried: Sequence[BaselinePlan], clock: Clock
) -> Explained:
    """Measure each plan twice, in turns, and explain the fastest."""
    calibrated, limits, ledger = CalibratedPredictor(predictor), Limits.of(prepared.workload), SimulatedLedger(clock)
    runner, surrogate = Runner(prepared, calibrated, pool, Undisturbed), Surrogate(calibrated)
    for baseline in (*tried, *tried):
        trial = ledger.begin(baseline.plan, baseline.role, {})
        finished = ledger.finish(trial, ledger.put(trial, runner.run(baseline.plan)))
        calibrated.learn(finished, prepared.job.search)
        surrogate.learn(finished)
    standings = standings_of(ledger.trials, surrogate, {each.plan: frozenset({str(each.role)}) for each in tried})
    winner = standings.winner()
    explainer = Explainer(
        predictor=calibrated,
        surrogate=surrogate,
        limits=limits,
        trials=ledger.trials,
        study_id=ledger.trials[0].study_id,
        samples=prepared.workload.data.samples,
    )
    explanation = explainer.explain(standings, winner)
    assert explanation is not None
    return Explained(explanation=explanation, usual=tried[0].plan, winner=standings.entries[winner.number].plan)


def true_loss(planted: Planted, usual: Plan, seed: int = 0) -> float:
    """Return the share of an epoch that the planted cause truly costs."""
    if planted.cause == "recompute":
        return recompute_loss(planted.job, usual, seed)
    samples = len(planted.job.prepared(seed).index) / len(planted.without.prepared(seed).index)
    without = samples * planted.without.machine(seed).epoch_seconds(usual)
    return 1 - without / planted.job.machine(seed).epoch_seconds(usual)


def recompute_loss(job: PlantedJob, usual: Plan, seed: int = 0) -> float:
    """Return the share of an epoch that recomputation truly costs, which is in the usual settings of every job."""
    stages = tuple(Stage(vision=stage.vision, language=stage.language) for stage in usual.stages)
    lean = Plan(packing=usual.packing, layout=usual.layout, stages=stages)
    return 1 - job.machine(seed).epoch_seconds(lean) / job.machine(seed).epoch_seconds(usual)


def _row(planted: Planted, seed: int) -> dict[str, Any]:
    found = explained(planted, seed)
    time = found.time
    return {
        "planted": planted.cause,
        "seed": seed,
        "named": [cause.name for cause in time.causes],
        "shares": {each.name: each.seconds / time.epoch_seconds for each in time.parts},
        "errors": {each.name: each.error / time.epoch_seconds for each in time.parts},
        "true_share": true_loss(planted, found.usual, seed),
        "true_share_of_recompute": recompute_loss(planted.job, found.usual, seed),
        "gain": time.epoch_seconds / found.explanation.winner.epoch_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    rows = [_row(planted, seed) for planted in PLANTED for seed in range(parser.parse_args().seeds)]
    print(*(f"{row['planted']}, seed {row['seed']}: {row['named'][:2]}" for row in rows), sep="\n", file=sys.stderr)
    first = [row["named"][0] == row["planted"] for row in rows]
    # A cause that was planted too weakly would be named second rightly.
    strong = [row["true_share"] / row["true_share_of_recompute"] for row in rows]
    unexplained = [abs(row["shares"]["unexplained"]) for row in rows]
    finish(
        rows,
        [
            at_least("share of the jobs whose planted cause is named first", [sum(first) / len(first)], 1.0),
            at_least("true share of the planted cause over that of recomputation", strong, 1.0),
            at_least("share of an epoch that is explained, least", [1 - max(unexplained)], 0.8),
        ],
    )


if __name__ == "__main__":
    main()
