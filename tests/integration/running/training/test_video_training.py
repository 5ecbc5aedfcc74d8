"""Trainings on videos on real ranks, compared with transformers' own model and torch's AdamW."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from autotune.workload import Prepared
from tests.contracts.test_families import TINY
from tests.values.data import record, write_records
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of, train
from trials import plugins
from trials.data.loader import encode
from trials.data.records.sample import Encoded
from trials.model.family import load_family
from trials.model.skeleton import load_config
from trials.plan import Packed, Plan
from trials.run.pool import WarmPool
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = pytest.mark.ranks

PACKING = Packed(qv=24, qt=240, qv_min=16, qt_min=160)
PLANS = {
    "pipeline": plan_of("3+0r1,0", "1+4r0,2", packing=PACKING),
    "data": plan_of("4+4r1,1", data=2, zero=1, packing=PACKING),
    "packs shared": plan_of("4+4r1,1", data=2, zero=1, packing=replace(PACKING, sequence=2)),
}
LEARNING_RATE = 1e-2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six samples: frames, a folder of frames, a video file, two videos, an image, and text alone."""
    folder, noise = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)

    def frames(name: str, *shape: int) -> list[str]:
        (folder / name).mkdir()
        paths = [f"{name}/{number}.png" for number in range(shape[0])]
        for path in paths:
            Image.fromarray(noise.integers(0, 256, (*shape[1:], 3), dtype=np.uint8)).save(folder / path)
        return paths

    film = frames("film", 5, 30, 44)
    frames("clip", 4, 58, 20)
    with av.open(folder / "file.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=8, options={"g": "1"})
        stream.width, stream.height = 48, 32
        for _ in range(24):
            picture = av.VideoFrame.from_ndarray(noise.integers(0, 256, (32, 48, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return write_records(
        folder / "train.jsonl",
        record("<video>\nWhat is red?", "A circle.", video=[film]),
        record("First <video>", "It is green.", video="clip"),
        record("<video> Why?", "So it is.", video="file.mp4"),
        record("Compare <video> with <video>.", "Both are green.", video=[film[:2], "clip"]),
        record("<image>\nWhat?", "A red circle.", image=film[0]),
        record("What is in the picture?", "Nothing."),
    )


def inputs(config: Any, encoded: Encoded) -> dict[str, Any]:
    """Inputs of transformers' model for videos of 2 frames per second, or for images."""
    ids = torch.from_numpy(encoded.input_ids)
    if encoded.pixel_values is None:
        return {"input_ids": ids[None]}
    films = bool((ids == config.video_token_id).any())
    pixels, grids = ("pixel_values_videos", "video_grid_thw") if films else ("pixel_values", "image_grid_thw")
    return {
        "input_ids": ids[None],
        pixels: torch.from_numpy(encoded.pixel_values).flatten(0, 1),
        grids: torch.from_numpy(encoded.grids),
        "mm_token_type_ids": ((ids == config.image_token_id) + 2 * (ids == config.video_token_id)).int()[None],
        **({"second_per_grid_ts": torch.ones(len(encoded.grids))} if films else {}),
    }


def expected_losses(prepared: Prepared, steps: int) -> list[float]:
    """Losses of transformers' model, trained with all samples one by one in each step."""
    folder = prepared.job.model.path
    config = load_config(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    encoder = load_family(config).encoder(folder)
    samples = [encode(prepared.index, row, encoder, pixels=True) for row in range(len(prepared.index))]
    assert sum(bool((each.input_ids == config.video_token_id).any()) for each in samples) == 4
    targets = sum(int((each.labels[1:] != -100).sum()) for each in samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        losses.append(0.0)
        for sample in samples:
            logits = model(**inputs(config, sample)).logits[0]
            loss = cross_entropy(logits[:-1], torch.from_numpy(sample.labels)[1:], reduction="sum") / targets
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("plan", parameters(PLANS, short=("pipeline",)))
def test_a_training_on_videos_has_the_losses_of_transformers_own_model(
    plan: Plan, shallow: Path, data: Path, pool: WarmPool, tmp_path: Path
) -> None:
    """Workers decode, in processes that are forked from ranks that have decoded some themselves."""
    folder = tmp_path / "model"
    plugins.load(TINY, "qwen2-5-vl").make(folder)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(load_config(str(folder)), dtype=torch.float32).save_pretrained(folder)
    prepared = prepared_of(
        shallow,
        tmp_path,
        model={"path": str(folder), "weights": "pretrained"},
        data={"sources": [{"path": str(data)}], "workers": 1},
        training={"global_batch_samples": 6, "epochs": 4, "learning_rate": LEARNING_RATE, "weight_decay": 0.0},
    )
    report = train(pool, prepared, plan)
    lines = map(json.loads, (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines())
    found = [line["loss"] for line in lines]
    assert report.steps == len(found) == 4
    assert found == pytest.approx(expected_losses(prepared, 4), rel=1e-3)
    assert found[-1] < 0.9 * found[0]
