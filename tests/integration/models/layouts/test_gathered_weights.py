"""Weights and gradients in shards: loss and gradients of every family are those of the plain model."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.test_families import TINY
from tests.integration.models.layouts.test_overlapped_averages import check_same_steps
from tests.integration.models.layouts.test_sharing import FAMILIES
from tests.integration.models.test_parity import check
from tests.integration.running.test_certificate import faults_in
from tests.machines.faulty_ranks import SHARD_FAULTS, serve_with_shard_faults
from tests.machines.own_ranks import on_ranks
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of, stage
from trials import plugins, wire
from trials.channels.folder import FolderChannel
from trials.engine.gathering import GatheredWeights
from trials.engine.group import process_group
from trials.plan import Levelled, Packed, Plan
from trials.run.pool import WarmPool
from trials.stage import Recomputed
from trials.tasks.request import Certification, Request, Training, write_request
from trials.tasks.session import open_session

pytestmark = pytest.mark.ranks
WITHIN = 1e-5
TIGHT = Packed(qv=6, qt=300, qv_min=6, qt_min=200, packer="best-fit")
SHARED = replace(TIGHT, qt_min=0, sequence=2)
LEVELLED = replace(
    plan_of("4+2", data=2, zero=3),
    packing=Levelled(levels=(replace(TIGHT, qt=130, qt_min=0), SHARED)),
    stages=(replace(stage("4+2"), further_levels=(Recomputed(vision=1, language=0),)),),
)

CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "ZeRO 2": (plan_of("4+2r2,1", data=2, zero=2, packing=TIGHT), {"training": {"clip_norm": 0.1}}),
    "ZeRO 3": (plan_of("4+2r2,1", data=2, zero=3, packing=TIGHT), {"training": {"clip_norm": 0.1}}),
    "bfloat16, ZeRO 2": (plan_of("4+2", data=2, zero=2, packing=TIGHT), {"model": {"dtype": "bfloat16"}}),
    "bfloat16, ZeRO 3": (plan_of("4+2r2,1", data=2, zero=3, packing=TIGHT), {"model": {"dtype": "bfloat16"}}),
    "a frozen vision tower": (plan_of("4+2", data=2, zero=3, packing=TIGHT), {"training": {"freeze": ["vision"]}}),
    "only the vision tower": (
        plan_of("4+2r4,2", data=2, zero=3, packing=TIGHT),
        {"training": {"freeze": ["projector", "language"]}},
    ),
    "only the projector": (
        plan_of("4+2r0,1", data=2, zero=2, packing=TIGHT),
        {"training": {"freeze": ["vision", "language"]}},
    ),
    "adapters": (plan_of("4+2r1,1", data=2, zero=3, packing=TIGHT), {"training": {"lora": {"rank": 4}}}),
    "shared packs": (plan_of("4+2", data=2, zero=3, packing=SHARED), {}),
    "levels": (LEVELLED, {}),
    "some layers gathered once": (plan_of("4+2r2,1g3", data=2, zero=3, packing=TIGHT), {}),
    "all layers gathered once": (plan_of("4+2r0,1g6", data=2, zero=3, packing=TIGHT), {"model": {"dtype": "bfloat16"}}),
    "a frozen vision tower, gathered once": (
        plan_of("4+2g5", data=2, zero=3, packing=TIGHT),
        {"training": {"freeze": ["vision"]}},
    ),
    "only the vision tower, gathered once": (
        plan_of("4+2r4,2g4", data=2, zero=3, packing=TIGHT),
        {"training": {"freeze": ["projector", "language"]}},
    ),
    "adapters, gathered once": (
        plan_of("4+2r1,1g6", data=2, zero=3, packing=TIGHT),
        {"training": {"lora": {"rank": 4}}},
    ),
    "levels, gathered once": (replace(LEVELLED, stages=(replace(LEVELLED.stages[0], gathered_once=4),)), {}),
    "four ranks, gathered once": (plan_of("4+2r1,1g4", data=4, zero=3, packing=TIGHT), {}),
    "four ranks, ZeRO 2": (plan_of("4+2r4,2", data=4, zero=2, packing=TIGHT), {}),
    "four ranks, ZeRO 3": (plan_of("4+2r1,1", data=4, zero=3, packing=TIGHT), {}),
}


@pytest.mark.parametrize("family", parameters({name: name for name in FAMILIES}, short=()))
def test_every_family_gathers_its_weights_by_layer(family: str, example: Path, pool: WarmPool, tmp_path: Path) -> None:
    plugins.load(TINY, family).make(tmp_path / "model")
    job = prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")})
    shape = job.workload.model
    units, tokens = (int(2.5 * column.max()) for column in (job.index.vision_units, job.index.text_tokens))
    packing = Packed(qv=units, qt=tokens, qv_min=0, qt_min=0)
    plan = plan_of(f"{shape.vision_layers}+{shape.language_layers}r1,1", data=2, zero=3, packing=packing)
    check(plan, job, pool, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize(("plan", "changes"), CASES.values(), ids=CASES)
def test_steps_are_those_of_whole_weights_and_gradients(
    plan: Plan, changes: dict[str, Any], tied: Path, pools: Mapping[int, WarmPool], tmp_path: Path
) -> None:
    stages = tuple(replace(each, gathered_once=0) for each in plan.stages)
    whole = replace(plan, layout=replace(plan.layout, zero=1), stages=stages)
    check_same_steps((whole, plan), changes, tied, pools[plan.layout.data], tmp_path)


@pytest.mark.parametrize(
    ("frozen", "counts"),
    parameters(
        {"none, and some": ([], (0, 3)), "last, and all": ([], (1, 6)), "frozen vision": (["vision"], (0, 1, 3, 6))},
        short=("none, and some",),
    ),
)
def test_weights_that_stay_are_gathered_once_in_a_pack(
    frozen: list[str], counts: tuple[int, ...], shallow: Path, tmp_path: Path
) -> None:
    plans = [plan_of(f"4+2r2,1g{once}", data=2, zero=3, packing=TIGHT) for once in counts]
    files = [request_of(plan, shallow, tmp_path / plan.id, training={"freeze": frozen}) for plan in plans]
    for of_rank in on_ranks(gathers_in_a_pack, files):
        for once, found in zip(counts, of_rank, strict=True):
            # Frozen layers have no backward pass, and the layer before the head never waits for its weights.
            vision = [1 if frozen or 6 - number <= once else 2 for number in range(4)]
            language = [2 if once < 2 else 1, 1]
            # The projector comes with the word embedding, the head with its norm: two messages each.
            assert found == [1 if frozen else 2, *vision, 2, 2, *language, 1, 1]


def gathers_in_a_pack(files: list[Path]) -> list[list[float]]:
    """Return how often this rank gathers the weights of each place of the chain for a pack of each training."""
    rank, gather, gathered = int(os.environ["RANK"]), GatheredWeights.gather, list[GatheredWeights]()

    def counted(each: GatheredWeights) -> None:
        gathered.extend(() if each.is_here else (each,))
        gather(each)

    found = []
    for file in files:
        request = wire.decode(Request, file.read_text())
        with (
            process_group(rank, rank, 2, f"file://{file}.rendezvous") as device,
            open_session(request, rank, device) as session,
            pytest.MonkeyPatch.context() as patch,
        ):
            epoch, shards = session.epoch(0), session.engine.stage.shards
            gathered.clear()
            patch.setattr(GatheredWeights, "gather", counted)
            with closing(session.batches(epoch, [0])) as batches:
                session.step(batches, epoch.step(0))
            assert not any(each.is_here for each in shards)
            found.append([gathered.count(each) / len(epoch.rows(0)) for each in shards])
    return found


def test_a_gradient_that_grows_after_it_was_scattered_ends_the_step(shallow: Path, tmp_path: Path) -> None:
    file = request_of(plan_of("4+2", data=2, zero=2, packing=TIGHT), shallow, tmp_path)
    for message in on_ranks(fault_of_late_gradient, file):
        assert "a parameter got a further gradient after its gradient was scattered" in message


def request_of(plan: Plan, shallow: Path, folder: Path, **changes: dict[str, Any]) -> Path:
    """Return the file of a training with a plan."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{plan.layout.zero}.json"
    prepared = prepared_of(shallow, folder / str(plan.layout.zero), **changes)
    file.write_text(wire.encode(prepared.request(plan, Training(output=folder))))
    return file


