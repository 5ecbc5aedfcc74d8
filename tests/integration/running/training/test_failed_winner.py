"""A training whose new plan fails at its launch goes on with the plan before, as if there had been no search."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from autotune.certification.certificate import Certificate
from autotune.errors import LaunchFailed, PlanFailed
from autotune.events import Event, Listener, Note, RanksStart, unheard
from autotune.results.known_plan import KnownPlan, Speed
from autotune.training.full_training import Launched
from autotune.training.plan_change import plan_to_continue
from autotune.training.watched_training import TrainingOptions, WatchedTraining
from autotune.workbench import Workbench
from storage.records import BestPlan
from tests.integration.running.training.test_retuned_training import SOON, check_samples, opened
from tests.programs.processes import ranks
from tests.values.storage import best_of
from tests.values.training import plan_of, train
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks.training.output import RECORD_FILE, read_record
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]

LEAN, GREEDY = plan_of("4+2r4,2", data=2, zero=1), plan_of("4+2", data=2, zero=1)
"""Plans that need 4.5 MiB and 11.3 MiB."""


def finds(plan: Plan) -> Callable[..., tuple[BestPlan, Certificate | None]]:
    """Return a search that knows its winner."""

    def search(
        bench: Workbench, _: Plan, certificate: Certificate | None, __: Listener
    ) -> tuple[BestPlan, Certificate | None]:
        return best_of(32 * "0", plan=plan, workload=bench.prepared.workload), certificate

    return search


def trained(
    bench: Workbench, hear: Callable[[Event], None] = unheard, stops: Callable[[], bool] = lambda: False
) -> tuple[WatchedTraining, Launched]:
    """Train with LEAN, which is promised to be faster than it is, and after a search with GREEDY."""
    training = WatchedTraining(
        bench=bench,
        chosen=KnownPlan(plan=LEAN, speed=Speed(mean=1e9, error=0.0)),
        certificate=None,
        options=TrainingOptions(retunes=True, patience=SOON),
        listener=hear,
        stopping=lambda: nullcontext(stops),
        tuning=finds(GREEDY),
    )
    return training, training.run()


def losses(bench: Workbench) -> list[float]:
    lines = (bench.prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def endings(bench: Workbench, plan: Plan) -> list[str | None]:
    return [launch.result.status if launch.result else None for launch in bench.store.launches(plan.id)]


@pytest.mark.long
def test_where_the_new_plan_runs_out_of_memory_the_training_goes_on_with_the_plan_before(
    shallow: Path, tmp_path: Path, pool: WarmPool, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(shallow, tmp_path / "alone") as bench:
        train(pool, bench.prepared, LEAN)
        undisturbed = losses(bench)
    with opened(shallow, tmp_path, memory_limit="8MiB") as bench:
        training, launched = trained(bench)
        check_samples(bench)
        assert losses(bench) == undisturbed
        record = read_record(bench.prepared.job.training.output / RECORD_FILE)
        assert endings(bench, LEAN) == ["interrupted", "finished"]
        assert endings(bench, GREEDY) == ["failed"]
        windows = [launch.windows for launch in bench.store.launches(LEAN.id)]
        notes: list[Event] = []
        greedy = KnownPlan(plan=GREEDY, speed=None)
        assert plan_to_continue(bench, greedy, notes.append) == (KnownPlan(plan=LEAN, speed=None), False)
    assert Note(text=f"The launch of plan {GREEDY.id} failed in this training: it keeps plan {LEAN.id}") in notes
    assert record is not None
    assert (record.settings.plan, record.changes, record.failed) == (LEAN.id, (), (GREEDY.id,))
    assert launched.report.finished
    assert launched.steps == launched.report.steps == len(undisturbed)
    assert training.chosen.plan == LEAN
    (retune,) = launched.retunes
    assert (retune.before, retune.winner, retune.training_samples_per_second) == (
        LEAN.id,
        GREEDY.id,
        launched.training_samples_per_second,
    )
    # The first step of each launch does not count. The stop cuts off a window, which is stored as well.
    assert (windows[0][-1].steps, SOON.window_steps) == (1, 2)
    assert [(some[0].first_step, some[-1].last_step) for some in windows] == [
        (2, retune.steps),
        (retune.steps + 2, len(undisturbed)),
    ]
    assert all(
        window.steps <= SOON.window_steps and (window.change or 0.0) < -0.9 for some in windows for window in some
    )
    assert all(len(window.parts.passes) == 1 for some in windows for window in some)
    assert str(retune.failure).startswith("out of memory on stage 0")
    assert f"plan {GREEDY.id} cannot be launched, and checkpoint-{retune.steps} is continued with plan" in caplog.text
    assert f"it is not tuned again, since the launch of plan {GREEDY.id} failed" in caplog.text


class Killed(BaseException):
    """The end of the agent at a moment of the test."""


def killed(moment: str) -> Callable[[Event], None]:
    """Return a listener that ends the agent at the first text of an event with these words."""

    def hear(event: Event) -> None:
        if moment in getattr(event, "text", ""):
            raise Killed

    return hear


AT_LAUNCH, BEFORE_LAUNCH = f"Training with plan {GREEDY.id}", "Tuned again after step"


@pytest.mark.long
@pytest.mark.parametrize("moment", [AT_LAUNCH, pytest.param(BEFORE_LAUNCH, marks=pytest.mark.long)])
def test_an_agent_that_follows_one_which_was_killed_at_its_new_plan_goes_on_with_the_plan_before(
    moment: str, shallow: Path, tmp_path: Path, pool: WarmPool, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(shallow, tmp_path / "alone") as bench:
        train(pool, bench.prepared, LEAN)
        undisturbed = losses(bench)
    with opened(shallow, tmp_path, memory_limit="8MiB") as bench:
        with pytest.raises(Killed):
            trained(bench, killed(moment))
        before = read_record(bench.prepared.job.training.output / RECORD_FILE)
        training = WatchedTraining(
            bench=bench,
            chosen=KnownPlan(plan=GREEDY, speed=None),
            certificate=None,
            options=TrainingOptions(retunes=True),
            listener=unheard,
            stopping=lambda: nullcontext(lambda: False),
        )
        launched = training.run()
        check_samples(bench)
        assert losses(bench) == undisturbed
        after = read_record(bench.prepared.job.training.output / RECORD_FILE)
    assert before is not None
    assert before.settings.plan == (GREEDY.id if moment == AT_LAUNCH else LEAN.id)
    assert after is not None
    assert (after.settings.plan, after.changes, after.failed) == (LEAN.id, (), (GREEDY.id,))
    assert (training.chosen.plan, launched.report.finished, launched.retunes) == (LEAN, True, ())
    assert re.search(rf"plan {GREEDY.id} cannot be launched, and checkpoint-\d+ is continued with", caplog.text)


@pytest.mark.long
def test_without_tuning_again_the_failure_of_a_changed_plan_ends_the_training(shallow: Path, tmp_path: Path) -> None:
    with opened(shallow, tmp_path, memory_limit="8MiB") as bench:
        with pytest.raises(Killed):
            trained(bench, killed(AT_LAUNCH))
        training = WatchedTraining(
            bench=bench,
            chosen=KnownPlan(plan=GREEDY, speed=None),
            certificate=None,
            options=TrainingOptions(),
            listener=unheard,
            stopping=lambda: nullcontext(lambda: False),
        )
        with pytest.raises(PlanFailed, match="out of memory"):
            training.run()
        assert endings(bench, GREEDY)[-1] == "failed"


def kill(rank: psutil.Process) -> None:
    rank.kill()


def fill_the_disk(rank: psutil.Process) -> None:
    rank.rlimit(psutil.RLIMIT_FSIZE, (0, 0))


def planted(fault: Callable[[psutil.Process], None]) -> Callable[[Event], None]:
    """Return a listener that does something to the last rank of every launch but the first."""
    starts = 0

    def hear(event: Event) -> None:
        nonlocal starts
        if isinstance(event, RanksStart) and event.is_ready:
            starts += 1
            if starts > 1:
                fault(ranks()[-1])

    return hear


@pytest.mark.long
def test_where_the_plan_before_fails_as_well_its_failure_ends_the_training(shallow: Path, tmp_path: Path) -> None:
    with opened(shallow, tmp_path) as bench:
        with pytest.raises(PlanFailed, match="rank 1 failed: the process was ended by signal 9"):
            trained(bench, planted(kill))
        assert endings(bench, LEAN) == ["interrupted", "failed"]
        assert endings(bench, GREEDY) == ["failed"]


@pytest.mark.long
def test_a_failure_of_the_machine_is_not_taken_for_one_of_the_plan(shallow: Path, tmp_path: Path) -> None:
    with opened(shallow, tmp_path) as bench:
        with pytest.raises(LaunchFailed, match="it could not write its report") as failure:
            trained(bench, planted(fill_the_disk))
        assert not isinstance(failure.value, PlanFailed)
        assert endings(bench, LEAN) == ["interrupted"]
        assert endings(bench, GREEDY) == ["failed"]


@pytest.mark.long
def test_a_request_to_stop_comes_before_the_plan_before(shallow: Path, tmp_path: Path) -> None:
    launches = 0

    def hear(event: Event) -> None:
        nonlocal launches
        launches += isinstance(event, RanksStart) and event.is_ready

    with opened(shallow, tmp_path, memory_limit="8MiB") as bench:
        with pytest.raises(PlanFailed, match="out of memory"):
            trained(bench, hear, lambda: launches > 1)
        assert endings(bench, LEAN) == ["interrupted"]
