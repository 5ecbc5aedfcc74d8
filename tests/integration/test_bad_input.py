"""Mistakes of a user: one message with the value and the remedy, the exit code of its kind, nothing left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import pytest
import torch
import yaml
from click.testing import CliRunner
from filelock import FileLock
from safetensors.torch import save_file

from autotune.cli import main
from autotune.workload import prepare
from storage.store import open_store
from tests.data_values import record, write_records
from tests.storage_values import WORKLOAD, best_of, packed_plan
from tests.training_values import job_of, plan_of, prepared_of
from trials.errors import ModelError
from trials.model.skeleton import build_skeleton, load_config

BAD_LINES = (b'{"id": 1, ', {"id": 2}, record("<image>What?", "A box.", image="gone.png"))
TOO_MANY = (os.cpu_count() or 1) * 4 + 1


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home of the test's own; its data folder is made by whatever keeps something."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home" / "data"))
    monkeypatch.delenv("AUTOTUNE_DB_URL", raising=False)
    return tmp_path / "home"


class JobFile:
    """A job on the example, which a test spoils."""

    def __init__(self, example: Path, folder: Path) -> None:
        self.path = folder / "job.yaml"
        self.output = folder / "output"
        self._document: dict[str, Any] = job_of(example, self.output).model_dump(mode="json", exclude_none=True)
        self.spoil()

    def spoil(self, **changes: object) -> str:
        """Sets `section__key`, or a whole section, and returns the file's path."""
        for name, value in changes.items():
            section, _, key = name.partition("__")
            self._document[section] = {**self._document[section], key: value} if key else value
        self.path.write_text(yaml.safe_dump(self._document))
        return str(self.path)


@pytest.fixture
def job(example: Path, tmp_path: Path) -> JobFile:
    return JobFile(example, tmp_path)


@pytest.fixture
def model(example: Path, tmp_path: Path) -> Path:
    """A copy of the example's model."""
    return Path(shutil.copytree(example / "model", tmp_path / "model"))


def refusal(*arguments: str | Path) -> tuple[int, str]:
    """(exit code, message) of a command that must fail with one message and an empty stdout."""
    answer = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(answer.exception, SystemExit), answer.exception
    assert answer.stdout == ""
    _, *messages = re.split("^Error: ", answer.stderr, flags=re.MULTILINE)
    assert len(messages) == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    return answer.exit_code, messages[0].strip()


def databases(folder: Path) -> list[Path]:
    return list(folder.rglob("*.db"))


# --- the command line and the job file ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "gone.yaml"], "gone.yaml: no such file; give the path of a job file"),
        (["tune", "."], "is a folder; give the job file in it"),
        (["tune", "JOB", "--time-limit", "apples"], "'apples' is not a time such as 90s, 10min or 1.5h"),
        (["tune", "JOB", "--time-limit", "0s"], "'0s' leaves no time to search"),
        (["tune", "JOB", "--trials", "0"], "0 is not in the range x>=1"),
        (["launch", "JOB", "--steps", "-1"], "-1 is not in the range x>=1"),
        (["tune"], "Missing argument 'JOB'"),
        (["tuen", "JOB"], "No such command 'tuen'"),
        (["show", "abc"], "no plan begins with 'abc'"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_wrong_usage_is_told_and_exits_with_2(
    job: JobFile, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str, as_json: bool
) -> None:
    monkeypatch.chdir(job.path.parent)
    given = [str(job.path) if argument == "JOB" else argument for argument in arguments]
    code, told = refusal(*given, *(["--json"] if as_json else []))
    assert code == 2
    assert message in told
    assert not job.output.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware__device": 2}, "hardware.device: unknown key; did you mean devices?"),
        ({"hardware__memory_limit": "400 apples"}, "'400 apples' is not a size such as 400MiB or 1.5GB"),
        ({"hardware__devices": TOO_MANY}, f"asks for {TOO_MANY} ranks but no accelerator is visible"),
        ({"model__path": ""}, "model.path: must be a text that is not empty"),
        ({"search__sampler": "nope"}, "search.sampler: 'nope' is not one of the samplers here: tpe"),
        ({"database": "results.db"}, "cannot read the database URL that begins with 'results.db'; use sqlite:///FILE"),
        ({"database": "mysql://me@host/results"}, "no database driver 'mysql'; use sqlite:///FILE"),
    ],
)
def test_a_job_that_asks_for_the_impossible_exits_with_2(
    job: JobFile, changes: dict[str, object], message: str, home: Path
) -> None:
    code, told = refusal("tune", job.spoil(**changes))
    assert code == 2
    assert message in told
    assert not job.output.exists()
    assert "sampler" in message or not databases(home)


