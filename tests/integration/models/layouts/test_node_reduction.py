"""Gradients that data ranks average in groups first: the same as those that all of them average at once."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.integration.models.test_parity import trained_gradients
from tests.machines.own_ranks import on_ranks
from tests.values.training import plan_of, prepared_of
from trials.channels.folder import file_rendezvous
from trials.engine.gradients.node_reduction import NodeReduction
from trials.engine.group import process_group
from trials.grid import Grid
from trials.launchers.local import LocalLauncher
from trials.plan import Packed, Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Training
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = pytest.mark.ranks

WITHIN = 1e-6
STEPS = 2
TIGHT = Packed(qv=6, qt=300, qv_min=6, qt_min=200, packer="best-fit")


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    with WarmPool(LocalLauncher(tmp_path_factory.mktemp("eight"), 8, "cpu")) as pool:
        yield pool


def check(plan: Plan, pool: WarmPool, example: Path, folder: Path, dtype: str = "float32") -> None:
    """Train some steps under the plan and under the one that averages at once, and compare them."""
    prepared = prepared_of(
        example,
        folder,
        hardware={"devices": plan.layout.world_size},
        model={"dtype": dtype},
        training={"global_batch_samples": 16, "checkpoint_every": 1, "keep_checkpoints": STEPS},
    )
    losses, gradients = [], []
    for name, each in (("groups", plan), ("at once", replace(plan, layout=replace(plan.layout, reduce_within=1)))):
        output = folder / name
        answer = pool.ask(prepared.request(each, Training(output=output, max_steps=STEPS)), 240)
        assert isinstance(answer, Answers), answer
        losses.append([line.loss for line in read_lines(output / PROGRESS_FILE) if isinstance(line, Progress)])
        gradients.append(trained_gradients(output / "checkpoint-1"))
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=WITHIN)
    grouped, at_once = gradients
    assert grouped.keys() == at_once.keys()
    # Sums of another order: some differ in their last bits. Those of bfloat16 gradients are exact in float32.
    differ = any(not torch.equal(grouped[name], gradient) for name, gradient in at_once.items())
    assert differ or dtype == "bfloat16"
    for name, gradient in at_once.items():
        assert torch.linalg.vector_norm(grouped[name] - gradient) <= WITHIN * torch.linalg.vector_norm(gradient), name


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.long)])
def test_groups_of_data_ranks_give_the_gradients_of_all_at_once(
    zero: int, shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    plan = plan_of("4+2r1,0", data=4, zero=zero, within=2, packing=TIGHT)  # type: ignore[arg-type]
    check(plan, four_ranks, shallow, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        plan_of("2+0", "2+2", data=4, within=2, packing=TIGHT),
        plan_of("2+0", "2+2", data=4, zero=1, within=2, packing=TIGHT),
        plan_of("4+2", data=4, tensor=2, zero=1, within=2, packing=TIGHT),
        plan_of("4+2", data=8, zero=1, within=4, packing=TIGHT),
    ],
    ids=str,
)
def test_so_do_groups_in_each_stage_and_of_each_tensor_rank(
    plan: Plan, shallow: Path, eight_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, eight_ranks, shallow, tmp_path)


@pytest.mark.long
def test_bfloat16_weights_have_their_float32_gradients_averaged_in_groups(
    shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan_of("4+2", data=4, zero=1, within=2), four_ranks, shallow, tmp_path, dtype="bfloat16")


def added_up(folder: str) -> list[list[float]]:
    """Return the sums of gradients of several sizes, each of which every rank has times another power of 10."""
    rank, found = int(os.environ["RANK"]), []
    with process_group(rank, rank, 6, file_rendezvous(Path(folder) / "rendezvous")):
        reduction = NodeReduction(Grid(pipeline=1, data=6), 3)
        for size in (1, 2, 3, 7, 12):
            gradients = torch.arange(size, dtype=torch.float32) * 10**rank
            reduction.add_up(gradients)
            found.append(gradients.tolist())
        distributed.barrier()
        reduction.close()
    return found


def test_gradients_of_any_size_are_added_up_once(tmp_path: Path) -> None:
    expected = [[111_111.0 * number for number in range(size)] for size in (1, 2, 3, 7, 12)]
    assert on_ranks(added_up, str(tmp_path), world_size=6) == [expected] * 6
