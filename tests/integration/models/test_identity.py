"""A model is known by what it is, wherever its folder lies, and plans of an older version are found with it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from autotune.job_file import load_job
from autotune.model_shape import model_shape
from autotune.workload import prepare
from storage.store import open_store
from tests.programs.users import JobFile, refusal
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of, variant_of
from trials.job import ModelSection
from trials.model.identity import config_digest
from trials.model.skeleton import load_config
from trials.workload import ModelShape

ROOT = Path(__file__).parents[3]
PLAN = plan_of("12+8r2,1")


def shape_of(folder: str | Path) -> ModelShape:
    return model_shape(ModelSection(path=str(folder), weights="random", dtype="float32"))


def test_the_same_model_in_another_place_is_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shape_of(model)
    monkeypatch.chdir(model.parent)
    copied = shutil.copytree(model, tmp_path / "colleague" / "renamed")
    for folder in (model.name, f"./{model.name}", f"{model}/", copied):
        assert shape_of(folder).config_digest == here.config_digest
        assert shape_of(folder).fingerprint == here.fingerprint
    assert shape_of(copied).name == "renamed"


def test_a_model_that_transformers_writes_anew_is_the_same(model: Path, tmp_path: Path) -> None:
    config, whole = load_config(str(model)), tmp_path / "whole"
    config.save_pretrained(tmp_path / "configuration")
    shutil.copytree(model, whole)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").save_pretrained(
        whole
    )
    written = json.loads((whole / "config.json").read_text())
    assert (written["dtype"], written["architectures"]) == ("bfloat16", ["InternVLForConditionalGeneration"])
    assert shape_of(tmp_path / "configuration") == replace(shape_of(model), name="configuration")
    assert shape_of(whole) == replace(shape_of(model), name="whole")


def by_writers(config: dict[str, Any]) -> None:
    for part in (config, config["text_config"], config["vision_config"]):
        part |= {"_name_or_path": "/somewhere", "torch_dtype": "bfloat16", "_attn_implementation_autoset": True}
        part |= {"architectures": ["Another"], "transformers_version": "4.57.0", "_commit_hash": "c0ffee"}


def test_what_a_writer_leaves_in_a_configuration_makes_no_other_model(example: Path, tmp_path: Path) -> None:
    changed = variant_of(example, tmp_path / "written", by_writers) / "model"
    assert shape_of(changed) == shape_of(example / "model")


def with_layers(config: dict[str, Any]) -> None:
    config["text_config"] |= {"num_hidden_layers": 7, "layer_types": config["text_config"]["layer_types"][:7]}


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "layers": with_layers,
    "vision layers": lambda config: config["vision_config"].update(num_hidden_layers=11),
    "rope theta": lambda config: config["text_config"]["rope_parameters"].update(rope_theta=5e5),
    "vocabulary": lambda config: config["text_config"].update(vocab_size=471),
    "activation": lambda config: config["text_config"].update(hidden_act="gelu"),
    "vision activation": lambda config: config["vision_config"].update(hidden_act="relu"),
    "projector": lambda config: config.update(projector_hidden_act="relu"),
    "window": lambda config: config["text_config"].update(sliding_window=64, use_sliding_window=True),
    "norm": lambda config: config["text_config"].update(rms_norm_eps=1e-5),
    "unknown": lambda config: config["text_config"].update(later_option=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_computation_or_sizes_makes_another_model(change: str, example: Path, tmp_path: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        CHANGES[change](config)

    digests = [config_digest(load_config(str(variant_of(example, tmp_path / "other", spoil) / "model")))]
    digests.append(config_digest(load_config(str(example / "model"))))
    assert len(set(digests)) == 2


def test_code_that_came_from_the_hub_is_known_by_its_class(example: Path) -> None:
    config = load_config(str(example / "model"))
    digests = []
    for code in ("org/name--modeling_x.X", "modeling_x.X", "modeling_x.Y"):
        config.text_config.auto_map = {"AutoModel": code, "AutoTokenizer": [code, None]}
        digests.append(config_digest(config))
    assert digests[0] == digests[1] != digests[2]


def test_a_named_plan_of_another_model_of_the_same_size_is_refused(job: JobFile, home: Path, tmp_path: Path) -> None:
    workload = prepare(load_job(job.path), tmp_path / "prepared").workload
    other = replace(workload, model=replace(workload.model, config_digest="0" * 16))
    with open_store() as store:
        concluded(store, best_of(store.create_study(store.add_workload(other), {}, 0).id, workload=other, plan=PLAN))
    assert "model.config_digest was 0" in refusal("launch", job.path, "--plan", PLAN.id, "--dry-run")[1]


def test_a_configuration_is_read_again_when_its_file_was_changed_and_is_each_callers_own(model: Path) -> None:
    first = load_config(str(model))
    first.get_text_config().rms_norm_eps = 0.5
    assert load_config(str(model)).get_text_config().rms_norm_eps == 1e-6
    document = json.loads((model / "config.json").read_text())
    document["text_config"]["rms_norm_eps"] = 0.25
    (model / "config.json").write_text(json.dumps(document))
    assert load_config(str(model)).get_text_config().rms_norm_eps == 0.25
