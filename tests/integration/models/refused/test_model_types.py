"""Every type of model that transformers knows is trained, or refused with the reason; the documentation lists them."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.family import find_family
from trials.model.plain.parity import check_parity

DOCS = Path(__file__).parents[4] / "docs"
SHOWN = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
REMEDY = re.compile(r"; (use|correct|set|supported are|it is not supported; use|transformers itself cannot run)")
UNSAID = re.compile(r"\b[A-Z]\w*Error\b")
"""An error of transformers, which says nothing of the structure of a model"""


def test_the_table_of_the_documentation_has_the_types_that_are_trained() -> None:
    table = (DOCS / "models.md").read_text().partition("## Every model type that takes images")[2]
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (.+) \|$", table, re.MULTILINE))
    trained = {name for name in SHOWN if find_family(AutoConfig.for_model(name))}
    assert rows.keys() == {*SHOWN}
    assert {name for name, answer in rows.items() if answer == "trained"} == trained


@pytest.mark.long
def test_the_table_of_the_documentation_has_the_reasons_of_today() -> None:
    spec = importlib.util.spec_from_file_location("model_types", DOCS / "model_types.py")
    assert spec is not None
    assert spec.loader is not None
    model_types = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model_types)
    assert model_types.written() == (DOCS / "models.md").read_text(), "write it again with `make chart`"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*SHOWN, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}))
def test_every_type_is_taken_or_refused_with_a_reason_and_a_remedy(name: str, tmp_path: Path) -> None:
    try:
        AutoConfig.for_model(name).save_pretrained(tmp_path)
    except Exception as error:  # its own validation
        pytest.skip(f"transformers has no default configuration of it: {type(error).__name__}")
    try:
        check_parity(ModelSection(path=str(tmp_path), weights="random", dtype="float32"))
    except ModelError as error:
        message = str(error)
        assert "\n" not in message
        assert REMEDY.search(message), message
        # Where it does not even build a model with default values, the file is what has to be mended.
        assert not UNSAID.search(message) or "correct its config.json" in message, message
