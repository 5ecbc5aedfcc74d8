"""Every setting of a configuration is followed, or the model is refused before anything is measured."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import text
from tests.tiny_models.tiles import ovis2
from tests.values.changed_settings import WHOLE, changed
from tests.values.parameters import parameters
from trials import plugins
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.plain.parity import check_parity, compare_stages
from trials.model.refusals.folder import CONFIG
from trials.model.skeleton import load_config

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
SEVERAL = [name for name in plugins.names(TINY) if not name.startswith("text")]
"""Models of vision and language"""
FURTHER: dict[str, Mapping[str, Any]] = {
    "phi3": {},
    "starcoder2": {},
    "smollm3": {},
    "ministral3": {"head_dim": 8},
    "olmo2": {},
    "glm4": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "minicpm3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "scale_emb": 1, "dim_model_base": 32,
    },
}  # fmt: skip
"""Language models beyond those of `text.KINDS`"""
LANGUAGE = (*text.KINDS, *FURTHER)
SHALLOW = {"vision_config": {"depth": 1}, "text_config": {"num_hidden_layers": 2}}
"""Of GLM's models, in which rounding grows faster"""
FEW = {"qwen2": "rope_parameters", "minicpm3": "dim_model_base"}
"""Settings of which a small copy may not show what a model does: for its samples, or for its sizes"""


def settings_of(folder: Path) -> dict[str, Any]:
    """Every setting of the configuration in a folder, with a context on both sides of which samples are."""
    settings: dict[str, Any] = json.loads(load_config(str(folder)).to_json_string(use_diff=False))
    language = settings.get("text_config", settings)
    language["max_position_embeddings"] = WHOLE
    return settings


def passed_over(folder: Path, changes: Iterator[tuple[str, dict[str, Any]]]) -> list[str]:
    """The changes under which the model is taken, but computed in another way than by transformers."""
    found = []
    for name, settings in changes:
        (folder / CONFIG).write_text(json.dumps(settings))
        try:
            compare_stages(load_config(str(folder)))
        except ModelError as error:
            # What transformers itself cannot run is not looked at.
            if "cannot be checked" not in str(error) and is_taken(folder):
                found.append(f"{name}: {error}")
    return found


def is_taken(folder: Path) -> bool:
    """Whether the check before a search finds nothing."""
    try:
        check_parity(ModelSection(path=str(folder), weights="random"))
    except ModelError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "setting"),
    parameters(
        {kind: (kind, None) for kind in LANGUAGE} | {f"{kind}, {name}": (kind, name) for kind, name in FEW.items()},
        short=["minicpm3, dim_model_base"],
    ),
)
def test_no_setting_of_a_language_model_is_passed_over(kind: str, setting: str | None, tmp_path: Path) -> None:
    text.make_kind(tmp_path, kind, **FURTHER.get(kind, {}))
    changes = changed(settings_of(tmp_path))
    assert not passed_over(tmp_path, (each for each in changes if setting in (None, each[0])))


OF_OVIS: dict[str, dict[str, Any]] = {
    "the first row": {"tokenize_function": "st_argmax"},
    "no squares": {"hidden_stride": 1},
    "wide squares": {"hidden_stride": 4},
    "the first row, no squares": {"tokenize_function": "st_argmax", "hidden_stride": 1},
}


@pytest.mark.parametrize("change", parameters(OF_OVIS, short=("the first row, no squares",)))
def test_choices_of_rows_and_squares_of_patches_of_ovis_are_followed(change: dict[str, Any], tmp_path: Path) -> None:
    ovis2.make(tmp_path)
    settings = settings_of(tmp_path)
    settings["vision_config"].update(change)
    # Beyond the vocabulary of the small copy
    settings["image_token_id"] = 200
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    check_parity(ModelSection(path=str(tmp_path), weights="random"))


@pytest.mark.long
@pytest.mark.parametrize("section", ["vision_config", None])
@pytest.mark.parametrize("name", SEVERAL)
def test_no_setting_of_a_vision_language_model_is_passed_over(name: str, section: str | None, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    settings = settings_of(tmp_path)
    for part, fewer in SHALLOW.items() if name.startswith("glm") else ():
        settings[part].update(fewer)
    changes = changed(settings[section] if section else settings)
    whole = ((each, {**settings, section: made}) if section else (each, made) for each, made in changes)
    assert not passed_over(tmp_path, whole)
