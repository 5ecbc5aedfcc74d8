"""Gradients that are averaged or scattered during the last backward pass: the steps are those of averages after it."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from tests.machines.own_ranks import on_ranks
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.engine.gradients.overlapped_averages import buckets
from trials.engine.group import process_group
from trials.engine.state import MOMENTS, WEIGHT
from trials.model.ends import head_loss
from trials.plan import Packed, Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Request, Training
from trials.tasks.session import open_session
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = pytest.mark.ranks

STEPS = 2
WITHIN = 1e-5
# Some CPUs multiply matrices of other addresses in another order. AdamW makes steps of equal size of gradients that are
# nearly 0, so that the smallest biases differed by 2.6e-3 on one.
ROUNDED = 1e-2
"""The same for weights and moments in bfloat16 with ZeRO 3, whose weights are gathered to other places."""
BUCKET = 40_000
"""Bytes of several small parameters, and fewer than those of a matrix."""
TIGHT = Packed(qv=6, qt=300, qv_min=6, qt_min=200, packer="best-fit")

CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "ZeRO 0": (plan_of("4+2r2,1", data=2, packing=TIGHT), {}),
    "ZeRO 1": (plan_of("4+2", data=2, zero=1, packing=TIGHT), {"training": {"clip_norm": 0.1}}),
    "a frozen vision tower": (plan_of("4+2", data=2, packing=TIGHT), {"training": {"freeze": ["vision"]}}),
    "only the vision tower": (
        plan_of("4+2r4,2", data=2, zero=1, packing=TIGHT),
        {"training": {"freeze": ["projector", "language"]}},
    ),
    "shared packs": (plan_of("4+2", data=2, packing=replace(TIGHT, qt_min=0, sequence=2)), {}),
    "four ranks": (plan_of("4+2", data=4, packing=TIGHT), {}),
    "four ranks, ZeRO 1": (plan_of("4+2r4,2", data=4, zero=1, packing=TIGHT), {}),
    "four ranks, bfloat16": (plan_of("4+2", data=4, zero=1, packing=TIGHT), {"model": {"dtype": "bfloat16"}}),
}


@pytest.mark.long
@pytest.mark.parametrize(("plan", "changes"), CASES.values(), ids=CASES)
def test_steps_are_those_of_averages_after_the_pass(
    plan: Plan, changes: dict[str, Any], tied: Path, pools: Mapping[int, WarmPool], tmp_path: Path
) -> None:
    check_same_steps((plan, averaging(plan)), changes, tied, pools[plan.layout.data], tmp_path)


def test_averages_during_the_pass_and_shards_have_the_steps_of_averages_after_it(
    tied: Path, pool: WarmPool, tmp_path: Path
) -> None:
    after = plan_of("4+2r2,1", data=2, zero=1, packing=TIGHT)
    of_weights = plan_of("4+2r2,1g3", data=2, zero=3, packing=TIGHT)
    changes = {"model": {"dtype": "bfloat16"}, "training": {"clip_norm": 0.1}}
    check_same_steps((after, averaging(after), of_weights), changes, tied, pool, tmp_path)


def averaging(plan: Plan) -> Plan:
    """The plan, with averages during the pass."""
    return replace(plan, layout=replace(plan.layout, bucket_bytes=BUCKET))


def check_same_steps(
    plans: Sequence[Plan], changes: Mapping[str, Any], example: Path, pool: WarmPool, folder: Path
) -> None:
    """Compare losses, weights and moments after the steps of plans, of a job with these changes."""
    settings = {"checkpoint_every": STEPS, "global_batch_samples": 16, **changes.get("training", {})}
    hardware = {"devices": plans[0].layout.data}
    prepared = prepared_of(example, folder, **{**changes, "training": settings, "hardware": hardware})
    losses, weights = [], []
    for number, plan in enumerate(plans):
        output = folder / str(number)
        answer = pool.ask(prepared.request(plan, Training(output=output, max_steps=STEPS)), 240)
        assert isinstance(answer, Answers), answer
        losses.append([line.loss for line in read_lines(output / PROGRESS_FILE) if isinstance(line, Progress)])
        weights.append(stored(output / f"checkpoint-{STEPS}"))
    assert len(losses[0]) == STEPS
    for plan, found, states in zip(plans[1:], losses[1:], weights[1:], strict=True):
        assert losses[0] == pytest.approx(found, rel=WITHIN), plan.layout
        assert weights[0].keys() == states.keys()
        is_rounded = plan.layout.shards_weights and changes.get("model", {}).get("dtype") == "bfloat16"
        within = ROUNDED if is_rounded else WITHIN
        for name, state in weights[0].items():
            if name.endswith("k_proj.bias"):  # no score depends on it: its gradient is rounding, which AdamW enlarges
                continue
            difference = torch.linalg.vector_norm(states[name] - state)
            assert difference <= within * torch.linalg.vector_norm(state), (name, plan.layout)


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights and moments of a checkpoint."""
    return {
        f"{file.name} {name}": tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("averaged", "sharded"), parameters({"ZeRO 1 and 2": (1, 2), "ZeRO 0 and 3": (0, 3)}, short=("ZeRO 1 and 2",))
)
def test_ranks_whose_passes_leave_other_gradients_out_send_the_same(
    averaged: ZeroStage, sharded: ZeroStage, shallow: Path, tmp_path: Path
) -> None:
    """On one rank no vision layer gets a gradient, on the other one no language layer does."""
    whole, during, shards = (plan_of("4+2", data=2, zero=zero, packing=TIGHT) for zero in (0, averaged, sharded))
    prepared, files = prepared_of(shallow, tmp_path), []
    for number, plan in enumerate((whole, averaging(during), shards)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=tmp_path))))
    one, other = on_ranks(weights_after_a_step, files)
    assert one == other
    after, *several = one
    for found in several:
        assert found == pytest.approx(after, rel=WITHIN)


