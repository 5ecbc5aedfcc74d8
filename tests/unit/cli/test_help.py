"""The help of the program."""

import re
from itertools import chain

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.cli.parameters import WorkflowGroup


def test_every_command_stands_in_one_section_of_the_help_with_its_first_sentence() -> None:
    sections = [*chain.from_iterable(WorkflowGroup.sections.values())]
    assert sorted(sections) == sorted(main.commands)
    shown = re.sub(r"\s+", " ", CliRunner().invoke(main, ["--help"]).stdout)
    for name, command in main.commands.items():
        description = re.sub(r"\s+", " ", command.help or "").partition(". ")[0]
        assert f" {name} {description}" in shown
    assert "..." not in shown.partition("Start:")[2]


def test_a_recommendation_without_a_device_names_those_with_data_sheets() -> None:
    shown = CliRunner().invoke(main, ["recommend", "model", "data.jsonl"]).stderr
    assert "Missing option '--device'. One of a10, a100-40gb, " in re.sub(r"\s+", " ", shown)


@pytest.mark.parametrize("model", ["OpenGVLab/InternVL3-2B", "."])
def test_a_recommendation_for_a_model_without_data_says_what_is_missing(model: str) -> None:
    shown = CliRunner().invoke(main, ["recommend", model, "--device", "h100"])
    assert shown.exit_code == 2
    assert f"{model} is not a job file; name one, or the annotation files after the model" in shown.stderr


def test_a_number_that_is_none_is_named_in_plain_words() -> None:
    shown = CliRunner().invoke(main, ["recommend", "model", "data.jsonl", "--device", "h100", "--devices", "1-8"])
    assert shown.exit_code == 2
    assert "Invalid value for '--devices': '1-8' is not a valid integer." in shown.stderr
