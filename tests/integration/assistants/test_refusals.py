"""What the server refuses an assistant, and how it says so."""

import shlex
from pathlib import Path

import pytest
import yaml

from tests.integration.assistants.conftest import Assistant, text_of


def test_a_run_that_is_not_allowed_is_refused_with_the_command_for_it(reader: Assistant) -> None:
    message = reader.refused("tune", job="my job.yaml", trials=3, fresh=True)
    assert "was started without --allow-runs" in message
    command = message.partition("`")[2].partition("`")[0]
    assert shlex.split(command) == ["autotune", "tune", "my job.yaml", "--trials=3", "--fresh"]
    assert "`predict` from a profile" in message
    assert "`autotune launch job.yaml --dry-run`" in reader.refused("launch", job="job.yaml", dry_run=True)


def test_a_dry_run_submits_nothing(runner: Assistant, job: Path) -> None:
    nodes = ["hardware.launcher=slurm", "hardware.nodes=1"]
    assert "--dry-run" in runner.refused("launch", job=str(job), set=nodes, dry_run=True, submit=True)


def test_trusting_code_is_set_only_where_runs_are_allowed(reader: Assistant, runner: Assistant, job: Path) -> None:
    for setting in ("model.trust_remote_code=true", 'model={path: x, "trust\\x5fremote_code": true}', "database=x"):
        for tool, argument in (("pack", "job"), ("plans", "like")):
            given = {argument: str(job), "set": ["training.epochs=2", setting]}
            assert reader.refused(tool, **given).startswith(f"set {setting.partition('=')[0]} ")
            assert "--allow-runs" not in text_of(runner.ask(tool, **given))


def test_a_job_that_trusts_code_trusts_that_of_its_own_folder_alone(
    reader: Assistant, runner: Assistant, job: Path
) -> None:
    document = yaml.safe_load(job.read_text())
    document["model"]["trust_remote_code"] = True
    trusting = job.with_name("trusting.yaml")
    trusting.write_text(yaml.safe_dump(document))
    for tool, argument in (("pack", "job"), ("plans", "like"), ("doctor", "job"), ("recommend", "model")):
        other: dict[str, object] = {argument: str(trusting), "set": ["model.path=/absent"]}
        if tool == "recommend":
            other["device"] = "h100"
        message = reader.refused(tool, **other)
        assert message.startswith("set model.path would run code of /absent")
        assert str(trusting) in message
        assert "--allow-runs" not in runner.refused(tool, **other)
        assert "--allow-runs" not in reader.refused(tool, **{**other, argument: str(job)})
    reader.answered("plans", like=str(trusting))


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("show", {"plan": "ffff"}, "ffff"),
        ("predict", {"job": "absent.yaml"}, "absent.yaml: no such file; give the path of a job file"),
        ("plans", {"top": 0}, "Invalid value for '--top': 0 is not in the range"),
        ("plans", {"here": "yes"}, 'here: must be true or false, not "yes"'),
        ("recommend", {"model": "m", "data": "train.jsonl"}, 'data: must be a list, not "train.jsonl"'),
        ("show", {"plan": "a\0b"}, "plan: holds a null character"),
        ("pack", {"job": "absent.yaml", "set": [5]}, "absent.yaml: no such file"),
        ("show", {}, "Missing argument 'PLAN'"),
        ("show", {"plan": "ffff", "out": "x"}, "show has no argument 'out'; it has plan"),
        ("run", {"job": "job.yaml"}, "there is no tool 'run'; there are recommend, doctor"),
    ],
)
def test_what_cannot_be_is_refused_with_the_message_of_the_command(
    reader: Assistant, runner: Assistant, tool: str, arguments: dict[str, object], message: str
) -> None:
    for assistant in (reader, runner):
        assert message in assistant.refused(tool, **arguments)
