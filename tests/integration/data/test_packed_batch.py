"""The samples of a step of a trainer that packs, which `init --from` finds in the job's own data."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune import pack
from autotune.cli import main
from autotune.job_file import load_job
from tests.values.data import record, write_records

SCRIPT = """
NPROC_PER_NODE=2 swift sft --model MODEL --dataset DATA --packing true --max_length 700 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --freeze_vit false
"""


@pytest.mark.parametrize("is_here", [True, False], ids=["with the model", "without the model"])
def test_a_batch_of_packs_becomes_one_of_samples(
    is_here: bool, example: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = example / "model" if is_here else tmp_path / "none"
    data = example / "data" / "train.jsonl"
    Path("run.sh").write_text(SCRIPT.replace("MODEL", str(model)).replace("DATA", str(data)))
    answer = CliRunner().invoke(main, ["init", "--from", "run.sh", "--devices", "2", "--out", "job.yaml"])
    assert answer.exit_code == 0, answer.output
    assert "A step has 8 packs: 2 per device x 2 accumulation steps x 2 devices" in answer.output
    job = load_job("job.yaml")
    if not is_here:
        assert job.training.global_batch_samples == 8
        assert (
            "counts packs until you multiply it by that mean, which `autotune pack JOB` shows for --qt 700"
            in answer.output
        )
        return
    packs = pack(job, qt=700, qv=1 << 20, packer="best-fit", data_parallel=1, global_batch=1).after.epoch.packs
    found = re.search(r"hold (\d+\.\d) on average, so training.global_batch_samples is (\d+)", answer.output)
    assert found is not None
    assert float(found[1]) == pytest.approx(packs.counts.mean(), abs=0.05)
    assert job.training.global_batch_samples == int(found[2]) == pytest.approx(8 * float(found[1]), abs=0.5)


@pytest.mark.usefixtures("home")
def test_no_batch_is_made_of_the_text_that_is_left_where_images_are_lost(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    shown, asked = record("<image>What?", "A box.", image="gone.png"), record("Who?", "Ada.")
    data = write_records(tmp_path / "train.jsonl", shown, asked)
    Path("run.sh").write_text(SCRIPT.replace("MODEL", str(example / "model")).replace("DATA", str(data)))

    def written(out: str) -> str:
        answer = CliRunner().invoke(main, ["init", "--from", "run.sh", "--devices", "2", "--out", out])
        assert answer.exit_code == 0, answer.output
        return answer.output

    text = written("lost.yaml")
    assert "is not known here (no image or video is left to train on: 1 of 1 record with some cannot be used" in text
    assert load_job("lost.yaml").training.global_batch_samples == 8
    whole = record("<image>What?", "A box.", image=str(example / "data" / "images" / "000000-0.png"))
    write_records(data, shown, asked, whole)
    assert "Packs of the 2 samples hold 2.0 on average" in written("left.yaml")
    assert caplog.messages[-1].startswith("1 of 3 dataset lines are skipped")
