"""What is said about events, without a terminal."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from autotune.cli.display.board import Board
from autotune.events import Event, Gain, Phase, PhaseBegan, RanksStart, TrialBegan
from tests.values.display import BEST, EVALUATED, PLAN, SEARCH, SHORT, STEP, TRAINING, ended, running, status
from trials.data.reading import Reading


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def hear(board: Board, events: Iterable[Event]) -> list[str]:
    """Return the texts that last."""
    return [text for event in events if (text := board.hear(event))]


def test_until_a_phase_begins_the_name_of_the_command_stands_for_it(clock: Clock) -> None:
    board = Board("db check", clock)
    clock.now += 4
    assert board.rows() == [("db check", "4 s")]
    assert board.line() == "  db check, 4 s"


def test_the_ids_of_all_trials_last_with_their_causes_of_failure(clock: Clock) -> None:
    said = "\n".join(hear(Board("tune", clock), SEARCH))
    assert said.count(PLAN.id) == 1
    assert "trial 1  default              failed: out of memory on stage 1" in said
    assert "disturbed: other processes used 1.2 of 2 cores" in said


def test_a_running_trial_is_shown_with_its_plan_its_duration_and_what_is_left(clock: Clock) -> None:
    board = Board("tune", clock)
    hear(board, SEARCH[:8])
    clock.now += 20
    hear(board, [TrialBegan(trial=running(6)), status(7, 100.0)])
    clock.now += 5
    first, now = board.rows()
    assert first == ("search", f"25 s: 7 of at most 14 trials, trial 6 ({PLAN.id}) for 5 s, at most 1 min 35 s left")
    assert now[0] == "now"
    assert now[1].startswith(f"trial 6, sampled, {PLAN.id}: pipeline 2 x data 4, ZeRO 1; split 2v+1l | 0v+3l")
    clock.now += 96
    assert board.line().endswith(f"trial 6 ({PLAN.id}) for 1 min 41 s, the time is used up")
    hear(board, [PhaseBegan(phase=Phase.REPEATS, text="Repeating the finalists in turns")])
    assert board.line().endswith("the time is used up, but every plan that may win is repeated once")
    hear(board, [TrialBegan(trial=running(7, role="final")), status(7, -5.0)])
    assert board.line().endswith("the time is used up, but the longer run of the winner is completed")


def test_held_out_samples_that_could_not_be_read_are_told(clock: Clock) -> None:
    begun = PhaseBegan(phase=Phase.TRAINING, text="Training")
    said = hear(Board("launch", clock), [begun, replace(EVALUATED, samples=6, blank_samples=2)])
    assert said[-1].endswith("  6 samples in 4.0 s, 2 could not be read")


def test_a_baseline_that_is_faster_so_far_is_named_with_its_own_ratio(clock: Clock) -> None:
    board, slower = Board("tune", clock), replace(BEST, gains=(Gain(role="packed", gain=0.8, error=0.1),))
    hear(board, [*SEARCH[:10], status(1, best=slower)])
    (best,) = (text for name, text in board.rows() if name == "best")
    assert best.endswith(": but packed is 1.25 times as fast")


def test_the_best_plan_is_compared_with_each_baseline_and_outcomes_are_counted(clock: Clock) -> None:
    board = Board("tune", clock)
    hear(board, SEARCH)
    phase, now, best, so_far = board.rows()
    assert phase == ("repeats", f"0 s: trial 3 ({PLAN.id}) for 0 s, at most 1 min 00 s left")
    assert now[1].startswith(f"trial 3, confirm, {PLAN.id}")
    compared = "2.29 +- 0.03 times as fast as default, it is omnibal"
    assert best == ("best", f"{PLAN.id}, epoch 126.6 +- 1.5 s: {compared}")
    assert so_far == (
        "so far",
        f"2 completed, 1 failed; 1 disturbed by other load; last failure: {SHORT.cause}",
    )


def test_a_search_without_a_running_trial_chooses_and_repeats_wait(clock: Clock) -> None:
    board = Board("tune", clock)
    hear(board, SEARCH[7:8])
    assert board.line() == "  search, 0 s: solving for the plans to try first"
    hear(board, SEARCH[8:-3])
    assert board.line() == "  search, 0 s: 3 of at most 14 trials, choosing the next plan, at most 1 min 10 s left"
    hear(board, SEARCH[-3:-2])
    assert board.line() == "  repeats, 0 s: at most 1 min 10 s left"


def test_a_best_plan_without_a_baseline_claims_no_gain(clock: Clock) -> None:
    board = Board("tune", clock)
    hear(board, [*SEARCH[:8], status(1, 9.0, replace(BEST, gains=()))])
    assert board.rows()[1][1].endswith("no baseline has completed yet")


def test_results_of_others_are_not_counted_as_outcomes_of_this_search(clock: Clock) -> None:
    board = Board("tune", clock)
    (said,) = hear(board, [*SEARCH[7:8], replace(ended(running(0)), is_known=True)])[1:]
    assert said.startswith("    known  sampled")
    assert len(board.rows()) == 1


def test_starting_ranks_are_named_until_they_have_begun(clock: Clock) -> None:
    board = Board("profile", clock)
    hear(board, SEARCH[4:6])
    assert board.line() == "  profile, 0 s: starting the ranks"
    board.hear(RanksStart(group=1, is_ready=False))
    board.hear(RanksStart(is_ready=True))
    assert board.line() == "  profile, 0 s: starting the ranks"
    board.hear(RanksStart(group=1, is_ready=True))
    assert board.line() == "  profile, 0 s"


def test_reading_shows_records_speed_and_share(clock: Clock) -> None:
    board = Board("pack", clock)
    hear(board, SEARCH[1:2])
    clock.now += 10
    board.hear(Reading(records=1000, share=None))
    assert (board.line(), board.share) == ("  lengths, 10 s: 1,000 records, 100/s", None)
    clock.now += 10
    board.hear(Reading(records=23000, share=0.5))
    assert (board.line(), board.share) == ("  lengths, 20 s: 23,000 records, 2,200/s, 50%", 0.5)


def test_the_speed_of_reading_is_that_of_measuring_and_of_the_present_sources(clock: Clock) -> None:
    board = Board("tune", clock)
    hear(board, SEARCH[1:2])
    board.hear(Reading(records=1_000_000, share=None))
    board.hear(Reading(records=1_000_000, share=0.2))
    assert board.line() == "  lengths, 0 s: 1,000,000 records, 20%"
    clock.now += 100
    board.hear(Reading(records=1_000_500, share=0.99))
    assert board.line() == "  lengths, 1 min 40 s: 1,000,500 records, 5/s, 99%"
    clock.now += 100
    board.hear(Reading(records=1_000_600, share=1.0))
    assert (board.line(), board.share) == ("  lengths, 3 min 20 s: 1,000,600 records read", 1.0)
    clock.now += 2
    board.hear(Reading(records=10, share=None))
    assert board.line() == "  lengths, 3 min 22 s: 10 records, 5/s"


def test_a_training_shows_its_speed_waits_and_time_left(clock: Clock) -> None:
    board = Board("launch", clock)
    said = hear(board, TRAINING)
    assert [line.split()[1] for line in said[1:-1]] == [
        "1/120",
        "10/120",
        "20/120",
        "30/120",
        "40/120",
        "50/120",
        "60/120",
    ]
    assert said[-1] == "  step 60/120  evaluation loss 3.500  8 samples in 4.0 s"
    assert board.rows() == [
        ("training", "0 s: step 60 of 120, loss 5.650, 8.0 samples/s; about 2 min 00 s left"),
        ("data", "waited for in 25.0% of the time"),
        ("held out", "loss 3.500 after step 60, best 3.500 after step 60"),
    ]
    assert board.share == 0.5


def test_evaluations_and_checkpoints_count_for_the_time_left(clock: Clock) -> None:
    board = Board("launch", clock)
    hear(board, TRAINING[:1])
    for number in range(1, 31):
        clock.now += 5  # the step itself takes 2 s
        board.hear(replace(STEP, step=number))
    assert board.line().endswith("step 30 of 120, loss 6.250, 8.0 samples/s; about 7 min 30 s left")
    clock.now += 4
    board.hear(replace(EVALUATED, step=30))
    assert board.line().endswith("about 7 min 30 s left")


def test_the_first_step_counts_neither_for_speed_nor_for_waits(clock: Clock) -> None:
    board = Board("launch", clock)
    hear(board, [*TRAINING[:1], replace(STEP, seconds=60.0)])
    assert board.line() == "  training, 0 s: step 1 of 120, loss 6.250"
    board.hear(replace(STEP, step=2))
    assert "8.0 samples/s" in board.line()


def test_a_late_step_is_noticed_and_the_end_is_that_of_this_launch(clock: Clock) -> None:
    board = Board("launch", clock)
    hear(board, [PhaseBegan(phase=Phase.TRAINING, text="Training", last_step=4)])
    assert "no step yet" in board.line()
    hear(board, [replace(STEP, step=number) for number in (1, 2, 3)])
    clock.now += 5
    assert board.line().endswith("step 3 of 4, loss 6.250, 8.0 samples/s; about 2 s left")
    clock.now += 2
    assert board.line().endswith("about 2 s left; no step for 7 s")
    board.hear(replace(STEP, step=4))
    assert board.line().endswith("step 4 of 4, loss 6.250, 8.0 samples/s; writing the results")


def test_the_best_evaluation_may_be_one_before_this_launch(clock: Clock) -> None:
    board, best = Board("launch", clock), replace(EVALUATED, step=20, evaluation_loss=1.5)
    hear(board, [PhaseBegan(phase=Phase.TRAINING, text="Training", best_evaluation=best)])
    assert "held out" not in dict(board.rows())
    hear(board, [STEP, EVALUATED])
    assert board.rows()[-1] == ("held out", "loss 3.500 after step 60, best 1.500 after step 20")


def test_the_best_evaluation_is_kept(clock: Clock) -> None:
    board = Board("launch", clock)
    hear(board, [*TRAINING, replace(EVALUATED, step=80, evaluation_loss=4.5)])
    assert board.rows()[-1] == ("held out", "loss 4.500 after step 80, best 3.500 after step 60")
