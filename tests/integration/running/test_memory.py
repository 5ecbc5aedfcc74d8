"""What the memory meter counts, compared with the prediction."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autotune.prediction.exchange import AttentionWidths
from autotune.prediction.predictor import Predictor
from autotune.workload import Prepared
from tests.parameters import parameters
from tests.training_values import PACKED, plan_of
from trials.engine.memory import MemoryExceeded, SavedTensorMeter
from trials.layer_costs import LayerCosts
from trials.plan import Levelled, Padded, Plan, Recomputed
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial


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
    with meter.watch(), pytest.raises(MemoryExceeded) as raised:
        states.sin().sin()
    assert (raised.value.needed_bytes, raised.value.memory_limit_bytes) == (1000 + 2 * TENSOR, 1000 + TENSOR)


@pytest.mark.parametrize(
    "plan",
    parameters(
        {
            "kept": plan_of("8+0", "4+8"),
            "some recomputed": plan_of("8+0r5,0", "4+8r2,0"),
            "all recomputed": plan_of("12+1r12,1", "0+7r0,7"),
            "padded": plan_of("10+0", "2+8r2,4", packing=Padded(samples=4)),
            "ZeRO 1": plan_of("12+8r6,0", data=2, zero=1),
            "levels": BY_LEVEL,
            "levels of a pipeline": BY_LEVEL_AND_STAGE,
            "shared": plan_of("12+8", data=2, packing=replace(PACKED, sequence=2)),
            "shared, some recomputed": plan_of("12+8r12,3", data=2, zero=1, packing=replace(PACKED, sequence=2)),
        },
        short=("padded", "levels", "shared, some recomputed"),
    ),
)
def test_predicted_bytes_of_every_stage_are_close_to_the_measured(
    plan: Plan, prepared: Prepared, costs: LayerCosts, pool: WarmPool
) -> None:
    attention = AttentionWidths(heads=4, key_heads=2, head_size=12)
    predicted = Predictor(costs, prepared.epoch, element_bytes=4, attention=attention).predict(plan)
    steps = prepared.epoch(plan.packing, plan.layout.data).steps
    answer = pool.ask(prepared.request(plan, Trial(warmup_steps=(), timed_steps=tuple(range(steps)))), 120)
    assert isinstance(answer, Answers), answer
    measured: dict[int, int] = {}
    for report in answer.reports:
        assert isinstance(report, TrialReport)
        measured[report.stage.stage] = max(report.stage.peak_bytes, measured.get(report.stage.stage, 0))
    for stage, needed in enumerate(predicted.stage_bytes):
        assert needed == pytest.approx(measured[stage], rel=0.01)
        interval = predicted.stage_memory[stage]
        assert interval.low <= measured[stage] <= interval.high


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
