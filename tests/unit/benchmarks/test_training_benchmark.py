"""The arithmetic of the benchmark of trainings, and that its Trainer learns from the same samples."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import training
from benchmarks.full_training import kills, rival
from benchmarks.full_training.following import (
    CommandFailed,
    Follower,
    Step,
    run,
    training_samples_per_second,
    wait_share,
)
from benchmarks.output.result import Check
from benchmarks.references import hf_trainer
from tests.values.training import prepared_of
from trials.data.loader import encode
from trials.model.inputs.encoders import load_encoder


def step(arrived: float, *, samples: int = 8, seconds: float = 1.0, waited: float = 0.0) -> Step:
    return Step(arrived=arrived, line={"samples": samples, "seconds": seconds, "data_wait_seconds": waited})


def held(checks: list[Check]) -> list[bool]:
    return [check.holds for check in checks]


def test_a_follower_reads_whole_lines_that_are_new(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text('{"step": 1}\n')
    follower = Follower(file)
    with file.open("a") as stream:
        stream.write('{"step": 2}\n{"step":')
        stream.flush()
        follower.look()
        stream.write(" 3}\n")
    assert [each.line["step"] for each in follower.steps] == [2]
    follower.look()
    assert [each.line["step"] for each in follower.steps] == [2, 3]


def test_a_follower_takes_the_repeated_steps_of_a_file_that_was_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    lines = [f'{{"step": {number}, "seconds": 0.{number}}}\n' for number in (1, 2, 3)]
    file.write_text("".join(lines))
    follower = Follower(file)
    follower.look()
    (tmp_path / "new").write_text(lines[0])
    (tmp_path / "new").replace(file)
    follower.look()
    with file.open("a") as stream:
        stream.write('{"step": 2, "seconds": 0.9}\n')
    follower.look()
    assert [each.line for each in follower.steps] == [{"step": 2, "seconds": 0.9}]


def test_a_commands_document_follows_the_lines_of_libraries_and_a_failure_has_its_log(tmp_path: Path) -> None:
    ended = run([sys.executable, "-c", """print('[WARNING] {no}\\n{\\n"id": "5b38"\\n}')"""], tmp_path)
    assert ended.document == {"id": "5b38"}
    with pytest.raises(CommandFailed, match="exit code 1:\nthe reason\n"):
        run([sys.executable, "-c", "import sys; sys.exit('the reason')"], tmp_path)


def test_speed_counts_from_the_last_dropped_step_on_the_benchmarks_clock() -> None:
    steps = [step(10.0, samples=100), step(12.0, samples=6), step(14.0, samples=10)]
    assert training_samples_per_second(steps, 1) == 4.0
    assert training_samples_per_second(steps, 2) == 5.0


def test_the_wait_share_is_of_the_time_and_not_of_the_steps() -> None:
    steps = [step(0.0, waited=1.0), step(0.0, seconds=3.0, waited=0.2), step(0.0, seconds=1.0, waited=0.2)]
    assert wait_share(steps, 1) == pytest.approx(0.1)


def test_a_promise_is_missed_in_either_direction_and_a_wait_by_the_worst_family() -> None:
    def row(ratio: float, wait_share: float) -> dict[str, float]:
        return {"measured_over_promised": ratio, "wait_share_ahead": wait_share, "steps": 200}

    rows = [row(1.04, 0.01), row(0.96, 0.02)]
    assert held(training.check_promises(rows)) == [True, True]
    for ratio in (0.94, 1.06):
        assert held(training.check_promises([*rows, row(ratio, 0.03)])) == [False, False]


def test_losses_are_compared_with_those_of_the_same_step_and_a_line_that_was_cut_off_does_not_count(
    tmp_path: Path,
) -> None:
    file = tmp_path / "progress.jsonl"
    file.write_text('{"step": 1, "loss": 4.0}\n{"step": 3, "loss": 2.002}\n{"step": 4, "lo')
    found = kills.losses(file)
    assert found == {1: 4.0, 3: 2.002}
    compared = kills.difference({1: 4.0, 2: 3.0, 3: 2.0}, found)
    assert compared == {"losses": 2, "equal": 1, "difference": pytest.approx(0.001)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True, True, True]),
        ({"difference": 1e-3}, [False, True, True]),
        ({"steps": 8}, [True, False, True]),
        ({"seconds_to_end": 15.1}, [True, True, False]),
    ],
    ids=["held", "another loss", "steps missing", "processes left"],
)
def test_kills_hold_the_bars_only_with_equal_losses_all_steps_and_no_process_left(
    change: dict[str, Any], expected: list[bool]
) -> None:
    kill = {"part": "kill", "difference": 0.0, "seconds_to_end": 3.0, **change}
    end = {"part": "end", "difference": 0.0, "steps": 9, **change}
    rows = [{"part": "undisturbed", "difference": 0.0, "steps": 9}, kill, end]
    assert held(training.check_kills(rows)) == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((1.0, 1.4), (1.1, 1.5), [True, True]),
        ((1.0, 1.4), (1.5, 1.9), [True, False]),
        ((1.5, 1.9), (1.0, 1.4), [True, False]),
    ],
    ids=["within the spread", "lower", "higher"],
)
def test_losses_may_differ_by_their_spread_over_the_seeds(
    ours: tuple[float, ...], theirs: tuple[float, ...], expected: list[bool]
) -> None:
    rows, losses = [], {}
    for kind, found, speed in (("autotune", ours, 19.0), ("trainer", theirs, 10.0)):
        for seed, loss in enumerate(found):
            rows.append({"kind": kind, "speed": speed + seed, "model": f"{kind}-{seed}"})
            losses[f"{kind}-{seed}"] = {"loss": loss, "targets": 5.0}
    summary = rival.summary(rows, losses)
    assert summary["gains"] == [1.9, 20 / 11]
    assert held(training.check_rival([summary])) == expected
    assert held(training.check_rival([{**summary, "gain": 1.79}])) == [False, expected[1]]


def test_the_trainer_gets_the_fastest_micro_batch() -> None:
    assert rival.best_batch({"1": 3.0, "2": 5.0, "4": 4.0, "8": 2.0}) == 2


def test_the_trainer_learns_from_the_same_tokens_targets_and_pixels(example: Path, tmp_path: Path) -> None:
    prepared = prepared_of(example, tmp_path)
    encoder = load_encoder(prepared.job.model, prepared.job.data)
    samples = hf_trainer.Samples(str(example / "model"), str(example / "data" / "train.jsonl"))
    assert len(samples) == len(prepared.index)
    for row in range(len(samples)):
        found, expected = samples[row], encode(prepared.index, row, encoder, pixels=True)
        assert found["input_ids"] == expected.input_ids.tolist()
        assert found["labels"] == expected.labels.tolist()
        if expected.pixel_values is None:
            assert found["pixel_values"] is None
        else:
            np.testing.assert_array_equal(found["pixel_values"].numpy(), expected.pixel_values)


def test_a_padded_batch_ignores_what_it_adds() -> None:
    long, short = ({"input_ids": [5] * n, "labels": [-100] + [5] * (n - 1), "pixel_values": None} for n in (3, 1))
    batch = hf_trainer.pad([long, short])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 5, 5], [5, 0, 0]],
        "labels": [[-100, 5, 5], [-100, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
