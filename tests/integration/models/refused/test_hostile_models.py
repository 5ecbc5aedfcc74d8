"""Damaged and hostile model folders are refused with one line, in bounded time and memory."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.values.hostile_models import CASES, MOST_BYTES, Ending, endings
from tests.values.parameters import parameters
from trials.model.refusals.folder import check_folder

SHORT = (
    "config a list", "config very deep", "config deep", "config large", "config of lists", "config a pipe",
    "type a list", "hub code", "architectures a number", "no number", "infinite", "text for a number", "no heads",
    "no head", "many layers", "huge width", "many parameters", "other configuration", "unknown activation",
    "unknown dtype", "ratio", "small vocabulary", "tokenizer empty", "tokenizer a device", "token a list",
    "resample a list", "a mean too large",
)  # fmt: skip
"""One of each check that no other test shows"""
TYPES = ("blip-2", "gemma3n", "internvl", "mllama", "qwen2_5_vl")


@pytest.fixture(scope="module")
def ending_of(shallow: Path) -> Callable[[str], Ending]:
    """The ending of a case: one process uses all folders of the same run."""

    @cache
    def of_several(names: Sequence[str]) -> dict[str, Ending]:
        return endings(shallow / "model", names)

    others = tuple(name for name in CASES if name not in SHORT)
    return lambda name: of_several(SHORT if name in SHORT else others)[name]


def is_bounded(ending: Ending) -> bool:
    """Check that each message is short and has one line, and that time and memory are bounded."""
    is_short = all("\n" not in message and len(message) < 1000 for message in ending.messages)
    return is_short and not ending.died and not ending.raised and ending.peak_bytes < MOST_BYTES


@pytest.mark.parametrize("name", parameters({name: name for name in CASES}, short=SHORT))
def test_a_hostile_model_folder_is_refused_in_one_line(ending_of: Callable[[str], Ending], name: str) -> None:
    ending = ending_of(name)
    assert is_bounded(ending), ending
    assert any(re.search(CASES[name][1], message) for message in ending.messages), ending


@pytest.mark.long
def test_random_damage_of_a_model_folder_is_refused_or_harmless(example: Path) -> None:
    harmed = {seed: ending for seed, ending in endings(example / "model", 25).items() if not is_bounded(ending)}
    assert not harmed


@pytest.mark.parametrize(
    "model_type", parameters({name: name for name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)}, short=TYPES)
)
def test_every_configuration_that_transformers_writes_is_within_bounds(tmp_path: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    check_folder(tmp_path)
