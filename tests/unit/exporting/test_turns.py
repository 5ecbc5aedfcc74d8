"""The template of LLaMA-Factory that writes the turns of a model's own chat template."""

from pathlib import Path

import pytest

from autotune.errors import ExportError
from autotune.exporting.trainers import llama_factory
from autotune.exporting.turns import CHATML, MISTRAL, VICUNA, OwnTurns
from tests.tiny_models.tiles import llava_next
from trials.job import ModelSection


def of(question: str, answer: str, *, first: str = "", end: str = "") -> str:
    """A chat template with these turns."""
    return (
        f"{first}{{% for message in messages %}}{{% if message['role'] == 'user' %}}{question}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}"
        f"{end}{{% else %}}{answer}"
        "{{ message['content'][0]['text'] }}{{ eos_token }}{% endif %}{% endfor %}"
    )


WRITTEN = {
    "vicuna": of("USER: ", "ASSISTANT: ", end=" "),
    "mistral": of("[INST] ", " ", first="{{ bos_token }}", end=" [/INST]"),
    "chatml": of("<|im_start|>user\n", "<|im_start|>assistant\n", end="<|im_end|>\n"),
    "chatml with a system prompt": of(
        "<|im_start|>user\n",
        "<|im_start|>assistant\n",
        first="<|im_start|>system\nAnswer the questions.<|im_end|>\n",
        end="<|im_end|>\n",
    ),
    "llama 3": of(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
    ).replace("{{ eos_token }}", "<|eot_id|>"),
    "vicuna with a system prompt": of("USER: ", "ASSISTANT: ", first="A chat. ", end=" "),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llava-next")
    llava_next.make(made)
    return made


def written(folder: Path, template: str) -> ModelSection:
    (folder / "chat_template.jinja").write_text(template)
    return ModelSection(path=str(folder))


@pytest.mark.parametrize(
    ("name", "template", "system"),
    [
        ("vicuna", "llava_next", ""),
        ("vicuna with a system prompt", "llava_next", "A chat."),
        ("mistral", "llava_next_mistral", ""),
        ("llama 3", "llava_next_llama3", ""),
        ("chatml", "llava_next_yi", ""),
        ("chatml with a system prompt", "llava_next_yi", "Answer the questions."),
    ],
)
def test_a_template_is_chosen_by_the_model_s_own(folder: Path, name: str, template: str, system: str) -> None:
    model = written(folder, WRITTEN[name])
    assert llama_factory.template_of(model, "llava_next") == {"template": template, "default_system": system}


@pytest.mark.parametrize(
    "template",
    [
        of("### Human: ", "### Assistant: ", end="\n"),
        of("<|im_start|>user\n", "<|im_start|>assistant\n<think>\n", end="<|im_end|>\n"),
        of("[INST] ", " ", first="Be brief.", end=" [/INST]"),
    ],
)
def test_other_turns_than_those_of_all_templates_are_refused(folder: Path, template: str) -> None:
    model = written(folder, template)
    with pytest.raises(ExportError, match=r"writes other turns .*llava_next, llava_next_mistral.*by --from"):
        llama_factory.template_of(model, "llava_next")


def test_models_without_a_known_template_are_refused(folder: Path) -> None:
    with pytest.raises(ExportError, match=r"models of type idefics3; give a configuration by --from whose"):
        llama_factory.template_of(ModelSection(path=str(folder)), "idefics3")


def test_a_chat_template_without_the_turns_is_refused(folder: Path) -> None:
    with pytest.raises(ExportError, match="does not show two questions"):
        OwnTurns(written(folder, "{{ 'nothing' }}"))
    with pytest.raises(ExportError, match="cannot be compared"):
        OwnTurns(written(folder, "{{ raise_exception('no') }}"))


def test_turns_fit_no_others(folder: Path) -> None:
    own = OwnTurns(written(folder, WRITTEN["mistral"]))
    assert [own.system_of(turns) for turns in (CHATML, MISTRAL, VICUNA)] == [None, "", None]
