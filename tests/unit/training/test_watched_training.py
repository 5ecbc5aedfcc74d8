"""What a training of several launches says of all of them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
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
from tests.values.storage import packed_plan
from tests.values.training import job_of
from trials.tasks.answer import TrainingReport
from trials.tasks.stop import Stop
from trials.tasks.training.progress import Progress

UNUSED: Any = None
CHOSEN = KnownPlan(plan=packed_plan(), speed=None)


class ScriptedTraining(WatchedTraining):
    """A training without ranks: a drift stops its first launch, and before the checkpoint it is as fast as before."""

    @override
    def _launch(self, _: Any, drifts: Any, stops: Callable[[], bool], *, changes_plan: bool) -> Launched:
        begun = self.bench.folder / "begun"
        if is_first := not begun.exists():
            begun.touch()
            drifts.hear(DRIFT, Progress(step=100, of=10_000, loss=1.0, seconds=1.0, samples=8))
        return Launched(
            report=TrainingReport(
                steps=900 if is_first else 1000,
                finished=not is_first,
                model=None,
                blank_samples=0,
                stopped=Stop.AT_CHECKPOINT if drifts.stops else None,
            ),
            training_samples_per_second=10.0 if is_first else 14.2,
            data_wait_share=None,
            steps=900 if is_first else 100,
            blank_samples=0,
        )


def test_a_drift_that_ended_without_a_search_is_told_and_the_speeds_say_since_when(tmp_path: Path) -> None:
    job = job_of(tmp_path, tmp_path / "output", training={"checkpoint_every": 40})
    prepared = replace(prepared_of(tmp_path), job=job)
    with open_store(f"sqlite:///{tmp_path / 'known.db'}") as store:
        launched = ScriptedTraining(
            bench=Workbench(prepared=prepared, store=store, agent=UNUSED, site=UNUSED, folder=tmp_path),
            chosen=CHOSEN,
            certificate=None,
            options=TrainingOptions(retunes=True),
            listener=unheard,
            stopping=lambda: nullcontext(lambda: False),
        ).run()
    assert (launched.steps, launched.retunes, launched.drift, launched.speeds_since) == (1000, (), DRIFT, 900)
    lines = launched_text(CHOSEN, launched, 0, 0).splitlines()
    assert lines[:2] == [f"Trained 1000 steps with plan {CHOSEN.plan.id}", "Measured 14.2 samples/s since step 900"]
    assert lines[2] == f"Drift: {DRIFT}"
    assert launched_document(CHOSEN, launched)["speeds_since"] == 900
