"""Samples that can no longer be read when ranks come to them, on this machine or on another node."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from autotune.errors import PlanFailed, TrialsKeepFailing
from autotune.search.execution.profiling import profile_layers
from autotune.training.full_training import Launched, launch
from autotune.workload import Prepared
from storage.spool import Spool
from storage.store import open_store
from tests.integration.models.layouts.test_sharing import compared
from tests.machines.own_ranks import on_ranks
from tests.values.training import PACKED, plan_of, prepared_of, train
from trials.certification import Reference
from trials.data.tokens import PackTokens
from trials.engine.group import process_group
from trials.errors import DataError
from trials.model.features import join_text
from trials.outcome import Crash
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.sharing.group import join_groups
from trials.sites.local import LocalSite
from trials.tasks.answer import TrainingReport, TrialReport
from trials.tasks.request import Training, Trial
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = pytest.mark.ranks

PIPELINE = plan_of("3+0r1,0", "1+2")
EVERY_STEP = {"global_batch_samples": 24, "checkpoint_every": 1}


def job_with_pictures(
    shallow: Path, folder: Path, *, evaluation: bool = False, devices: int = 2, **data: Any
) -> tuple[Prepared, Path]:
    """Return a job of two steps with a checkpoint after each, and a picture of its first pack, to be damaged.

    With `evaluation` it evaluates on the samples that it trains on, after each step.
    """
    shutil.copytree(shallow / "data", folder / "data")
    sources = [{"path": str(folder / "data" / "train.jsonl")}]
    sections = {"evaluation": {"sources": sources, "every": 1}} if evaluation else {}
    prepared = prepared_of(
        shallow,
        folder,
        data={"sources": sources, **data},
        training=EVERY_STEP,
        hardware={"devices": devices},
        **sections,
    )
    first = prepared.epoch(PIPELINE.packing, PIPELINE.layout.data).step(0).packs[0][0]
    picture = next(image for row in first.tolist() for image in prepared.index.sample(row).images)
    assert isinstance(picture, Path)
    return prepared, picture


def launch_in(folder: Path, prepared: Prepared, plan: Plan = PIPELINE, **options: Any) -> Launched:
    """Launch the two steps."""
    with open_store(f"sqlite:///{folder / 'known.db'}") as store:
        return launch(
            prepared,
            plan,
            store,
            Spool(folder / "spool"),
            folder / "launches",
            site=LocalSite("cpu"),
            promised_samples_per_second=None,
            max_steps=2,
            **options,
        )


def damage(picture: Path) -> None:
    content = picture.read_bytes()
    picture.write_bytes(content[:60] + bytes(len(content) - 80) + content[-20:])


def test_an_image_that_is_damaged_later_does_not_end_the_training(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared, picture = job_with_pictures(shallow, tmp_path)
    damage(picture)
    answer = pool.ask(prepared.request(PIPELINE, Training(output=prepared.job.training.output)), 120)
    assert isinstance(answer, Answers), answer
    reports = [report for report in answer.reports if isinstance(report, TrainingReport)]
    assert [report.finished for report in reports] == [True, True]
    # Both stages leave out the same samples. The checks before the checkpoints read the first pack again.
    showing = sum(picture in prepared.index.sample(row).images for row in range(48))
    assert [report.blank_samples for report in reports] == [showing, showing]
    assert sum(step.blank_samples for step in steps_of(prepared)) == showing


def test_a_launch_warns_at_the_first_samples_that_cannot_be_read(
    shallow: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, picture = job_with_pictures(shallow, tmp_path)
    damage(picture)
    warned_at: list[int] = []

    def on_step(_: str, progress: Progress) -> None:
        warned_at.extend([progress.step] * any("replaced by" in record.message for record in caplog.records))

    launch_in(tmp_path, prepared, on_step=on_step)
    assert warned_at == [1, 2]
    assert "until step 1, 1 sample could not be read and was replaced by a blank one (the first: " in caplog.text
    assert f"image {picture} cannot be" in caplog.text


HIDES_FROM_RANKS = """
import json
import os
from pathlib import Path

opened = Path.open

def open_here(self, *arguments, **options):
    with open(Path(__file__).with_name("lost.json")) as file:
        lost = json.load(file)
    if str(self) in lost.get(os.environ.get("RANK"), ()):
        raise FileNotFoundError(2, "No such file or directory", str(self))
    return opened(self, *arguments, **options)

