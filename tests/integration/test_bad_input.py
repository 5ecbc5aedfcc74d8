"""Mistakes of a user: one message with the value and the remedy, the exit code of its kind, nothing left behind."""

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from filelock import FileLock

from autotune import workload
from autotune.cli import main
from autotune.errors import JobError
from autotune.job_file import load_job
from autotune.machine.devices import lock_file, locked
from autotune.plan_check import check_first_steps
from autotune.training.full_training import launch
from autotune.workload import look_at, read_data
from storage.store import open_store
from tests.programs.users import JobFile, databases, refusal
from tests.values.parameters import parameters
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.plan import Padded, Plan
from trials.tasks.request import Training
from trials.tasks.training.output import open_output
from trials.tasks.training.settings import training_settings

TOO_MANY = (os.cpu_count() or 1) * 4 + 1

pytestmark = pytest.mark.usefixtures("home")


# --- the command line and the job file ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "gone.yaml"], "gone.yaml: no such file; give the path of a job file"),
        (["tune", "."], "is a folder; give the job file in it"),
        (["tune", "JOB", "--time-limit", "apples"], "'apples' is not a time such as 90s, 10min or 1.5h"),
        (["tune", "JOB", "--time-limit", "0s"], "'0s' leaves no time"),
        (["tune", "JOB", "--trials", "0"], "0 is not in the range x>=1"),
        (["tune", "JOB", "--for", "ms-swfit"], "--for ms-swfit: did you mean ms-swift? plans are exported to internvl"),
        (["tune", "JOB", "--for", "qwen-vl"], "trains Qwen's models alone, and this is a model of type internvl"),
        (["launch", "JOB", "--steps", "-1"], "-1 is not in the range x>=1"),
        (["tune"], "Missing argument 'JOB'"),
        (["tuen", "JOB"], "No such command 'tuen'"),
        (["show", "abc"], "no plan begins with 'abc'"),
    ],
)
@pytest.mark.parametrize("as_json", parameters({"text": False, "json": True}, short=("text",)))
def test_wrong_usage_is_reported_and_exits_with_2(
    job: JobFile, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str, as_json: bool
) -> None:
    monkeypatch.chdir(job.path.parent)
    given = [str(job.path) if argument == "JOB" else argument for argument in arguments]
    code, reported = refusal(*given, *(["--json"] if as_json else []))
    assert code == 2
    assert message in reported
    assert not job.output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware__device": 2}, "hardware.device: unknown key; did you mean devices?"),
        ({"hardware__memory_limit": "400 apples"}, "'400 apples' is not a size such as 400MiB or 1.5GB"),
        ({"hardware__devices": TOO_MANY}, f"asks for {TOO_MANY} ranks but no accelerator is visible"),
        pytest.param({"model__path": ""}, "model.path: must be a text that is not empty", marks=pytest.mark.long),
        (
            {"search__sampler": "nope"},
            "search.sampler: 'nope' is not one of the samplers here: exhaustive, gp, model, tpe, uniform",
        ),
        ({"search__queue": ["none.yaml"]}, "none.yaml cannot be read (No such file or directory); give a file such as"),
        ({"search__current_plan": "none.yaml"}, "none.yaml cannot be read (No such file or directory); give a file"),
        ({"database": "results.db"}, "cannot read the database URL; use sqlite:///FILE"),
        ({"database": "mysql://me@host/results"}, "no database driver 'mysql'; use sqlite:///FILE"),
    ],
)
def test_a_job_that_asks_for_the_impossible_exits_with_2(
    job: JobFile, changes: dict[str, object], message: str, home: Path
) -> None:
    code, reported = refusal("tune", job.spoil(**changes))
    assert code == 2
    assert message in reported
    assert not job.output.exists()
    assert not databases(home)  # so it is reported before a wait for devices that are in use


