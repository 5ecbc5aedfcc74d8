"""Every training writes its model at the end, whatever of it is frozen and however its ranks share the weights."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autotune.workload import Prepared
from tests.integration.running.training.test_training import losses, stored_tensors
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import plan_of, prepared_of, train
from trials.engine.state import WEIGHT
from trials.model.conversion import stored_form
from trials.model.skeleton import build_skeleton, load_config
from trials.outcome import Crash
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks.request import Training
from trials.tasks.training.adapter import peft_name
from trials.tasks.training.progress import PROGRESS_FILE
from trials.workload import Part

pytestmark = pytest.mark.ranks

FROZEN: tuple[tuple[Part, ...], ...] = (
    (),
    ("vision",),
    ("projector",),
    ("language",),
    ("vision", "language"),
    ("vision", "projector"),
    ("projector", "language"),
)
PLANS = {
    "ZeRO 1": plan_of("4+2", data=2, zero=1),
    "ZeRO 2": plan_of("4+2r2,1", data=2, zero=2),
    "ZeRO 3": plan_of("4+2", data=2, zero=3),
    "ZeRO 3, recomputed": plan_of("4+2r4,2", data=2, zero=3),
    "pipeline": plan_of("3+0", "1+2", zero=1),
    "pipeline with recomputation": plan_of("4+1r2,1", "0+1", zero=1),
}
ADAPTERS = {
    "adapters": {"rank": 4, "alpha": 8},
    "adapters and projector": {"rank": 4, "alpha": 8, "train_projector": True},
}
CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    **{
        f"{name}, {'frozen ' if freeze else ''}{' and '.join(freeze) or 'whole'}": (plan, {"freeze": list(freeze)})
        for (name, plan), freeze in product(PLANS.items(), FROZEN)
    },
    **{
        f"{name}, {what}": (plan, {"lora": lora})
        for (name, plan), (what, lora) in product(PLANS.items(), ADAPTERS.items())
    },
}


@pytest.mark.parametrize(
    ("plan", "trained"),
    parameters(
        CASES,
        short=("ZeRO 3, adapters and projector", "pipeline, frozen projector and language"),
    ),
)
def test_the_model_that_is_written_is_what_the_ranks_held(
    plan: Plan, trained: dict[str, Any], shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    saved_model(shallow, tmp_path / "model")
    prepared = prepared_of(
        shallow,
        tmp_path,
        model={"path": str(tmp_path / "model"), "weights": "pretrained", "dtype": "bfloat16"},
        data={"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:8"}]},
        training={"global_batch_samples": 8, "learning_rate": 5e-3, "max_steps": 1, **trained},
    )
    report = train(pool, prepared, plan)
    assert report.finished
    assert report.model is not None
    # safetensors creates files that only their owner can read.
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in prepared.job.training.output.rglob("*.safetensors")}
    assert modes == {(tmp_path / "new").stat().st_mode}
    held: dict[str, torch.Tensor] = {}
    for file in (prepared.job.training.output / f"checkpoint-{report.steps}").glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            part, _, name = key.partition(":")
            held |= {name: tensor.to(torch.bfloat16)} if part == WEIGHT else {}
    after = stored_tensors(report.model)
    if "lora" in trained:
        assert held
        assert {peft_name(name): after[peft_name(name)].tolist() for name in held}.keys() == after.keys()
        assert all(torch.equal(after[peft_name(name)], tensor) for name, tensor in held.items())
        return
    skeleton = build_skeleton(load_config(str(tmp_path / "model")), torch.bfloat16)
    moved = stored_form(skeleton.model, held)
    before = {name: tensor.to(torch.bfloat16) for name, tensor in stored_tensors(tmp_path / "model").items()}
    assert before.keys() == after.keys() >= moved.keys()
    for name, tensor in {**before, **moved}.items():
        assert torch.equal(after[name], tensor), name
    frozen = [path for part in trained["freeze"] for path in skeleton.chain.paths_of(part)]
    assert not any(name.startswith(f"{path}.") for name in held for path in frozen)


def small(shallow: Path, folder: Path) -> Prepared:
    """A short training of a model folder of its own."""
    saved_model(shallow, folder / "model")
    return prepared_of(
        shallow,
        folder,
        model={"path": str(folder / "model"), "weights": "pretrained", "dtype": "float32"},
        training={"global_batch_samples": 8, "learning_rate": 5e-3, "max_steps": 3},
    )


def test_a_model_that_could_not_be_written_is_refused_before_the_first_step(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared = small(shallow, tmp_path)
    # A file that belongs to the saved model, and cannot be read, as on a bad disk.
    (tmp_path / "model" / "chat_template.json.bak").symlink_to("/proc/self/mem")
    answer = pool.ask(prepared.request(PLANS["pipeline"], Training(output=prepared.job.training.output)), 180)
    assert isinstance(answer, Crash)
    assert "the trained model could not be written at the end; correct the files of model.path" in answer.detail
    assert not (prepared.job.training.output / PROGRESS_FILE).exists()


@pytest.mark.long
def test_a_training_whose_model_cannot_be_written_is_kept_and_ends_with_the_same_command(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared = small(shallow, tmp_path)
    output, file = prepared.job.training.output, tmp_path / "model" / "tokenizer_config.json"
    before = file.read_text()

    def on_wait() -> None:
        if (output / PROGRESS_FILE).exists() and (output / PROGRESS_FILE).read_text():
            file.write_text("[")

    answer = pool.ask(prepared.request(PLANS["pipeline"], Training(output=output)), 180, on_wait)
    assert isinstance(answer, Crash)
    assert f"all 3 steps are done and in {output}/checkpoint-3, but the model could not be written" in answer.detail
    assert "launch again" in answer.detail
    file.write_text(before)
    report = train(pool, prepared, PLANS["pipeline"])
    assert report.finished
    assert report.model is not None
    assert len(losses(prepared)) == 3
