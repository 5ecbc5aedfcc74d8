import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data._utils.pin_memory import pin_memory

from autotune import workload
from tests.contracts.test_families import TINY
from tests.values.data import record, write_records
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of
from trials import plugins
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.indexing import build_index
from trials.data.loader import MicroBatch, collate, encode, micro_batches
from trials.data.records.sample import IGNORED, NO_GRIDS, Encoded, Encoder, Lengths
from trials.errors import DataError
from trials.job import DataSection, LossWeighting, Source
from trials.model.families import internvl
from trials.model.family import load_family
from trials.model.skeleton import load_config
from trials.plan import Packed, Packing, Padded
from trials.sharing.share import Share
from trials.tasks.request import Training, Trial

PACKED = Packed(qv=10, qt=500, qv_min=8, qt_min=400)


@pytest.fixture(scope="module")
def encoder(example: Path) -> Encoder:
    return internvl.encoder(str(example / "model"))


def index_of(folder: Path, encoder: Encoder, path: str = "data/train.jsonl") -> DatasetIndex:
    index, _ = build_index(DataSection(sources=(Source(path=Path(path)),)), encoder, folder)
    return index


@pytest.fixture(scope="module")
def index(example: Path, encoder: Encoder) -> DatasetIndex:
    return index_of(example, encoder)


def epoch_of(index: DatasetIndex, packing: Packing, ranks: int = 2) -> Epoch:
    weights = CostWeights(unit=100.0, token=1.0, square=0.01)
    return build_epoch(index, packing, EpochSettings(global_batch_samples=16, weights=weights), data_parallel=ranks)


def encoded(*tokens: int, tiles: int = 0, targets: int = 1) -> Encoded:
    """A sample of these tokens, of which the last are targets."""
    input_ids = np.array(tokens, dtype=np.int64)
    labels = np.where(np.arange(len(tokens)) >= len(tokens) - targets, input_ids, IGNORED)
    pixels = np.full((tiles, 3, 56, 56), tokens[0], dtype=np.float32) if tiles else None
    positions = np.arange(len(tokens))[None]
    return Encoded(input_ids=input_ids, labels=labels, positions=positions, pixel_values=pixels, grids=NO_GRIDS)


def join(encoder: Encoder, *samples: Encoded, padded: bool = False, pixels: bool = True) -> MicroBatch:
    batch = collate(samples, encoder, pixels=pixels, padded=padded)
    assert {batch.tokens.input_ids.dtype, batch.tokens.positions.dtype, batch.labels.dtype} == {torch.int64}
    assert batch.tokens.input_ids.shape == batch.tokens.positions.shape[1:] == batch.labels.shape
    return batch


def test_joined_samples_restart_their_positions_and_shift_their_own_labels(encoder: Encoder) -> None:
    batch = join(encoder, encoded(10, 11, 12, targets=2), encoded(20, 21))
    assert batch.tokens.input_ids.tolist() == [10, 11, 12, 20, 21]
    assert batch.tokens.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.tokens.lengths == (3, 2)
    assert batch.labels.tolist() == [11, 12, IGNORED, 21, IGNORED]


def test_padded_samples_are_filled_up_to_the_longest(encoder: Encoder) -> None:
    pad = encoder.pad_token_id
    batch = join(encoder, encoded(10, 11), encoded(20, 21, 22, 23, targets=3), padded=True)
    assert batch.tokens.input_ids.tolist() == [10, 11, pad, pad, 20, 21, 22, 23]
    assert batch.tokens.positions.tolist() == [[0, 1, 1, 1, 0, 1, 2, 3]]
    assert batch.tokens.lengths == (4, 4)
    assert batch.labels.tolist() == [11, IGNORED, IGNORED, IGNORED, 21, 22, 23, IGNORED]


@pytest.mark.parametrize(("weighting", "of_three"), [("sample", 1 / 3), ("square", 3**-0.5)])
@pytest.mark.parametrize("padded", [False, True])
def test_each_label_has_the_weight_of_its_whole_sample(
    encoder: Encoder, weighting: LossWeighting, of_three: float, padded: bool
) -> None:
    samples = (encoded(10, 11), encoded(20, 21, 22, 23, targets=3), encoded(30, 31, targets=0))
    batch = collate(samples, encoder, pixels=False, padded=padded, weighting=weighting)
    assert batch.weights is not None
    first, second, third = batch.weights.split(list(batch.tokens.lengths))
    assert (set(first.tolist()), set(third.tolist())) == ({1.0}, {0.0})
    assert second.tolist() == pytest.approx([of_three] * 4)
    # A sample's targets count whichever rank has them.
    parts = [
        collate(samples, encoder, pixels=False, padded=padded, weighting=weighting, share=Share(index=rank, degree=2))
        for rank in range(2)
    ]
    weights = [part.weights for part in parts if part.weights is not None]
    assert torch.cat(weights).tolist() == batch.weights.tolist()
    assert join(encoder, *samples).weights is None