@pytest.mark.parametrize("command", ["run", pytest.param("launch", marks=pytest.mark.long)])
def test_an_adapter_to_random_weights_is_refused_before_anything_is_measured(
    command: str, job: JobFile, home: Path
) -> None:
    code, reported = refusal(command, job.spoil(training__lora={"rank": 4}))
    assert code == 2
    assert reported == (
        "training.lora with model.weights: random would train an adapter to weights that are in no folder; set "
        "model.weights: pretrained, or remove training.lora"
    )
    assert not databases(home)


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ({"steps": 2, "max_tokens": 4}, "max_tokens: 4 is less than the {shortest} text tokens of the shortest sample"),
        pytest.param(
            {"steps": 2, "max_tokens": 9999},
            "max_tokens: 9999 leaves no sample for later: the longest has {longest} ",
            marks=pytest.mark.long,
        ),
        (
            {"steps": 10, "max_tokens": 0},
            "steps: 10 are more than the 1 step that any plan makes of the 1 sample of an epoch",
        ),
    ],
)
def test_a_curriculum_that_the_data_cannot_have_is_refused_before_anything_is_measured(
    curriculum: dict[str, int], message: str, job: JobFile, example: Path, tmp_path: Path
) -> None:
    tokens = prepared_of(example, tmp_path).index.text_tokens
    curriculum = {**curriculum, "max_tokens": curriculum["max_tokens"] or int(tokens.min())}
    code, reported = refusal("run", job.spoil(training__curriculum=curriculum))
    assert code == 2
    assert reported.startswith("training.curriculum." + message.format(shortest=tokens.min(), longest=tokens.max()))


