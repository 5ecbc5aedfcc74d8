"""The commands as functions of `autotune`."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import autotune
from autotune import best_plan, export, launch, load_job, pack, predict, recommend, tune, what_if
from autotune.errors import JobError, PackError, PlanNotValid, PredictError
from autotune.folders import lengths_folder
from autotune.library.export import best_known
from autotune.workload import look_at, workload_of
from storage.baseline import Baseline
from storage.errors import BadUrl, DatabaseUnavailable, UnknownPlan
from storage.records import BestPlan
from storage.store import open_store
from tests.programs.users import JobFile, databases
from tests.unit.repository.test_docs import rows
from tests.values.storage import best_of, concluded, result_of
from tests.values.training import plan_of
from trials.arrays import Ints
from trials.errors import AutotuneError, ModelError
from trials.plan import Plan

HEAVY = {"torch", "transformers", "deepspeed", "numpy", "optuna", "scipy", "sqlalchemy", "pydantic", "click"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "library.md"
PLAN, OTHER_PLAN = plan_of("9+0", "3+8"), plan_of("8+0", "4+8")

pytestmark = pytest.mark.usefixtures("home")


def test_importing_the_package_imports_no_library() -> None:
    code = "import sys, autotune; print(*dir(autotune)); print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    names, imported = map(str.split, done.stdout.splitlines())
    assert set(autotune.__all__) <= set(names)
    assert not HEAVY & set(imported)


def test_no_module_hides_a_public_name() -> None:
    assert not {module.name for module in pkgutil.iter_modules(autotune.__path__)} & set(autotune.__all__)
    assert all(getattr(autotune, name).__name__ == name for name in autotune.__all__)


def test_the_package_tells_its_version() -> None:
    assert autotune.__version__ == version("vlm-autotune")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tuner'; it has AutotuneError, Balanced"):
        importlib.import_module("autotune").tuner  # noqa: B018


def test_every_function_is_documented_with_its_options() -> None:
    text = DOCUMENT.read_text()
    assert set(autotune.__all__) <= set(re.findall(r"`(\w+)", text))
    listed = {name: set(re.findall(r"`(\w+)`", options)) for name, options in rows(DOCUMENT, "function", "options")}
    functions = (tune, best_plan, predict, recommend, pack, what_if, export, launch)
    assert {f"`{function.__name__}`": _options_of(function) for function in functions} == listed


def _options_of(function: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_code_in_the_documentation_can_be_compiled_and_imports_what_exists() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    code = [ast.parse(block) for block in blocks]
    assert len(code) == 3
    imported = [
        alias.name
        for tree in code
        for each in ast.walk(tree)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    ]
    assert set(imported) <= set(autotune.__all__)


# --- jobs ---


def test_a_path_a_mapping_and_a_job_are_the_same_job(job: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    document = yaml.safe_load(job.path.read_text())
    document["model"]["path"] = Path(document["model"]["path"])
    document["training"]["output"] = "relative"
    monkeypatch.chdir(job.path.parent)
    job.spoil(training__output="relative")
    known = [job.path, str(job.path), document, load_job(job.path), load_job(str(job.path))]
    assert [known_samples(each) for each in known] == [48] * 5


def known_samples(job: Any) -> int:
    """Samples of the job that a function of the library takes, by its packs."""
    return len(pack(job, qv=10, qt=500).after.epoch.packs.samples)


def _first_parameter(name: str) -> str:
    return next(iter(inspect.signature(getattr(autotune, name)).parameters), "")


REQUIRED = {"recommend": {"device": "h100"}}
"""Options without a default."""
FURTHER = {"export": ("ms-swift", "new")}
"""Arguments behind the file, of functions that need some."""
TAKE_A_FILE = [name for name in autotune.__all__ if _first_parameter(name) in {"path", "job", "data"}]


def test_every_function_that_takes_a_file_is_among_those_called_here() -> None:
    functions = {name.strip("`").partition("(")[0] for name, _ in rows(DOCUMENT, "function", "what it returns")}
    assert set(TAKE_A_FILE) == functions | {"load_job", "SampleDataset"}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", TAKE_A_FILE)
def test_the_path_of_a_job_is_a_text_or_a_path(name: str, kind: Callable[[str], object]) -> None:
    with pytest.raises(AutotuneError, match=r"^nowhere.yaml: no such file"):
        getattr(autotune, name)(kind("nowhere.yaml"), *FURTHER.get(name, ()), **REQUIRED.get(name, {}))


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    ("function", "option", "path"),
    [
        (predict, "plan", "nowhere.yaml"),
        (predict, "device_profile", "nowhere.json"),
        (pack, "out", "nowhere/packs.jsonl"),
    ],
)
def test_the_path_in_an_option_is_a_text_or_a_path(
    function: Callable[..., object], option: str, path: str, kind: Callable[[str], object], job: JobFile
) -> None:
    with pytest.raises(AutotuneError, match="nowhere"):
        function(job.path, **{option: kind(path)})


@pytest.mark.parametrize("function", [tune, best_plan, predict, launch])
def test_a_database_is_named_by_a_url_alone(function: Callable[..., object], job: JobFile, home: Path) -> None:
    with pytest.raises(BadUrl, match=r"by the text of its URL, not by a PosixPath; use sqlite:///FILE"):
        function(job.path, database=home / "results.db")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: no such file; give the path of a job file"),
        (3, "a job is the path of a job file, a mapping with the sections of one, or a Job, not 3; give one"),
        (None, "or a Job, not empty; give one"),
        ({}, "the job: model: missing; add it\nthe job: data: missing; add it"),
        ({"model": {"path": {1, 2}}, "data": {}}, "the job cannot be read: .* is not a value of a job; give texts"),
        ({"model": {"path": "a\0b"}}, r"the job: model.path: holds a null character \(\\0\); remove it"),
        ({"modle": {}}, "the job: modle: unknown key; did you mean model"),
    ],
    ids=["no file", "a number", "nothing", "an empty mapping", "a set", "a null character", "an unknown key"],
)
@pytest.mark.parametrize("function", [tune, best_plan, predict, launch])
def test_what_is_no_job_is_refused(function: Callable[[Any], object], given: object, message: str, home: Path) -> None:
    with pytest.raises(JobError, match=message):
        function(given)
    assert not databases(home)


def test_a_model_that_does_not_exist_is_refused(job: JobFile) -> None:
    with pytest.raises(ModelError, match=r"model folder .*nowhere does not exist"):
        best_plan(job.spoil(model__path=str(job.path.parent / "nowhere")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "the job: search.trials: must be greater than 0, not 0"),
        ({"trials": "many"}, "the job: search.trials: must be a whole number, not 'many'"),
        ({"time_limit": "soon"}, "the job: search.time_limit: 'soon' is not a time such as 90s"),
    ],
)
def test_options_of_tune_are_checked_like_a_job_file(job: JobFile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        tune(job.path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"plan": 3}, "plan must be a text, not int"),
        ({"plan": "abc", "resume_with": "abc"}, "`plan` and `resume_with` exclude each other"),
    ],
)
def test_options_of_launch_are_checked(job: JobFile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        launch(job.path, **options)


# --- plans ---


@pytest.fixture
def winner(job: JobFile) -> BestPlan:
    """The winner of a search on exactly the job, in the user's own database."""
    settings = load_job(job.path)
    work = workload_of(settings, look_at(settings))
    with open_store() as store:
        study = store.create_study(store.add_workload(work), {}, 0)
        return concluded(store, best_of(study.id, workload=work, plan=PLAN, ties=(), pareto=()))