def fault_of_late_gradient(file: Path) -> str:
    """Return the message of a step in which a vision layer uses a weight of a language layer too."""
    rank, request = int(os.environ["RANK"]), wire.decode(Request, file.read_text())
    with (
        process_group(rank, rank, 2, f"file://{file}.rendezvous") as device,
        open_session(request, rank, device) as session,
    ):
        chain, epoch = session.engine.stage.chain, session.epoch(0)
        model = session.engine.stage.model
        weight = next(iter(model.get_submodule(chain.language_layers[0]).parameters()))
        layer = model.get_submodule(chain.vision_layers[1])
        layer.register_forward_hook(lambda _, __, output: output + 0 * weight.sum())
        with closing(session.batches(epoch, [0])) as batches, pytest.raises(RuntimeError) as caught:
            session.step(batches, epoch.step(0))
        return str(caught.value)


@pytest.mark.long
def test_every_fault_in_the_exchange_of_shards_shows(shallow: Path, tmp_path: Path) -> None:
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 12})
    request = job.request(plan_of("4+2r0,1", data=2, zero=3), Certification(reference="transformers", follows=False))
    for name in SHARD_FAULTS:
        write_request(FolderChannel(tmp_path / name), request)
    assert on_ranks(serve_with_shard_faults, tmp_path) == [True, True]
    wrong = {
        name: [text for text in faults_in(tmp_path / name) if text.startswith(("the loss", "the gradient of"))]
        for name in SHARD_FAULTS
    }
    assert not wrong.pop("none")
    assert all(wrong.values()), wrong
