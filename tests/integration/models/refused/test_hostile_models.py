"""Damaged and hostile model folders are refused with one line, in bounded time and memory."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.values.hostile_models import CASES, MOST_BYTES, Ending, endings
from trials.model.refusals.folder import check_folder


@pytest.fixture(scope="module")
def found(example: Path) -> dict[str, Ending]:
    return endings(example / "model")


def is_bounded(ending: Ending) -> bool:
    """Check that each message is short and has one line, and that time and memory are bounded."""
    is_short = all("\n" not in message and len(message) < 1000 for message in ending.messages)
    return is_short and not ending.died and not ending.raised and ending.peak_bytes < MOST_BYTES


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_model_folder_is_refused_in_one_line(found: dict[str, Ending], name: str) -> None:
    ending = found[name]
    assert is_bounded(ending), ending
    assert any(re.search(CASES[name][1], message) for message in ending.messages), ending


@pytest.mark.long
def test_random_damage_of_a_model_folder_is_refused_or_harmless(example: Path) -> None:
    harmed = {seed: ending for seed, ending in endings(example / "model", 25).items() if not is_bounded(ending)}
    assert not harmed


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
def test_every_configuration_that_transformers_writes_is_within_bounds(tmp_path: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    check_folder(tmp_path)
