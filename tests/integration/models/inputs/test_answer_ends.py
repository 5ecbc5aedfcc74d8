"""Users are warned of a chat template that ends no answer, since the trained model would never stop."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.data_problems import model_findings
from autotune.loop.samples import SampleDataset
from tests.contracts.test_families import TINY
from tests.tiny_models import CHATML, qwen2_5_vl, text
from tests.tiny_models.tiles import llava
from tests.values.data import record, write_records
from tests.values.parameters import parameters
from trials import plugins
from trials.job import ModelSection
from trials.model.family import load_family
from trials.model.inputs.chat_template import template_file
from trials.model.skeleton import load_config

WITHOUT_END = ["llava", "llava_next", "llava_siglip", "vipllava"]
"""Models with the template that llava-hf publishes."""
SHORT = ("llava", "gemma3", "qwen2-5-vl", "text")
REASON = "the chat template does not end an answer with <|endoftext|> or <|im_end|>, at which the model would stop"
REMEDY = "write {{ eos_token }} behind an answer in chat_template.jinja of the model folder"


ENDED = llava.CHAT.replace("{% endfor %} {% endfor %}", "{% endfor %} {{ eos_token }}{% endfor %}")


def no_end(folder: Path) -> str | None:
    return load_family(load_config(str(folder))).encoder(str(folder)).no_end


@pytest.mark.parametrize("name", parameters({name: name for name in plugins.names(TINY)}, short=SHORT))
def test_a_template_without_an_end_is_seen_in_every_family(name: str, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    assert no_end(tmp_path) == (REASON if name.replace("-", "_") in WITHOUT_END else None)


def test_a_template_that_writes_the_end_behind_answers_is_as_it_should_be(tmp_path: Path) -> None:
    llava.make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(ENDED)
    assert no_end(tmp_path) is None


@pytest.mark.parametrize("name", ["processor_config.json", "chat_template.json", "tokenizer_config.json"])
def test_the_file_of_the_template_is_the_one_that_transformers_reads(name: str, tmp_path: Path) -> None:
    llava.make(tmp_path)
    if name == "tokenizer_config.json":  # read only where there is no other
        (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / name
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**settings, "chat_template": llava.CHAT}))
    assert (template_file(str(tmp_path)), no_end(tmp_path)) == (name, REASON)
    file.write_text(json.dumps({**settings, "chat_template": ENDED}))
    assert no_end(tmp_path) is None


@pytest.mark.parametrize("stops", ["<|im_start|>", ["<|im_start|>", "<|vision_end|>"]], ids=["one", "several"])
def test_generation_settings_name_the_tokens_at_which_a_model_stops(stops: str | list[str], tmp_path: Path) -> None:
    qwen2_5_vl.make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(qwen2_5_vl.CHAT.replace("<|im_end|>", "<|im_start|>"))
    assert no_end(tmp_path) is not None
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    stated = ids[stops] if isinstance(stops, str) else [ids[each] for each in stops]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    assert no_end(tmp_path) is None


def test_a_model_for_text_alone_needs_an_end_too(tmp_path: Path) -> None:
    text.make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", ""))
    assert no_end(tmp_path) == REASON


SPACED = CHATML.replace("['role'] }}\n", "['role'] }} \n")
ASKED = "<|im_end|>\n<|im_start|>assistant"
PROMPTS = {
    "a blank more in conversations": (SPACED, (f"{ASKED} \n", f"{ASKED}\n")),
    "a blank more in both": (SPACED.replace("assistant\n", "assistant \n"), None),
    "a blank more in prompts": (CHATML.replace("assistant\n", "assistant\n{{ ' ' }}"), (f"{ASKED}\n", f"{ASKED}\n ")),
    "the beginning of an answer in prompts": (CHATML.replace("assistant\n", "assistant\n<think>"), None),
}


@pytest.mark.parametrize(("template", "texts"), PROMPTS.values(), ids=PROMPTS)
def test_prompts_that_the_training_does_not_have_are_shown(
    template: str, texts: tuple[str, str] | None, tmp_path: Path
) -> None:
    text.make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    if texts is None:
        assert encoder.other_prompt is None
        return
    shown = "writes {!r} between a question and its answer, but {!r} behind a question that asks for one"
    assert encoder.other_prompt == f"the chat template {shown.format(*texts)}"
    (finding,) = model_findings(encoder, ModelSection(path=str(tmp_path)))
    assert encoder.other_prompt in finding.what
    assert finding.remedy == "write the same in both places of chat_template.jinja in the model folder"


@pytest.mark.usefixtures("devices_in_use")
def test_the_warning_comes_with_the_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llava.make(tmp_path / "model")
    write_records(tmp_path / "data.jsonl", *(record("Who?", f"I, {number}.") for number in range(4)))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"model: {{path: {tmp_path / 'model'}, weights: random, dtype: float32}}\n"
        f"data: {{sources: [{{path: {tmp_path / 'data.jsonl'}}}]}}\n"
        "hardware: {devices: 2}\n"
        "training: {global_batch_samples: 2, learning_rate: 1.0e-4, weight_decay: 0}\n"
    )
    run = CliRunner().invoke(main, ["doctor", str(job), "--json"])
    (finding,) = (found for found in json.loads(run.stdout)["findings"] if found["what"].startswith("answers"))
    assert REASON in finding["what"]
    assert REMEDY in finding["remedy"]
    caplog.clear()
    SampleDataset(str(job))
    (message,) = caplog.messages
    assert REASON in message
    assert REMEDY in message