def test_tiles_of_a_pack_come_in_the_order_of_its_samples(encoder: Encoder) -> None:
    pixels = join(encoder, encoded(1, 5, tiles=2), encoded(2, 5), encoded(3, 5, tiles=1)).pixel_values
    assert pixels is not None
    assert (pixels.dtype, pixels.shape[1:]) == (torch.float32, (3, 56, 56))
    assert pixels[:, 0, 0, 0].tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize("padded", [False, True])
def test_a_pack_without_images_carries_one_zero_tile(encoder: Encoder, padded: bool) -> None:
    pixels = join(encoder, encoded(1, 2), padded=padded).pixel_values
    assert pixels is not None
    assert pixels.shape == (1, 3, 56, 56)
    assert not pixels.any()


@pytest.mark.parametrize("padded", [False, True])
def test_an_empty_pack_carries_one_pad_token_that_is_no_target(encoder: Encoder, padded: bool) -> None:
    batch = join(encoder, padded=padded)
    assert batch.tokens.input_ids.tolist() == [encoder.pad_token_id]
    assert (batch.tokens.positions.tolist(), batch.labels.tolist()) == ([[0]], [IGNORED])
    assert batch.pixel_values is not None
    assert batch.pixel_values.shape == (1, 3, 56, 56)


def test_pixels_are_left_out_where_no_stage_needs_them(encoder: Encoder) -> None:
    assert join(encoder, encoded(1, 2, tiles=2), pixels=False).pixel_values is None


@pytest.mark.parametrize("packing", [PACKED, Padded(samples=3)])
def test_micro_batches_have_the_sizes_that_the_epoch_predicts(
    index: DatasetIndex, encoder: Encoder, packing: Packing
) -> None:
    epoch = epoch_of(index, packing, ranks=3)
    sizes = epoch.pack_sizes()
    targets = 0
    for rank in range(3):
        batches = list(
            micro_batches(index, epoch, range(epoch.steps), rank, encoder, pixels=True, workers=0, on_error="fail")
        )
        for number, batch in zip(epoch.assignment[:, rank], batches, strict=True):
            assert batch.pixel_values is not None
            assert (len(batch.pixel_values), len(batch.tokens.input_ids)) == (sizes.units[number], sizes.tokens[number])
            assert len(batch.tokens.lengths) == max(1, sizes.samples[number])
            targets += int((batch.labels != IGNORED).sum())
    assert targets == sum(epoch.step(number).target_tokens for number in range(epoch.steps))


@pytest.mark.parametrize(
    ("degree", "workers"),
    parameters({"2 ranks": (2, 0), "3 ranks": (3, 0), "4 ranks with workers": (4, 2)}, short=("3 ranks",)),
)
def test_the_parts_of_a_shared_pack_make_up_the_whole(
    index: DatasetIndex, encoder: Encoder, degree: int, workers: int
) -> None:
    def read(rank: int, epoch: Epoch) -> list[MicroBatch]:
        every = range(epoch.steps)
        return [*micro_batches(index, epoch, every, rank, encoder, pixels=True, workers=workers, on_error="fail")]

    shared = epoch_of(index, replace(PACKED, sequence=degree), degree)
    parts = [read(rank, shared) for rank in range(degree)]
    whole = read(0, epoch_of(index, PACKED, 1))
    for expected, *found in zip(whole, *parts, strict=True):
        tokens = [each.tokens for each in found]
        missing = -len(expected.labels) % degree
        assert all(torch.equal(one.input_ids, tokens[0].input_ids) for one in tokens)
        assert tokens[0].input_ids[: len(expected.labels)].tolist() == expected.tokens.input_ids.tolist()
        assert tokens[0].lengths == (*expected.tokens.lengths, *([missing] if missing else []))
        labels = torch.cat([each.labels for each in found])
        assert labels.tolist() == expected.labels.tolist() + [IGNORED] * missing
        assert len({len(each.labels) for each in found}) == 1
        assert expected.pixel_values is not None
        pixels = [each.pixel_values for each in found if each.pixel_values is not None and not each.tokens.stands_in]
        if expected.tokens.stands_in:
            assert not pixels
        else:
            assert torch.equal(torch.cat(pixels), expected.pixel_values)
            assert len(pixels) == min(degree, len(expected.pixel_values))
        assert all(len(each.pixel_values) for each in found if each.pixel_values is not None)


