"""Reports of studies that lack much or hold nonsense, and files that cannot be written."""

import json
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser

from autotune.cli import main
from storage.store import Store, open_store
from tests.programs.browser import LAPTOP, PHONE, opened
from tests.programs.users import refusal
from tests.values import storage as storage_values
from tests.values.parameters import parameters
from tests.values.storage import OUTCOMES, WORKLOAD, packed_plan, result_of
from trials.outcome import Crash, Failed, Rejected

ASSETS = Path(__file__).parents[2] / "assets" / "databases"
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>{{7*7}}\x1b[31m\u202e\u2028\x00"
VISIBLE = (
    "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>{{7*7}}\\x1b[31m\\u202e\\u2028\\x00"
)


def report(url: str, path: Path, *arguments: str) -> tuple[dict[str, Any], str, str]:
    """Return (the document that the command prints, its stderr, the page)."""
    answer = CliRunner().invoke(main, ["report", *arguments, "--db", url, "--out", str(path), "--json"])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout), answer.stderr, path.read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """Return the page without its script."""
    return page.partition('<script type="module">')[0]


# --- studies that lack something ---


def nothing(store: Store, study: str) -> None:
    """Leave the study without a trial."""


def running(store: Store, study: str) -> None:
    store.start_trial(study, packed_plan(), "default")
    store.abandon_trial(store.start_trial(study, packed_plan(3), "sampled").id)


def failures(store: Store, study: str) -> None:
    for name in ("rejected", "out of memory", "crash", "timeout"):
        store.finish_trial(result_of(store.start_trial(study, packed_plan(), name).id, OUTCOMES[name]))


def one_run(store: Store, study: str) -> None:
    store.finish_trial(result_of(store.start_trial(study, packed_plan(), "default").id))


LACKING: dict[str, tuple[Callable[[Store, str], None], str]] = {
    "no trial": (nothing, "there is no result yet"),
    "running": (running, "there is no result yet"),
    "failures": (failures, "there is no result yet"),
    "one run": (one_run, "This search has no winner yet; 1 trial measured so far."),
}


@pytest.mark.parametrize("kind", parameters({name: name for name in LACKING}, short=("no trial", "one run")))
def test_a_study_that_lacks_results_has_a_report_that_says_so(kind: str, browser: Browser, tmp_path: Path) -> None:
    fill, said = LACKING[kind]
    url, path = f"sqlite:///{tmp_path}/study.db", tmp_path / "report.html"
    with open_store(url) as store:
        fill(store, storage_values.new_study(store))
    found, _, page = report(url, path)
    assert said in page
    assert any("No profile of the layers is stored" in each for each in found["not_shown"])
    with opened(browser, path, **PHONE) as shown:
        assert shown.said == []
        assert shown.value("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg'))")
        assert shown.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_without_a_study_there_is_nothing_to_report(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path}/study.db").close()
    code, message = refusal("report", "--db", f"sqlite:///{tmp_path}/study.db", "--out", tmp_path / "report.html")
    assert (code, message) == (2, "no study is stored, so there is nothing to report; run `autotune tune JOB` first")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("version", sorted(path.stem for path in ASSETS.glob("*.db")))
def test_studies_of_older_versions_have_reports(version: str, tmp_path: Path) -> None:
    shutil.copy(ASSETS / f"{version}.db", tmp_path / "old.db")
    found, _, page = report(f"sqlite:///{tmp_path}/old.db", tmp_path / "report.html")
    assert found["study"] in page


# --- rows that cannot be read ---

BROKEN = {
    "a trial": "UPDATE autotune_outcome SET document = '{' WHERE rowid = (SELECT min(rowid) FROM autotune_outcome)",
    "all trials": "UPDATE autotune_outcome SET document = '{}'",
    "the winner": "UPDATE autotune_best_plan SET estimated_samples_per_second = -1",
    "the profile": "UPDATE autotune_layer_profile SET document = '[]'",
    "the corrections": "UPDATE autotune_study SET calibration_state = '{\"time_mean\": [1]}'",
    "wrong corrections": (
        "UPDATE autotune_study SET calibration_state = "
        '\'{"time_mean": [], "time_covariance": [], "byte_mean": [], "byte_covariance": []}\''
    ),
    "the settings": "UPDATE autotune_study SET settings = '\"x\"'",
    "the lengths": "UPDATE autotune_data_profile SET histogram = '[]'",
}


@pytest.mark.parametrize(
    "kind",
    parameters({name: name for name in BROKEN}, short=("all trials", "the profile")),
)
def test_what_cannot_be_read_is_left_out(kind: str, study_url: str, tmp_path: Path) -> None:
    broken = tmp_path / "study.db"
    shutil.copy(study_url.removeprefix("sqlite:///"), broken)
    with sqlite3.connect(broken) as connection:
        assert connection.execute(BROKEN[kind]).rowcount > 0
    found, _, page = report(f"sqlite:///{broken}", tmp_path / "report.html")
    assert found["study"] in page
    assert len(re.findall("<figure>", page)) >= (1 if kind == "all trials" else 8)


