"""`autotune export` of samples with videos, and of variables that a script gives its trainer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import yaml

from autotune.draft.arguments import read_arguments
from autotune.forecast.forecast import ForecastData
from autotune.forecast.profile_file import ProfiledCosts
from autotune.job_file import load_job
from autotune.model_shape import model_shape
from tests.integration.prediction.test_export import HELD_BY_ALL
from tests.programs.users import JobFile
from tests.tiny_models import qwen2_5_vl
from tests.values.data import record, write_records
from tests.values.training import plan_of
from trials import wire
from trials.plan import Padded, Plan

pytestmark = pytest.mark.usefixtures("home")

Exported = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture
def plan(job: JobFile, profiled: ProfiledCosts, profile: Path, tmp_path: Path) -> Plan:
    """A plan for a job with 12 samples, of which 4 show a video of 3 s."""
    qwen2_5_vl.make(tmp_path / "qwen2.5-vl")
    with av.open(tmp_path / "film.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height = 48, 32
        for _ in range(24):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 48, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    filmed = [record("<video>\nWhat is red?", "A circle.", video="film.mp4")] * 4
    data = write_records(tmp_path / "film.jsonl", *filmed, *[record("What is red?", "Nothing.")] * 8)
    job.spoil(
        model__path=str(tmp_path / "qwen2.5-vl"),
        model__dtype="bfloat16",
        data={"sources": [{"path": str(data)}]},
        training__global_batch_samples=4,
    )
    shape = model_shape(load_job(job.path).model)
    profile.write_text(wire.encode(replace(profiled, model=shape)))
    return plan_of(f"{shape.vision_layers}+{shape.language_layers}", data=2, zero=1, packing=Padded(samples=2))


def settings(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((out / "sft.yaml").read_text())
    return found


def test_ms_swift_gets_the_settings_of_videos_of_the_model_folder(plan: Plan, job: JobFile, exported: Exported) -> None:
    document, out = exported("ms-swift", plan)
    found = settings(out)
    limits = {name: value for name, value in found["ENV"].items() if name.startswith(("FPS", "VIDEO"))}
    edges = {"VIDEO_MIN_PIXELS": str(14 * 14), "VIDEO_MAX_PIXELS": str(14 * 14 * 12)}
    assert limits == {"FPS": "2", "FPS_MIN_FRAMES": "4", "FPS_MAX_FRAMES": "12", **edges}
    longest = int(ForecastData.of(load_job(job.path)).index.text_tokens.max())
    assert found["max_length"] == 2 * longest + 64
    assert any(note.startswith("WARNING: 4 of 12 samples have videos, whose tokens") for note in document["notes"])
    assert any(note.startswith("WARNING: do_sample_frames is true in video_pre") for note in document["notes"])


def test_llama_factory_gets_the_settings_of_videos_and_the_rest_is_named(plan: Plan, exported: Exported) -> None:
    document, out = exported("llama-factory", plan)
    found = {name: value for name, value in settings(out).items() if name.startswith("video")}
    edges = {"video_min_pixels": 14 * 14, "video_max_pixels": 14 * 14 * 12}
    assert found == {"video_fps": 2, "video_maxlen": 12, **edges}
    assert any(
        each.startswith("min_frames: 4 (video_pre") and "4 of 12 samples" in each for each in document["left_out"]
    )


def test_qwen_vl_gets_the_settings_of_its_own_processor(plan: Plan, tmp_path: Path, exported: Exported) -> None:
    document, out = exported("qwen-vl", plan)
    found = {name: value for name, value in read_arguments(out / "sft.sh").values.items() if name.startswith("video")}
    edges = {"video_min_pixels": str(14 * 14), "video_max_pixels": str(14 * 14 * 12)}
    assert found == {"video_fps": "2", "video_min_frames": "4", "video_max_frames": "12", **edges}
    assert not any("do_sample_frames" in note for note in document["notes"])
    file = tmp_path / "qwen2.5-vl" / "video_preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample_frames": False}))
    document, _ = exported("qwen-vl", plan)
    assert any("shows every frame of a video there: 4 of 12 samples" in note for note in document["notes"])


def test_variables_of_a_script_are_kept_or_named(exported: Exported, tmp_path: Path) -> None:
    file = tmp_path / "own.sh"
    file.write_text(
        "export FPS=1 WANDB_API_KEY=secret\nVIDEO_MIN_PIXELS=3136 MAX_PIXELS=50176\nexport MAX_PIXELS\n"
        "NPROC_PER_NODE=2 VIDEO_MAX_PIXELS=37632 \\\n"
        "FPS_MAX_FRAMES=$1 swift sft --model m --dataset d --train_type full\n"
    )
    document, out = exported("ms-swift", HELD_BY_ALL, "--from", file)
    kept = {"FPS": "1", "VIDEO_MAX_PIXELS": "37632", "MAX_PIXELS": "50176"}
    assert kept.items() <= settings(out)["ENV"].items()
    assert "VIDEO_MIN_PIXELS" not in settings(out)["ENV"]
    (named,) = (note for note in document["notes"] if note.startswith("Not kept of the variables of the script; "))
    assert named.endswith("is started: FPS_MAX_FRAMES, WANDB_API_KEY")
    assert "secret" not in (out / "sft.yaml").read_text() + str(document)


def test_a_setting_of_videos_that_is_another_than_the_folder_s_is_named(
    plan: Plan, exported: Exported, tmp_path: Path
) -> None:
    file = tmp_path / "own.sh"
    file.write_text("FPS=1 FPS_MAX_FRAMES=12 swift sft --model m --dataset d --train_type full\n")
    document, _ = exported("ms-swift", plan, "--from", file)
    (named,) = (note for note in document["notes"] if "other values than the model folder" in note)
    assert "(FPS: 1 for 2)" in named


def test_limits_of_a_configuration_that_those_of_the_folder_replace_are_named(
    plan: Plan, exported: Exported, tmp_path: Path
) -> None:
    file = tmp_path / "own.yaml"
    stated = {"video_fps": 1.0, "video_maxlen": 12, "video_max_pixels": 512}
    own = {"stage": "sft", "model_name_or_path": "m", "dataset": "d", "finetuning_type": "full", **stated}
    file.write_text(yaml.safe_dump(own))
    document, _ = exported("llama-factory", plan, "--from", file)
    (named,) = (note for note in document["notes"] if "replaced by values of the model folder" in note)
    assert f"belong: video_fps: 1.0 by 2, video_max_pixels: 512 by {14 * 14 * 12}; write" in named
