"""What the memory meter counts, compared with the prediction."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.workload import Prepared
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of
from trials.costs.layer_costs import LayerCosts
from trials.engine.memory import MemoryExceeded, SavedTensorMeter
from trials.model.paths import parameters_at
from trials.model.skeleton import build_skeleton, load_config
from trials.outcome import OutOfMemory, StageMeasurement
from trials.plan import Layout, Levelled, Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.stage import Recomputed
from trials.tasks.answer import TrialReport
from trials.tasks.request import Training, Trial


def by_level(packing: Levelled, plan: Plan, *further: tuple[int, int]) -> Plan:
    """The plan with (vision, language) layers that each stage recomputes at the second level."""
    stages = (
        replace(stage, further_levels=(Recomputed(vision=vision, language=language),))
        for stage, (vision, language) in zip(plan.stages, further, strict=True)
    )
    return Plan(packing=packing, layout=plan.layout, stages=tuple(stages))


pytestmark = pytest.mark.ranks

LEVELS = Levelled(levels=(replace(PACKED, qt=150, qt_min=0), replace(PACKED, qv=12, qt=600, sequence=2)))
BY_LEVEL = by_level(LEVELS, plan_of("12+8r0,2", data=2, zero=1), (12, 8))
BY_LEVEL_AND_STAGE = by_level(
    Levelled(levels=tuple(replace(level, sequence=1) for level in LEVELS.levels)),
    plan_of("9+0r9,0", "3+8"),
    (4, 0),
    (3, 8),
)

FURTHER = Levelled(
    levels=(
        *LEVELS.levels[:1],
        replace(PACKED, qt=300, qt_min=0, sequence=2),
        replace(PACKED, qv=12, qt=600, sequence=4),
    )
)
FOUR_RANKS = {
    "shared by four": plan_of("12+8r3,2", data=4, packing=replace(PACKED, sequence=4)),
    "shared by two of four, ZeRO 1": plan_of("12+8", data=4, zero=1, packing=replace(PACKED, sequence=2)),
    "shared, split in the vision tower": plan_of(
        "9+0r2,0", "3+8r3,0", data=2, zero=1, packing=replace(PACKED, sequence=2)
    ),
    "shared, split in the language model": plan_of("12+3r0,3", "0+5", data=2, packing=replace(PACKED, sequence=2)),
    "layers cut, data parallel, ZeRO 1": plan_of("12+8r3,2", data=2, tensor=2, zero=1),
    "layers cut, shared": plan_of("12+8", data=2, tensor=2, packing=replace(PACKED, sequence=2)),
    "layers cut, split in the language model": plan_of("12+3r0,3", "0+5", tensor=2),
    "layers cut, levels": replace(BY_LEVEL, layout=replace(BY_LEVEL.layout, tensor=2)),
    "levels of a pipeline, alone and shared": by_level(
        LEVELS, plan_of("9+0r9,0", "3+8", data=2, zero=1), (4, 0), (3, 8)
    ),
    "three levels": Plan(
        packing=FURTHER,
        layout=Layout(pipeline=1, data=4, zero=1),
        stages=(
            replace(
                plan_of("12+8").stages[0],
                further_levels=(Recomputed(vision=12, language=0), Recomputed(vision=0, language=8)),
            ),
        ),
    ),
}

ROWS, COLUMNS = 64, 32
TENSOR = 4 * ROWS * COLUMNS


def test_the_meter_counts_a_storage_once_and_parameters_not_at_all() -> None:
    weight = nn.Parameter(torch.randn(COLUMNS, COLUMNS))
    meter = SavedTensorMeter([weight], static_bytes=1000, memory_limit_bytes=1 << 40)
    states = torch.randn(ROWS, COLUMNS, requires_grad=True)
    with meter.watch():
        product = states @ weight  # keeps states and weight
        result = (product.sin() + product.cos()).sum()  # keeps the product twice
        assert meter.live_bytes == 2 * TENSOR
        result.backward()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 1000 + 2 * TENSOR


def test_the_meter_ends_a_step_that_passes_the_limit() -> None:
    meter = SavedTensorMeter([], static_bytes=1000, memory_limit_bytes=1000 + TENSOR)
    states = torch.randn(ROWS, COLUMNS, requires_grad=True)
    for _ in range(2):  # nothing of the step that was ended counts in the next one
        with meter.watch(), pytest.raises(MemoryExceeded) as raised:
            states.sin().sin()
        assert (raised.value.needed_bytes, raised.value.memory_limit_bytes) == (1000 + 2 * TENSOR, 1000 + TENSOR)
        del raised
        gc.collect()
        assert meter.live_bytes == 0


def test_a_training_on_a_cpu_is_bounded_by_the_limit_of_its_job_alone(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    plan = plan_of("4+2", data=2)
    for limit, expected in ((None, Answers), ("400MiB", OutOfMemory)):
        prepared = prepared_of(shallow, tmp_path / str(limit), hardware={"devices": 2, "memory_limit": limit})
        task = Training(output=prepared.job.training.output, max_steps=1)
        # Less than any step needs, as another machine may have.
        request = replace(prepared.request(plan, task), memory_limit_bytes=1 << 20)
        assert isinstance(pool.ask(request, 120), expected)


@pytest.mark.parametrize(
    "plan",
    parameters(
        {
            "kept": plan_of("8+0", "4+8"),
            "some recomputed": plan_of("8+0r5,0", "4+8r2,0"),
            "some selectively": plan_of("8+0r2,0s6,0", "4+8s3,8"),
            "all selectively": plan_of("12+8s12,8", data=2, zero=1),
            "all recomputed": plan_of("12+1r12,1", "0+7r0,7"),
            "padded": plan_of("10+0", "2+8r2,4", packing=Padded(samples=4)),
            "ZeRO 1": plan_of("12+8r6,0", data=2, zero=1),
            "ZeRO 2": plan_of("12+8", data=2, zero=2),
            "ZeRO 3": plan_of("12+8", data=2, zero=3),
            "ZeRO 3, some recomputed": plan_of("12+8r12,3", data=2, zero=3),
            "ZeRO 3, all recomputed, padded": plan_of("12+8r12,8", data=2, zero=3, packing=Padded(samples=1)),
            "ZeRO 3, some gathered once": plan_of("12+8r12,3g6", data=2, zero=3),
            "ZeRO 3, all gathered once": plan_of("12+8r2,8g20", data=2, zero=3),
            "ZeRO 3, levels": replace(BY_LEVEL, layout=Layout(pipeline=1, data=2, zero=3)),
            "levels": BY_LEVEL,
            "levels of a pipeline": BY_LEVEL_AND_STAGE,
            "shared": plan_of("12+8", data=2, packing=replace(PACKED, sequence=2)),
            "layers cut": plan_of("12+8", tensor=2),
            "layers cut, some recomputed": plan_of("12+8r12,3", tensor=2, zero=1),
            "shared, some recomputed": plan_of("12+8r12,3", data=2, zero=1, packing=replace(PACKED, sequence=2)),
        },
        short=("levels",),
    ),
)
def test_predicted_bytes_of_every_stage_are_close_to_the_measured(
    plan: Plan, prepared: Prepared, costs: LayerCosts, pool: WarmPool
) -> None:
    check(plan, prepared, costs, pool)


@pytest.fixture(scope="module")
def prepared_for_four(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_of(example, tmp_path_factory.mktemp("job of four"), hardware={"devices": 4})


@pytest.fixture(scope="module")
def costs_of_four(
    prepared_for_four: Prepared, four_ranks: WarmPool, tmp_path_factory: pytest.TempPathFactory
) -> LayerCosts:
    return profile_layers(prepared_for_four, four_ranks, tmp_path_factory.mktemp("logs of four"))


@pytest.mark.long
@pytest.mark.parametrize("plan", FOUR_RANKS.values(), ids=FOUR_RANKS)
def test_predicted_bytes_on_four_ranks_are_close_to_the_measured(
    plan: Plan, prepared_for_four: Prepared, costs_of_four: LayerCosts, four_ranks: WarmPool
) -> None:
    check(plan, prepared_for_four, costs_of_four, four_ranks)


def check(plan: Plan, prepared: Prepared, costs: LayerCosts, pool: WarmPool) -> None:
    """Run an epoch, and compare the peak of each stage's fullest rank with the prediction.

    Where ranks share a pack, its targets lie as is predicted or are spread further, up to equally many on each rank.
    """
    predictor = Predictor(costs, prepared.epoch, element_bytes=4)
    predicted = predictor.predict(plan)
    evenly = predictor.stage_memory(plan, predictor.sizes(plan.packing, plan.layout).evenly)
    steps = prepared.epoch(plan.packing, plan.layout.data).steps
    answer = pool.ask(prepared.request(plan, Trial(warmup_steps=(), timed_steps=tuple(range(steps)))), 120)
    assert isinstance(answer, Answers), answer
    measured: dict[int, int] = {}
    for report in answer.reports:
        assert isinstance(report, TrialReport)
        measured[report.stage.stage] = max(report.stage.peak_bytes, measured.get(report.stage.stage, 0))
    for stage, needed in enumerate(predicted.stage_bytes):
        assert 0.99 * measured[stage] <= needed
        assert evenly[stage].expected <= 1.01 * measured[stage]
        interval = predicted.stage_memory[stage]
        assert interval.low <= measured[stage] <= interval.high


def test_the_bytes_of_the_last_stage_are_those_of_the_targets_of_its_packs(
    prepared: Prepared, costs: LayerCosts, pool: WarmPool
) -> None:
    plan = plan_of("12+6", "0+2")
    assert prepared.workload.data.target_share < 0.4
    check(plan, prepared, costs, pool)
    index = replace(prepared.index, target_tokens=prepared.index.text_tokens)
    every_token = Predictor(costs, replace(prepared, index=index).epoch, element_bytes=4).predict(plan)
    predicted = Predictor(costs, prepared.epoch, element_bytes=4).predict(plan)
    assert every_token.stage_bytes[1] > 1.05 * predicted.stage_bytes[1]


@pytest.mark.long
def test_recomputing_a_layer_saves_the_same_bytes_each_time(prepared: Prepared, pool: WarmPool) -> None:
    peaks = []
    for count in (1, 2, 3):
        answer = pool.ask(
            prepared.request(plan_of(f"12+8r{count},0", data=2), Trial(warmup_steps=(), timed_steps=(0,))), 120
        )
        assert isinstance(answer, Answers), answer
        peaks.append(max(report.stage.peak_bytes for report in answer.reports if isinstance(report, TrialReport)))
    first, second = peaks[0] - peaks[1], peaks[1] - peaks[2]
    assert first > 0
    assert first == pytest.approx(second, rel=0.02)


def test_tensor_ranks_keep_as_much_as_ranks_that_share_packs_and_hold_slices_of_the_layers(
    prepared: Prepared, pool: WarmPool
) -> None:
    """Packs are the same in both plans, and either way each rank has half of the work of a layer."""
    shared, cut = (
        measured_stages(prepared, pool, plan)
        for plan in (plan_of("12+8", data=2, packing=replace(PACKED, sequence=2)), plan_of("12+8", tensor=2))
    )
    kept, wanted = (max(each.peak_bytes - each.static_bytes for each in stages) for stages in (cut, shared))
    assert kept == pytest.approx(wanted, rel=0.01)
    skeleton = build_skeleton(load_config(prepared.job.model.path), torch.float32)
    dealt = [
        parameter.numel()
        for path in skeleton.chain.language_layers
        for name, parameter in parameters_at(skeleton.model, path)
        if "norm" not in name
    ]
    # Weights, gradients and two moments of half of them.
    assert {each.static_bytes for each in cut} == {shared[0].static_bytes - 16 * sum(dealt) // 2}


def measured_stages(prepared: Prepared, pool: WarmPool, plan: Plan) -> list[StageMeasurement]:
    """Return what each rank measured in the first step."""
    answer = pool.ask(prepared.request(plan, Trial(warmup_steps=(), timed_steps=(0,))), 120)
    assert isinstance(answer, Answers), answer
    return [report.stage for report in answer.reports if isinstance(report, TrialReport)]
