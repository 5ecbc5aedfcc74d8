"""A training that becomes slower is tuned again at a checkpoint, and goes on with every sample once."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from autotune.events import Event, Note, PhaseBegan, unheard
from autotune.results.known_plan import KnownPlan, Speed
from autotune.training.drift import Patience
from autotune.training.full_training import Launched
from autotune.training.plan_change import plan_to_continue
from autotune.training.retuning import tune_again
from autotune.training.watched_training import TrainingOptions, WatchedTraining
from autotune.workbench import Workbench, workbench
from tests.integration.running.training.test_changed_plans import steps_of
from tests.integration.running.training.test_evaluation import train_alone
from tests.programs.processes import ranks
from tests.values.storage import COSTS
from tests.values.training import job_of, plan_of, prepared_of
from trials import wire
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training
from trials.tasks.stop import Stop
from trials.tasks.training.output import RECORD_FILE, PlanChange, TrainingRecord, read_record
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines
from trials.tasks.training.settings import training_settings

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]

EPOCHS = 4
"""Enough steps that the agent, which reads them on busy cores, can stop the ranks before the last one."""
PLAN = plan_of("4+2", data=2, zero=1)
SPLIT, OTHER_SPLIT = ("4+0", "0+2"), ("3+0", "1+2")
SOON = Patience(window_steps=2, windows=1)
PATIENT = Patience(window_steps=6, windows=1)


@contextmanager
def opened(
    example: Path,
    folder: Path,
    epochs: int = EPOCHS,
    memory_limit: str = "2GiB",
    curriculum: Mapping[str, int] | None = None,
    **search: Any,
) -> Iterator[Workbench]:
    """A workbench for a training of about 6 steps in an epoch, with a checkpoint after every fourth."""
    job = job_of(
        example,
        folder / "output",
        data={"sources": [{"path": str(example / "data" / "train.jsonl"), "sampling": "first:24"}]},
        hardware={"memory_limit": memory_limit},
        training={
            "epochs": epochs,
            "global_batch_samples": 4,
            "checkpoint_every": 4,
            "curriculum": curriculum or {},
        },
        search={"trials": 1, "time_limit": "0.001s", "timed_steps": 1, "warmup_steps": 0, **search},
    )
    with workbench(job, f"sqlite:///{folder / 'known.db'}") as bench:
        yield bench


def trained(
    bench: Workbench,
    chosen: KnownPlan,
    hear: Callable[[Event], None] = lambda _: None,
    stops: Callable[[], bool] = lambda: False,
    patience: Patience = SOON,
) -> tuple[WatchedTraining, Launched]:
    training = WatchedTraining(
        bench=bench,
        chosen=chosen,
        certificate=None,
        options=TrainingOptions(retunes=True, patience=patience),
        listener=hear,
        stopping=lambda: nullcontext(stops),
    )
    return training, training.run()


def check_samples(bench: Workbench, epochs: int = EPOCHS) -> None:
    """Check that the steps of the training, whose plans are in its record, have every sample once in each epoch."""
    output = bench.prepared.job.training.output
    record = read_record(output / RECORD_FILE)
    assert record is not None
    assert record.plan is not None
    steps = steps_of(bench.prepared, record.changes, record.plan, epochs)
    lines = [json.loads(line) for line in (output / PROGRESS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(steps) + 1))
    assert [line["samples"] for line in lines] == [len(rows) for _, rows in steps]
    for number in range(epochs):
        assert sorted(np.concatenate([rows for epoch, rows in steps if epoch == number])) == list(range(24))


def test_a_search_that_fails_is_warned_of_and_chooses_no_plan(
    shallow: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(shallow, tmp_path, sampler="nobodys") as bench:
        assert tune_again(bench, PLAN, None, unheard) is None
    assert f"goes on with plan {PLAN.id}: search.sampler: 'nobodys' is not one of the samplers" in caplog.text


def test_a_training_is_compared_with_what_was_promised_for_its_tokens(shallow: Path, tmp_path: Path) -> None:
    with opened(shallow, tmp_path, epochs=1) as bench:
        _, launched = trained(bench, KnownPlan(plan=PLAN, speed=Speed(mean=1e-3, error=0.0)))
        data, output = bench.prepared.workload.data, bench.prepared.job.training.output
        steps = [line for line in read_lines(output / PROGRESS_FILE) if isinstance(line, Progress)][1:]
    of_search = data.text_tokens / data.samples
    of_steps = sum(step.text_tokens for step in steps) / sum(step.samples for step in steps)
    assert of_steps != pytest.approx(of_search, rel=1e-3)
    assert launched.promised_samples_per_second == pytest.approx(1e-3 * of_search / of_steps)


@pytest.mark.long
def test_where_the_search_fails_the_training_goes_on_with_its_plan(
    shallow: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    too_fast = KnownPlan(plan=PLAN, speed=Speed(mean=1e9, error=0.0))
    notes: list[str] = []
    with opened(shallow, tmp_path, sampler="nobodys") as bench:
        training, launched = trained(bench, too_fast, lambda event: notes.append(getattr(event, "text", "")))
        check_samples(bench)
    assert (launched.report.finished, launched.report.stopped) == (True, None)
    assert launched.steps == launched.report.steps
    assert training.chosen == too_fast
    (retune,) = launched.retunes
    assert (retune.steps % 4, retune.before, retune.winner) == (0, PLAN.id, None)
    assert retune.training_samples_per_second == launched.training_samples_per_second
    assert f"Stopped at checkpoint-{retune.steps} to tune again, on the machine as it is now" in notes
    assert f"goes on with plan {PLAN.id}: search.sampler: 'nobodys' is not one of the samplers" in caplog.text
    assert "it is not tuned again, since the last search failed" in caplog.text


@pytest.mark.long
def test_a_curriculum_is_not_compared_with_what_is_promised_of_the_usual_steps(shallow: Path, tmp_path: Path) -> None:
    tokens = prepared_of(shallow, tmp_path).index.text_tokens[:24]
    with opened(shallow, tmp_path, curriculum={"steps": 2, "max_tokens": int(np.median(tokens))}) as bench:
        launched = WatchedTraining(
            bench=bench,
            chosen=KnownPlan(plan=PLAN, speed=Speed(mean=1e9, error=0.0)),
            certificate=None,
            options=TrainingOptions(max_steps=5, patience=SOON),
            listener=unheard,
            stopping=lambda: nullcontext(lambda: False),
        ).run()
        (launch,) = bench.store.launches(PLAN.id)
    assert [(window.first_step, window.promised_samples_per_second is None) for window in launch.windows] == [
        (2, True),
        (4, False),
    ]
    assert launched.promised_samples_per_second is None
    assert launched.drift is not None
    assert launched.drift.step == 5


@pytest.mark.long
def test_a_request_to_stop_comes_before_the_search(shallow: Path, tmp_path: Path) -> None:
    too_fast = KnownPlan(plan=PLAN, speed=Speed(mean=1e9, error=0.0))
    heard: list[Event] = []

    def stops() -> bool:
        return any(isinstance(event, Progress) and event.step == 3 for event in heard)

    with opened(shallow, tmp_path) as bench:
        _, launched = trained(bench, too_fast, heard.append, stops)
    assert launched.report.stopped
    assert launched.drift is not None
    assert launched.retunes == ()
    assert (bench.prepared.job.training.output / f"checkpoint-{launched.report.steps}").is_dir()


@pytest.mark.long
def test_a_training_with_a_slow_rank_is_tuned_again_on_the_machine_as_it_is(shallow: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    halted = threading.Event()
    slow = threading.Thread(target=slow_down, args=(halted,))
    steps = 0

    def hear(event: Event) -> None:
        nonlocal steps
        if isinstance(event, PhaseBegan):
            steps = 0
        elif isinstance(event, Note):
            notes.append(event.text)
            if event.text.startswith("Stopped at checkpoint-"):
                halted.set()
        elif isinstance(event, Progress):
            steps += 1
            # The steps before say how fast the training is without a slow rank.
            if steps == PATIENT.window_steps + 2 and slow.ident is None:
                slow.start()

    with opened(shallow, tmp_path, epochs=8, time_limit="0.5s") as bench:
        work = bench.prepared.workload
        measured = (work.hardware.fingerprint, work.model.fingerprint, work.software)
        bench.store.add_workload(work)
        bench.store.save_layer_profile(*measured, wire.encode(COSTS))
        training, launched = trained(bench, KnownPlan(plan=PLAN, speed=None), hear, patience=PATIENT)
        check_samples(bench, epochs=8)
        profile = bench.store.layer_profile(*measured)
        winner = bench.store.last_winner(bench.prepared.workload.fingerprint)
        assert winner is not None
        study = bench.store.study(winner.study_id)
        until_then = bench.store.find_plan(launched.retunes[-1].before, study_id=winner.study_id)
    halted.set()
    slow.join()
    assert launched.report.finished
    first, last = launched.retunes[0], launched.retunes[-1]
    assert first.drift.growth is not None
    assert first.before == PLAN.id
    assert profile is not None
    assert profile.document != wire.encode(COSTS), "the stored profile is of the time before"
    assert study.settings["fresh"]
    assert last.winner == winner.plan.id == training.chosen.plan.id
    assert "current-plan" in {trial.role for trial in until_then.trials}
    assert any(note.startswith(f"Tuned again after step {last.steps}") for note in notes)


def slow_down(halted: threading.Event) -> None:
    """Let the last rank run for a fifth of the time, until it is halted."""
    rank = ranks()[-1]
    with suppress(psutil.NoSuchProcess):
        while not halted.wait(0.1):
            rank.suspend()
            halted.wait(0.4)
            rank.resume()


def test_a_training_that_was_tuned_again_keeps_its_plan(shallow: Path, tmp_path: Path) -> None:
    old, new, other = (KnownPlan(plan=plan_of(*stages), speed=None) for stages in (SPLIT, OTHER_SPLIT, ("4+2",)))
    with opened(shallow, tmp_path) as bench:
        output, index = bench.prepared.job.training.output, bench.prepared.index
        assert plan_to_continue(bench, old, unheard) == (old, False)
        settings = training_settings(bench.prepared.request(new.plan, Training(output=output)), index)
        record = TrainingRecord(
            id=16 * "0", settings=settings, plan=new.plan, changes=(PlanChange(plan=old.plan, steps=4),)
        )
        output.mkdir()
        (output / RECORD_FILE).write_text(wire.encode(record))
        assert plan_to_continue(bench, old, unheard) == (new, False)
        assert plan_to_continue(bench, new, unheard) == (new, False)
        assert plan_to_continue(bench, other, unheard) == (other, True)


def test_a_training_that_is_to_stop_at_a_checkpoint_goes_on_to_the_next_that_is_due(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(every: int, stop: Stop) -> tuple[TrainingReport, set[str]]:
        training = {"global_batch_samples": 4, "checkpoint_every": every}
        report = train_alone(prepared_of(shallow, tmp_path, data=data, training=training), monkeypatch, lambda: stop)
        return report, {path.name for path in (tmp_path / "output").glob("checkpoint-*")}

    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    stopped, checkpoints = train(2, Stop.AT_CHECKPOINT)
    assert (stopped.steps, stopped.stopped, checkpoints) == (2, Stop.AT_CHECKPOINT, {"checkpoint-2"})
    stopped, checkpoints = train(2, Stop.NOW)
    assert (stopped.steps, stopped.stopped, checkpoints) == (3, Stop.NOW, {"checkpoint-2", "checkpoint-3"})
    finished, _ = train(100, Stop.AT_CHECKPOINT)
    assert (finished.finished, finished.stopped) == (True, None)


def test_the_steps_before_a_stop_have_the_times_of_their_ranks(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter((None, None, None, Stop.NOW))
    report = train_alone(prepared_of(shallow, tmp_path), monkeypatch, lambda: next(asked))
    lines = read_lines(tmp_path / "output" / PROGRESS_FILE)
    windows = [line.window for line in lines if isinstance(line, Progress)]
    assert (report.steps, report.stopped) == (4, Stop.NOW)
    assert windows[:3] == [None, None, None]
    assert windows[3] is not None