@pytest.mark.parametrize(
    "name", parameters({name: name for name in plugins.names(TINY)}, short=("ovis2", "qwen2-5-vl"))
)
@pytest.mark.parametrize("pixels", [True, False])
def test_a_pack_without_images_can_be_shared(name: str, pixels: bool, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    family_encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    text = family_encoder.blank(Lengths(vision_units=0, text_tokens=6, target_tokens=0), pixels=pixels)
    for rank in range(2):
        batch = collate([text], family_encoder, pixels=pixels, padded=False, share=Share(index=rank, degree=2))
        assert (len(batch.labels), batch.tokens.stands_in) == (3, pixels)


def test_each_rank_of_a_shared_pack_tells_of_the_faults_that_it_finds(
    changing: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(changing, encoder, "a.jsonl")
    epoch = epoch_of(index, replace(PACKED, sequence=2), 2)
    vanish(changing)
    one, other = (
        next(micro_batches(index, epoch, [0], rank, encoder, pixels=True, workers=0, on_error="skip"))
        for rank in (0, 1)
    )
    assert (len(one.faults), len(other.faults), len(caplog.messages)) == (1, 1, 2)
    assert replace(other.faults[0], sharer=0) == one.faults[0]
    assert torch.equal(one.tokens.input_ids, other.tokens.input_ids)


def test_steps_can_be_asked_for_in_any_selection(index: DatasetIndex, encoder: Encoder) -> None:
    epoch = epoch_of(index, PACKED)
    every = list(micro_batches(index, epoch, range(epoch.steps), 1, encoder, pixels=False, workers=0, on_error="fail"))
    of_step = [
        batch.tokens.input_ids.tolist()
        for batch in micro_batches(index, epoch, [1], 1, encoder, pixels=False, workers=0, on_error="fail")
    ]
    m = epoch.micro_batches
    assert of_step == [batch.tokens.input_ids.tolist() for batch in every[m : 2 * m]]


@pytest.mark.parametrize("pixels", [True, False])
def test_pixels_labels_and_weights_are_pinned_by_the_loader(
    index: DatasetIndex, encoder: Encoder, pixels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        pins.append(tensor)
        return tensor.clone()

    weighting: LossWeighting = "token" if pixels else "sample"
    pins: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)  # there may be no device to pin memory for
    epoch = epoch_of(index, PACKED)
    batch = next(
        micro_batches(index, epoch, [0], 0, encoder, pixels=pixels, workers=0, on_error="fail", weighting=weighting)
    )
    found = pin_memory(batch)
    assert isinstance(found, MicroBatch)
    assert torch.equal(found.labels, batch.labels)
    assert (found.pixel_values is None) == (not pixels)
    expected = [batch.pixel_values, batch.labels] if pixels else [batch.labels, batch.weights]
    assert [id(tensor) for tensor in pins] == list(map(id, expected))


@pytest.fixture
def changing(tmp_path: Path) -> Path:
    """A folder with one record and its picture, to be changed after it was indexed."""
    Image.new("RGB", (120, 60)).save(tmp_path / "a.png")
    write_records(tmp_path / "a.jsonl", record("<image>What is it?", "A circle.", image="a.png"))
    return tmp_path


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 1])
def test_an_image_that_changed_its_size_is_named_by_the_line_that_shows_it(
    changing: Path, encoder: Encoder, workers: int
) -> None:
    index = index_of(changing, encoder, "a.jsonl")
    Image.new("RGB", (60, 60)).save(changing / "a.png")
    batches = micro_batches(
        index, epoch_of(index, PACKED, 1), [0], 0, encoder, pixels=False, workers=workers, on_error="fail"
    )
    message = r"a\.jsonl:1: the sample has 3 vision units, \d+ text tokens .* was indexed with 3 vision units"
    with pytest.raises(DataError, match=message) as caught:
        next(batches)
    assert "Traceback" not in str(caught.value)