def test_the_best_plan_is_the_winner_of_exactly_this_job(
    job: JobFile, winner: BestPlan, capfd: pytest.CaptureFixture[str]
) -> None:
    assert best_plan(job.path) == winner
    assert winner.fastest_baseline in winner.baselines
    assert not winner.is_baseline
    assert capfd.readouterr() == ("", "")
    with open_store() as store:
        name = store.study(winner.study_id).name
        store.archive_studies([winner.study_id])
        with pytest.raises(
            PlanNotValid, match=rf"here, except in an archived search \(`autotune studies unarchive {name}`"
        ):
            best_plan(job.path)
        store.unarchive_studies([winner.study_id])
    with pytest.raises(PlanNotValid, match=f"no plan is known for this job here; .*nearest by `--plan {PLAN.id}`"):
        best_plan(job.spoil(hardware__memory_limit="3GiB"))
    with pytest.raises(DatabaseUnavailable, match=r"empty.db does not exist; check --db"):
        best_plan(job.path, database=f"sqlite:///{job.path.parent}/empty.db")


def test_a_best_plan_in_doubt_is_logged_with_the_plan_that_measured_faster(
    job: JobFile, winner: BestPlan, caplog: pytest.LogCaptureFixture
) -> None:
    faster = Baseline(
        role="packed",
        estimated_samples_per_second=20.0,
        estimated_samples_per_second_error=0.1,
        gain=0.5,
        gain_error=0.01,
        plan_id=OTHER_PLAN.id,
    )
    with open_store() as store:
        study = store.create_study(store.add_workload(winner.workload), {"fresh": True}, 0)
        store.finish_trial(result_of(store.start_trial(study.id, OTHER_PLAN, "packed").id))
        concluded(store, replace(winner, study_id=study.id, baselines=(faster,)))
    assert best_plan(job.path).plan == winner.plan
    assert f"the best plan {winner.plan.id} is in doubt: packed ({OTHER_PLAN.id}) measured faster, 2.00" in caplog.text
    assert f"predict(JOB, plan='{OTHER_PLAN.id}')[0].plan" in caplog.text


