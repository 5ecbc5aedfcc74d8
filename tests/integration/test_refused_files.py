"""Names that are too long, places that are taken or cannot be written: one message, its exit code, nothing lost."""

import errno
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cli import os_errors
from autotune.folders import work_folder
from autotune.job_file import load_job
from autotune.workload import look_at, read_data
from storage.store import open_store
from tests.programs.users import JobFile, refusal
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of
from trials.tasks.request import Training
from trials.tasks.training.output import open_output
from trials.tasks.training.settings import training_settings

LONG = "x" * 300


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (f"tune {LONG}.yaml", 2),
        pytest.param(f"pack {LONG}", 2, marks=pytest.mark.long),
        pytest.param(f"doctor {LONG}", 2, marks=pytest.mark.long),
        (f"plans --like {LONG}", 2),
        pytest.param(f"db import {LONG}", 2, marks=pytest.mark.long),
        (f"show {LONG}", 2),
        pytest.param(f"studies {LONG}", 2, marks=pytest.mark.long),
        pytest.param(f"db export --study {LONG}", 2, marks=pytest.mark.long),
        (f"db export --hardware x --out {LONG}.jsonl", 2),
        (f"launch JOB --plan {LONG}", 2),
        (f"predict JOB --plan {LONG}", 2),
        pytest.param(f"predict JOB --plan {LONG}.yaml", 2, marks=pytest.mark.long),
        pytest.param(f"predict JOB --device-profile {LONG}", 2, marks=pytest.mark.long),
        (f"predict JOB --device-profile {LONG}.json", 2),
        pytest.param(f"predict JOB --plot {LONG}.png", 2, marks=pytest.mark.long),
        (f"pack JOB --out {LONG}.jsonl", 2),
        (f"profile JOB --out {LONG}.json", 2),
        (f"plans --db sqlite:///{LONG}", 4),
        (f"db repair --db sqlite:///{LONG}", 4),
        (f"plans --db sqlite:///{LONG[:250]}", 4),
    ],
)
def test_a_name_that_is_too_long_is_reported(
    job: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(job.path) if argument == "JOB" else argument for argument in arguments.split()]
    assert refusal(*given)[0] == code


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("changes", "code", "expected"),
    [
        ({"model__path": LONG}, 2, "File name too long"),
        ({"data__sources": [{"path": LONG}]}, 1, "File name too long"),
        ({"training__output": LONG}, 2, "training.output"),
        ({"search__current_plan": LONG}, 2, "search.current_plan"),
        pytest.param({"search__current_plan": "a\0b"}, 2, "holds a null character", marks=pytest.mark.long),
        pytest.param({"search__queue": [LONG]}, 2, "search.queue[0]", marks=pytest.mark.long),
        pytest.param({"search__sampler": LONG}, 2, "search.sampler", marks=pytest.mark.long),
        pytest.param({"search__sampler": f"hub:mine@{LONG}"}, 2, "File name too long", marks=pytest.mark.long),
        ({"search__space": {"packers": [LONG]}}, 2, "search.space.packers"),
        ({"database": f"sqlite:///{LONG}"}, 4, "File name too long"),
        pytest.param(
            {"search__space": {"split": [12, 8], "recompute": [[1]]}},
            2,
            "recompute[0][1]: missing",
            marks=pytest.mark.long,
        ),
        ({"search__space": {"split": [12, 8], "recompute": [[1, 1]]}}, 2, "counts for 1 stage but split has 2"),
    ],
)
def test_a_job_with_an_impossible_name_or_shape_is_refused(
    job: JobFile, changes: dict[str, object], code: int, expected: str
) -> None:
    found, message = refusal("launch" if "training__output" in changes else "tune", job.spoil(**changes))
    assert (found, expected in message) == (code, True), message


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("command", "place", "code", "expected"),
    [
        ("tune", "ranks", 1, "a part of the path is a file"),
        pytest.param("profile", "ranks", 1, "a part of the path is a file", marks=pytest.mark.long),
        ("tune", "spool", 4, "cannot keep results in"),
        pytest.param("tune", "", 1, "cannot write", marks=pytest.mark.long),
    ],
)
def test_a_file_in_the_place_of_a_work_folder_is_reported(
    job: JobFile, command: str, place: str, code: int, expected: str
) -> None:
    path = work_folder(None) / place
    path.parent.mkdir(parents=True)
    path.touch()
    found, message = refusal(command, job.path)
    assert (found, expected in message, str(path) in message) == (code, True, True), message


@pytest.mark.long
@pytest.mark.usefixtures("home")
def test_a_limit_on_the_size_of_files_is_reported(job: JobFile) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    answer = subprocess.run(
        [sys.executable, "-m", "autotune", "pack", job.path, "--out", job.path.parent / "packs.jsonl"],
        capture_output=True,
        text=True,
        preexec_fn=limited,  # nothing else runs in this process's threads meanwhile
        check=False,
    )
    assert answer.returncode == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    assert "Error: File too large" in answer.stderr


def test_a_refusal_names_the_place_and_the_remedy() -> None:
    for code in (errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EMFILE):
        error = OSError(code, os.strerror(code), "/some/place")
        assert os_errors.message(error).startswith(f"{os.strerror(code)} (/some/place); ")
        assert os_errors.exit_code(error) == 1
    assert os_errors.exit_code(OSError(errno.ENAMETOOLONG, "File name too long", LONG)) == 2


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("command", ["launch", pytest.param("run", marks=pytest.mark.long)])
def test_no_plan_is_offered_for_a_training_that_has_other_fixed_settings(
    command: str, job: JobFile, tmp_path: Path
) -> None:
    read = load_job(job.path)
    prepared, plan = read_data(read, look_at(read), tmp_path), plan_of("12+4", "0+4")
    here = prepared.workload
    with open_store() as store:
        other = replace(here, memory_limit_bytes=2 * here.memory_limit_bytes)
        study = store.create_study(store.add_workload(other), {}, seed=0)
        concluded(store, best_of(study.id, workload=other, plan=plan))
    settings = training_settings(prepared.request(plan, Training(output=job.output)), prepared.index)
    open_output(job.output, replace(settings, data="0" * 16, learning_rate=0.5), plan)
    code, reported = refusal(command, job.path)
    assert code == 2
    assert reported == (
        f"training.output {job.output} belongs to a training with data {'0' * 16}, not {settings.data} "
        "(digests of the lengths, repeats and files of its samples); name another folder, or go back to those files "
        "and settings"
    )
