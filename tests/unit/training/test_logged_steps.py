"""Which steps of a resumed training its loggers have: a step with other losses than before is a new one."""

from dataclasses import replace
from pathlib import Path

from autotune.training.training_log import logged_run
from tests.unit.training.test_training_output import PLAN, SETTINGS, write_checkpoint
from tests.values.training import job_of, plan_of
from trials.plan import Plan
from trials.tasks.training.output import RECORD_FILE, OpenedOutput, open_output, read_record
from trials.tasks.training.progress import PROGRESS_FILE, Progress, append_line, read_lines
from trials.tasks.training.settings import Settings

OTHER = plan_of("2+4")


def opened(
    output: Path, settings: Settings = SETTINGS, plan: Plan = PLAN, *, instead_of: Plan | None = None
) -> OpenedOutput:
    return open_output(output, replace(settings, plan=plan.id), plan, instead_of=instead_of)


def train(output: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        append_line(output / PROGRESS_FILE, Progress(step=step, of=100, loss=2.0, seconds=1.0, samples=8))


def logged(
    output: Path, settings: Settings = SETTINGS, plan: Plan = PLAN, *, instead_of: Plan | None = None
) -> tuple[int, set[int]]:
    """Return (the steps after which a launch resumes, those that its loggers have)."""
    before, lines = read_record(output / RECORD_FILE), list(read_lines(output / PROGRESS_FILE))
    now = opened(output, settings, plan, instead_of=instead_of)
    run = logged_run(job_of(output, output), plan, now, before, lines)
    return run.done, {step for _, step in run.logged}


def test_the_same_steps_are_known_after_a_kill_and_new_with_other_settings(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, opened(tmp_path), 5)
    train(tmp_path, 1, 10)
    assert logged(tmp_path) == (5, set(range(1, 11)))
    train(tmp_path, 6, 10)
    slower = replace(SETTINGS, learning_rate=1e-5)
    assert logged(tmp_path, slower) == (5, set(range(1, 6)))
    train(tmp_path, 6, 8)
    assert logged(tmp_path, slower) == (5, set(range(1, 9)))


def test_the_steps_of_another_plan_are_new_once(tmp_path: Path) -> None:
    record = opened(tmp_path)
    train(tmp_path, 1, 12)
    for steps in (5, 10):
        write_checkpoint(tmp_path, record, steps)
    assert logged(tmp_path, plan=OTHER, instead_of=PLAN) == (10, set(range(1, 11)))
    train(tmp_path, 11, 13)
    assert logged(tmp_path, plan=OTHER) == (10, set(range(1, 14)))
    train(tmp_path, 11, 13)
    (tmp_path / "checkpoint-10").rename(tmp_path / "bad")
    assert logged(tmp_path, plan=OTHER) == (5, set(range(1, 6)))  # the other plan trains steps 6 to 10, too
