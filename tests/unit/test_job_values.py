"""Jobs that programs give as values."""

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import JobError
from autotune.job_file import as_job, job_of_values, load_job, with_values
from trials.job import EvaluationSection, Job

EVERYTHING = """\
model: {path: some/model, weights: random}
data:
  sources:
    - {path: train.jsonl, repeat: 1.5, sampling: "first:10%"}
  oversize: truncate
  max_tokens: 100
evaluation: {samples: 0.1, every: 5}
hardware: {memory_limit: 400MiB}
training: {betas: [0.9, 0.95], freeze: [vision], learning_rates: {projector: 1e-3}, loggers: [wandb], warmup: 0.1}
search:
  time_limit: 1.5h
  current_plan: plan.json
  space: {layouts: [p2-d1-z0], split: [4, 4], recompute: [[1, 0], [0, 2]], qv: [4, 8]}
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job.yaml").write_text(EVERYTHING)
    return load_job(tmp_path / "job.yaml")


def test_a_path_a_mapping_and_a_job_give_the_same(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_job("job.yaml") == as_job(tmp_path / "job.yaml") == as_job(job) == job
    assert as_job(job.model_dump(mode="json")) == as_job(job.model_dump()) == job


def test_relative_paths_of_values_start_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    values: dict[str, Any] = {"model": {"path": "model"}, "data": {"sources": [{"path": Path("train.jsonl")}]}}
    for job in (as_job(values), as_job(Job.model_validate(values))):
        assert (job.model.path, job.data.sources[0].path) == (str(tmp_path / "model"), tmp_path / "train.jsonl")


def test_values_replace_those_of_a_section_and_are_checked(job: Job) -> None:
    changed = with_values(job, "search", {"trials": 3, "time_limit": "2min"})
    assert (changed.search.trials, changed.search.time_limit) == (3, 120)
    update = {"trials": job.search.trials, "time_limit": job.search.time_limit}
    assert changed.model_copy(update={"search": changed.search.model_copy(update=update)}) == job
    assert with_values(job, "search", {}) is job
    with pytest.raises(JobError, match=r"^the job: search.trials: must be a whole number, not 2.5$"):
        with_values(job, "search", {"trials": 2.5})


def test_null_removes_a_section_and_nothing_else() -> None:
    values: dict[str, Any] = {
        "model": {"path": "some/model"},
        "data": {"sources": [{"path": "train.jsonl"}]},
        "evaluation": {"samples": 0.05, "every": 20},
        "training": {"lora": {"rank": 8, "alpha": 4}},
    }
    job = job_of_values(values, ("evaluation=null", "training.lora=null", "search.space=null"))
    assert (job.evaluation, job.training.lora.rank) == (EvaluationSection(), None)
    assert job_of_values(values, ("evaluation.sources=null",)).evaluation.samples == 0.05
    for key in ("training.learning_rate", "evalution", "training.epochs.x", "model"):
        with pytest.raises(JobError, match=f"^the job: {key.removesuffix('.x')}"):
            job_of_values(values, (f"{key}=null",))


def test_values_that_no_file_can_hold_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["model"] = endless
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"model": deep}
    wrong: list[Any] = [endless, deep, {"model": object()}, {("a", "b"): 1}]
    for values in wrong:
        with pytest.raises(JobError, match=r"the job cannot be read: .*; give texts, numbers, lists and mappings"):
            as_job(values)
    with pytest.raises(JobError, match=r"the job: model.path: must be a text; put quotes around it, not 3\nthe job: "):
        as_job({"model": {"path": 3}, "data": {"sources": []}})


def test_the_path_of_a_file_may_be_a_text(job: Job, tmp_path: Path) -> None:
    assert load_job(str(tmp_path / "job.yaml")) == job


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "load_job takes the path of a job file, not empty; give one"),
        (({"model": {}},), "load_job takes the path of a job file, not a section; give one"),
        (("job.yaml", "training.epochs=2"), "a list of changes, not the text 'training.epochs=2'; put it in a list"),
    ],
    ids=["nothing", "a mapping", "one change"],
)
def test_what_is_no_path_and_no_list_of_changes_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_job(*arguments)
