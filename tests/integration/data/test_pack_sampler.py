"""Batch samplers of packs: the steps of a launch, for a loop of one's own."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader

from autotune import EvenPackSampler, PackSampler, SampleDataset
from autotune.errors import PackError
from autotune.workload import Prepared, prepare
from tests.values.training import PACKED, job_of, plan_of
from trials import wire
from trials.data.records.sample import IGNORED, Encoded
from trials.errors import DataError
from trials.plan import Padded, Plan

PLAN = plan_of("9+0", "3+8", data=2)
PADDED = Plan(packing=Padded(samples=3), layout=PLAN.layout, stages=PLAN.stages)


@pytest.fixture(scope="module")
def folder(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's data with two records that cannot be used."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "model").symlink_to(example / "model")
    (folder / "data").mkdir()
    (folder / "data" / "images").symlink_to(example / "data" / "images")
    lines = (example / "data" / "train.jsonl").read_text().splitlines()
    lines[2:2] = ['{"id": "broken"}', "no JSON"]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lengths are kept in a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def prepared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The job as a launch prepares it."""
    return prepare(job_of(folder, folder / "output", training={"epochs": 3}), tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def samples(prepared: Prepared) -> SampleDataset:
    return SampleDataset(prepared.job)


@pytest.mark.parametrize("plan", [PLAN, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_the_packs_of_all_ranks_are_those_of_a_launch(
    plan: Plan, epoch: int, prepared: Prepared, samples: SampleDataset
) -> None:
    expected = prepared.epoch(plan.packing, 2, epoch)
    steps = [expected.step(number) for number in range(expected.steps)]
    for rank in range(2):
        sampler = PackSampler(samples, plan, rank=rank, ranks=2)
        sampler.set_epoch(epoch)
        packs = [rows.tolist() for step in steps for rows in step.packs[rank]]
        assert list(sampler) == list(sampler) == packs
        assert len(sampler) == len(packs)
        assert [(each.number, each.packs, each.samples, each.target_tokens) for each in sampler.steps] == [
            (number, len(step.packs[rank]), step.samples, step.target_tokens) for number, step in enumerate(steps)
        ]


def test_a_loader_without_packs_shows_each_sample_once_where_some_records_are_not_trained_on(
    samples: SampleDataset, folder: Path
) -> None:
    assert (len(samples), samples.records) == (48, 50)
    assert samples.index.record.tolist() == [0, 1, *range(4, 50)]
    records = (folder / "data" / "train.jsonl").read_text().splitlines()
    images = [len(json.loads(records[number]).get("image", "")) > 0 for number in samples.index.record]
    assert [sample.pixel_values is not None for sample in samples] == images
    loader: DataLoader[Encoded] = DataLoader(samples, shuffle=True, batch_size=None, collate_fn=lambda sample: sample)
    shown = sorted(sample.input_ids.tolist() for sample in loader)
    assert shown == sorted(sample.input_ids.tolist() for sample in samples)
    for number in (48, -1):
        with pytest.raises(IndexError, match=f"sample {number} is not one of the 48 that are trained on"):
            samples[number]


def test_held_out_samples_are_in_no_pack(folder: Path, prepared: Prepared) -> None:
    job = job_of(folder, folder / "output", evaluation={"samples": 8})
    numbers = [number for pack in PackSampler(SampleDataset(job), PACKED) for number in pack]
    assert len(numbers) == len(set(numbers)) == 40


def test_an_epoch_goes_on_from_a_stored_state(samples: SampleDataset) -> None:
    whole = PackSampler(samples, PLAN, rank=1, ranks=2)
    whole.set_epoch(1)
    packs = list(whole)
    state = json.loads(json.dumps(whole.state_dict(1)))
    other = PackSampler(samples, PLAN, rank=1, ranks=2)
    other.load_state_dict(state)
    done = sum(step.packs for step in whole.steps[:2])
    assert (other.epoch, list(other), len(other)) == (1, packs[done:], len(packs) - done)
    assert other.steps == whole.steps[2:]
    last = whole.state_dict(len(whole.steps) - 1)
    other.load_state_dict(last)
    assert list(other) == []


def test_a_loop_over_epochs_goes_on_from_a_stored_state(samples: SampleDataset) -> None:
    whole, other = (PackSampler(samples, PLAN, ranks=2) for _ in range(2))
    expected = []
    for epoch in range(1, 3):
        whole.set_epoch(epoch)
        skipped = whole.steps[0].packs if epoch == 1 else 0
        expected += list(whole)[skipped:]
    whole.set_epoch(1)
    other.load_state_dict(whole.state_dict(0))
    found = []
    for epoch in range(other.epoch, 3):
        other.set_epoch(epoch)
        found += list(other)
    assert found == expected
    other.set_epoch(1)
    assert list(other) == list(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 99), r"epoch 1 has \d+ steps, so none begins after 99"),
        ((1, -1), r"epoch 1 has \d+ steps, so none begins after -1"),
        ((-1,), "epoch must be a whole number of at least 0, not -1"),
        (("1",), "epoch must be a whole number of at least 0, not '1'"),
    ],
)
def test_an_epoch_or_step_that_does_not_exist_is_refused(
    arguments: tuple[int, ...], message: str, samples: SampleDataset
) -> None:
    sampler = PackSampler(samples, PLAN, ranks=2)
    packs = list(sampler)
    with pytest.raises(PackError, match=message):
        sampler.set_epoch(*arguments)
    assert list(sampler) == packs