def weights_after_a_step(files: Sequence[Path]) -> list[list[float]]:
    """Return the norms of the weights after the first step of each request."""
    rank, found = int(os.environ["RANK"]), []
    for file in files:
        request = wire.decode(Request, file.read_text())
        with (
            process_group(rank, rank, 2, f"file://{file}.rendezvous") as device,
            open_session(request, rank, device) as session,
        ):
            stage, epoch = session.engine.stage, session.epoch(0)
            cut_off = (stage.chain.vision_layers, stage.chain.language_layers)[rank][-1]
            stage.model.get_submodule(cut_off).register_forward_hook(lambda _, __, output: output.detach())
            with closing(session.batches(epoch, [0])) as batches:
                session.step(batches, epoch.step(0))
            states = [session.engine.state.read(each, WEIGHT) for each in stage.parameters()]
            found.append([float(state.norm()) for state in states])
    return found


CHUNKED: dict[str, tuple[ZeroStage, int]] = {
    "ZeRO 0": (0, 2),
    "ZeRO 1": (1, 2),
    "ZeRO 0, on one rank": (0, 1),
    "ZeRO 1, on one rank": (1, 1),
}
"""ZeRO stage, and the ranks whose loss is in chunks."""
FEW_BYTES = 30_000
"""Of float32 logits: those of a few rows."""


@pytest.mark.parametrize(("zero", "chunking"), parameters(CHUNKED, short=("ZeRO 1", "ZeRO 0, on one rank")))
@pytest.mark.parametrize("kind", ["shallow", "tied"])
def test_a_loss_in_chunks_has_the_gradients_of_averages_after_the_pass(
    kind: str, zero: ZeroStage, chunking: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    after = plan_of("4+2r2,1", data=2, zero=zero, packing=TIGHT)
    prepared, files = prepared_of(request.getfixturevalue(kind), tmp_path), []
    for number, plan in enumerate((after, averaging(after))):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(wire.encode(prepared.request(plan, Training(output=tmp_path))))
    for rank, (chunks, differing) in enumerate(on_ranks(gradients_of_chunks, files, chunking)):
        assert all((count > 1) == (rank < chunking) for count in chunks)
        assert differing == []


def gradients_of_chunks(files: Sequence[Path], chunking: int) -> tuple[list[int], list[str]]:
    """Return the chunks in the first step of two requests, and the parameters whose gradients differ between them.

    The first ranks compute the loss in chunks.
    """
    rank, chunks, found = int(os.environ["RANK"]), list[int](), list[dict[str, torch.Tensor]]()
    few = FEW_BYTES if rank < chunking else head_loss._LOGITS_BYTES
    for file in files:
        request = wire.decode(Request, file.read_text())
        with (
            process_group(rank, rank, 2, f"file://{file}.rendezvous") as device,
            open_session(request, rank, device) as session,
            patch.object(head_loss, "_LOGITS_BYTES", few),
            patch.object(head_loss, "checkpoint", wraps=checkpoint) as chunk,
        ):
            epoch, state = session.epoch(0), session.engine.state
            with closing(session.batches(epoch, [0])) as batches:
                session.step(batches, epoch.step(0))
            chunks.append(chunk.call_count)
            # After one step the first moment is a multiple of the gradient.
            named = session.engine.stage.model.named_parameters()
            found.append({name: state.read(each, MOMENTS[0]).clone() for name, each in named})
    after, during = found
    norm = torch.linalg.vector_norm
    return chunks, [
        name
        for name, moment in after.items()
        if not name.endswith("k_proj.bias") and norm(during[name] - moment) > WITHIN * norm(moment)
    ]


def test_a_gradient_that_grows_after_its_bucket_has_begun_ends_the_step(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path / "work")
    plan = averaging(plan_of("4+2r4,2", data=2, packing=TIGHT))
    file = tmp_path / "request.json"
    file.write_text(wire.encode(prepared.request(plan, Training(output=tmp_path))))
    for message in on_ranks(fault_of_shared_layers, file):
        assert "a parameter got a further gradient while its first one was averaged" in message


def fault_of_shared_layers(file: Path) -> str:
    """Return the message of a step whose first two vision layers have the same weights, and are recomputed."""
    rank, request = int(os.environ["RANK"]), wire.decode(Request, file.read_text())
    with (
        process_group(rank, rank, 2, f"file://{file}.rendezvous") as device,
        open_session(request, rank, device) as session,
    ):
        stage, epoch = session.engine.stage, session.epoch(0)
        layers = stage.model.get_submodule(stage.chain.vision_layers[0].rpartition(".")[0])
        assert isinstance(layers, torch.nn.ModuleList)
        layers[0] = layers[1]
        with closing(session.batches(epoch, [0])) as batches, pytest.raises(RuntimeError) as caught:
            session.step(batches, epoch.step(0))
        return str(caught.value)


def test_a_large_gradient_is_alone_and_small_ones_are_together() -> None:
    sizes = (1, 1000, 2, 30, 30, 40)
    found = buckets([torch.nn.Parameter(torch.zeros(size)) for size in sizes], least_bytes=200)
    assert [[each.numel() for each in bucket] for bucket in found] == [[1000], [1, 2, 30, 30], [40]]
