"""Weights, gradients and optimizer states take the predicted bytes."""

from pathlib import Path

import pytest

from tests.machines.own_ranks import on_ranks
from tests.machines.rank_bytes import measured_bytes
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.plan import Padded, ZeroStage
from trials.tasks.request import Training

pytestmark = pytest.mark.ranks

ZEROS: tuple[ZeroStage, ...] = (0, 1, 2, 3)
DATA_PARALLEL = [("float32", zero) for zero in ZEROS] + [("bfloat16", zero) for zero in ZEROS[1:]]
ONE = Padded(samples=1)
CASES = [(dtype, plan_of("4+2", data=2, zero=zero, packing=ONE)) for dtype, zero in DATA_PARALLEL] + [
    ("bfloat16", plan_of("3+0", "1+2", zero=1, packing=ONE))
]


@pytest.mark.long
def test_every_zero_stage_holds_its_static_bytes(wide_shallow: Path, tmp_path: Path) -> None:
    files = []
    for number, (dtype, plan) in enumerate(CASES):
        folder = tmp_path / str(number)
        prepared = prepared_of(wide_shallow, folder, model={"dtype": dtype}, training={"global_batch_samples": 2})
        files.append(folder / "request.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=folder))))
    for of_rank in on_ranks(measured_bytes, files):
        for (dtype, plan), sizes in zip(CASES, of_rank, strict=True):
            # Beyond the formula: a tensor across the border of two ranks' shares is held by both.
            assert 0 <= sizes["held"] - sizes["expected"] <= 0.04 * sizes["expected"], (dtype, plan)
