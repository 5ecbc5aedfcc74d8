"""Contents of turns reach a chat template as it wants them: as lists of parts, as texts, or some turns as each."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from autotune import SampleDataset
from autotune.data_problems import check_inputs
from autotune.job_file import as_job
from autotune.workload import prepare
from tests.contracts.test_families import TINY
from trials import plugins
from trials.data.index import DatasetIndex
from trials.data.indexing import build_index
from trials.data.records.sample import IGNORED, Encoder, Sample, Turn, Video
from trials.errors import DataError
from trials.job import Job
from trials.model.family import load_family
from trials.model.inputs import chat
from trials.model.inputs.answers import PLACES, find_answers
from trials.model.inputs.encoders import load_encoder
from trials.model.inputs.processor import load_processor
from trials.model.plain.differing import difference
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.skeleton import load_config

GLM_4_1V = (
    "[gMASK]<sop>\n{%- for msg in messages %}\n{%- if msg.role == 'system' %}\n<|system|>\n{{ msg.content }}\n"
    "{%- elif msg.role == 'user' %}\n<|user|>{{ '\\n' }}\n{%- if msg.content is string %}\n{{ msg.content }}\n"
    "{%- else %}\n{%- for item in msg.content %}\n{%- if item.type == 'video' or 'video' in item %}\n"
    "<|begin_of_video|><|video|><|end_of_video|>\n{%- elif item.type == 'image' or 'image' in item %}\n"
    "<|begin_of_image|><|image|><|end_of_image|>\n{%- elif item.type == 'text' %}\n{{ item.text }}\n{%- endif %}\n"
    "{%- endfor %}\n{%- endif %}\n{%- elif msg.role == 'assistant' %}\n<|assistant|>\n{{ msg.content }}\n{%- endif %}\n"
    "{%- endfor %}\n{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""In the form of the published one, which prints the content of all turns but the user's."""
SYSTEM_AS_TEXT = (
    "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n{% endif %}"
    "{% for message in messages if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Cohere's Command R7B treats a system prompt."""
SYSTEM, QUESTION, ANSWER = (
    Turn(role="system", text="Be brief."),
    Turn(role="user", text="<image>What?"),
    Turn(role="assistant", text="A cat."),
)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    """Save a tiny model with a chat template, by default its own; the folder also has an image and a video's frames."""

    def saved(name: str, template: str | None) -> Path:
        folder = tmp_path_factory.mktemp("forms") / "model"
        plugins.load(TINY, name).make(folder)
        if template:
            (folder / "chat_template.jinja").write_text(template)
        (folder.parent / "video").mkdir()
        for path in ("a.png", "video/0.png", "video/1.png"):
            Image.new("RGB", (56, 56), (40, 90, 140)).save(folder.parent / path)
        return folder

    return saved


@pytest.fixture(scope="module")
def glm(save: Callable[[str, str | None], Path]) -> Path:
    return save("glm4v", GLM_4_1V)


def said(folder: Path, *turns: Turn, videos: int = 0) -> Sample:
    images = sum(turn.text.count("<image>") for turn in turns)
    return Sample(
        turns=turns,
        images=(folder.parent / "a.png",) * images,
        image_sizes=(None,) * images,
        videos=(Video(source=folder.parent / "video"),) * videos,
    )


def encoder_of(folder: Path) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder))


