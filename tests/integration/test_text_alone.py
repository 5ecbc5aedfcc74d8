"""The command line with a model for text alone: pack, tune, predict, launch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.cli import main
from tests.tiny_models import text
from tests.values.training import job_of, plan_of, prepared_of
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = pytest.mark.ranks

SEARCH = {"trials": 4, "time_limit": "90s", "warmup_steps": 0, "timed_steps": 1, "confirm_rounds": 1}
SHOWN = 5
"""Line of the one record with an image."""

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def job(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job on the example's conversations, of which one shows an image."""
    folder = tmp_path_factory.mktemp("text")
    text.make_kind(folder / "model", "qwen3", tie_word_embeddings=True)
    (folder / "data").mkdir()
    records = [json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()[:33]]
    for number, record in enumerate(records, 1):
        first = record["conversations"][0]
        first["value"] = first["value"].replace("<image>\n", "")
        record.pop("image", None)
        if number == SHOWN:
            record["image"] = str(next((example / "data" / "images").iterdir()))
            first["value"] = f"<image>\n{first['value']}"
    (folder / "data" / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    path = folder / "job.yaml"
    job = job_of(folder, folder / "output", search=SEARCH)
    path.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    return path


@pytest.fixture
def run(job: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("AUTOTUNE_DB_URL", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(job.parent / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(job.parent / "cache"))

    def run(command: str, *options: str) -> dict[str, Any]:
        answer = CliRunner().invoke(main, [command, str(job), *options, "--json"])
        assert answer.exit_code == 0, answer.stderr
        document: dict[str, Any] = json.loads(answer.stdout)
        return document

    return run


def test_its_data_are_packed_and_a_record_with_an_image_is_left_out(run: Run, job: Path) -> None:
    packed = run("pack", "--plot", str(job.parent / "packs.svg"))
    (refused,) = packed["bad_lines"]
    assert refused.startswith(f"{job.parent / 'data' / 'train.jsonl'}:{SHOWN}: the conversation shows images, but")
    assert packed["after"]["samples"] == 32
    assert (packed["before"]["dist_ratio_vision"], packed["after"]["dist_ratio_vision"]) == (0, 0)
    assert packed["after"]["cost_per_sample"] < packed["before"]["cost_per_sample"]


@pytest.mark.long
def test_it_is_tuned_predicted_and_trained(run: Run, job: Path) -> None:
    tuned = run("tune")
    usual, others = {"packed", "default", "omnibal"}, {"hbp"}  # HBP's where the profile says levels help
    assert usual <= {baseline["role"] for baseline in tuned["baselines"]} <= usual | others
    assert sum(stage["language"] for stage in tuned["plan"]["stages"]) == 4

    predicted = run("predict", "--plot", str(job.parent / "step.svg"))
    assert predicted["plans"][0]["keeps_batch"]
    assert predicted["plans"][0]["fits"]

    profiled = run("profile")
    timed = {kind for kind, costs in profiled["at_typical_pack"].items() if costs["forward_seconds"] > 0}
    assert timed == {"projector", "language", "head"}

    stopped = run("launch", "--steps", "2")
    assert (stopped["steps"], stopped["finished"]) == (2, False)
    trained = run("launch")
    assert trained["finished"]
    losses = [json.loads(line)["loss"] for line in (job.parent / "output" / PROGRESS_FILE).read_text().splitlines()]
    assert losses[-1] < losses[0]
    check_whole(trained["model"])
    assert AutoTokenizer.from_pretrained(trained["model"]).chat_template


@pytest.mark.long
def test_a_model_with_experts_is_trained_in_stages(job: Path, pool: WarmPool, tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(job.parent / "data")
    text.make_kind(tmp_path / "model", "qwen3_moe", mlp_only_layers=[1])
    prepared = prepared_of(tmp_path, tmp_path / "run")
    request = prepared.request(plan_of("0+2r0,1", "0+2"), Training(output=prepared.job.training.output))
    answer = pool.ask(request, 180)
    assert isinstance(answer, Answers), answer
    (report, *_) = answer.reports
    assert isinstance(report, TrainingReport)
    assert report.finished
    check_whole(str(report.model))


def check_whole(model: str) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    _, loading = loaded
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
