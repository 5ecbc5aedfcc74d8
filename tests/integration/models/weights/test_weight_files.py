"""Of several sets of weights in a folder, the one is trained that transformers loads, and the others are named."""

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from autotune.model_shape import model_shape
from tests.integration.models.weights.test_pretrained import SINGLE, check_equal, in_shards, section
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from trials.errors import ModelError
from trials.model.weights import weights_fingerprint

INDEX = "model.safetensors.index.json"


def shifted(folder: Path, to: str) -> None:
    """Writes the weights of the single file, each larger by one, to another file."""
    (folder / to).parent.mkdir(exist_ok=True)
    save_file({name: tensor + 1 for name, tensor in load_file(folder / SINGLE).items()}, folder / to, {"format": "pt"})


def other_shards(model: PreTrainedModel, folder: Path) -> None:
    """Adds shards of other weights, with their index."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    shutil.move(folder / SINGLE, folder / "kept")
    in_shards(model, folder)
    shutil.move(folder / "kept", folder / SINGLE)


def stale_index(model: PreTrainedModel, folder: Path) -> None:
    other_shards(model, folder)
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()


def shards_of_old_and_new(model: PreTrainedModel, folder: Path) -> None:
    other_shards(model, folder)
    shifted(folder, "model-00001-of-00001.safetensors")
    (folder / SINGLE).unlink()


def wrong_index(model: PreTrainedModel, folder: Path) -> None:
    other_shards(model, folder)
    (folder / SINGLE).unlink()
    document = json.loads((folder / INDEX).read_text())
    files = document["weight_map"]
    name = next(name for name, file in files.items() if list(files.values()).count(file) > 1)
    files[name] = next(file for file in files.values() if file != files[name])
    (folder / INDEX).write_text(json.dumps(document))


def twice_in_shards(model: PreTrainedModel, folder: Path) -> None:
    other_shards(model, folder)
    (folder / SINGLE).unlink()
    first = min(folder.glob("model-*.safetensors"))
    tensors = load_file(first)
    last = load_file(max(folder.glob("model-*.safetensors")))
    repeated = {name: tensor + 1 for name, tensor in last.items()}
    save_file({**repeated, **tensors}, first, {"format": "pt"})


def in_folder_below(model: PreTrainedModel, folder: Path) -> None:
    shifted(folder, "below/part.safetensors")
    names = dict.fromkeys(load_file(folder / SINGLE), "below/part.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / SINGLE).unlink()


def dangling_single(model: PreTrainedModel, folder: Path) -> None:
    other_shards(model, folder)
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(folder / "gone")


def folder_in_its_place(model: PreTrainedModel, folder: Path) -> None:
    other_shards(model, folder)
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


def named(file: str) -> Callable[[PreTrainedModel, Path], None]:
    def change(model: PreTrainedModel, folder: Path) -> None:
        other_shards(model, folder)
        shifted(folder, "chosen.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": file}))

    return change


def beside(*files: str) -> Callable[[PreTrainedModel, Path], None]:
    def change(model: PreTrainedModel, folder: Path) -> None:
        for file in files:
            if file.endswith(".safetensors"):
                shifted(folder, file)
            else:
                torch.save({name: tensor + 1 for name, tensor in model.state_dict().items()}, folder / file)

    return change


SETS: dict[str, tuple[Callable[[PreTrainedModel, Path], None], str | None]] = {
    "other shards": (other_shards, rf"those of {SINGLE} are used, .* model-00001-of-.* and \d+ more passed over"),
    "a stale index": (stale_index, rf"those of {SINGLE} are used, as by transformers, and {INDEX} passed over"),
    "shards of old and new": (
        shards_of_old_and_new,
        rf"those of {INDEX} are used, .* and model-00001-of-00001.safetensors passed over",
    ),
    "a wrong index": (wrong_index, rf"{INDEX} is not right about 1 tensors: .* is read from"),
    "twice in shards": (twice_in_shards, None),
    "in a folder below": (in_folder_below, None),
    "a dangling link": (dangling_single, None),
    "a folder in its place": (folder_in_its_place, None),
    "named": (named("chosen.safetensors"), r"those of chosen.safetensors are used, .* and \d+ more passed over"),
    "named index": (named(INDEX), rf"those of {INDEX} are used, .* chosen.safetensors, {SINGLE} passed over"),
    "pickled beside": (
        beside("pytorch_model.bin"),
        rf"those of {SINGLE} are used, .* and pytorch_model.bin passed over",
    ),
    "a variant beside": (
        beside("model.fp16.safetensors"),
        rf"those of {SINGLE} are used, .* and model.fp16.safetensors passed over",
    ),
    "an adapter beside": (
        beside("adapter_model.safetensors", "consolidated.safetensors"),
        r"and adapter_model.safetensors, consolidated.safetensors passed over",
    ),
}


@pytest.fixture(scope="module")
def original(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A model's folder, and the model: read them, do not change them."""
    folder = tmp_path_factory.mktemp("original")
    return folder, saved_model(shallow, folder)


@pytest.fixture
def saved(original: tuple[Path, PreTrainedModel], tmp_path: Path) -> PreTrainedModel:
    """The model that `tmp_path` holds."""
    folder, model = original
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return copy.deepcopy(model)


@pytest.mark.parametrize(
    ("add", "note"),
    parameters(
        SETS,
        short=(
            "other shards",
            "a stale index",
            "a wrong index",
            "in a folder below",
            "a dangling link",
            "named",
            "an adapter beside",
        ),
    ),
)
def test_the_set_is_read_that_transformers_loads(
    add: Callable[[PreTrainedModel, Path], None],
    note: str | None,
    saved: PreTrainedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add(saved, tmp_path)
    with caplog.at_level(logging.WARNING, "trials"):
        check_equal(tmp_path)
    found = [record.getMessage() for record in caplog.records if record.name.startswith("trials")]
    assert len(found) == (note is not None)
    assert all(re.search(note or "", message) for message in found)


def test_a_training_is_that_of_the_files_that_are_read(saved: PreTrainedModel, tmp_path: Path) -> None:
    before = weights_fingerprint(tmp_path)
    other_shards(saved, tmp_path)
    assert weights_fingerprint(tmp_path) == before
    (tmp_path / SINGLE).unlink()
    assert weights_fingerprint(tmp_path) != before


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize(
    ("add", "message"),
    [
        (
            lambda folder: torch.save({}, folder / "pytorch_model.bin"),
            r"has no model.safetensors but pytorch_model.bin; save the weights there as safetensors",
        ),
        (
            lambda folder: save_file({}, folder / "shard-00001-model-00001-of-00001.safetensors"),
            r"holds a distributed checkpoint \(shard-00001-model-00001-of-00001.safetensors\), which .* move these",
        ),
    ],
    ids=["pickled", "distributed"],
)
def test_weights_that_transformers_alone_can_read_are_refused(
    add: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    (tmp_path / SINGLE).unlink()
    add(tmp_path)
    with pytest.raises(ModelError, match=message):
        model_shape(section(tmp_path))


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("file", ["/etc/weights.safetensors", "../model.safetensors", "pytorch_model.bin", 3])
def test_a_configuration_cannot_name_weights_outside_its_folder(file: object, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_weights": file}))
    with pytest.raises(ModelError, match=r"transformers_weights of .* which is no file of safetensors in that folder"):
        model_shape(section(tmp_path))
