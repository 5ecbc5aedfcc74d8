"""The profile of a model whose output projection is its word embedding predicts what its ranks hold and update."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.updates import update_seconds_per_parameter
from autotune.search.execution.profiling import profile_layers
from autotune.workload import Prepared
from tests.machines.own_ranks import on_ranks
from tests.machines.rank_bytes import measured_bytes
from tests.values.search import COSTS
from tests.values.training import plan_of, prepared_of, variant_of
from trials import wire
from trials.costs.coefficients import KINDS
from trials.engine.memory import module_static_bytes
from trials.model.cut import cut
from trials.plan import Padded, Plan
from trials.run.pool import WarmPool
from trials.tasks.profiling.layer_profile import run_profile
from trials.tasks.request import ProbeSizes, Profile, Training
from trials.tasks.session import build_stage

pytestmark = pytest.mark.ranks

ONE = Padded(samples=1)
PLANS = [
    *(plan_of("4+2", data=2, zero=zero, packing=ONE) for zero in (0, 1, 2, 3)),
    *(plan_of(*stages, zero=zero, packing=ONE) for stages in (("4+1", "0+1"), ("3+0", "1+2")) for zero in (0, 1)),
]
"""A rank has both ends, then each stage one of them, then the last stage both."""
CUT = [plan_of("4+2", tensor=2, zero=zero, packing=ONE) for zero in (0, 1)]
WITHOUT_BACKWARD = 20
"""Bytes of a number that trains in a stage without a backward pass, for DeepSpeed's optimizer."""
CASES: dict[str, tuple[str, dict[str, Any], Sequence[Plan]]] = {
    "whole": ("float32", {}, [*PLANS, *CUT]),
    "whole in bfloat16": ("bfloat16", {}, [plan for plan in [*PLANS, *CUT] if plan.layout.zero]),
    "frozen vision": ("float32", {"freeze": ["vision"]}, PLANS),
    "frozen language layers": ("float32", {"freeze": ["language"]}, PLANS[:4]),
    "LoRA in the language layers": ("float32", {"lora": {"rank": 4}}, PLANS),
}


@pytest.fixture(scope="module")
def tied(wide_shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a fifth of its parameters in the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
        config["text_config"]["vocab_size"] *= 4

    return variant_of(wide_shallow, tmp_path_factory.mktemp("tied"), change)


def prepared_case(name: str, tied: Path, folder: Path) -> Prepared:
    dtype, training, _ = CASES[name]
    return prepared_of(tied, folder, model={"dtype": dtype}, training={"global_batch_samples": 2, **training})


@pytest.mark.parametrize("name", ["whole", pytest.param("frozen language layers", marks=pytest.mark.long)])
def test_a_stage_with_both_ends_holds_a_tied_weight_once(name: str, tied: Path, tmp_path: Path) -> None:
    prepared, (_, _, plans) = prepared_case(name, tied, tmp_path), CASES[name]
    sizes = ProbeSizes(unit_counts=(1,), sample_shapes=((1, 16),))
    task = Profile(
        sizes=sizes,
        curve_sizes=sizes,
        curve_spread=-1.0,
        zero_stages=(),
        exchange_seconds=None,
        repeats=1,
        of_node=1,
    )
    report = run_profile(prepared.request(PLANS[0], task), task, torch.device("cpu"))
    counts, frozen = dict(report.parameters), dict(report.frozen_parameters)
    costs = replace(
        COSTS,
        layers=tuple(
            (
                kind,
                replace(
                    COSTS[kind],
                    parameters=counts[kind],
                    frozen_parameters=frozen[kind],
                    tied_parameters=report.tied_parameters if kind == "head" else 0,
                ),
            )
            for kind in KINDS
        ),
    )
    predictor = Predictor(costs, prepared.epoch, element_bytes=4)
    for plan in plans:
        if plan.layout.zero == 3 or plan.layout.tensor > 1:  # which the ranks of a group build together
            continue
        request = prepared.request(plan, Training(output=tmp_path))
        for number, static in enumerate(predictor.memory.static(Parts.of(cut(plan)), plan.layout)):
            stage = build_stage(request, number, torch.device("cpu"))
            assert static == module_static_bytes(stage, plan.layout), (plan, number)


@pytest.mark.long
@pytest.mark.usefixtures("brief_profiles")
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_and_update_what_is_predicted_of_a_tied_model(
    name: str, tied: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared, (_, _, plans) = prepared_case(name, tied, tmp_path), CASES[name]
    costs = profile_layers(prepared, pool, tmp_path)
    assert costs["head"].tied_parameters > 0.15 * prepared.workload.model.parameters
    predictor = Predictor(costs, prepared.epoch, element_bytes=prepared.workload.model.element_bytes)
    for rank, of_rank in enumerate(on_ranks(measured_bytes, requests(plans, prepared, tmp_path))):
        for plan, found in zip(plans, of_rank, strict=True):
            stage, parts = plan.layout.grid.coordinates(rank).stage, Parts.of(cut(plan))
            static = predictor.memory.static(parts, plan.layout)[stage]
            none = WITHOUT_BACKWARD * (found["trained"] == 1)
            assert static <= found["expected"] <= static + none, (plan, rank)
            # Counters of steps, and weights across the border of two ranks' shares.
            assert static <= found["held"] <= 1.04 * static, (plan, rank)
            update = predictor.times.update_parts(plan.layout, parts, predictor.sizes(plan.packing, plan.layout))
            trained = update.optimizer[stage] / update_seconds_per_parameter(costs, plan.layout)
            assert trained == pytest.approx(found["trained"], abs=1), (plan, rank)


def requests(plans: Sequence[Plan], prepared: Prepared, folder: Path) -> list[Path]:
    """The files of a training with each plan."""
    files = []
    for number, plan in enumerate(plans):
        files.append(folder / f"request-{number}.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=folder / str(number)))))
    return files
