"""The report as an artifact of Optuna's study, which a real dashboard lists and serves."""

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import optuna
import pytest
from click.testing import CliRunner

from autotune.cli import main
from tests.programs.browser import CHROMIUM
from tests.programs.dashboards import ask, dashboard, rendered
from tests.programs.users import refusal


@pytest.fixture
def url(study_url: str, tmp_path: Path) -> str:
    """URL of a copy of the database with one finished study."""
    shutil.copyfile(study_url.removeprefix("sqlite:///"), tmp_path / "own.db")
    return f"sqlite:///{tmp_path}/own.db"


def given(url: str, *arguments: object) -> dict[str, Any]:
    """Return the document that a command prints."""
    answer = CliRunner().invoke(main, [*map(str, arguments), "--db", url, "--json"])
    assert answer.exit_code == 0, answer.output
    document: dict[str, Any] = json.loads(answer.stdout)
    return document


@pytest.mark.parametrize("renders", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_dashboard_lists_and_serves_the_newest_report_of_a_study(url: str, renders: bool, tmp_path: Path) -> None:
    file, folder = tmp_path / "report.html", tmp_path / "new" / "artifacts"
    command = ("report", "--out", file, "--artifacts", folder)
    first = given(url, *command)
    before = file.read_bytes()
    given(url, "note", first["id"], "measured after the move")
    assert given(url, *command)["artifact"] == first["artifact"]
    assert file.read_bytes() != before
    other = given(url, "report", "--out", tmp_path / "other.html", "--artifacts", folder)["artifact"]
    with dashboard(url, "--artifact-dir", str(folder)) as address:
        number = {each["study_name"]: each["study_id"] for each in ask(f"{address}/api/studies")["study_summaries"]}[
            first["study"]
        ]
        listed = {each["artifact_id"]: each for each in ask(f"{address}/api/studies/{number}?after=0")["artifacts"]}
        assert {key: each["filename"] for key, each in listed.items()} == {
            first["artifact"]: "report.html",
            other: "other.html",
        }
        with urlopen(f"{address}/artifacts/{number}/{first['artifact']}", timeout=30) as served:
            assert served.headers["Content-Type"] == "text/html"
            assert served.read() == file.read_bytes()
        if renders and CHROMIUM:
            page = rendered(f"{address}/dashboard/studies/{number}", tmp_path / "chromium")
            assert ("report.html" in page, "Study Artifacts" in page) == (True, True)
        urlopen(Request(f"{address}/api/artifacts/{number}/{first['artifact']}", method="DELETE"), timeout=30).close()
    assert {path.name for path in folder.iterdir()} == {other}
    assert given(url, *command)["artifact"] not in (first["artifact"], other)


def test_a_study_that_optuna_lacks_is_named_once_its_report_is_written(url: str, tmp_path: Path) -> None:
    (name,) = optuna.get_all_study_names(url)
    optuna.delete_study(study_name=name, storage=url)
    out = tmp_path / "report.html"
    code, message = refusal("report", "--db", url, "--out", out, "--artifacts", tmp_path / "artifacts")
    assert (code, out.exists()) == (2, True)
    assert f"Optuna has no study {name}, because it was imported, ended before its first trial" in message