def test_the_state_of_an_older_version_is_taken(samples: SampleDataset) -> None:
    for plan, packing in (
        (PLAN, '{"qv":10,"qt":500,"qv_min":10,"qt_min":400,"packer":"isf","kind":"packed"}'),
        (PADDED, '{"samples":3,"kind":"padded"}'),
    ):
        assert PackSampler(samples, plan, ranks=2).state_dict(0)["packing"] == packing


def test_a_state_of_other_data_or_packs_is_refused(samples: SampleDataset, folder: Path) -> None:
    state = PackSampler(samples, PLAN, ranks=2).state_dict(0)
    with pytest.raises(PackError, match="the state is not of these packs: ranks was 2 and is 1; restore what changed"):
        PackSampler(samples, PLAN).load_state_dict(state)
    with pytest.raises(PackError, match=r"packing was .*qv.* and is .*padded"):
        PackSampler(samples, PADDED, ranks=2).load_state_dict(state)
    source = {"path": str(folder / "data" / "train.jsonl"), "sampling": "first:40"}
    fewer = SampleDataset(job_of(folder, folder / "output", data={"sources": [source]}))
    with pytest.raises(PackError, match=r"the state is not of these packs: data was '.*' and is '.*'"):
        PackSampler(fewer, PLAN, ranks=2).load_state_dict(state)
    first, rest = (
        {"path": str(folder / "data" / "train.jsonl"), "sampling": sampling} for sampling in ("first:24", "end:24")
    )
    apart = SampleDataset(job_of(folder, folder / "output", data={"sources": [first, rest]}))
    assert apart.index.digest == samples.index.digest  # the same lengths, but each source is spread over the steps
    with pytest.raises(PackError, match=r"the state is not of these packs: data was '.*' and is '.*'"):
        PackSampler(apart, PLAN, ranks=2).load_state_dict(state)
    with pytest.raises(PackError, match="data was None"):
        PackSampler(samples, PLAN, ranks=2).load_state_dict({})


@pytest.mark.parametrize("step", [-1, 999, True, "3"])
def test_a_step_that_does_not_exist_has_no_state(step: Any, samples: SampleDataset) -> None:
    with pytest.raises(PackError, match=r"epoch 0 has no step .*, only \d+ steps, counted from 0; give the `number`"):
        PackSampler(samples, PLAN).state_dict(step)


