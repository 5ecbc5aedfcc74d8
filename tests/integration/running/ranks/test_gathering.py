"""Weights that ZeRO 3 gathers: on real ranks they are counted while they are there, and nothing outlives an engine."""

from pathlib import Path

import pytest

from tests.machines.closed_engines import left_behind
from tests.machines.own_ranks import on_ranks
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.outcome import StageMeasurement
from trials.plan import Padded, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Training, Trial

pytestmark = pytest.mark.ranks
ONE = Padded(samples=1)


@pytest.mark.long
def test_nothing_of_an_engine_with_zero_3_stays_in_its_process(shallow: Path, tmp_path: Path) -> None:
    files = []
    for zero in (3, 1):
        prepared = prepared_of(shallow, tmp_path / str(zero), training={"global_batch_samples": 2})
        plan = plan_of("4+2r1,1", data=2, zero=zero, packing=ONE)
        files.append(tmp_path / str(zero) / "request.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=tmp_path))))
    assert on_ranks(left_behind, files) == [[(True, False, False), (False, False, False)]] * 2


def test_a_rank_holds_the_weights_of_one_layer_and_keeps_the_same_as_with_zero_1(
    example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared = prepared_of(example, tmp_path, training={"global_batch_samples": 4})

    def measured(zero: ZeroStage) -> StageMeasurement:
        plan = plan_of("12+8r12,8", data=2, zero=zero, packing=ONE)
        answer = pool.ask(prepared.request(plan, Trial(warmup_steps=(), timed_steps=(0, 1))), 120)
        assert isinstance(answer, Answers), answer
        (first, _) = (report for report in answer.reports if isinstance(report, TrialReport))
        return first.stage

    whole, shared = measured(1), measured(3)
    kept, kept_with_weights = (each.peak_bytes - each.static_bytes for each in (whole, shared))
    weights = whole.static_bytes - shared.static_bytes  # half of the weights and of the gradients, 4 bytes each
    assert kept < kept_with_weights < kept + weights // 4