Path.open = open_here
"""
"""A `sitecustomize` for Python processes: ranks are on nodes that lack pictures."""
SHARED = plan_of("4+2", data=2, packing=replace(PACKED, sequence=2))
Hide: TypeAlias = Callable[[Mapping[str, Sequence[object]]], None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of Python modules for ranks that lack pictures."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(HIDES_FROM_RANKS)
    return folder


@pytest.fixture
def hide(site: Path, monkeypatch: pytest.MonkeyPatch) -> Hide:
    """Hide pictures from ranks by their number."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    # A text that no other test has, so that these ranks have a fork server of their own, with this path.
    monkeypatch.setenv("OMP_NUM_THREADS", "0001")

    def hide(lost: Mapping[str, Sequence[object]]) -> None:
        (site / "lost.json").write_text(json.dumps({rank: [*map(str, pictures)] for rank, pictures in lost.items()}))

    hide({})
    return hide


def pictures_of_packs(prepared: Prepared, plan: Plan) -> list[list[object]]:
    """Return the pictures of each pack of the first step that shows some."""
    packs = [pack for of_rank in prepared.epoch(plan.packing, plan.layout.data).step(0).packs for pack in of_rank]
    shown = [[image for row in pack.tolist() for image in prepared.index.sample(row).images] for pack in packs]
    return [[*pictures] for pictures in shown if pictures]


def steps_of(prepared: Prepared) -> list[Progress]:
    lines = read_lines(prepared.job.training.output / PROGRESS_FILE)
    return [line for line in lines if isinstance(line, Progress)]


@pytest.mark.parametrize("plan", [PIPELINE, SHARED])
def test_samples_that_some_ranks_alone_cannot_read_are_counted(
    plan: Plan, shallow: Path, hide: Hide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, _ = job_with_pictures(shallow, tmp_path)
    shown = [prepared.index.sample(row).images for row in range(len(prepared.index))]
    # Of two packs of one step, so that the count is not the highest of the ranks.
    picture, other = [pictures[0] for pictures in pictures_of_packs(prepared, plan)][:2]
    # Ranks that share a pack have to read the same samples of it.
    of_ranks = {"0": [picture], "1": [other]} if plan is PIPELINE else {"0": [picture, other], "1": [picture, other]}
    hide(of_ranks)
    launched = launch_in(tmp_path, prepared, plan)
    showing = sum(picture in images or other in images for images in shown)
    assert launched.blank_samples == sum(step.blank_samples for step in steps_of(prepared)) == showing
    assert f"{showing} sample" in caplog.text


def test_an_answer_counts_nothing_where_the_first_stage_alone_cannot_read_the_image(
    shallow: Path, hide: Hide, pool: WarmPool, tmp_path: Path
) -> None:
    found = dict[str, list[float]]()
    for without in ("none", "first", "both"):
        prepared, picture = job_with_pictures(shallow, tmp_path / without, evaluation=True)
        if without == "first":
            hide({"0": [picture]})
            launch_in(tmp_path / without, prepared)
        else:
            if without == "both":
                damage(picture)
            train(pool, prepared, PIPELINE)
        lines = read_lines(prepared.job.training.output / PROGRESS_FILE)
        found[without] = [line.loss if isinstance(line, Progress) else line.evaluation_loss for line in lines]
    assert len(found["none"]) == 4
    assert found["first"] == found["both"]
    assert all(one != other for one, other in zip(found["none"], found["both"], strict=True))
    # Random weights predict all tokens alike, so the mean over the other samples is nearly that over all.
    first = prepared.epoch(PIPELINE.packing, 1).step(0).targets
    assert found["both"][0] == pytest.approx(found["none"][0], rel=first.min() / first.sum() / 4)


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (SHARED, {"0": 0, "1": 1}),
        # The last stage, whose ranks have labels alone.
        (plan_of("4+0", "0+2", data=2, packing=replace(PACKED, sequence=2)), {"3": 0}),
    ],
    ids=["one stage", "last stage"],
)
def test_ranks_that_share_a_pack_and_read_different_samples_end_with_a_remedy(
    plan: Plan, lost: Mapping[str, int], shallow: Path, hide: Hide, tmp_path: Path
) -> None:
    prepared, _ = job_with_pictures(shallow, tmp_path, devices=plan.layout.world_size)
    first, *_ = (pictures for pictures in pictures_of_packs(prepared, plan) if len(set(pictures)) > 1)
    hide({rank: [first[place]] for rank, place in lost.items()})
    with pytest.raises(PlanFailed, match="ranks that share a pack have read different samples of it"):
        launch_in(tmp_path, prepared, plan)


def test_ranks_that_share_a_pack_of_text_have_to_read_the_same_samples(tmp_path: Path) -> None:
    for reason in on_ranks(reason_of_other_text, tmp_path / "ranks"):
        assert "ranks that share a pack have read different samples of it" in reason


