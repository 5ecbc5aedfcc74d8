"""The report of a stored study, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser

from autotune.cli import main
from tests.programs.browser import CHROMIUM, NEEDED, chromium


@pytest.fixture(scope="package")
def report(study_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of that study."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    answer = CliRunner().invoke(main, ["report", "--db", study_url, "--out", str(path)])
    assert answer.exit_code == 0, answer.output
    return path


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NEEDED)
    with chromium() as browser:
        yield browser
