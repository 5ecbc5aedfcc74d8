"""The profile of a model of which not all trains predicts its trials."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.dimensions.zero import trained_parameters
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import layer_costs
from storage.store import open_store
from tests.values.training import plan_of, prepared_of
from trials.costs.coefficients import KINDS, LayerKind
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import GRADIENT_BYTES
from trials.model.cut import cut
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

pytestmark = pytest.mark.ranks

CASES: dict[str, tuple[dict[str, Any], set[LayerKind], Sequence[Plan]]] = {
    "frozen vision": (
        {"freeze": ["vision"]},
        {"vision_embedding", "vision"},
        [
            plan_of("1+0r1,0", "3+2r0,1"),
            plan_of("4+0", "0+2r0,2", zero=1),
            plan_of("4+2r2,1", data=2, zero=1),
            plan_of("4+2", data=2, zero=3),
        ],
    ),
    "LoRA in the language layers": (
        {"lora": {"rank": 4}},
        {"vision_embedding", "vision", "projector"},
        [
            plan_of("1+0r1,0", "3+2r1,1"),
            plan_of("4+1r0,1", "0+1", zero=1),
            plan_of("4+2r2,1", data=2, zero=1),
            plan_of("4+2", data=2, zero=3),
        ],
    ),
    "frozen language layers": (
        {"freeze": ["language"]},
        set(),
        [plan_of("4+2", data=2, zero=1), plan_of("4+2", data=2, zero=3)],
    ),
}


def surplus_bytes(costs: LayerCosts, plan: Plan) -> int:
    """Return the most bytes that the prediction adds on purpose with gradients in shards.

    It takes the larger one of what may be behind a language layer: another one, or the head, which is behind the last.
    """
    _, _, _, language, head = trained_parameters(costs)
    return GRADIENT_BYTES * max(0, language - head) * plan.layout.shards_gradients


@pytest.mark.long
@pytest.mark.usefixtures("brief_profiles")
@pytest.mark.parametrize("name", CASES)
def test_time_and_bytes_are_predicted_without_what_does_not_run(
    name: str, wide_shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    training, without_backward, plans = CASES[name]
    prepared = prepared_of(wide_shallow, tmp_path, training=training)
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        store.add_workload(prepared.workload)
        costs = layer_costs(prepared, store, pool, tmp_path)
        assert layer_costs(prepared, store, pool, tmp_path) == costs  # found under what trains
    assert {kind for kind, cost in costs.layers if not cost.has_backward} == without_backward
    assert all(not any(costs[kind].kept_bytes) for kind in without_backward)
    predictor = Predictor(costs, prepared.epoch, element_bytes=4)
    for plan in plans:
        steps = prepared.epoch(plan.packing, plan.layout.data).steps
        answer = pool.ask(prepared.request(plan, Trial(warmup_steps=(), timed_steps=tuple(range(steps)))), 120)
        assert isinstance(answer, Answers), answer
        stages = [report.stage for report in answer.reports if isinstance(report, TrialReport)]
        predicted, parts = predictor.predict(plan), Parts.of(cut(plan))
        for number, needed in enumerate(predicted.stage_memory):
            of_stage = [stage for stage in stages if stage.stage == number]
            assert needed.static == of_stage[0].static_bytes
            measured = max(stage.peak_bytes for stage in of_stage)
            assert 0.99 * measured <= needed.expected <= 1.01 * measured + surplus_bytes(costs, plan)
            runs_backward = any(costs[KINDS[kind]].has_backward for kind in np.flatnonzero(parts.layers[number]))
            assert [stage.backward_seconds > 0 for stage in of_stage] == [runs_backward] * len(of_stage)
