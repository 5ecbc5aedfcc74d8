"""Weights, gradients and optimizer states take the predicted bytes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.machines.own_ranks import on_ranks
from tests.machines.rank_bytes import measured_bytes
from tests.machines.update_peaks import peaks_of_step
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.engine import static_memory
from trials.engine.static_memory import buffer_bytes
from trials.plan import Padded, Plan, ZeroStage
from trials.tasks.request import Training

pytestmark = pytest.mark.ranks

ZEROS: tuple[ZeroStage, ...] = (0, 1, 2, 3)
DATA_PARALLEL = [("float32", zero) for zero in ZEROS] + [("bfloat16", zero) for zero in ZEROS[1:]]
ONE = Padded(samples=1)
BUCKET = 100_000
"""Elements, of two million gradients."""
CASES = [(dtype, plan_of("4+2", data=2, zero=zero, packing=ONE)) for dtype, zero in DATA_PARALLEL] + [
    ("bfloat16", plan_of("3+0", "1+2", zero=1, packing=ONE))
]
UPDATES = [
    (dtype, plan_of(*stages, data=2 // len(stages), zero=zero, packing=ONE))
    for dtype, zero in (("float32", ZEROS[0]), ("bfloat16", ZEROS[1]))
    for stages in (("4+2",), ("3+0", "1+2"))
]


def requests(cases: Sequence[tuple[str, Plan]], example: Path, folder: Path) -> list[Path]:
    """The files of a training with each (dtype, plan)."""
    files = []
    for number, (dtype, plan) in enumerate(cases):
        of_case = folder / str(number)
        prepared = prepared_of(example, of_case, model={"dtype": dtype}, training={"global_batch_samples": 2})
        files.append(of_case / "request.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=of_case))))
    return files


@pytest.mark.long
def test_an_update_copies_no_more_gradients_than_a_bucket_has(wide_shallow: Path, tmp_path: Path) -> None:
    for of_rank in on_ranks(peaks_of_step, requests(UPDATES, wide_shallow, tmp_path), BUCKET):
        for (_, plan), (_, further) in zip(UPDATES, of_rank, strict=True):
            if plan.layout.whole_copies:
                assert further <= 4 * 1000  # a norm of each parameter
            else:
                assert 0 < further <= 2 * 4 * BUCKET


@pytest.mark.long
def test_backward_passes_hold_the_predicted_buffer(wide_shallow: Path, tmp_path: Path) -> None:
    small, large = (
        on_ranks(peaks_of_step, requests(CASES, wide_shallow, tmp_path / str(size)), size)[0]
        for size in (BUCKET, 50 * BUCKET)
    )
    for (dtype, plan), (less, _), (more, _) in zip(CASES, small, large, strict=True):
        of_element = buffer_bytes(plan.layout, 2 if dtype == "bfloat16" else 4) / static_memory.BUCKET
        expected, further = 49 * BUCKET * of_element, 5 * BUCKET * 4
        # The gradients fill less than half of the large buffer, and a message has a copy of those alone.
        assert 0.5 * expected - further <= more - less <= expected + further, (dtype, plan)


@pytest.mark.long
def test_every_zero_stage_holds_its_static_bytes(wide_shallow: Path, tmp_path: Path) -> None:
    for of_rank in on_ranks(measured_bytes, requests(CASES, wide_shallow, tmp_path)):
        for (dtype, plan), sizes in zip(CASES, of_rank, strict=True):
            # Beyond the formula: a tensor across the border of two ranks' shares is held by both.
            assert 0 <= sizes["held"] - sizes["expected"] <= 0.04 * sizes["expected"], (dtype, plan)