def texts_of(folder: Path, sample: Sample) -> tuple[str, str]:
    """Return the text of a sample's tokens, each run of image tokens as one, and that of its targets."""
    encoded = encoder_of(folder).encode(sample, pixels=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = encoded.input_ids
    shown = tokenizer.convert_tokens_to_ids("<|image|>")
    again = np.concatenate([[False], (ids[1:] == shown) & (ids[:-1] == shown)])
    return tokenizer.decode(ids[~again]), tokenizer.decode(ids[encoded.labels != IGNORED])


def test_a_template_that_prints_answers_gets_the_turns_of_the_user_alone_in_parts(glm: Path) -> None:
    sample = said(glm, SYSTEM, QUESTION, ANSWER)
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    assert texts_of(glm, sample) == (
        f"[gMASK]<sop><|system|>\nBe brief.<|user|>\n{image}What?<|assistant|>\nA cat.",
        "A cat.",
    )
    asked = [{"type": "image"}, {"type": "text", "text": "What?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "A cat."},
    ]
    config = load_config(str(glm))
    processor = load_processor(str(glm), config, trust_remote_code=False)
    text = processor.apply_chat_template(messages, tokenize=False)
    (expected,) = processor(images=[[Image.open(sample.images[0])]], text=[text])["input_ids"]
    encoded = encoder_of(glm).encode(sample, pixels=False)
    assert encoded.input_ids.tolist() == list(expected)
    plain = PlainInputs(str(glm), config, trust_remote_code=False)
    for each in (sample, said(glm, Turn(role="user", text="What?"), ANSWER)):
        assert difference(encoder_of(glm).encode(each, pixels=False), plain.expected(each), None) is None


def test_an_answer_to_a_question_about_a_video_is_learnt_as_its_text(glm: Path) -> None:
    text, learnt = texts_of(glm, said(glm, SYSTEM, Turn(role="user", text="<video>What?"), ANSWER, videos=1))
    assert text.startswith("[gMASK]<sop><|system|>\nBe brief.<|user|>\n<|begin_of_video|>")
    assert text.endswith("<|end_of_video|>What?<|assistant|>\nA cat.")
    assert learnt == "A cat."


@pytest.mark.parametrize("printed", ["{{ messages[0]['content'] }}", "{{ messages[0]['content'] | tojson }}"])
def test_a_system_prompt_of_which_a_template_prints_the_parts_is_a_text(
    save: Callable[[str, str | None], Path], printed: str
) -> None:
    folder = save("qwen2-5-vl", SYSTEM_AS_TEXT.replace("{{ messages[0]['content'] }}", printed))
    text, _ = texts_of(folder, said(folder, SYSTEM, QUESTION, ANSWER))
    shown = "Be brief." if "tojson" not in printed else '"Be brief."'
    assert text.startswith(f"<|im_start|>system\n{shown}<|im_end|>\n<|im_start|>user\n<|vision_start|>")


@pytest.mark.parametrize(
    ("name", "question", "moves"),
    [
        ("llava", "First <image> then <image> compare.", True),
        ("llava", "What is this?\n<image>", True),
        ("llava", "<image>\n<image>\nCompare.", False),
        ("qwen2-5-vl", "First <image> then <image> compare.", False),
        ("qwen2-5-vl", "What is this?\n<image>", False),
    ],
)
def test_places_of_images_that_a_template_does_not_keep_are_named(
    save: Callable[[str, str | None], Path], name: str, question: str, moves: bool
) -> None:
    """Templates of LLaVA write the images of a turn before its text."""
    first = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] | "
        "selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}{% for part in message['content'] | "
        "selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = save(name, first if name == "llava" else None)
    sample = said(folder, Turn(role="user", text=question), ANSWER)
    again = said(folder, *sample.turns, *sample.turns)
    for each in (sample, again):
        found = encoder_of(folder).measure(each, ((56, 56),) * len(each.images))
        assert found.unused == (PLACES,) * moves


def job_of(folder: Path, records: Sequence[dict[str, Any]], **changes: Any) -> Job:
    """A job on `records`, whose model is that of the folder."""
    file = folder.parent / "records.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return as_job(
        {
            "model": {"path": str(folder), "weights": "random", "dtype": "float32"},
            "data": {"sources": [{"path": str(file)}]},
            "hardware": {"devices": 1},
            "training": {"global_batch_samples": 2, "output": str(folder.parent / "output")},
            **changes,
        }
    )


def record_of(*turns: Turn, **media: list[str]) -> dict[str, Any]:
    return {"messages": [{"role": turn.role, "content": turn.text} for turn in turns], **media}