@pytest.mark.parametrize("command", ["run", "launch"])
@pytest.mark.parametrize("output", ["a file", "a file/below", "/proc/output"])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(
    job: JobFile, tmp_path: Path, home: Path, command: str, output: str
) -> None:
    (tmp_path / "a file").touch()
    code, told = refusal(command, job.spoil(training__output=str(tmp_path / output)))
    assert code == 2
    assert f"training.output {tmp_path / output} cannot be written (" in told
    assert not home.exists()


# --- databases, devices and plans ---


@pytest.mark.parametrize("command", ["tune", "plans"])
@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("a file/results.db", "a part of its path is a file: name another database"),
        ("/proc/results.db", "name another database"),
        ("", "name a file, also one that is not there yet"),
    ],
)
def test_a_database_that_cannot_be_opened_exits_with_4(
    job: JobFile, tmp_path: Path, command: str, place: str, remedy: str
) -> None:
    (tmp_path / "a file").touch()
    arguments = [command, job.spoil()] if command == "tune" else [command]
    code, told = refusal(*arguments, "--db", f"sqlite:///{tmp_path / place}")
    assert code == 4
    assert remedy in told


def test_an_empty_url_is_refused_while_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DB_URL", "")
    assert CliRunner().invoke(main, ["plans"]).exit_code == 0
    code, told = refusal("plans", "--db", "")
    assert (code, told) == (2, "the database URL is empty; use sqlite:///FILE or postgresql://USER@HOST/DATABASE")


def test_a_data_folder_that_cannot_be_written_is_told(job: JobFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(job.path))
    code, told = refusal("tune", job.path, "--db", f"sqlite:///{job.path.parent / 'own.db'}")
    assert code == 1
    assert f"cannot write {job.path / 'autotune'} (" in told
    assert not databases(job.path.parent)


def test_devices_in_use_exit_with_6(job: JobFile, home: Path) -> None:
    lock = home / "data" / "autotune" / "devices.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        code, told = refusal("run", job.path, "--json")
    assert code == 6
    assert f"another autotune uses the devices of this machine (it holds {lock}); wait for it" in told
    assert not databases(home)


def test_a_job_without_a_known_plan_exits_with_3(job: JobFile) -> None:
    code, told = refusal("launch", job.path, "--dry-run", "--json")
    assert code == 3
    assert "no plan is known for this job here; run `autotune tune`" in told
    code, told = refusal("launch", job.path, "--plan", "abc")
    assert code == 2
    assert "no plan begins with 'abc'; no study has found a plan yet; run a search first" in told


def test_an_id_that_several_plans_share_asks_for_more_digits() -> None:
    with open_store() as store:
        for qv in (9, 10):
            study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
            store.save_best(best_of(study.id, plan=packed_plan(qv)))
    code, told = refusal("show", "")
    assert code == 2
    assert told.startswith("2 plans begin with ''")
    code, told = refusal("show", "none")
    assert code == 2
    assert all(packed_plan(qv).id in told for qv in (9, 10))


