"""What `doctor` says of a job before it is searched."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForImageTextToText

from autotune.cli import main
from tests.programs.users import JobFile
from tests.tiny_models import qwen2_5_vl


def said(*arguments: str | Path) -> str:
    answer = CliRunner().invoke(main, ["doctor", *map(str, arguments)])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


pytestmark = pytest.mark.usefixtures("devices_in_use")


def test_the_doctor_shows_the_model_and_the_lengths_of_a_job(job: JobFile, example: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    answers = ["yes", "no and " * 200, "maybe"]
    turns = [[{"from": "human", "value": "so?"}, {"from": "gpt", "value": answer}] for answer in answers]
    file.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in turns))
    job.spoil(data={"sources": [{"path": str(file)}]})
    found = json.loads(said("--json", job.path))
    lengths = found["data"]["lengths"]
    assert lengths["most_vision_units"] == 0
    assert lengths["most_text_tokens"] > lengths["mean_text_tokens"] > 64 > lengths["half_have_at_most"]
    assert 0.5 < lengths["target_share"] < 1
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(example / "model"))
    assert sum(found["parameters"].values()) == model.num_parameters()
    assert found["parameters"]["vision"] == model.model.vision_tower.num_parameters()
    shown = said(job.path)
    assert f"language {found['parameters']['language']:,}; " in shown
    assert f"half of the samples at most {lengths['half_have_at_most']}, the longest " in shown


def test_the_samples_of_an_epoch_are_traced_to_the_records(
    job: JobFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "train.jsonl"
    answers = ["yes", "no and " * 200, "maybe", "no", "well", "why", "so"]
    turns = [[{"from": "human", "value": "so?"}, {"from": "gpt", "value": answer}] for answer in answers]
    file.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in (*turns, [])))
    source = {"path": str(file), "sampling": "first:6", "repeat": 0.5}
    job.spoil(data={"sources": [source], "oversize": "truncate", "max_tokens": 200}, evaluation={"samples": 2})
    answer = CliRunner().invoke(main, ["doctor", str(job.path)])
    origin = (
        "2 samples an epoch (8 records: 1 that cannot be used, 1 left out by `sampling`, 2 held out, 4 to train on; "
        "train.jsonl shown 0.5 times)"
    )
    assert f"Data      {origin}, 2 of them without images" in answer.stdout
    assert "1 of 6 samples has 200 tokens: longer ones are cut to that" in caplog.text
    packed = CliRunner().invoke(main, ["pack", str(job.path), "--qv", "9", "--qt", "500", "--data-parallel", "1"])
    assert f"\n{origin}\n" in packed.stdout


def test_the_doctor_names_the_least_memory_and_a_limit_below_it(job: JobFile) -> None:
    """Trained in float32: a weight, its gradient and two moments; frozen: the weight."""
    found = json.loads(said("--json", job.path))
    counts, trained = found["parameters"], found["least_memory"]["bytes"]
    assert found["least_memory"]["layout"] == "p2-d1-z0"
    assert trained > 16 * sum(counts.values()) / 2
    for off, says in ((-1, True), (0, False)):
        job.spoil(hardware__memory_limit=f"{trained + off}B")
        findings = json.loads(said("--json", job.path))["findings"]
        assert any("for the longest sample the leanest layout" in each["what"] for each in findings) == says
    job.spoil(hardware__memory_limit="2GiB", training__freeze=["language"])
    frozen = json.loads(said("--json", job.path))["least_memory"]["bytes"]
    # A stage of the language model alone may need most, and may hold its half.
    assert trained - frozen > 12 * counts["language"] / 4


def test_layouts_that_only_a_profile_knows_have_no_least_memory(job: JobFile) -> None:
    job.spoil(search__space={"layouts": ["p1-d1-t2-z0"]})
    assert json.loads(said("--json", job.path))["least_memory"] is None
    assert "; the memory that a rank needs at least is known once `autotune profile JOB` has run\n" in said(job.path)


def test_the_doctor_shows_what_decides_on_videos_and_names_settings_that_nothing_reads(
    job: JobFile, tmp_path: Path
) -> None:
    qwen2_5_vl.make(tmp_path / "qwen")
    job.spoil(model__path=str(tmp_path / "qwen"))
    line = "\nVideos    2 fps, 4 to 12 frames, 196 to 2,352 pixels a frame, from video_preprocessor_config.json\n"
    shown = said(job.path)
    assert line in shown
    assert "that nothing reads" not in shown
    file = tmp_path / "qwen" / "video_preprocessor_config.json"
    wrong = {"fps_max_frames": 12, "FPS": 2, "video_max_pixels": 37632}
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    found = json.loads(said("--json", job.path))
    assert found["videos"]["max_frames"] == 12
    (finding,) = (each for each in found["findings"] if "that nothing reads" in each["what"])
    assert finding["what"].endswith("that nothing reads: FPS, fps_max_frames, video_max_pixels")
    assert "max_frames, " in finding["remedy"]
    file.unlink()
    assert "pixels a frame, from preprocessor_config.json\n" in said(job.path)