def reason_of_other_text(file: Path) -> str:
    """Join a pack of text of which this rank has other tokens than the other one; return the error."""
    rank = int(os.environ["RANK"])
    ids = torch.arange(4) + rank
    tokens = PackTokens(input_ids=ids, positions=ids[None], lengths=(4,), grids=torch.zeros(0, 0, dtype=torch.int64))
    model: Any = SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(8, 2))
    with process_group(rank, rank, 2, f"file://{file}.rendezvous"):
        try:
            join_text(model, (), tokens, join_groups([range(2)], rank))
        except DataError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("lost", ["all images", "images of a file", "a file"])
def test_a_training_whose_files_are_lost_ends_before_its_first_step(
    shallow: Path, pool: WarmPool, tmp_path: Path, lost: str
) -> None:
    prepared, _ = job_with_pictures(shallow, tmp_path)
    other = tmp_path / "data" / "other.jsonl"
    if lost != "all images":
        records = (tmp_path / "data" / "train.jsonl").read_text().splitlines(keepends=True)
        other.write_text("".join([record for record in records if '"image"' in record][:8]))
        sources = [{"path": str(other)}, {"path": str(tmp_path / "data" / "train.jsonl")}]
        prepared = prepared_of(shallow, tmp_path / "two", data={"sources": sources}, training=EVERY_STEP)
    index = prepared.index
    if lost == "a file":
        other.write_text("{}\n")
    else:
        rows = range(len(index)) if lost == "all images" else range(8)
        for picture in {image for row in rows for image in index.sample(row).images}:
            assert isinstance(picture, Path)
            picture.unlink()
    answer = pool.ask(prepared.request(PIPELINE, Training(output=prepared.job.training.output)), 120)
    assert isinstance(answer, Crash), answer
    name = "train" if lost == "all images" else "other"
    assert re.search(
        rf"4 of 4 samples of \S+{name}\.jsonl that were tried cannot be read, the last one: ", answer.detail
    )
    assert "restore the files on this machine, and run the same command again" in answer.detail
    assert not (prepared.job.training.output / PROGRESS_FILE).exists()


def test_a_training_that_has_ended_needs_no_files_of_the_data(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    prepared, _ = job_with_pictures(shallow, tmp_path)
    assert train(pool, prepared, PIPELINE).finished
    for picture in {image for row in range(48) for image in prepared.index.sample(row).images}:
        assert isinstance(picture, Path)
        picture.unlink()
    assert train(pool, prepared, PIPELINE).finished


def test_a_profile_whose_files_are_lost_ends_before_layers_are_timed(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared, _ = job_with_pictures(shallow, tmp_path)
    for picture in {image for row in range(48) for image in prepared.index.sample(row).images}:
        assert isinstance(picture, Path)
        picture.unlink()
    with pytest.raises(
        TrialsKeepFailing, match=r"4 of 4 samples of \S+train\.jsonl that were tried cannot be read, the last one: "
    ):
        profile_layers(prepared, pool, tmp_path)


def test_a_trial_counts_the_samples_that_it_could_not_read(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    prepared, picture = job_with_pictures(shallow, tmp_path)
    damage(picture)
    answer = pool.ask(prepared.request(PIPELINE, Trial(warmup_steps=(0,), timed_steps=(1,))), 120)
    assert isinstance(answer, Answers), answer
    showing = sum(picture in prepared.index.sample(row).images for row in range(48))
    reports = [report for report in answer.reports if isinstance(report, TrialReport)]
    assert [report.blank_samples for report in reports] == [showing] * 2
    assert all(str(picture) in report.blank_reason for report in reports)


@pytest.mark.parametrize("reference", ["transformers", "stages"])
def test_a_plan_is_certified_on_the_samples_that_can_be_read(
    reference: Reference, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared, picture = job_with_pictures(shallow, tmp_path)
    damage(picture)
    step = compared(prepared, PIPELINE, pool, reference)
    assert step.blank_samples > 0
    assert step.loss is not None
    assert step.loss.found == pytest.approx(step.loss.expected, rel=1e-5)
    assert all(part.difference < 1e-4 for part in step.parts)


@pytest.mark.long
def test_an_image_that_was_trained_on_and_is_then_damaged_prevents_no_checkpoint(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared, picture = job_with_pictures(shallow, tmp_path, on_error="fail")
    train(pool, prepared, PIPELINE, max_steps=1)
    damage(picture)
    report = train(pool, prepared, PIPELINE)
    assert (report.steps, report.finished, report.blank_samples) == (2, True, 0)