# --- the data ---


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (None, {}, "train.jsonl does not exist; correct its path"),
        ([], {}, "train.jsonl is empty; write the dataset again"),
        ([b"hello"], {}, "is in no format known here; set `format` of this source to one of: internvl"),
        (
            BAD_LINES,
            {},
            "no sample of {path} can be used, of 3 records; the first fault is {path}:1: the line is not JSON",
        ),
        (BAD_LINES[2:], {}, "{path}:1: image {folder}/gone.png does not exist; correct the lines, or `images`"),
        (
            (*BAD_LINES, record("What?", "A box.")),
            {"data__on_error": "fail"},
            "{path}:1: the line is not JSON: Expecting",
        ),
        ((record("Hi?", "Ho."), BAD_LINES[1]), {"data__on_error": "fail"}, "{path}:2: `conversations` is missing"),
    ],
    ids=["missing", "empty", "no format", "only bad", "no image", "no JSON", "no conversations"],
)
def test_data_that_cannot_be_used_is_told_with_file_and_line(
    job: JobFile, tmp_path: Path, lines: tuple[object, ...] | None, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "train.jsonl"
    if lines is not None:
        write_records(path, *lines)
    code, told = refusal("tune", job.spoil(data__sources=[{"path": str(path)}], **changes))
    assert code == 1
    assert message.format(path=path, folder=tmp_path) in told
    assert lines is not None or not databases(tmp_path)


def test_bad_lines_are_skipped_with_a_warning_and_a_small_dataset_is_warned_of(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_records(tmp_path / "train.jsonl", record("What?", "A box."), *BAD_LINES, record("Who?", "Ada."))
    job = job_of(example, tmp_path / "output", data={"sources": [{"path": str(path)}]})
    assert prepare(job, tmp_path).workload.data.samples == 2
    skipped, small = caplog.messages
    first, *named = skipped.splitlines()
    assert first == "3 of 5 dataset lines are skipped:"
    assert [line.split(": ")[0].strip() for line in named] == [f"{path}:{number}" for number in (2, 3, 4)]
    assert small.startswith("an epoch has 2 samples, fewer than training.global_batch_samples: 8")


# --- the model ---


def set_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "does not exist; give a local folder or a hub id such as org/name"),
        (
            lambda folder: (folder / "config.json").unlink(),
            "has no config.json; save the model there with save_pretrained",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "is not a valid JSON file"),
        (lambda folder: (folder / "config.json").write_text("{}"), "Should have a `model_type` key in its config.json"),
        (lambda folder: set_config(folder, model_type="martian"), "has model type `martian` but Transformers does not"),
        (
            lambda folder: set_config(folder, model_type="bert"),
            "model type 'bert' is not supported; supported are: int",
        ),
        (
            lambda folder: set_config(folder, text_config={"num_hidden_layers": "eight"}),
            "Field 'num_hidden_layers' expected int, got str (value: 'eight')",
        ),
        (
            lambda folder: set_config(folder, text_config={"model_type": "gpt2"}),
            "language model 'gpt2' has no norm and no rotary_emb",
        ),
        (
            lambda folder: set_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}),
            "it runs code of its own; read that code, then set model.trust_remote_code: true",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "save both there with save_pretrained"),
    ],
    ids=["folder", "config", "JSON", "type", "unknown", "unsupported", "value", "layers", "code", "tokenizer"],
)
def test_a_model_that_cannot_be_used_is_told_and_makes_no_database(
    job: JobFile, model: Path, home: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(model)
    code, told = refusal("tune", job.spoil(model__path=str(model)))
    assert code == 1
    assert message in told
    assert not databases(home)


def test_a_file_is_no_model(job: JobFile) -> None:
    with pytest.raises(ModelError, match=r"job.yaml is a file; give the folder that it is in"):
        load_config(str(job.path))


@pytest.mark.parametrize("path", ["nobody/no-such-model", "a model?"])
def test_a_hub_that_does_not_answer_fails_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"is no folder beside the job file.*correct model.path"):
        load_config(path)
    assert time.monotonic() - start < 8


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = build_skeleton(load_config(str(folder)), torch.float32).model
    return {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}


