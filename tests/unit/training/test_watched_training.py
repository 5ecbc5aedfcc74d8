"""What a training of several launches says of all of them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from autotune.events import unheard
from autotune.results.known_plan import KnownPlan
from autotune.training.full_training import Launched
from autotune.training.launched_report import launched_document, launched_text
from autotune.training.watched_training import TrainingOptions, WatchedTraining
from autotune.workbench import Workbench
from storage.store import open_store
from tests.unit.training.test_retuning import DRIFT
from tests.values.search import prepared_of
from tests.values.storage import best_of, packed_plan
from tests.values.training import job_of
from trials.tasks.answer import TrainingReport
from trials.tasks.stop import Stop
from trials.tasks.training.progress import Progress

UNUSED: Any = None
CHOSEN = KnownPlan(plan=packed_plan(), speed=None)


@dataclass(slots=True, kw_only=True)
class ScriptedTraining(WatchedTraining):
    """A training without ranks: a drift stops each launch but the last one."""

    script: list[tuple[int, float | None, bool]]
    """Steps and speed of each launch, and whether it is slow at its end."""
    done: int = 0

    @override
    def _launch(self, watch: Any, drifts: Any, stops: Callable[[], bool], *, changes_plan: bool) -> Launched:
        steps, speed, watch.is_slow = self.script.pop(0)
        self.done += steps
        if self.script:
            drifts.hear(DRIFT, Progress(step=100, of=10_000, loss=1.0, seconds=1.0, samples=8))
        return Launched(
            report=TrainingReport(
                steps=self.done,
                finished=not self.script,
                model=None,
                blank_samples=0,
                stopped=Stop.AT_CHECKPOINT if drifts.stops else None,
            ),
            training_samples_per_second=speed,
            tokens_per_sample=400.0 if speed else None,
            data_wait_share=None,
            steps=steps,
            blank_samples=0,
        )


def trained(folder: Path, *script: tuple[int, float | None, bool]) -> Launched:
    """The end of a training whose searches find its own plan."""
    job = job_of(folder, folder / "output", training={"checkpoint_every": 40})
    prepared = replace(prepared_of(folder), job=job)
    with open_store(f"sqlite:///{folder / 'known.db'}") as store:
        return ScriptedTraining(
            bench=Workbench(prepared=prepared, store=store, agent=UNUSED, site=UNUSED, folder=folder),
            chosen=CHOSEN,
            certificate=None,
            options=TrainingOptions(retunes=True),
            listener=unheard,
            stopping=lambda: nullcontext(lambda: False),
            tuning=lambda *_: (best_of("a study"), None),
            script=list(script),
        ).run()


def test_a_drift_that_ended_without_a_search_is_told_and_the_speeds_say_since_when(tmp_path: Path) -> None:
    launched = trained(tmp_path, (900, 10.0, False), (100, 14.2, False))
    assert (launched.steps, launched.retunes, launched.drift, launched.speeds_since) == (1000, (), DRIFT, 900)
    lines = launched_text(CHOSEN, launched, 0, 0).splitlines()
    assert lines[:2] == [f"Trained 1000 steps with plan {CHOSEN.plan.id}", "Measured 14.2 samples/s since step 900"]
    assert lines[2] == f"Drift: {DRIFT}"
    assert launched_document(CHOSEN, launched)["speeds_since"] == 900


def test_the_speed_after_a_search_stays_when_a_later_drift_ends_without_one(tmp_path: Path) -> None:
    launched = trained(tmp_path, (900, 8.0, True), (3100, 14.0, False), (1, None, False))
    (retune,) = launched.retunes
    assert (launched.steps, launched.speeds_since, retune.steps) == (4001, 4000, 900)
    assert "14.0 samples/s after it, 10.0 before for samples of as many tokens (+40%)" in retune.text