def test_a_curriculum_longer_than_its_samples_with_this_plan_is_refused(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepared_of(example, tmp_path, training={"global_batch_samples": 8})
    most = int(np.median(prepared.index.text_tokens))
    training = prepared.job.training
    changed = {"curriculum": training.curriculum.model_copy(update={"steps": 4, "max_tokens": most})}
    prepared = replace(prepared, job=prepared.job.model_copy(update={"training": training.model_copy(update=changed)}))
    unused: Any = None
    short = int(np.count_nonzero(prepared.index.text_tokens <= most))
    plan = plan_of("12+8", packing=Padded(samples=8))
    with pytest.raises(JobError, match=rf"4 are more than the \d steps that plan \w+ makes of the {short} samples"):
        launch(prepared, plan, unused, unused, tmp_path, site=unused, promised_samples_per_second=None, max_steps=None)
    assert not caplog.messages
    check_first_steps(prepared, plan_of("12+8", packing=Padded(samples=6)))
    assert "the steps of training.curriculum are off by 25 % of training.global_batch_samples: 8" in caplog.text


@pytest.mark.long
def test_a_dry_run_checks_the_curriculum_too(job: JobFile, example: Path, tmp_path: Path) -> None:
    most = int(np.median(prepared_of(example, tmp_path).index.text_tokens))
    job.spoil(training__curriculum={"steps": 4, "max_tokens": most})
    file = tmp_path / "plan.json"
    file.write_text(wire.encode(plan_of("12+8", packing=Padded(samples=8))))
    code, reported = refusal("launch", job.path, "--plan", file, "--dry-run")
    assert code == 2
    assert reported.startswith("training.curriculum.steps: 4 are more than the ")


@pytest.mark.parametrize(("samples", "warned"), [(8, False), (12, True)])
def test_a_training_with_steps_unlike_random_ones_is_warned_of(
    samples: int, warned: bool, example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepared_of(example, tmp_path, training={"global_batch_samples": 8})
    check_first_steps(prepared, plan_of("12+8", packing=Padded(samples=samples)))
    missed = "changes what is learned: 100% of the steps miss training.global_batch_samples: 8 by more than 2 samples"
    assert (missed in caplog.text) == warned


@pytest.mark.parametrize("part", ["vision", pytest.param("projector", marks=pytest.mark.long)])
def test_a_learning_rate_of_a_part_that_the_model_does_not_have_is_refused(
    part: str, job: JobFile, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    shape = replace(WORKLOAD.model, vision_layers=0, family="llama", name="tiny")
    monkeypatch.setattr(workload, "model_shape", lambda settings, training: shape)
    code, reported = refusal("tune", job.spoil(training__learning_rates={part: 2e-6}))
    assert code == 2
    assert reported == (
        f"training.learning_rates.{part}: 2e-06, but tiny is a llama model without vision; remove the key"
    )
    code, reported = refusal("tune", job.spoil(training__learning_rates={}, training__freeze=[part]))
    assert code == 2
    assert reported == f"training.freeze has {part}, but tiny is a llama model without vision; remove it"
    assert not databases(home)


@pytest.mark.parametrize("command", ["run", pytest.param("launch", marks=pytest.mark.long)])
@pytest.mark.parametrize("output", ["a file", "a file/below", "/proc/output"])
def test_an_output_that_cannot_be_written_is_reported_before_anything_is_measured(
    job: JobFile, tmp_path: Path, home: Path, command: str, output: str
) -> None:
    (tmp_path / "a file").touch()
    code, reported = refusal(command, job.spoil(training__output=str(tmp_path / output)))
    assert code == 2
    assert f"training.output {tmp_path / output} cannot be written (" in reported
    assert not home.exists()


# --- databases, devices and plans ---


@pytest.mark.parametrize(
    ("command", "place", "remedy"),
    [
        ("tune", "a file/results.db", "a part of its path is a file: name another database"),
        pytest.param("tune", "/proc/results.db", "name another database", marks=pytest.mark.long),
        pytest.param("tune", "", "name a file, also one that is not there yet", marks=pytest.mark.long),
        ("plans", "a file/results.db", "does not exist; check --db"),
        ("plans", "/proc/results.db", "does not exist; check --db"),
        ("plans", "", "name a file, also one that is not there yet"),
    ],
)
def test_a_database_that_cannot_be_opened_exits_with_4(
    job: JobFile, tmp_path: Path, command: str, place: str, remedy: str
) -> None:
    (tmp_path / "a file").touch()
    arguments = [command, job.spoil()] if command == "tune" else [command]
    code, reported = refusal(*arguments, "--db", f"sqlite:///{tmp_path / place}")
    assert code == 4
    assert remedy in reported


def test_an_empty_url_is_refused_while_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DB_URL", "")
    assert CliRunner().invoke(main, ["plans"]).exit_code == 0
    code, reported = refusal("plans", "--db", "")
    assert (code, reported) == (2, "the database URL is empty; use sqlite:///FILE or postgresql://USER@HOST/DATABASE")


@pytest.mark.parametrize("variable", ["XDG_DATA_HOME", pytest.param("XDG_STATE_HOME", marks=pytest.mark.long)])
def test_a_user_folder_that_cannot_be_written_is_reported(
    job: JobFile, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(job.path))
    code, reported = refusal("tune", job.path, "--db", f"sqlite:///{job.path.parent / 'own.db'}")
    assert code == 1
    assert f"cannot write {job.path / 'autotune'}" in reported
    assert reported.endswith(f"(Not a directory); make its folder writable, or set {variable} to another one")
    assert not databases(job.path.parent)


def test_devices_in_use_exit_with_6(job: JobFile, home: Path) -> None:
    lock = lock_file()
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        code, reported = refusal("run", job.path, "--json")
    assert code == 6
    assert f"uses the devices of this machine (process {os.getpid()}, `" in reported
    assert f" UTC holds {lock}); wait for it, or end it" in reported
    assert not databases(home)


def test_devices_in_use_are_known_from_another_data_folder(
    job: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    with locked(("cpu",)):
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
        code, reported = refusal("tune", job.path)
    assert code == 6
    assert "another autotune process uses the devices of this machine" in reported


def test_a_job_without_a_known_plan_exits_with_3(job: JobFile) -> None:
    code, reported = refusal("launch", job.path, "--dry-run", "--json")
    assert code == 3
    assert "no plan is known for this job here; run `autotune tune JOB`" in reported
    code, reported = refusal("launch", job.path, "--plan", "abc")
    assert code == 2
    assert "no plan begins with 'abc'; no study has tried a plan yet; run a search first" in reported


@pytest.mark.parametrize("command", [pytest.param("launch", marks=pytest.mark.long), "run"])
def test_tuning_again_needs_a_checkpoint_before_the_end(command: str, job: JobFile, home: Path) -> None:
    code, reported = refusal(command, job.path, "--retune-on-drift")
    assert code == 2
    assert "without training.checkpoint_every and with training.epochs: 1 the only one is at the end" in reported
    assert not databases(home)


def test_a_job_without_a_plan_of_its_own_names_the_nearest_that_may_run(job: JobFile, tmp_path: Path) -> None:
    read = load_job(job.path)
    prepared = read_data(read, look_at(read), tmp_path)
    here, plan = prepared.workload, plan_of("12+4", "0+4")
    found = {
        replace(here, memory_limit_bytes=here.memory_limit_bytes + 1): packed_plan(),  # nearer, but for 8 devices
        replace(here, memory_limit_bytes=2 * here.memory_limit_bytes): plan,
    }
    with open_store() as store:
        for other, winner in found.items():
            study = store.create_study(store.add_workload(other), {}, seed=0)
            concluded(store, best_of(study.id, workload=other, plan=winner))
    code, reported = refusal("launch", job.path, "--dry-run")
    assert code == 3
    assert (
        f"or train with the nearest by `--plan {plan.id}`, which was not measured here: hardware.memory_limit"
        in reported
    )
    settings = training_settings(prepared.request(packed_plan(), Training(output=job.output)), prepared.index)
    open_output(job.output, settings, packed_plan())
    code, reported = refusal("launch", job.path)
    assert code == 3
    assert (
        f"or continue the training in {job.output} from its last checkpoint with the nearest by `autotune launch "
        f"JOB --resume-with {plan.id}`, which was not measured here: hardware.memory_limit" in reported
    )


def test_no_search_begins_where_a_training_has_begun_and_its_plan_is_offered(job: JobFile, tmp_path: Path) -> None:
    read = load_job(job.path)
    prepared, plan = read_data(read, look_at(read), tmp_path), plan_of("12+4", "0+4")
    settings = training_settings(prepared.request(plan, Training(output=job.output)), prepared.index)
    open_output(job.output, settings, plan)
    code, reported = refusal("run", job.path)
    assert code == 2
    assert f"continue with `autotune launch JOB --plan {plan.id}`, or name another folder" in reported
    for given in (["--plan", plan.id[:10]], []):
        offered = CliRunner().invoke(main, ["launch", str(job.path), *given, "--dry-run"])
        assert offered.exit_code == 0, offered.stderr
    assert f"The training goes on with its plan {plan.id}: no plan is known for this job here" in offered.stderr
    code, reported = refusal("launch", job.path, "--plan", plan_of("12+5", "0+3").id, "--dry-run")
    assert code == 2
    assert "no study has tried a plan yet" in reported


@pytest.mark.long
def test_where_too_few_devices_are_left_for_the_plan_of_a_training_others_are_offered(
    job: JobFile, tmp_path: Path
) -> None:
    read = load_job(job.path)
    prepared = read_data(read, look_at(read), tmp_path)
    here, old, near = prepared.workload, packed_plan(), plan_of("12+4", "0+4")
    settings = training_settings(prepared.request(old, Training(output=job.output)), prepared.index)
    open_output(job.output, settings, old)
    code, reported = refusal("run", job.path)
    assert code == 2
    assert (
        f"holds a training with plan {old.id}, which cannot run here: it needs 8 devices, and the job has 2; run "
        "`autotune tune JOB` and continue from its last checkpoint by `autotune launch JOB --resume-with PLAN` with "
        "the winner; or name another folder" in reported
    )
    other = replace(here, memory_limit_bytes=2 * here.memory_limit_bytes)
    with open_store() as store:
        for work, plan in ((replace(here, hardware=replace(here.hardware, devices=8)), old), (other, near)):
            study = store.create_study(store.add_workload(work), {}, seed=0)
            concluded(store, best_of(study.id, workload=work, plan=plan))
    code, reported = refusal("run", job.path)
    assert code == 2
    assert (
        f"with the winner, or continue the training in {job.output} from its last checkpoint with the nearest by "
        f"`autotune launch JOB --resume-with {near.id}`, which was not measured here: hardware.memory_limit" in reported
    )
    assert f"--plan {old.id}" not in reported


def _plans_alike() -> tuple[str, list[Plan]]:
    """Return a digit, and two plans whose ids begin with it: of 17 plans there are such two."""
    by_digit: dict[str, list[Plan]] = defaultdict(list)
    for plan in map(packed_plan, range(9, 26)):
        by_digit[plan.id[0]].append(plan)
    return next((digit, plans[:2]) for digit, plans in by_digit.items() if len(plans) > 1)


def test_an_id_that_several_plans_share_asks_for_more_digits() -> None:
    digit, alike = _plans_alike()
    with open_store() as store:
        for plan in alike:
            study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
            concluded(store, best_of(study.id, plan=plan))
    code, reported = refusal("show", digit)
    assert code == 2
    assert reported.startswith(f"several plans begin with '{digit}'")
    code, reported = refusal("show", "none")
    assert code == 2
    assert reported.startswith("no plan begins with 'none'; `autotune plans --archived` lists all winners; a plan that")
    near, other = packed_plan(9).id, packed_plan(10).id
    code, reported = refusal("show", f"{near[:5]}x{near[6:]}")
    assert code == 2
    assert reported.endswith(f"; near ids are {near}")
    assert other not in reported


def test_a_profile_that_cannot_be_written_is_reported_before_anything_is_measured(job: JobFile, tmp_path: Path) -> None:
    code, reported = refusal("profile", job.path, "--out", tmp_path / "costs.txt")
    assert code == 2
    assert "give a name that ends in .json" in reported
