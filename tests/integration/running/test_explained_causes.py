"""The explanation names a planted cause of lost time first, on real ranks."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autotune.prediction.predictor import Predictor
from autotune.search.baselines import BaselinePlan
from autotune.search.roles import Role
from autotune.workload import Prepared
from benchmarks.planted_causes import Explained, explain
from tests.values.training import plan_of, prepared_of, variant_of
from trials.costs.layer_costs import LayerCosts
from trials.plan import Padded, Plan
from trials.run.pool import WarmPool

pytestmark = pytest.mark.ranks

PADDED = Padded(samples=4)


class _Now:
    def now(self) -> datetime:
        return datetime.now(UTC)


def explained(prepared: Prepared, costs: LayerCosts, pool: WarmPool, usual: Plan) -> Explained:
    predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
    found = explain(prepared, predictor, pool, (BaselinePlan(role=Role.DEFAULT, plan=usual),), _Now())
    for plan in found.explanation.plans:
        assert sum(part.seconds for part in plan.parts) == pytest.approx(plan.epoch_seconds)
    return found


def records(lengths: Iterator[int]) -> str:
    turns = [
        [{"from": "human", "value": "Count."}, {"from": "gpt", "value": " ".join(["one"] * length)}]
        for length in lengths
    ]
    return "".join(json.dumps({"id": number, "conversations": each}) + "\n" for number, each in enumerate(turns))


@pytest.mark.long
def test_texts_of_very_unequal_lengths_are_padding(
    shallow: Path, tmp_path: Path, costs: LayerCosts, pool: WarmPool
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text(records(600 if number % 4 == 0 else 10 for number in range(64)))
    prepared = prepared_of(
        shallow,
        tmp_path,
        data={"sources": [{"path": str(data)}]},
        training={"global_batch_samples": 32},
    )
    found = explained(prepared, costs, pool, plan_of("4+2", data=2, packing=Padded(samples=8)))
    assert found.time.causes[0].name == "padding"


@pytest.mark.long
def test_a_heavy_vision_tower_on_the_first_stage_is_stage_imbalance(
    shallow: Path, tmp_path: Path, costs: LayerCosts, pool: WarmPool
) -> None:
    """The profile is that of a narrow tower, as one of another machine could be; what the ranks measure decides."""

    def widen(config: dict[str, Any]) -> None:
        config["vision_config"] |= {"hidden_size": 384, "intermediate_size": 1536}

    heavy = variant_of(shallow, tmp_path / "wide tower", widen)
    prepared = prepared_of(heavy, tmp_path, training={"global_batch_samples": 24})
    found = explained(prepared, costs, pool, plan_of("4+0r4,0", "0+2r0,2", packing=PADDED))
    assert found.time.causes[0].name == "stage_imbalance"
    assert found.time.part("stage_imbalance").basis == "measured"
