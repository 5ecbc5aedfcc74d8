"""The examples of the library train as `launch` does, step by step."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from autotune import best_plan, launch
from autotune.events import Event
from autotune.workload import Prepared, prepare
from storage.store import open_store
from tests.machines.own_ranks import on_ranks
from tests.programs.processes import free_port
from tests.programs.scripts import output_of
from tests.tiny_models import qwen2_5_vl
from tests.values.saved_models import saved_model
from tests.values.storage import best_of, concluded
from tests.values.training import job_of, plan_of
from trials.plan import Packed, Plan
from trials.tasks.training.progress import Progress

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[3] / "examples" / "library"
PIPELINE = plan_of("3+0r1,0", "1+2r0,1")
DATA = plan_of("4+2r0,1", data=2)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A user with a job, whose two databases have a winner each."""

    job: Path
    environment: Mapping[str, str]

    def database(self, plan: Plan) -> str:
        return f"sqlite:///{self.job.parent}/{plan.id}.db"

    def losses(self, plan: Plan, script: str, ranks: int = 1) -> list[float]:
        """Return the losses that an example prints, by step, on ranks which need no time to import libraries."""
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment = {**self.environment, **rendezvous, "AUTOTUNE_DB_URL": self.database(plan)}
        first, *_ = on_ranks(output_of, str(EXAMPLES / script), [str(self.job)], environment, world_size=ranks)
        return losses_in(first)

    def losses_of_command(self, plan: Plan, *command: str) -> list[float]:
        """Return the losses that an example prints, by step, when a user starts it."""
        environment = {**self.environment, "AUTOTUNE_DB_URL": self.database(plan)}
        command = (sys.executable, *command, str(self.job))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return losses_in(done.stdout)


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", output)]


def world_of(example: Path, folder: Path, *plans: Plan) -> tuple[World, Prepared]:
    """Return the world of a user who trains the model of `example` from random weights that were saved."""
    saved_model(example, folder / "saved")
    job = job_of(
        example,
        folder / "output",
        model={"path": str(folder / "saved"), "weights": "pretrained"},
        data={"sources": [{"path": str(example / "data" / "train.jsonl"), "sampling": "first:32"}]},
        training={"epochs": 2, "schedule": "constant"},
    )
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    homes = {"XDG_DATA_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    world = World(job=file, environment={**os.environ, **homes, "OMP_NUM_THREADS": "1"})
    prepared = prepare(job, folder / "prepared")
    for plan in plans:
        with open_store(world.database(plan)) as store:
            study = store.create_study(store.add_workload(prepared.workload), {}, 0)
            concluded(store, best_of(study.id, workload=prepared.workload, plan=plan, ties=(), pareto=()))
    return world, prepared


@pytest.fixture(scope="module")
def world(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    world, prepared = world_of(shallow, tmp_path_factory.mktemp("world"), PIPELINE, DATA)
    # What the tests rely on: packs without images, and steps of different sizes.
    steps = [(number, step) for number in range(2) for step in range(prepared.epoch(PIPELINE.packing, 1, number).steps)]
    packs = [prepared.epoch(PIPELINE.packing, 1, number).step(step).packs[0] for number, step in steps]
    assert any(not prepared.index.vision_units[pack].any() for each in packs for pack in each)
    assert len({len(each) for each in packs}) > 1
    return world


def launched(world: World, plan: Plan, folder: Path) -> list[float]:
    """Return the losses of a launch by its steps."""
    found: list[float] = []

    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            found.append(event.loss)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.environment.items():
            patch.setenv(name, value)
        database = world.database(plan)
        assert best_plan(world.job, database=database).plan == plan
        settings = yaml.safe_load(world.job.read_text())
        settings["training"]["output"] = folder / "output"
        done = launch(settings, database=database, listener=listen)
    assert done.report.finished
    assert done.steps == len(found)
    return found


@pytest.fixture(scope="module")
def expected(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a launch with a pipeline."""
    found = launched(world, PIPELINE, tmp_path_factory.mktemp("launched"))
    assert found[-1] < found[0] - 0.3
    return found


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("plain_loop.py", 1),
        pytest.param("trainer.py", 1, marks=pytest.mark.long),
        pytest.param("pipeline.py", 2, marks=pytest.mark.long),
    ],
)
def test_an_example_refuses_what_its_loop_does_not_follow(
    script: str, ranks: int, example: Path, tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    job = job_of(example, tmp_path / "output", training={"freeze": ["vision"], "max_steps": 2})
    file.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    environment = {"XDG_CACHE_HOME": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said, *_ = on_ranks(refusal_of, str(EXAMPLES / script), [str(file)], environment, world_size=ranks)
    assert "training.freeze, training.max_steps: this loop does not follow it; remove it, or use" in said


def refusal_of(script: str, arguments: list[str], environment: Mapping[str, str]) -> str:
    """Return the text with which a script ends."""
    with pytest.raises(SystemExit) as ended:
        output_of(script, arguments, environment)
    return str(ended.value)


@pytest.mark.long
def test_the_trainer_is_refused_where_it_would_cut_packs_for_several_gpus(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    monkeypatch.setattr(sys, "argv", ["trainer.py", str(world.job)])
    with pytest.raises(SystemExit, match="one process sees 2 GPUs, and the Trainer would cut each pack into as many"):
        runpy.run_path(str(EXAMPLES / "trainer.py"), run_name="__main__")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "ranks"),
    [("plain_loop.py", 1), ("trainer.py", 1), ("pipeline.py", 2)],
)
def test_an_example_has_the_losses_of_launch(script: str, ranks: int, world: World, expected: list[float]) -> None:
    assert world.losses(PIPELINE, script, ranks) == pytest.approx(expected, rel=1e-5)


def test_the_trainer_counts_targets_for_a_model_whose_class_denies_it(example: Path, tmp_path: Path) -> None:
    qwen2_5_vl.make(tmp_path / "model")
    (tmp_path / "data").symlink_to(example / "data")
    plan = plan_of("4+4", packing=Packed(qv=200, qt=400, qv_min=150, qt_min=300))
    world, prepared = world_of(tmp_path, tmp_path, plan)
    epoch = prepared.epoch(plan.packing, 1)
    assert len({len(epoch.step(number).packs[0]) for number in range(epoch.steps)}) > 1
    found = world.losses(plan, "trainer.py")
    assert found == pytest.approx(world.losses(plan, "plain_loop.py"), rel=1e-5)
    assert len(found) > epoch.steps


@pytest.mark.long
def test_the_plain_loop_on_two_ranks_has_the_losses_of_launch(world: World, tmp_path: Path) -> None:
    assert world.losses(DATA, "plain_loop.py", 2) == pytest.approx(launched(world, DATA, tmp_path), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("command", [("plain_loop.py",), ("trainer.py",), (*TORCHRUN, "pipeline.py")], ids=" ".join)
def test_the_command_of_an_example_has_the_losses_of_launch(
    command: tuple[str, ...], world: World, expected: list[float]
) -> None:
    *program, script = command
    assert world.losses_of_command(PIPELINE, *program, str(EXAMPLES / script)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_the_command_of_the_plain_loop_on_two_ranks_has_the_losses_of_launch(world: World, tmp_path: Path) -> None:
    found = world.losses_of_command(DATA, *TORCHRUN, str(EXAMPLES / "plain_loop.py"))
    assert found == pytest.approx(launched(world, DATA, tmp_path), rel=1e-5)
