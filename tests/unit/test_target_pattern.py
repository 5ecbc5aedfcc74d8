"""Layers that get an adapter, from the patterns of other trainers."""

import pytest

from autotune.draft.adapters import AdapterTargets, targets_of

LANGUAGE = ("up_proj", "down_proj", "q_proj", "v_proj")


@pytest.mark.parametrize(
    ("pattern", "part", "names"),
    [
        (r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|q|v)_proj", "language", LANGUAGE),
        (r"model.language_model.layers.[\d]+.(_wrapped.)?(mlp|self_attn).(up|down|q|v)_proj", "language", LANGUAGE),
        (r"^language_model\.model\.layers\.\d+\.(mlp|self_attn)\.(up|down|q|v)_proj$", "language", LANGUAGE),
        (r"model.text_model.layers.[\d]+.(mlp|self_attn).(up|down|q|v)_proj", "language", LANGUAGE),
        (r".*language_model.*\.(?:q_proj|v_proj)", "language", ("q_proj", "v_proj")),
        (r"language_model.layers.[0-9]+.self_attn.(q|v)_proj", "language", ("self_attn.q_proj", "self_attn.v_proj")),
        (r"model\.visual\.blocks\.\d+\.attn\.qkv", "vision", ("attn.qkv",)),
        (r"model.visual.merger.linear_fc1", "projector", ("linear_fc1",)),
    ],
)  # fmt: skip
def test_a_path_to_the_same_layers_of_every_block_names_them(pattern: str, part: str, names: tuple[str, ...]) -> None:
    found = targets_of(pattern)
    assert isinstance(found, AdapterTargets)
    assert (found.part, found.names) == (part, names)


@pytest.mark.parametrize(
    "pattern",
    [
        r"model.language_model.layers.(0|1|2).self_attn.q_proj",
        r"model.language_model.layers.3.self_attn.q_proj",
        r"model.(language_model|visual).*.(q_proj|v_proj)",
        r"^(?!.*visual).*(q_proj|v_proj)",
        r"llm\..*\.(q_proj|v_proj)",
        r".*",
        r"(a+)+b",
        "",
    ],
)
def test_other_patterns_are_not_guessed(pattern: str) -> None:
    assert targets_of(pattern) is None
