"""Samples on which an exported training evaluates: those of the job, whole."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.draft.arguments import read_arguments
from tests.programs.users import JobFile
from tests.values.data import record, write_records
from tests.values.training import plan_of
from trials.plan import Padded

Exported = Callable[..., tuple[dict[str, Any], Path]]
HELD_BY_ALL = plan_of("12+8", data=2, packing=Padded(samples=2))

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write_records(tmp_path / "val.jsonl", *(record(f"Question {number}?", "Yes.") for number in range(8)))


@pytest.mark.parametrize(("sampling", "counts"), [("random:3", {1: 3}), ("exactly:12", {1: 4, 2: 4}), ("all", {1: 8})])
def test_the_samples_of_an_evaluation_are_those_that_the_job_shows(
    sampling: str, counts: dict[int, int], job: JobFile, exported: Exported, questions: Path
) -> None:
    job.spoil(evaluation={"sources": [{"path": str(questions), "sampling": sampling}]})
    _, out = exported("ms-swift", HELD_BY_ALL)
    times = Counter((out / "val.jsonl").read_text().splitlines())
    assert Counter(times.values()) == counts


@pytest.mark.parametrize(("trainer", "key"), [("llama-factory", "cutoff_len"), ("ms-swift", "max_length")])
def test_no_sample_of_an_evaluation_is_cut(
    trainer: str, key: str, job: JobFile, exported: Exported, tmp_path: Path
) -> None:
    def length() -> int:
        return int(read_arguments(exported(trainer, HELD_BY_ALL)[1] / "sft.yaml").values[key])

    usual = length()
    long = write_records(tmp_path / "long.jsonl", record("Why?", " ".join(map(str, range(usual + 500)))))
    job.spoil(evaluation={"sources": [{"path": str(long)}]})
    assert length() > usual + 500
