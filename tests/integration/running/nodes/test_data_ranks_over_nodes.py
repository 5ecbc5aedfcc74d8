"""Data ranks on two nodes of two ranks each: losses, and times that the link between the nodes decides."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.workload import Prepared
from tests.machines.nodes import Cable, cable, two_nodes
from tests.values.exchanges import named
from tests.values.training import plan_of, prepared_of
from trials.costs.layer_costs import LayerCosts
from trials.launchers.local import LocalLauncher
from trials.launchers.node_ranks import NodeLauncher
from trials.plan import Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

pytestmark = [pytest.mark.ranks, pytest.mark.long]

RANKS = 4
LAYERS = {"vision_embedding": 1, "vision": 4, "projector": 1, "language": 2, "head": 1}
ZEROS: tuple[ZeroStage, ...] = (2, 3)
SLOW_BITS = 2.5e6
"""Bits per second, with which the link takes longer than all the rest of a step."""
BURST_BYTES = 64 << 10
"""What the cable lets through at once."""


@pytest.fixture(scope="module")
def joined() -> Iterator[Cable]:
    with cable() as made:
        yield made


@pytest.fixture(scope="module")
def pool(joined: Cable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    with (
        two_nodes(joined, ranks=2) as nodes,
        WarmPool(NodeLauncher(nodes, tmp_path_factory.mktemp("nodes"), RANKS, "cpu")) as both,
    ):
        yield both


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    with WarmPool(LocalLauncher(tmp_path_factory.mktemp("here"), RANKS, "cpu")) as all_here:
        yield all_here


@pytest.fixture(scope="module")
def prepared(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    found = prepared_of(shallow, tmp_path_factory.mktemp("job"), hardware={"devices": RANKS})
    work = found.workload
    return replace(found, workload=replace(work, hardware=replace(work.hardware, nodes=2)))


def plan_with(zero: ZeroStage) -> Plan:
    return plan_of("4+2", data=RANKS, zero=zero)


def reports(pool: WarmPool, prepared: Prepared, plan: Plan, steps: tuple[int, ...]) -> list[TrialReport]:
    answer = pool.ask(prepared.request(plan, Trial(warmup_steps=(), timed_steps=steps)), 300)
    assert isinstance(answer, Answers), answer
    return [report for report in answer.reports if isinstance(report, TrialReport)]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_of_two_nodes_have_the_losses_of_one_machine(
    zero: ZeroStage, pool: WarmPool, here: WarmPool, prepared: Prepared
) -> None:
    steps = tuple(range(min(3, prepared.epoch(plan_with(zero).packing, RANKS).steps)))
    over_nodes, expected = (
        [report.losses for report in reports(ranks, prepared, plan_with(zero), steps)] for ranks in (pool, here)
    )
    assert over_nodes == expected
    assert [len(of_rank) for of_rank in expected] == [len(steps)] * RANKS


@pytest.mark.parametrize("zero", [0, 1])
def test_averages_on_each_node_first_give_the_losses_of_averages_at_once(
    zero: ZeroStage, pool: WarmPool, prepared: Prepared, joined: Cable
) -> None:
    """And they send a third less between the nodes."""
    grouped = plan_of("4+2", data=RANKS, zero=zero, within=2)
    steps = tuple(range(min(3, prepared.epoch(grouped.packing, RANKS).steps)))
    losses, sent = [], []
    for plan in (grouped, plan_with(zero)):
        before = joined.sent_bytes
        losses.append([report.losses for report in reports(pool, prepared, plan, steps)])
        sent.append(joined.sent_bytes - before)
    for one, other in zip(*losses, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    gradients = 4 * prepared.workload.model.parameters
    assert sent[1] - sent[0] > 0.4 * gradients * len(steps)


def sent_bytes(costs: LayerCosts, zero: ZeroStage) -> float:
    """Return the bytes that a node sends to the other one for a pack at least, with rings of all ranks."""
    everything = 4 * sum(LAYERS[kind] * cost.parameters for kind, cost in costs.layers)
    head = 4 * costs["head"].parameters
    once = (RANKS - 1) / RANKS
    return once * (2 * everything if zero == 2 else everything + (everything - head) + everything)


def test_real_and_predicted_steps_take_the_time_of_the_link_between_the_nodes(
    joined: Cable, pool: WarmPool, prepared: Prepared, tmp_path: Path
) -> None:
    joined.limit(f"{SLOW_BITS:.0f}bit")
    try:
        predictor = Predictor(profile_layers(prepared, pool, tmp_path), prepared.epoch, 4)
        found = {(each.pipeline, each.within): each.seconds_per_byte[1] for each in named(predictor.costs, "average")}
        of_all, of_nodes = found[1, 1], found[1, 2]
        assert {within for pipeline, within in found if pipeline > 1} == {1}
        # At once a node sends 1.5 times the bytes, and on each node first their number.
        assert of_all > 0.9 * 1.5 * 8 / SLOW_BITS
        assert of_all > of_nodes > 0.9 * 8 / SLOW_BITS
        grouped, at_once = (plan_of("4+2", data=RANKS, within=within) for within in (2, 1))
        assert predictor.epoch_seconds(grouped) < predictor.epoch_seconds(at_once)
        for zero in ZEROS:
            plan = plan_with(zero)
            packs = len(prepared.epoch(plan.packing, RANKS).rows(0))
            measured = max(each.step_seconds[0] for each in reports(pool, prepared, plan, (0,)))
            (predicted,) = predictor.step_seconds(plan, (0,)).tolist()
            least = 8 * (packs * sent_bytes(predictor.costs, zero) - BURST_BYTES) / SLOW_BITS
            assert least < measured
            assert least < predicted
    finally:
        joined.limit(None)
