"""What the end of a launch says."""

import pytest

from autotune.results.known_plan import KnownPlan, Speed
from autotune.training.full_training import Launched
from autotune.training.launched_report import launched_document, launched_text, stopped_text
from autotune.training.retuning import Retune
from tests.unit.training.test_retuning import RETUNE
from tests.values.storage import packed_plan
from trials.tasks.answer import TrainingReport
from trials.tasks.stop import Stop
from trials.tasks.training.progress import Evaluated


@pytest.mark.parametrize(
    ("share", "spare", "expected"),
    [
        (None, 4, ""),
        (0.004, 4, "Waited for data in 0.4% of the time"),
        (0.25, 4, "Waited for data in 25.0% of the time; raise data.workers, now 3, to decode images ahead"),
        (0.25, 3, "Waited for data in 25.0% of the time; no core is free to decode images ahead"),
    ],
)
def test_a_long_wait_for_data_comes_with_its_remedy(share: float | None, spare: int, expected: str) -> None:
    report = TrainingReport(steps=8, finished=True, model=None, blank_samples=0)
    launched = Launched(report=report, training_samples_per_second=9.0, data_wait_share=share, steps=8, blank_samples=0)
    text = launched_text(KnownPlan(plan=packed_plan(), speed=None), launched, 3, spare)
    assert text.splitlines()[2:] == [expected] * bool(expected)


def test_what_slowed_a_launch_down_is_named() -> None:
    reason = "other processes used 1.2 of 2 cores"
    launched = Launched(
        report=TrainingReport(steps=8, finished=True, model=None, blank_samples=0),
        training_samples_per_second=9.0,
        data_wait_share=None,
        steps=8,
        blank_samples=0,
        disturbance=reason,
    )
    text = launched_text(KnownPlan(plan=packed_plan(), speed=None), launched, 3, 4)
    assert text.splitlines()[2:] == [f"Disturbed: {reason}; on an idle machine the training is faster"]


def test_a_launch_with_nothing_left_to_train_says_how_to_go_on_and_claims_no_slowness() -> None:
    launched = Launched(
        report=TrainingReport(steps=8, finished=True, model=None, blank_samples=0),
        training_samples_per_second=None,
        data_wait_share=None,
        steps=0,
        blank_samples=0,
        disturbance="other processes used 1.2 of 2 cores",
    )
    text = launched_text(KnownPlan(plan=packed_plan(), speed=None), launched, 3, 4)
    assert text.startswith("Nothing was left to train after 8 steps; to go on, raise training.epochs")
    assert "Disturbed" not in text


@pytest.mark.parametrize(
    ("steps", "retunes", "expected"),
    [
        (1000, (), "Trained 1000 steps with plan {}"),
        (100, (), "Trained 100 steps, to step 1000, with plan {}"),
        (100, (RETUNE,), "Trained 100 steps, to step 1000, at last with plan {}"),
    ],
)
def test_the_steps_of_a_launch_are_told_apart_from_those_before_it(
    steps: int, retunes: tuple[Retune, ...], expected: str
) -> None:
    launched = Launched(
        report=TrainingReport(steps=1000, finished=True, model=None, blank_samples=0),
        training_samples_per_second=None,
        data_wait_share=None,
        steps=steps,
        blank_samples=0,
        retunes=retunes,
    )
    text = launched_text(KnownPlan(plan=packed_plan(), speed=None), launched, 3, 4)
    assert text.splitlines()[0] == expected.format(packed_plan().id)


def test_the_speed_is_compared_with_the_promise_for_samples_of_as_many_tokens() -> None:
    launched = Launched(
        report=TrainingReport(steps=8, finished=True, model=None, blank_samples=0),
        training_samples_per_second=24.0,
        promised_samples_per_second=20.0,
        data_wait_share=None,
        steps=8,
        blank_samples=0,
    )
    chosen = KnownPlan(plan=packed_plan(), speed=Speed(mean=10.0, error=0.2))
    text = launched_text(chosen, launched, 3, 4)
    assert text.splitlines()[1] == (
        "Measured 24.0 samples/s, promised 20.0 +- 0.4 for samples of as many tokens (+20%)"
    )
    assert launched_document(chosen, launched)["promised_samples_per_second"] == 20.0


@pytest.mark.parametrize(("step", "before"), [(None, ""), (6, "; model/ is still that of step 6")])
def test_a_launch_that_stopped_before_the_end_says_whose_model_is_there(step: int | None, before: str) -> None:
    launched = Launched(
        report=TrainingReport(steps=8, finished=False, model=None, blank_samples=0),
        training_samples_per_second=None,
        data_wait_share=None,
        steps=8,
        blank_samples=0,
        model_step=step,
    )
    chosen = KnownPlan(plan=packed_plan(), speed=None)
    text = launched_text(chosen, launched, 3, 4)
    assert text.endswith(f"The model is written after the last step: a larger --steps, or none, goes on{before}")
    assert launched_document(chosen, launched)["model_step"] == step


@pytest.mark.parametrize(
    ("last_step", "expected"),
    [
        (None, "Stopped after step 8 with a checkpoint; the same command goes on with step 9"),
        (9, "Stopped after step 8 with a checkpoint; the same command goes on with step 9"),
        (8, "Stopped in the evaluation after step 8, the last one; the same command makes it"),
    ],
)
def test_a_stop_is_told_with_what_the_same_command_does_next(last_step: int | None, expected: str) -> None:
    report = TrainingReport(steps=8, finished=False, model=None, blank_samples=0, stopped=Stop.NOW)
    assert stopped_text(report, last_step) == expected


def test_the_last_and_the_best_evaluation_are_named() -> None:
    def text(*losses: float, blank: int = 0) -> str:
        found = [
            Evaluated(step=step, of=8, evaluation_loss=loss, seconds=1, samples=4, blank_samples=blank)
            for step, loss in enumerate(losses, 1)
        ]
        launched = Launched(
            report=TrainingReport(steps=8, finished=True, model=None, blank_samples=0),
            training_samples_per_second=None,
            data_wait_share=None,
            steps=8,
            blank_samples=0,
            evaluations=tuple(found),
        )
        return launched_text(KnownPlan(plan=packed_plan(), speed=None), launched, 3, 4).splitlines()[-1]

    assert text(2.0, 1.5) == "Evaluation loss 1.500 after step 2, the best"
    assert text(2.0, blank=3).endswith("the best; without 3 samples that could not be read, which the logs name")
    assert text(2.0, 1.25, 1.5, 1.25, 3.0) == "Evaluation loss 3.000 after step 5, best 1.250 after step 2"