def test_values_of_another_type_are_refused(samples: SampleDataset) -> None:
    with pytest.raises(PackError, match="a state is what `state_dict` returned, not NoneType"):
        PackSampler(samples, PLAN).load_state_dict(cast("Any", None))
    with pytest.raises(PackError, match="sampler must be a PackSampler, not list"):
        EvenPackSampler(cast("Any", [1]), 1)


def test_steps_of_more_ranks_that_miss_the_global_batch_are_told_once(
    samples: SampleDataset, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = Padded(samples=2)
    for ranks in (2, 8):
        for rank in range(ranks):
            PackSampler(samples, pairs, rank=rank, ranks=ranks)
    (warning,) = caplog.messages
    assert warning.startswith("a step of 8 ranks has 16 samples on average, but training.global_batch_samples is 8: ")


def test_a_state_waits_for_the_loop(samples: SampleDataset) -> None:
    whole, other = (PackSampler(samples, PLAN, ranks=2) for _ in range(2))
    whole.set_epoch(1)
    other.load_state_dict(whole.state_dict(1))
    next(iter(other))
    for _ in range(2):
        other.set_epoch(1)
        assert other.steps == whole.steps[2:]
    list(other)
    other.set_epoch(1)
    assert other.steps == whole.steps
    other.load_state_dict(whole.state_dict(1))
    with pytest.raises(PackError, match=r"epoch 0 is set after epoch 1, .* if the loop goes back, give the first step"):
        other.set_epoch(0)
    other.set_epoch(0, 0)
    assert other.epoch == other.steps[0].number == 0


@pytest.mark.parametrize("resumes", [False, True])
def test_a_loader_that_sets_another_epoch_than_the_loop_is_refused(resumes: bool, samples: SampleDataset) -> None:
    sampler, numbers = PackSampler(samples, PLAN, ranks=2), list(range(50))
    if resumes:
        sampler.set_epoch(1)
        sampler.load_state_dict(sampler.state_dict(0))
    loader = prepare_data_loader(DataLoader(numbers, batch_sampler=sampler, collate_fn=list), put_on_device=False)  # type: ignore[arg-type]

    def train() -> None:
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            batches = iter(loader)
            for pack in list(copy.copy(sampler)):
                assert next(batches) == pack

    with pytest.raises(PackError, match=r"epoch 0 is set after epoch 1, .* do not let accelerate prepare the loader"):
        train()


def test_the_packs_of_a_rank_are_not_distributed_again(samples: SampleDataset) -> None:
    sampler = PackSampler(samples, PLAN, ranks=2)
    for packs in (sampler, EvenPackSampler(sampler, 2)):
        loader = DataLoader(list(range(50)), batch_sampler=packs, collate_fn=list)  # type: ignore[arg-type,var-annotated]
        with pytest.raises(PackError, match="packs have no batch size, and a sampler has those of one rank alone"):
            prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)
        assert list(skip_first_batches(loader, 3)) == list(packs)[3:]  # as a Trainer that resumes


def test_every_step_of_an_even_sampler_has_as_many_packs(samples: SampleDataset) -> None:
    sampler = PackSampler(samples, PLAN)
    even = EvenPackSampler(sampler, 3)
    packs = list(even)
    assert len(packs) == len(even) == len(even.steps) * even.micro_batches
    assert {step.packs for step in even.steps} != {even.micro_batches}
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    assert [pack for pack in packs if pack] == [pack for pack in expected if pack]
    for number, step in enumerate(even.steps):
        first = number * even.micro_batches
        assert not any(packs[first + step.packs : first + even.micro_batches])


def test_an_even_sampler_refuses_a_state_that_it_would_not_follow(samples: SampleDataset) -> None:
    sampler = PackSampler(samples, PLAN)
    even = EvenPackSampler(sampler, 3)
    sampler.load_state_dict(sampler.state_dict(0))
    for _ in range(2):
        for use in (lambda: EvenPackSampler(sampler, 3), lambda: list(even)):
            with pytest.raises(
                PackError, match="continues after 1 step of epoch 0, but an EvenPackSampler begins with"
            ):
                use()
        sampler.set_epoch(0)