def save_index(folder: Path, document: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, "has no model.safetensors; set `model.weights: random`"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "model.safetensors cannot be read ("),
        (lambda folder: save_index(folder, {}), "is not an index of weights (KeyError('weight_map'))"),
        (
            lambda folder: save_index(folder, {"weight_map": dict.fromkeys(weights_of(folder), "gone.safetensors")}),
            "gone.safetensors cannot be read (",
        ),
        (
            lambda folder: save_file(dict(list(weights_of(folder).items())[2:]), folder / "model.safetensors"),
            "2 parameters are missing and 0 are unknown, for example",
        ),
        (
            lambda folder: save_file({**weights_of(folder), "x": torch.zeros(1)}, folder / "model.safetensors"),
            "0 parameters are missing and 1 are unknown, for example x; load the model once with transformers",
        ),
        (
            lambda folder: save_file(
                {**weights_of(folder), "lm_head.weight": torch.zeros(3)}, folder / "model.safetensors"
            ),
            "lm_head.weight has shape (3,) in the files but (",
        ),
    ],
    ids=["absent", "junk", "index", "shard", "missing", "unexpected", "shape"],
)
def test_weights_that_do_not_fit_are_told_before_a_rank_starts(
    job: JobFile, model: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(model)
    code, told = refusal("tune", job.spoil(model__path=str(model), model__weights="pretrained"))
    assert code == 1
    assert message in told


# --- output that nobody takes ---


def start(*arguments: str | Path, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_reader_that_has_seen_enough_is_no_error_to_talk_about() -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("plans", "--json", stdout=write)
    os.close(write)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (1, "")


def test_a_full_disk_behind_stdout_is_told() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        process = start("plans", "--json", stdout=full.fileno())
        _, told = process.communicate(timeout=60)
    assert told == "Error: the result cannot be written to stdout: No space left on device; write it elsewhere\n"
    assert process.returncode == 1


# --- with real ranks ---


class Tunings:
    """One job that is tuned again and again in one data folder."""

    def __init__(self, example: Path, folder: Path) -> None:
        self.job = JobFile(example, folder)
        records = (json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()[:40])
        mixed = write_records(folder / "mixed.jsonl", *BAD_LINES, *records)
        self.job.spoil(
            data__sources=[{"path": str(mixed), "images": str(example / "data")}],
            training__global_batch_samples=4,
            search={"trials": 1, "time_limit": "20s", "timed_steps": 1, "warmup_steps": 0},
        )
        self.data = folder / "data"


@pytest.fixture(scope="module")
def tunings(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Tunings:
    return Tunings(example, tmp_path_factory.mktemp("tunings"))


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Ctrl-C reaches what is started, also where a shell runs the tests in the background and so ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stop(process: "subprocess.Popen[str]", number: int, *, told: str, group: bool) -> tuple[str, str]:
    """Sends the signal once a line with `told` has come and the ranks run; (told before, told after)."""
    assert process.stderr is not None
    before = []
    try:
        for line in process.stderr:
            before.append(line)
            if told in line:
                break
        while len(ranks := psutil.Process(process.pid).children(recursive=True)) < 2:
            assert process.poll() is None, "".join(before)
            time.sleep(0.1)
        (os.killpg if group else os.kill)(process.pid, number)
        _, after = process.communicate(timeout=30)
        _, alive = psutil.wait_procs(ranks, timeout=0.5)
        assert not alive
    finally:
        process.kill()  # its ranks end with it
    return "".join(before), after


@pytest.mark.timeout(120)
def test_an_interrupted_tuning_leaves_no_process_and_goes_on_next_time(
    tunings: Tunings, monkeypatch: pytest.MonkeyPatch, heard_interrupts: None
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tunings.data))
    told_of_trials = []
    for number, told, group, code in (
        (signal.SIGINT, "  trial ", True, 130),
        (signal.SIGTERM, "40 samples", False, 143),
        (signal.SIGINT, "  trial ", False, 130),
    ):
        process = start("tune", tunings.job.path, "--json")
        before, after = stop(process, number, told=told, group=group)
        assert process.returncode == code, before + after
        told_of_trials += re.findall(r"^ +trial (\d+)  (\S+)", before, flags=re.MULTILINE)
        assert "WARNING: 3 of 43 dataset lines are skipped" in before
        assert after.splitlines()[-1] == "Interrupted; what was measured is kept."
        assert "Traceback" not in after
    (first, role), (second, next_role) = told_of_trials
    assert (first, role, next_role) == ("0", "default", "default-no-recompute")
    assert int(second) > 0


def test_a_limit_below_the_leanest_plan_exits_with_3(tunings: Tunings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tunings.data))
    code, told = refusal("tune", tunings.job.spoil(hardware__memory_limit="1MiB"))
    assert code == 3
    assert "no plan fits 1 MiB per rank: the leanest layout" in told
    assert "raise hardware.memory_limit or give more devices" in told


def test_a_launch_onto_the_checkpoint_of_another_plan_is_refused(job: JobFile, example: Path, tmp_path: Path) -> None:
    prepared = prepared_of(example, tmp_path / "work")
    plan = plan_of("9+0", "3+8")
    with open_store() as store:
        study = store.create_study(store.add_workload(prepared.workload), {}, seed=0)
        store.save_best(best_of(study.id, plan=plan, workload=prepared.workload))
    checkpoint = job.output / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(
        json.dumps({"steps": 3, "plan": "of-another", "data": prepared.index.digest})
    )
    code, told = refusal("launch", job.path, "--steps", "4")
    assert code == 1
    assert f"{checkpoint} was written with plan of-another, not {plan.id}; launch that one or give a new output" in told
    with open_store() as store:
        (launch,) = store.launches(plan.id)
    assert launch.result is not None
    assert (launch.result.status, launch.result.steps) == ("failed", 0)
