"""Looking things up costs no training libraries, whatever the database holds."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from autotune.machine.devices import locked
from storage.store import open_store
from tests.values.storage import best_of, changed, concluded, packed_plan, result_of

HEAVY = {"torch", "transformers", "deepspeed", "datasets", "optuna", "scipy", "numpy", "vl_convert", "alembic"}
CORES = len(os.sched_getaffinity(0))
SCRIPT = """
import pathlib, sys
from autotune.cli import main
try:
    main(sys.argv[2:], prog_name="autotune")
finally:
    pathlib.Path(sys.argv[1]).write_text(" ".join(sys.modules))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Environment of a user with three studies and their winners, and without an accelerator."""
    folder = tmp_path_factory.mktemp("a user")
    url = f"sqlite:///{folder}/known.db"
    with open_store(url) as store:
        for number in range(3):
            work = changed("hardware.devices", CORES + 1, changed("global_batch_samples", 32 + number))
            study = store.create_study(store.add_workload(work), {}, 0)
            plan = packed_plan(1 + number)
            store.finish_trial(result_of(store.start_trial(study.id, plan, "sampled").id))
            concluded(store, best_of(study.id, workload=work, plan=plan))
    home = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **home, "AUTOTUNE_DB_URL": url}


def modules_of(
    environment: Mapping[str, str], folder: Path, *arguments: str, exit_code: int = 0
) -> tuple[set[str], str]:
    """(what the command imported, what it wrote to stderr)"""
    command = [sys.executable, "-c", SCRIPT, str(folder / "modules"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stderr
    assert done.stdout or exit_code
    return {name.partition(".")[0] for name in (folder / "modules").read_text().split()}, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("plans", marks=pytest.mark.long),
        pytest.param("plans --here", marks=pytest.mark.long),
        pytest.param("plans --verdict re-measure --json", marks=pytest.mark.long),
        pytest.param(f"show {packed_plan(1).id}", marks=pytest.mark.long),
        pytest.param(f"compare {packed_plan(1).id} {packed_plan(2).id}", marks=pytest.mark.long),
        pytest.param("studies", marks=pytest.mark.long),
        pytest.param("studies STUDY", marks=pytest.mark.long),
        pytest.param("db check", marks=pytest.mark.long),
        pytest.param("db upgrade", marks=pytest.mark.long),
        "db export --study STUDY",
        "doctor",
    ],
)
def test_a_look_up_imports_neither_a_training_library_nor_the_models_of_a_job(
    arguments: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    with open_store(environment["AUTOTUNE_DB_URL"]) as store:
        study = store.studies()[0].id
    imported, _ = modules_of(environment, tmp_path, *arguments.replace("STUDY", study).split())
    assert not imported & HEAVY
    assert "trials.job" not in (tmp_path / "modules").read_text().split()


@pytest.mark.parametrize(
    "command",
    ["tune", *(pytest.param(each, marks=pytest.mark.long) for each in ("launch", "run", "profile", "predict"))],
)
def test_a_mistake_in_a_job_is_named_before_torch_is_imported(
    command: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: {path: m}\ndata: {sources: [{path: d}]}\ntraning: {}\n")
    imported, written = modules_of(environment, tmp_path, command, str(job), exit_code=2)
    assert "traning: unknown key; did you mean training?" in written
    assert not imported & (HEAVY | {"sqlalchemy"})


def test_devices_in_use_are_refused_before_torch_is_imported(
    environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: {path: m}\ndata: {sources: [{path: d}]}\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with locked(("cpu",)):
        state = {**environment, "XDG_STATE_HOME": str(tmp_path)}
        imported, written = modules_of(state, tmp_path, "tune", str(job), exit_code=6)
    assert "another autotune process uses the devices of this machine" in written
    assert not imported & {"torch", "transformers", "deepspeed", "optuna"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("model.path=./gone", "gone does not exist; give a local folder or a hub id"),
        ("data.sources[0].path=gone.jsonl", "gone.jsonl does not exist; correct its path"),
        ("evaluation.sources=[{path: gone.jsonl}]", "gone.jsonl does not exist; correct its path"),
    ],
    ids=["model", "data", "evaluation"],
)
def test_a_model_and_data_that_are_not_there_are_named_before_torch_is_imported(
    changes: str, message: str, environment: Mapping[str, str], example: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    source = example / "data" / "train.jsonl"
    job.write_text(f"model: {{path: {example / 'model'}}}\ndata: {{sources: [{{path: {source}}}]}}\n")
    imported, written = modules_of(environment, tmp_path, "profile", str(job), "--set", changes, exit_code=1)
    assert message in written
    assert not imported & {"torch", "transformers", "deepspeed", "optuna"}


def test_a_report_imports_no_training_library(environment: Mapping[str, str], tmp_path: Path) -> None:
    imported, _ = modules_of(environment, tmp_path, "report", "--out", str(tmp_path / "report.html"))
    assert not imported & {"torch", "transformers", "deepspeed", "datasets", "alembic"}


def test_a_report_among_optuna_s_artifacts_imports_no_training_library(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    asked = ("report", "--out", str(tmp_path / "report.html"), "--artifacts", str(tmp_path / "artifacts"))
    imported, written = modules_of(environment, tmp_path, *asked, exit_code=2)
    assert "Optuna has no study" in written
    assert "optuna" in imported
    assert not imported & {"torch", "transformers", "deepspeed", "datasets"}


@pytest.mark.parametrize(
    "arguments",
    [
        "studies",
        pytest.param("studies --model tiny", marks=pytest.mark.long),
        pytest.param("db check", marks=pytest.mark.long),
        pytest.param("db upgrade", marks=pytest.mark.long),
    ],
)
def test_a_look_up_that_describes_no_machine_does_not_import_the_drivers_library(
    arguments: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    imported, _ = modules_of(environment, tmp_path, *arguments.split())
    assert "pynvml" not in imported


def test_the_interpreter_collects_no_garbage_when_it_exits(environment: Mapping[str, str]) -> None:
    # Functions that are registered first run last.
    code = "import atexit, gc; atexit.register(lambda: print(len(gc.get_objects()))); "
    code += "from autotune.cli import main; main(['studies'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 1000


def test_completion_imports_neither_a_training_library_nor_the_database(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    asked = {"_AUTOTUNE_COMPLETE": "bash_complete", "COMP_WORDS": "autotune pl", "COMP_CWORD": "1"}
    imported, _ = modules_of({**environment, **asked}, tmp_path)
    assert not imported & (HEAVY | {"sqlalchemy", "pydantic"})


def test_stored_plans_of_more_ranks_than_cores_are_listed_without_a_warning(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    imported, errors = modules_of(environment, tmp_path, "plans")
    assert not imported & HEAVY
    assert errors == ""