def test_an_export_names_the_archived_search_whose_plan_it_leaves(winner: BestPlan) -> None:
    notes = list[str]()
    predicted: Any = SimpleNamespace(workload=winner.workload, best=lambda _: [SimpleNamespace(plan=OTHER_PLAN)])

    def exported() -> Plan:
        notes.clear()
        return best_known(predicted, "ms-swift", None, lambda event: notes.append(str(event)))

    assert (exported(), "the winner of the last search" in notes[0]) == (winner.plan, True)
    with open_store() as store:
        store.archive_studies([winner.study_id])
    assert exported() == OTHER_PLAN
    assert "no plan is known for this job here, except in an archived search (`autotune studies unarchive" in notes[0]


def test_a_launch_without_a_known_plan_is_refused_and_makes_no_output(job: JobFile) -> None:
    with pytest.raises(PlanNotValid, match="no plan is known for this job here; run `autotune tune JOB`"):
        launch(job.path)
    with pytest.raises(UnknownPlan, match="no plan begins with 'abc'"):
        launch(job.path, plan="abc")
    assert not job.output.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top must be a whole number of at least 1, not 0"),
        ({"devices": 1.5}, "devices must be a whole number of at least 1, not 1.5"),
        ({"memory_limit": "much"}, "memory_limit: 'much' is not a size such as 400MiB"),
        ({"memory_limit": 0}, "memory_limit must be a whole number of at least 1, not 0"),
        ({"plan": 3}, "plan must be a text, not int"),
        ({"plan": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
        ({"device_profile": 3}, "device_profile must be a text, not int"),
    ],
)
def test_options_of_predict_are_checked(job: JobFile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PredictError, match=message):
        predict(job.path, **options)


# --- packs ---


def test_packs_are_those_of_the_command_and_can_be_written(job: JobFile, tmp_path: Path) -> None:
    out = tmp_path / "packs.jsonl"
    found = pack(job.path, qv=10, qt=500, data_parallel=2, out=out)
    assert (found.packing.qv, found.after.epoch.assignment.shape[1]) == (10, 2)
    rows: list[Ints] = [rows for packs in found.after.epoch.step(0).packs for rows in packs]
    written = [json.loads(line) for line in out.read_text().splitlines()]
    first = [each["samples"] for each in written if each["step"] == 0]
    assert first == [found.material.index.record[each].tolist() for each in rows]
    assert lengths_folder().exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qv": -1}, "qv must be a whole number of at least 0, not -1"),
        ({"qt": "many"}, "qt must be a whole number of at least 1, not 'many'"),
        ({"packer": 3}, "packer must be a text, not int"),
        ({"packer": "tetris"}, "tetris is not one of the packers here"),
        ({"oversize": "drop"}, "oversize is one of own-pack, truncate, skip, fail, not 'drop'"),
        ({"out": "packs.txt"}, "packs.txt: a file of this kind cannot be written"),
        ({"model": "other"}, "--model applies only to a file of lengths"),
    ],
)
def test_options_of_pack_are_checked(job: JobFile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PackError, match=message):
        pack(job.path, **options)


def test_packs_are_not_written_over_an_input(job: JobFile) -> None:
    data = Path(yaml.safe_load(job.path.read_text())["data"]["sources"][0]["path"])
    link = job.path.parent / "packs.jsonl"
    link.symlink_to(data)
    with pytest.raises(PackError, match="is not an earlier output of this kind, so it is not overwritten"):
        pack(job.path, qv=10, qt=500, out=link)
