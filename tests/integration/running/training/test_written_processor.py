"""Trained weights are saved with the tokenizer and the processor of the model's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny_models.tiles import llava
from trials.job import ModelSection
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config
from trials.tasks.training.checkpoint import add_processor

NAMED = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]


@pytest.mark.parametrize("stated", [NAMED, NAMED[0]["template"], None], ids=["named", "one", "none"])
def test_templates_of_the_tokenizer_are_kept_beside_that_of_the_processor(
    stated: list[dict[str, str]] | str | None, tmp_path: Path
) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    llava.make(source)
    (source / "chat_template.jinja").unlink()
    (source / "chat_template.json").write_text(json.dumps({"chat_template": llava.CHAT}))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": stated}))
    add_processor(ModelSection(path=str(source)), written)

    def templates(folder: Path) -> tuple[Any, Any]:
        processor = load_processor(str(folder), load_config(str(source)), trust_remote_code=False)
        return processor.chat_template, AutoTokenizer.from_pretrained(folder).chat_template

    assert templates(written) == templates(source)
