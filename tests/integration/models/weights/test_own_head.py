"""Output projections of their own are found in the weights, where a configuration ties them or leaves it open."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from autotune.model_shape import count_of_job, model_shape
from tests.tiny_models import mistral3, paddleocr_vl
from tests.tiny_models.tiles import deepseek_vl, internvl
from tests.values.own_head import make_untied
from trials.errors import ModelError
from trials.job import ModelSection, TrainingSection
from trials.model.paths import tensors_at
from trials.model.plain.parity import check_parity
from trials.model.shrunk import shrunk
from trials.model.skeleton import build_skeleton, load_config, load_with_note
from trials.model.weights import WeightFiles, read_weights
from trials.tasks.certifying.reference import build_model

KINDS: dict[str, Callable[[Path], None]] = {
    "internvl": internvl.make,
    "mistral3": mistral3.make,
    "deepseek_vl": deepseek_vl.make,
    "paddleocr_vl, flat": paddleocr_vl.make,
}
KEY, WEIGHTS = "tie_word_embeddings", "model.safetensors"
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with weights, whose configurations do not untie them; read them, do not change them."""
    folders = {kind: tmp_path_factory.mktemp("untied") for kind in KINDS}
    for kind, folder in folders.items():
        make_untied(KINDS[kind], folder)
    return folders


@pytest.fixture
def folder(kind: str, made: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[kind], tmp_path / "model"))


def section(folder: Path, **changes: Any) -> ModelSection:
    return ModelSection(path=str(folder), dtype="float32", **changes)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    settings = json.loads((folder / "config.json").read_text())
    change(settings)
    (folder / "config.json").write_text(json.dumps(settings))


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor], str, str], object]) -> None:
    """Change the tensors, given the names of the head and the embedding."""
    tensors = load_file(folder / WEIGHTS)
    names = (next(key for key in tensors if key.endswith(end)) for end in ("lm_head.weight", "embed_tokens.weight"))
    change(tensors, *names)
    save_file(tensors, folder / WEIGHTS)


def is_tied(folder: Path) -> bool:
    model = build_skeleton(load_config(str(folder)), torch.float32).model
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@every_kind
def test_a_head_of_its_own_is_read_as_transformers_reads_it(folder: Path) -> None:
    expected: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert expected.config.tie_word_embeddings  # without which this test shows nothing
    assert expected.get_output_embeddings().weight is not expected.get_input_embeddings().weight
    skeleton = build_skeleton(load_config(str(folder)), torch.float32)
    files = WeightFiles(folder, skeleton)
    files.check()
    read_weights(skeleton.model, skeleton.chain.parts, files, torch.device("cpu"))
    state = expected.state_dict()
    found = {name: each for path in skeleton.chain.parts for name, each in tensors_at(skeleton.model, path).items()}
    assert "lm_head.weight" in found
    assert all(torch.equal(each, state[name]) for name, each in found.items())
    whole = sum(each.numel() for each in expected.parameters())
    assert model_shape(section(folder)).parameters == whole
    assert sum(count_of_job(section(folder), TrainingSection()).parts.values()) == whole


@every_kind
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_all_that_is_compared_with_a_plan_has_that_head_too(weights: str, folder: Path) -> None:
    model = build_model(section(folder, weights=weights), TrainingSection(), torch.device("cpu"))
    state = model.state_dict()
    assert not torch.equal(state["lm_head.weight"], state["model.language_model.embed_tokens.weight"])
    config = load_config(str(folder))
    assert not shrunk(config).tie_word_embeddings
    check_parity(section(folder))
    config.save_pretrained(folder)
    assert not type(config).from_pretrained(folder).tie_word_embeddings


@every_kind
def test_one_matrix_stays_tied(folder: Path) -> None:
    with_weights(folder, lambda tensors, head, embedding: tensors.update({head: tensors[embedding].clone()}))
    assert is_tied(folder)
    with_weights(folder, lambda tensors, head, embedding: tensors[head][-1, -1].add_(1))
    assert not is_tied(folder)
    with_weights(folder, lambda tensors, head, _: tensors.pop(head))
    assert is_tied(folder)
    assert model_shape(section(folder)).parameters


def test_a_head_without_an_embedding_is_both(made: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(made["mistral3"], tmp_path, dirs_exist_ok=True)
    with_weights(tmp_path, lambda tensors, _, embedding: tensors.pop(embedding))
    assert is_tied(tmp_path)
    WeightFiles(tmp_path, build_skeleton(load_config(str(tmp_path)), torch.float32)).check()


@every_kind
def test_without_weights_the_language_models_word_counts(
    kind: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = section(folder, weights="random")
    before = model_shape(random)
    assert KEY not in caplog.text
    (folder / WEIGHTS).unlink()
    assert model_shape(random) == before
    # That of PaddleOCR-VL says false at the top level, which transformers passes over.
    assert sum(KEY in record.getMessage() for record in caplog.records) == ("flat" not in kind)
    if "flat" not in kind:
        edit(folder, lambda settings: settings["text_config"].update({KEY: True}))
        assert is_tied(folder)
        edit(folder, lambda settings: settings.update({KEY: True}) or settings["text_config"].update({KEY: False}))
        assert is_tied(folder)  # as the file says, and as transformers ties it


def test_a_configuration_that_contradicts_its_weights_is_named(made: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(made["mistral3"], tmp_path, dirs_exist_ok=True)
    assert load_with_note(str(tmp_path))[1] is None
    edit(tmp_path, lambda settings: settings.update({KEY: True}))
    config, note = load_with_note(str(tmp_path))
    assert not config.tie_word_embeddings
    assert note is not None
    assert "two that differ" in note


def test_a_model_that_is_tied_all_the_same_does_not_take_two_matrices(made: dict[str, Path]) -> None:
    config = load_config(str(made["mistral3"]))
    config.tie_word_embeddings = True
    with pytest.raises(ModelError, match=r"differ in .* tie_word_embeddings to false there, at the top level"):
        WeightFiles(made["mistral3"], build_skeleton(config, torch.float32)).check()
