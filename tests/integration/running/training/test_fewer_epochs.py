"""Jobs with fewer steps than the training in their output folder has been trained."""

from collections.abc import Callable
from pathlib import Path

from autotune.job_file import load_job
from autotune.workload import look_at, read_data
from tests.programs.users import JobFile, refusal
from tests.values.training import plan_of
from trials import wire
from trials.plan import Plan
from trials.tasks.request import Training
from trials.tasks.training.output import RECORD_FILE, TrainingState, open_output
from trials.tasks.training.settings import training_settings


def test_fewer_epochs_than_are_trained_are_refused_before_ranks_start_and_are_not_recorded(
    job: JobFile, tmp_path: Path, plan_file: Callable[[Plan], Path]
) -> None:
    job.spoil(training__epochs=8)
    read = load_job(job.path)
    prepared, plan = read_data(read, look_at(read), tmp_path), plan_of("12+4", "0+4")
    settings = training_settings(prepared.request(plan, Training(output=job.output)), prepared.index)
    opened = open_output(job.output, settings, plan)
    steps = 3 * prepared.epoch(plan.packing, plan.layout.data).steps
    checkpoint = job.output / f"checkpoint-{steps}"
    checkpoint.mkdir()
    state = TrainingState(steps=steps, plan=plan.id, data="d", training=opened.record.id, files=())
    (checkpoint / "state.json").write_text(wire.encode(state))
    before = (job.output / RECORD_FILE).read_bytes()
    job.spoil(training__epochs=2)
    own, other = ("--plan", plan.id), ("--resume-with", plan_file(plan_of("10+0", "2+8", packing=plan.packing)))
    for how in (own, (*own, "--dry-run"), other):
        code, reported = refusal("launch", job.path, *how)
        assert code == 2
        assert "has checkpoints beyond the" in reported
        assert "of training.epochs: 2; raise it, or name another training.output" in reported
    assert (job.output / RECORD_FILE).read_bytes() == before