def index_of(job: Job) -> tuple[DatasetIndex, Encoder]:
    encoder = load_encoder(job.model, job.data)
    return build_index(job.data, encoder, Path(), workers=1)[0], encoder


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault that shows in records with a system prompt and several answers alone."""

    def first_answer(turns: tuple[Turn, ...], *others: Any) -> list[Any]:
        return list(find_answers(turns, *others))[: 1 if turns[0].role == "system" else None]

    monkeypatch.setattr(chat, "find_answers", first_answer)


ASKED = Turn(role="user", text="What?")
COMMON, RARE = record_of(ASKED, ANSWER), record_of(SYSTEM, ASKED, ANSWER, ASKED, ANSWER)
FAULT = r"records\.jsonl:38: the label of token \d+ is -100 instead of .* by transformers' own processor"


@pytest.fixture
def mixed(save: Callable[[str, str | None], Path]) -> Job:
    """A job on 101 records, one of which has a system prompt and several answers."""
    return job_of(save("text", None), [RARE if number == 37 else COMMON for number in range(101)])


@pytest.mark.usefixtures("fault")
def test_a_fault_in_one_kind_of_records_is_found_wherever_they_stand(mixed: Job) -> None:
    with pytest.raises(DataError, match=FAULT):
        check_inputs(mixed, *index_of(mixed))


@pytest.mark.usefixtures("fault", "home")
def test_the_library_compares_inputs_as_commands_do(mixed: Job) -> None:
    with pytest.raises(DataError, match=FAULT):
        SampleDataset(mixed)


@pytest.mark.usefixtures("fault", "home")
def test_samples_to_evaluate_are_compared_too(mixed: Job, tmp_path: Path) -> None:
    (tmp_path / "trained.jsonl").write_text(json.dumps(COMMON) + "\n")
    sources = {"data": {"sources": [{"path": str(tmp_path / "trained.jsonl")}]}}
    evaluation = {"evaluation": {"sources": [{"path": str(mixed.data.sources[0].path)}], "every": 1}}
    job = as_job({**mixed.model_dump(mode="json", exclude_unset=True), **sources, **evaluation})
    with pytest.raises(DataError, match=FAULT):
        prepare(job, tmp_path / "work")


@pytest.mark.usefixtures("fault")
def test_what_records_with_videos_say_besides_is_compared(glm: Path) -> None:
    shown = Turn(role="user", text="<video>What?")
    job = job_of(glm, [record_of(SYSTEM, shown, ANSWER, ASKED, ANSWER, videos=["video"])])
    with pytest.raises(DataError, match=r"records\.jsonl:1: the label of token \d+ is -100"):
        check_inputs(job, *index_of(job))


@pytest.mark.usefixtures("fault")
def test_the_last_of_many_kinds_of_records_is_compared_too(glm: Path) -> None:
    """A model for images and videos tells 24 kinds apart."""

    def shown(images: int, videos: int, before: Sequence[Turn], behind: Sequence[Turn]) -> dict[str, Any]:
        asked = Turn(role="user", text="<image>" * images + "<video>" * videos + "What?")
        return record_of(*before, asked, ANSWER, *behind, images=["a.png"] * images, videos=["video"] * videos)

    again = (ASKED, ANSWER)
    sound = [
        shown(images, videos, *turns)
        for turns in (((), ()), ((SYSTEM,), ()), ((), again))
        for images in range(3)
        for videos in range(2)
    ]
    job = job_of(glm, [*sound, shown(2, 1, (SYSTEM,), again)])
    with pytest.raises(DataError, match=rf"records\.jsonl:{len(sound) + 1}: the label of token \d+ is -100"):
        check_inputs(job, *index_of(job))


@pytest.mark.usefixtures("home")
def test_a_file_of_lengths_is_no_data_set_of_samples(save: Callable[[str, str | None], Path]) -> None:
    job = job_of(save("text", None), [{"vit_num": 0, "token_num": 5}])
    with pytest.raises(DataError, match="holds only lengths, so there is nothing to train on"):
        SampleDataset(job)
