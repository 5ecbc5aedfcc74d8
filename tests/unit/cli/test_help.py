"""The help of the program."""

import re
from itertools import chain

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