def test_an_iteration_is_not_moved_by_another_one(samples: SampleDataset) -> None:
    sampler = PackSampler(samples, PLAN)
    even = EvenPackSampler(sampler, 3)
    for packs in (even, sampler):
        expected, batches = list(packs), iter(packs)
        half = [next(batches) for _ in range(len(expected) // 2)]
        next(iter(even))
        sampler.set_epoch(1)
        assert [*half, *batches] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "ranks": 2}, "rank 2 of 2 does not exist"),
        ({"rank": "0"}, "rank '0' of 1 does not exist"),
        ({"ranks": 0}, "rank 0 of 0 does not exist"),
        ({"plan": 5}, "plan must be a Plan, its packing or a plan file, not int; such as best_plan"),
        ({"plan": "gone.json"}, "gone.json cannot be read .No such file or directory.; give a file such as"),
        ({"samples": "job.yaml"}, "samples must be a SampleDataset, not str; make one from the job"),
        ({"dataset": [1, 2, 3]}, "the dataset has 3 items but the data of the job 50 records; make both of the same"),
    ],
)
def test_arguments_of_a_sampler_are_checked(arguments: dict[str, object], message: str, samples: SampleDataset) -> None:
    given: dict[str, object] = {"samples": samples, "plan": PLAN, **arguments}
    with pytest.raises(PackError, match=message):
        PackSampler(**given)  # type: ignore[arg-type]


def test_a_plan_file_gives_the_packs_of_its_plan(samples: SampleDataset, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(wire.encode(PLAN))
    for given in (file, str(file)):
        assert list(PackSampler(samples, given)) == list(PackSampler(samples, PLAN))


def test_a_dataset_of_ones_own_is_drawn_from_by_the_numbers_of_records(samples: SampleDataset) -> None:
    own = [f"record {number}" for number in range(50)]
    sampler = PackSampler(samples, PLAN, ranks=2, dataset=own)
    loader: DataLoader[str] = DataLoader(own, batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    packs, same = (list(PackSampler(samples, PLAN, ranks=2, dataset=each)) for each in (None, samples))
    assert list(loader) == [[f"record {samples.index.record[number]}" for number in pack] for pack in packs]
    assert same == packs != list(sampler)


def test_a_sample_that_has_changed_is_blank_or_refused(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").symlink_to(example / "model")
    shutil.copytree(example / "data", tmp_path / "data")
    file = tmp_path / "data" / "train.jsonl"
    skipping, failing = (
        SampleDataset(job_of(tmp_path, tmp_path, data={"sources": [{"path": str(file)}], "on_error": on_error}))
        for on_error in ("skip", "fail")
    )
    assert (skipping[0].labels != IGNORED).any()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records[0]["conversations"][1]["value"] += " And more."
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert (skipping[0].labels == IGNORED).all()
    assert "its record or an image has changed, index the dataset again; a blank sample is used" in caplog.text
    with pytest.raises(DataError, match="its record or an image has changed, index the dataset again"):
        failing[0]


def test_a_loop_ends_where_most_samples_cannot_be_read(example: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(example / "model")
    shutil.copytree(example / "data", tmp_path / "data")
    samples = SampleDataset(job_of(tmp_path, tmp_path / "output"))
    shown, texts = (np.flatnonzero((samples.index.vision_units > 0) == has_image) for has_image in (True, False))
    shutil.rmtree(tmp_path / "data" / "images")
    for number in (shown[0], texts[0]) * 32:  # half of them
        samples[number]
    samples[shown[0]]
    with pytest.raises(DataError, match=r"17 of the last 32 samples cannot be read, the last one: .*; restore the"):
        samples[shown[0]]