@pytest.mark.parametrize(
    "damage",
    [
        "autotune_data_profile SET histogram = 'x'",
        pytest.param("autotune_model SET token_flops = '[]'", marks=pytest.mark.long),
    ],
)
def test_a_workload_that_cannot_be_read_is_refused(damage: str, study_url: str, tmp_path: Path) -> None:
    broken = tmp_path / "study.db"
    shutil.copy(study_url.removeprefix("sqlite:///"), broken)
    with sqlite3.connect(broken) as connection:
        connection.execute(f"UPDATE {damage}")
    code, message = refusal("report", "--db", f"sqlite:///{broken}", "--out", tmp_path / "report.html")
    assert code == 4
    assert "repair" in message
    assert list(tmp_path.glob("*.html")) == []


# --- hostile text ---


def test_names_with_html_and_escapes_are_text_everywhere(browser: Browser, tmp_path: Path) -> None:
    name = HOSTILE.replace("\x00", "")
    model, hardware = replace(WORKLOAD.model, name=name), replace(WORKLOAD.hardware, device_name=name)
    url, path = f"sqlite:///{tmp_path}/study.db", tmp_path / "report.html"
    with open_store(url) as store:
        study = storage_values.new_study(store, replace(WORKLOAD, model=model, hardware=hardware))
        store.finish_trial(result_of(store.start_trial(study, packed_plan(), name, {name: name}).id))
        for outcome in (Rejected(reason=name), Failed(cause=Crash(rank=0, detail=HOSTILE))):
            store.finish_trial(result_of(store.start_trial(study, packed_plan(3), name).id, outcome))
    _, errors, page = report(url, path)
    assert not set(page) & set("\x1b\u202e\u2028\x00")
    assert not set(errors) & set("\x1b\u202e\u2028")
    shown = VISIBLE.replace("\\x00", "")
    with opened(browser, path, **LAPTOP) as found:
        assert found.said == []
        assert found.asked == [path.as_uri()]
        assert found.value("window.pwned") is None
        assert (
            found.value(
                "document.querySelectorAll('img').length + document.querySelectorAll('main script:not([type])').length"
            )
            == 0
        )
        assert shown in found.page.locator("h1").inner_text()
        assert VISIBLE in (found.page.locator("#chart-failures").locator("xpath=../..").text_content() or "")
        found.page.locator("#chart-history .mark-symbol path").first.hover()
        found.page.wait_for_selector("#vg-tooltip-element.visible")
        assert shown in found.page.locator("#vg-tooltip-element").inner_text()
        assert found.value("window.pwned") is None


# --- files that cannot be written ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing/report.html", "cannot be written (No such file or directory); name another file"),
        ("report.pdf", "a file of this kind cannot be written; give a name that ends in .html"),
        ("folder.html", "cannot be written (it is a folder); name a file in it"),
        (
            "notes.html",
            "exists and is not an earlier output of this kind, so it is not overwritten; remove it, or name another "
            "file",
        ),
        ("pipe.html", "cannot be written (it is a named pipe, not a regular file); name another file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_at_once(name: str, said: str, study_url: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "notes.html").write_text("<p>mine")
    os.mkfifo(tmp_path / "pipe.html")
    code, message = refusal("report", "--db", study_url, "--out", tmp_path / name)
    assert (code, message) == (2, f"{tmp_path / name}{':' if 'a file of this kind' in said else ''} {said}")
    assert (tmp_path / "notes.html").read_text() == "<p>mine"


def test_an_older_report_is_replaced(study_url: str, tmp_path: Path) -> None:
    first = report(study_url, tmp_path / "report.html")
    second = report(study_url, tmp_path / "report.html", first[0]["id"])
    assert second[0] == first[0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def run(url: str, folder: Path, redirect: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a shell, in the folder."""
    command = ["bash", "-c", f'"$@" {redirect}', "bash", sys.executable, "-m", "autotune", "report", "--db", url]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False, env={**os.environ, **environment}
    )


@pytest.mark.long
def test_a_full_disk_leaves_no_part_of_a_report(study_url: str, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    command = [sys.executable, "-m", "autotune", "report", "--db", study_url, "--out", str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 2
    assert done.stderr.endswith("report.html cannot be written (File too large); name another file\n")
    assert list(tmp_path.iterdir()) == []


def test_a_locale_without_utf_8_and_a_closed_pipe_leave_a_whole_report(study_url: str, tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = run(study_url, tmp_path, "| true; exit ${PIPESTATUS[0]}", **plain)
    assert "Traceback" not in done.stderr
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"report-[0-9a-f]{8}\.html", path.name)
    page = path.read_text(encoding="utf-8")
    assert "\u00b1" in page
    assert page.endswith("</script>\n</body>\n</html>")


def test_the_libraries_of_the_extra_are_named_when_they_are_missing(
    study_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, message = refusal("report", "--db", study_url, "--out", tmp_path / "report.html")
    assert (code, message) == (2, "a report needs vl-convert-python; pip install vl-convert-python")
