"""Weight gradients that stages defer (ZB-H1): the same as those of 1F1B, with no more bytes."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autotune.workload import Prepared
from tests.integration.models.test_parity import trained_gradients
from tests.machines.own_ranks import on_ranks
from tests.tiny_models import glm4v, glm4v_moe, qwen3_vl
from tests.values.parameters import parameters
from tests.values.training import offloading, plan_of, prepared_of, stage, variant_of
from trials import wire
from trials.engine.group import process_group
from trials.engine.zero_bubble import ComputeWeightGradients, ZeroBubbleSchedule
from trials.model.skeleton import load_config
from trials.model.weight_gradients import WeightGradients
from trials.plan import Layout, Levelled, Packed, Plan
from trials.run.pool import Answers, WarmPool
from trials.stage import Recomputed
from trials.tasks.request import Request, Training
from trials.tasks.session import open_session
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = pytest.mark.ranks

WITHIN = 1e-5
STEPS = 2
TIGHT = Packed(qv=6, qt=300, qv_min=0, qt_min=0, packer="best-fit")
SPLIT = plan_of("3+0", "1+2", packing=TIGHT)
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "kept, tied ends": (SPLIT, {}),
    "ZeRO 1, some recomputed": (plan_of("3+0r1,0", "1+2r0,1", zero=1, packing=TIGHT), {}),
    "some selectively": (plan_of("4+1s2,1", "0+1", packing=TIGHT), {"training": {"clip_norm": 0.1}}),
    "some offloaded": (offloading(plan_of("3+0r1,0", "1+2r0,1", packing=TIGHT), "both"), {}),
    "bfloat16": (plan_of("2+0", "2+2", zero=1, packing=TIGHT), {"model": {"dtype": "bfloat16"}}),
    "a frozen vision tower": (SPLIT, {"training": {"freeze": ["vision"]}}),
    "frozen language layers": (SPLIT, {"training": {"freeze": ["language"]}}),
    "LoRA": (SPLIT, {"training": {"lora": {"rank": 2}}}),
    "weighted samples": (SPLIT, {"training": {"loss_weighting": "square"}}),
}
ON_FOUR: dict[str, Plan] = {
    "four stages": plan_of("1+0", "2+0", "1+1", "0+1", packing=TIGHT),
    "four stages, fewer packs": replace(
        plan_of("1+0", "2+0", "1+1", "0+1", packing=TIGHT),
        layout=Layout(pipeline=4, data=1, zero=0, zero_bubble=True),
        stages=(
            stage("1+0"),
            stage("2+0"),
            *(replace(stage(each), most_deferred=n) for n, each in enumerate(("1+1", "0+1"))),
        ),
    ),
    "data ranks, ZeRO 1": plan_of("3+0", "1+2r0,1", data=2, zero=1, packing=TIGHT),
    "shared packs": plan_of("3+0", "1+2", data=2, packing=replace(TIGHT, sequence=2)),
    "levels": replace(
        plan_of("3+0", "1+2", data=2),
        packing=Levelled(levels=(replace(TIGHT, qt=130), replace(TIGHT, sequence=2))),
        stages=(
            replace(stage("3+0"), further_levels=(Recomputed(vision=1, language=0),)),
            replace(stage("1+2"), further_levels=(Recomputed(vision=0, language=0),)),
        ),
    ),
}


def prepared(plan: Plan, example: Path, folder: Path, **sections: Any) -> Prepared:
    training = {"global_batch_samples": 16, "checkpoint_every": 1, "keep_checkpoints": STEPS}
    return prepared_of(
        example,
        folder,
        **{
            **sections,
            "hardware": {"devices": plan.layout.world_size},
            "training": {**training, **sections.get("training", {})},
        },
    )


def check(plan: Plan, pool: WarmPool, example: Path, folder: Path, **sections: Any) -> None:
    """Train some steps under the plan with and without deferred weight gradients, and compare them."""
    job, losses, gradients = prepared(plan, example, folder, **sections), [], []
    assert job.epoch(plan.packing, plan.layout.data).micro_batches > 2
    usual = replace(
        plan,
        layout=replace(plan.layout, zero_bubble=False),
        stages=tuple(replace(each, most_deferred=None) for each in plan.stages),
    )
    deferring = replace(plan, layout=replace(plan.layout, zero_bubble=True))
    for name, run in (("1F1B", usual), ("ZB-H1", deferring)):
        output = folder / name
        answer = pool.ask(job.request(run, Training(output=output, max_steps=STEPS)), 240)
        assert isinstance(answer, Answers), answer
        losses.append([line.loss for line in read_lines(output / PROGRESS_FILE) if isinstance(line, Progress)])
        gradients.append(trained_gradients(output / "checkpoint-1"))
    assert len(losses[0]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=WITHIN)
    one, other = gradients
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        difference = torch.linalg.vector_norm(other[name] - gradient)
        assert difference <= WITHIN * torch.linalg.vector_norm(gradient), name


@pytest.fixture(scope="module")
def tied(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with few layers, and an output projection that is the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.mark.parametrize(("plan", "sections"), parameters(CASES, short=("LoRA",)))
def test_two_stages_have_the_loss_and_gradients_of_1f1b(
    plan: Plan, sections: dict[str, Any], tied: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, pool, tied, tmp_path, **sections)


@pytest.mark.long
@pytest.mark.parametrize("plan", ON_FOUR.values(), ids=ON_FOUR)
def test_so_have_four_ranks(plan: Plan, tied: Path, four_ranks: WarmPool, tmp_path: Path) -> None:
    check(plan, four_ranks, tied, tmp_path)


@pytest.mark.parametrize("family", parameters({"glm4v": glm4v, "qwen3-vl": qwen3_vl, "glm4v-moe": glm4v_moe}, short=()))
def test_so_have_families_with_experts_and_with_features_of_inner_layers(
    family: ModuleType, example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    family.make(tmp_path / "model")
    layers = load_config(str(tmp_path / "model"))
    vision, language = layers.vision_config, layers.get_text_config().num_hidden_layers
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    plan = plan_of(f"{depth}+1", f"0+{language - 1}", packing=Packed(qv=200, qt=900, qv_min=0, qt_min=0))
    check(plan, pool, example, tmp_path, model={"path": str(tmp_path / "model")})


def dropped() -> AbstractContextManager[Any]:
    """Drop the last deferred gradient of each pack."""

    def drop(self: WeightGradients) -> None:
        self._packs[0].pop()
        compute(self)

    compute = WeightGradients.compute
    return patch.object(WeightGradients, "compute", drop)


def late() -> AbstractContextManager[Any]:
    """Compute the gradients of the last pack of a step after the update."""

    def steps(self: ZeroBubbleSchedule) -> Iterator[list[Any]]:
        *before, last = run(self)
        found = next(each for each in last if isinstance(each, ComputeWeightGradients))
        last.remove(found)
        yield from (*before, [*last, found])

    run = ZeroBubbleSchedule.steps
    return patch.object(ZeroBubbleSchedule, "steps", steps)


def of_another_pack() -> AbstractContextManager[Any]:
    """Take the inputs of the pack that was deferred last for the gradients of the first."""

    def mix(self: WeightGradients) -> None:
        pairs = zip(self._packs[0], self._packs[-1], strict=True)
        self._packs[0] = [one._replace(states=each.states) for one, each in pairs if _alike(one, each)]
        compute(self)

    compute = WeightGradients.compute
    return patch.object(WeightGradients, "compute", mix)


def _alike(one: Any, other: Any) -> bool:
    return bool(one.hooks.unpack(one.states).shape == other.hooks.unpack(other.states).shape)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "dropped": dropped,
    "late": late,
    "of another pack": of_another_pack,
}


@pytest.mark.long
def test_a_gradient_that_is_dropped_late_or_of_other_inputs_is_found(shallow: Path, tmp_path: Path) -> None:
    job, files = prepared(SPLIT, shallow, tmp_path), []
    for name, zero_bubble in (("1F1B", False), ("ZB-H1", True)):
        plan = replace(SPLIT, layout=replace(SPLIT.layout, zero_bubble=zero_bubble))
        request = job.request(plan, Training(output=tmp_path))
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(wire.encode(request))
    # The last stage alone defers a pack while others run.
    _, found = on_ranks(moments_after_a_step, *files)
    usual, right = found.pop("1F1B"), found.pop("none")
    assert right == pytest.approx(usual, rel=WITHIN)
    assert found.keys() == {"dropped", "late", "of another pack"}
    for name, wrong in found.items():
        assert wrong != pytest.approx(usual, rel=1e-3), name


def moments_after_a_step(usual: Path, deferring: Path) -> dict[str, list[float]]:
    """Return the norms of the first moments after a step of 1F1B, and after one of ZB-H1 with each fault."""
    rank, found = int(os.environ["RANK"]), {}
    for name, file in {"1F1B": usual, **dict.fromkeys(FAULTS, deferring)}.items():
        request = wire.decode(Request, file.read_text())
        with (
            process_group(rank, rank, 2, f"file://{file}.{name.replace(' ', '-')}") as device,
            FAULTS.get(name, nullcontext)(),
            open_session(request, rank, device) as session,
        ):
            epoch, state = session.epoch(0), session.engine.state
            with closing(session.batches(epoch, [0])) as batches:
                session.step(batches, epoch.step(0))
            moments = [state.read(each, "exp_avg") for each in session.engine.stage.parameters()]
            found[name] = [float(moment.norm()) for moment in moments]
    return found