def test_an_image_that_vanished_is_named_by_the_line_that_shows_it(changing: Path, encoder: Encoder) -> None:
    index = index_of(changing, encoder, "a.jsonl")
    (changing / "a.png").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl:1: image .*a\.png does not exist"):
        encode(index, 0, encoder, pixels=True)


def vanish(folder: Path) -> None:
    (folder / "a.png").unlink()


def resize(folder: Path) -> None:
    Image.new("RGB", (60, 60)).save(folder / "a.png")


def damage(folder: Path) -> None:
    """Damage the picture but keep its size and end, so that only decoding finds it."""
    content = (folder / "a.png").read_bytes()
    (folder / "a.png").write_bytes(content[:50] + bytes(len(content) - 70) + content[-20:])


def rewrite(folder: Path) -> None:
    write_records(folder / "a.jsonl", record("<image>What is it?", "A circle and a square.", image="a.png"))


def cut_off(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "pixels"),
    [
        *((each, True) for each in (vanish, resize, damage, rewrite, cut_off)),
        (rewrite, False),
        *(pytest.param(each, False, marks=pytest.mark.long) for each in (vanish, resize, damage, cut_off)),
    ],
)
def test_a_sample_that_cannot_be_used_any_more_becomes_a_blank_of_its_lengths(
    changing: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], pixels: bool
) -> None:
    lines = (changing / "a.jsonl").read_bytes() + json.dumps(record("Who?", "Ada.")).encode()
    (changing / "a.jsonl").write_bytes(lines)
    index = index_of(changing, encoder, "a.jsonl")
    epoch = epoch_of(index, PACKED, 1)
    before = next(micro_batches(index, epoch, [0], 0, encoder, pixels=pixels, workers=0, on_error="fail"))
    spoil(changing)
    if spoil in (rewrite, cut_off):  # the second record is where it was
        content = (changing / "a.jsonl").read_bytes()[: int(index.offset[1])].ljust(int(index.offset[1]), b"\n")
        (changing / "a.jsonl").write_bytes(content + lines[int(index.offset[1]) :])
    after = next(micro_batches(index, epoch, [0], 0, encoder, pixels=pixels, workers=0, on_error="skip"))
    assert after.tokens.input_ids.shape == before.tokens.input_ids.shape
    assert torch.equal(after.tokens.positions, before.tokens.positions)
    image_tokens = encoder.blank(index.lengths(0), pixels=False).input_ids[0]
    assert int((after.tokens.input_ids == image_tokens).sum()) == int((before.tokens.input_ids == image_tokens).sum())
    learnt = int((after.labels != IGNORED).sum())
    assert learnt == index.target_tokens[1] < int((before.labels != IGNORED).sum())
    assert len(after.faults) == len(caplog.messages) == 1
    assert re.match(rf"{changing}/a\.jsonl:1: .*; a blank sample is used instead$", caplog.messages[0])
    if pixels:
        assert after.pixel_values is not None
        assert before.pixel_values is not None
        assert after.pixel_values.shape == before.pixel_values.shape
        assert not after.pixel_values.any()


def test_workers_tell_of_blanks_in_the_process_that_trains(
    changing: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(changing, encoder, "a.jsonl")
    vanish(changing)
    batches = micro_batches(index, epoch_of(index, PACKED, 1), [0], 0, encoder, pixels=True, workers=1, on_error="skip")
    assert len(next(batches).faults) == len(caplog.messages) == 1


def test_a_record_that_changed_its_answer_is_refused(changing: Path, encoder: Encoder) -> None:
    index = index_of(changing, encoder, "a.jsonl")
    write_records(changing / "a.jsonl", record("<image>What is it?", "A circle and a square.", image="a.png"))
    with pytest.raises(DataError, match=r"a\.jsonl:1: the sample has .*; its record or an image has changed"):
        encode(index, 0, encoder, pixels=True)


def test_trials_and_trainings_have_the_workers_that_the_machine_leaves(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepared_of(shallow, tmp_path).job.data.workers == 0  # CPU ranks
    monkeypatch.setattr(workload, "default_workers", lambda *_, **__: 3)
    prepared = prepared_of(shallow, tmp_path)
    tasks = (Trial(warmup_steps=(), timed_steps=(0,)), Training(output=tmp_path))
    assert [prepared.request(plan_of("3+0", "1+2"), task).job.data.workers for task in tasks] == [3, 3]
    assert prepared_of(shallow, tmp_path, data={"workers": 1}).job.data.workers == 1
