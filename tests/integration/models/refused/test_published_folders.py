"""Folders of a hub that hold no model that can be trained are refused with what they hold."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.values.saved_models import saved_model
from trials.errors import ModelError
from trials.model.skeleton import build_skeleton, load_config
from trials.model.weights import WeightFiles

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4512398720\n"


@pytest.fixture(scope="module")
def saved(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights, in a folder as transformers saves it."""
    folder = tmp_path_factory.mktemp("saved")
    saved_model(shallow, folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(model: Path, **settings: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("section", [None, "text_config"])
def test_quantized_weights_are_refused(model: Path, section: str | None) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    if section:
        text = json.loads((model / "config.json").read_text())[section]
        change(model, text_config=text | quantized)
    else:
        change(model, **quantized)
    with pytest.raises(ModelError, match=r"weights are quantized \(quantization_config: 'fp8'\).* give the model"):
        load_config(str(model))


def test_an_empty_section_on_quantization_is_none(model: Path) -> None:
    change(model, quantization_config=None)
    assert load_config(str(model)).model_type == "internvl"


def test_a_form_that_its_architecture_alone_shows_is_named(model: Path) -> None:
    change(model, model_type="llava", architectures=["LlavaLlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"architecture 'LlavaLlamaForCausalLM' is not supported: .* llava-hf"):
        load_config(str(model))


def test_an_adapter_is_named_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/name", "peft_type": "LORA"}')
    with pytest.raises(ModelError, match="holds an adapter of peft for 'org/name', not a model; merge it"):
        load_config(str(tmp_path))


def test_an_adapter_next_to_its_model_is_not_dropped(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "org/name", "peft_type": "LORA"}')
    files = WeightFiles(model, build_skeleton(load_config(str(model)), torch.float32))
    with pytest.raises(ModelError, match=r"a model and an adapter of peft \(adapter_config.json\).* or move that file"):
        files.check()


def test_a_pointer_of_git_lfs_is_named_wherever_a_file_is_read(model: Path) -> None:
    skeleton = build_skeleton(load_config(str(model)), torch.float32)
    shutil.copy(model / "model.safetensors", model / "kept")
    (model / "model.safetensors").write_text(POINTER)
    load_config(str(model))  # random weights need no files of them
    with pytest.raises(ModelError, match=r"model.safetensors is a pointer of Git LFS.* `git lfs pull` in "):
        WeightFiles(model, skeleton)
    (model / "kept").replace(model / "model.safetensors")
    (model / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ModelError, match=r"tokenizer.json is a pointer of Git LFS"):
        load_config(str(model))
