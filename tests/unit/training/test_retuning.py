"""When a training is tuned again, and what is said of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import JobError
from autotune.training.drift import Drift
from autotune.training.retuning import MOST_RETUNES, Retune, check_checkpoints, refusal
from tests.values.training import job_of
from trials.job import Job
from trials.tasks.training.progress import Progress

DRIFT = Drift(
    step=100,
    steps=50,
    training_samples_per_second=8.0,
    tokens_per_sample=500.0,
    promised_samples_per_second=16.0,
    growth=None,
)
RETUNE = Retune(drift=DRIFT, steps=120, search_seconds=90.0, before="old", winner="new", gain=1.25)


def job(**training: Any) -> Job:
    """A job whose search takes at most a minute."""
    return job_of(Path(), Path(), training={"checkpoint_every": 40, "global_batch_samples": 8, **training})


def refused(of: int = 10_000, last: int | None = None, retunes: Sequence[Retune] = ()) -> str | None:
    step = Progress(step=100, of=of, loss=1.0, seconds=1.0, samples=8)
    return refusal(job(), DRIFT, step, last, retunes)


def test_a_training_is_tuned_again_if_its_last_steps_lose_more_time_than_a_search_takes() -> None:
    # A step of 8 samples loses 0.5 s. The search comes after step 120.
    assert refused(of=120 + 121) is None
    assert refused(of=120 + 120) == (
        "it is not tuned again: the 120 steps after the next checkpoint lose 1 min 00 s, "
        "and a search may take 1 min 00 s (search.time_limit)"
    )


def test_a_search_that_took_longer_than_its_limit_is_the_price_of_the_next_one() -> None:
    assert refused(of=120 + 181, retunes=[RETUNE]) is None
    assert refused(of=120 + 180, retunes=[RETUNE]) == (
        "it is not tuned again: the 180 steps after the next checkpoint lose 1 min 30 s, and a search took 1 min 30 s"
    )


def test_steps_after_the_end_of_the_launch_do_not_count() -> None:
    assert refused(last=120 + 121) is None
    assert "the 120 steps" in str(refused(last=120 + 120))
    assert "the 0 steps" in str(refused(last=110))


def test_a_launch_is_tuned_again_a_few_times() -> None:
    assert refused(retunes=(MOST_RETUNES - 1) * [RETUNE]) is None
    assert refused(retunes=MOST_RETUNES * [RETUNE]) == "it is not tuned again, since it was 3 times in this launch"


def test_after_a_search_that_failed_there_is_no_other() -> None:
    failed = replace(RETUNE, winner=None, gain=None)
    assert refused(retunes=[failed]) == "it is not tuned again, since the last search failed"


def test_after_a_winner_that_could_not_be_launched_there_is_no_other_search() -> None:
    failed = replace(RETUNE, failure="rank 1 failed: a reason")
    assert refused(retunes=[failed]) == "it is not tuned again, since the launch of plan new failed"


def test_a_training_with_a_checkpoint_at_its_end_alone_is_refused() -> None:
    with pytest.raises(JobError, match=r"without training.checkpoint_every .* set training.checkpoint_every, for ex"):
        check_checkpoints(job(checkpoint_every=None))
    check_checkpoints(job(checkpoint_every=None, epochs=2))
    check_checkpoints(job())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"training_samples_per_second": 9.6, "tokens_per_sample": 500.0},
            "plan new instead of old, expected +25%; "
            "9.6 samples/s after it, 8.0 before for samples of as many tokens (+20%)",
        ),
        (
            {"winner": "old", "gain": 1.0, "training_samples_per_second": 12.8, "tokens_per_sample": 312.5},
            "plan old is still the fastest; 12.8 samples/s after it, 12.8 before for samples of as many tokens (+0%)",
        ),
        ({}, "plan new instead of old, expected +25%"),
        ({"gain": None}, "plan new instead of old"),
        ({"winner": "old", "gain": 1.0}, "plan old is still the fastest"),
        ({"winner": None, "gain": None}, "the search failed, and plan old was kept"),
        (
            {
                "failure": "rank 1 failed: a reason",
                "training_samples_per_second": 8.8,
                "tokens_per_sample": 500.0,
            },
            "the launch of plan new failed (rank 1 failed: a reason), and plan old was kept; "
            "8.8 samples/s after it, 8.0 before for samples of as many tokens (+10%)",
        ),
    ],
)
def test_a_search_in_between_is_told_with_what_it_gained(changes: dict[str, Any], text: str) -> None:
    assert replace(RETUNE, **changes).text == f"Tuned again after step 120, in 1 min 30 s: {text}"
