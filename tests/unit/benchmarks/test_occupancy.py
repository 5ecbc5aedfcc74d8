"""Bytes of stages, counted event by event."""

from dataclasses import replace

import pytest

from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_VIT_300M
from benchmarks.cases.workloads import SimulatedWorkload
from benchmarks.machines.analytic import A100, analytic_costs
from benchmarks.machines.occupancy import Size, most_bytes, most_of_epoch
from trials.plan import Layout, Packed, Plan
from trials.stage import Stage

VISION, LANGUAGE = replace(INTERN_VIT_300M, layers=6), replace(INTERN_LM2_2B, layers=6)
COSTS = analytic_costs(VISION, LANGUAGE, A100)
PACKING = Packed(qv=9, qt=4096, qv_min=9, qt_min=4032, packer="best-fit")
PACK: Size = (4.0, 1500.0, 1500.0**2, 300.0)
UNITS, TOKENS, _, TARGETS = PACK


def plan_of(*stages: Stage, data: int = 1) -> Plan:
    return Plan(packing=PACKING, layout=Layout(pipeline=len(stages), data=data, zero=1), stages=stages)


def test_a_selective_layer_keeps_less_and_needs_a_little_more_while_it_runs() -> None:
    stage = Stage(vision=6, language=6, selective_vision=6, selective_language=6)
    plan = plan_of(stage)
    (found,) = most_bytes(COSTS, plan, [PACK])
    before = UNITS * COSTS["vision_embedding"].kept_bytes[0] + 6 * UNITS * COSTS["vision"].selective_bytes[0]
    before += UNITS * COSTS["projector"].kept_bytes[0] + 6 * TOKENS * COSTS["language"].selective_bytes[1]
    with_head = before + TARGETS * COSTS["head"].kept_bytes[1]
    # After the head the last language layer runs, and computes again what it needs.
    more = TOKENS * (COSTS["language"].selective_peak_bytes[1] - COSTS["language"].selective_bytes[1])
    counts = {"vision_embedding": 1, "vision": 6, "projector": 1, "language": 6, "head": 1}
    static = 18 * sum(counts[kind] * cost.parameters for kind, cost in COSTS.layers)
    assert found - static == pytest.approx(max(with_head, before + more))


def test_the_first_stage_holds_a_pack_for_each_stage_behind_it() -> None:
    plan = plan_of(Stage(vision=6, language=0), Stage(vision=0, language=3), Stage(vision=0, language=3))
    first, _, _ = most_bytes(COSTS, plan, [PACK] * 8)
    few, _, _ = most_bytes(COSTS, plan, [PACK] * 2)
    ends = COSTS["vision_embedding"].kept_bytes[0] + COSTS["projector"].kept_bytes[0]
    kept = UNITS * (ends + 6 * COSTS["vision"].kept_bytes[0])
    assert first - few == pytest.approx(kept)


@pytest.mark.parametrize("data", [1, 2])
def test_predicted_bytes_are_those_of_the_events_for_any_recomputation(data: int) -> None:
    job = SimulatedWorkload(
        name="small", vision=VISION, language=LANGUAGE, tensor=1, data="tiles up to 5", devices=4, room=1.0, seed=0
    )
    ways = [(0, 0), (2, 0), (0, 2), (1, 2), (3, 0), (0, 3), (1, 1)]
    for whole, selective in ways:
        of_both = Stage(
            vision=3,
            language=3,
            recompute_vision=whole,
            recompute_language=whole,
            selective_vision=selective,
            selective_language=selective,
        )
        of_vision = replace(of_both, language=0, recompute_language=0, selective_language=0)
        of_language = replace(of_both, vision=0, recompute_vision=0, selective_vision=0)
        plan = plan_of(of_vision, of_both, of_language, data=data)
        most = most_of_epoch(job.costs, plan, job.epoch(PACKING, data))
        predicted = job.predictor.predict(plan).stage_bytes
        # The prediction takes the heaviest packs together, in whatever order they run.
        ratios = [found / expected for found, expected in zip(most, predicted, strict=True)]
        assert min(ratios) > 0.9
        assert max(ratios) < 1.0001
