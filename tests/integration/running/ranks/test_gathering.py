"""Weights that ZeRO 3 shares and gathers: what ranks hold while they build and train, and after an engine is closed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines.built_stages import bytes_to_build
from tests.machines.closed_engines import left_behind
from tests.machines.own_ranks import on_ranks
from tests.values.training import plan_of, prepared_of, variant_of
from trials import wire
from trials.model.paths import parameters_at
from trials.model.skeleton import build_skeleton, load_config
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
    assert on_ranks(left_behind, files) == [[False, False]] * 2


def test_a_rank_holds_weights_and_gradients_of_two_layers_and_keeps_the_same_as_with_zero_1(
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
    assert kept < kept_with_weights < kept + weights // 3


TRAINED: dict[str, dict[str, Any]] = {
    "whole": {},
    "the projector alone": {"freeze": ["vision", "language"]},
    "adapters": {"lora": {"rank": 4}},
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
def test_a_rank_holds_one_whole_part_and_its_shares_while_its_stage_is_built(
    trained: dict[str, Any], ranks: int, wide: Path, tmp_path: Path
) -> None:
    def tie(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    tied = variant_of(wide, tmp_path, tie)
    prepared = prepared_of(
        tied, tmp_path / "job", hardware={"devices": ranks}, training={"global_batch_samples": ranks, **trained}
    )
    file = tmp_path / "request.json"
    plan = plan_of("12+8", data=ranks, zero=3, packing=ONE)
    file.write_text(wire.encode(prepared.request(plan, Training(output=tmp_path))))
    skeleton = build_skeleton(load_config(prepared.job.model.path), torch.float32)
    parts = [sum(each.nbytes for _, each in parameters_at(skeleton.model, path)) for path in skeleton.chain.parts]
    added = max(parts) // 4  # adapters, and buffers
    for peak, held in on_ranks(bytes_to_build, file, world_size=ranks):
        assert held <= sum(parts) // ranks + added
        # A message may hold the last weight of the part before for a moment after it was sent.
        assert peak <= sum(parts) // ranks + 2 * max(parts) + added < sum(parts)
